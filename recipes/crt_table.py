"""The accuracies of "Chefs' Random Tables" (Likhosherstov et al. 2022, arXiv:2205.15317), Table 1, to set beside ours.

A cell that was not at hand is left out, not guessed. The columns TrigRF, PosRF and GERF are complete, and their means
are the averages that the paper prints: 35.5, 54.3 and 56.1; the other columns could not be checked in that way.
"""

from __future__ import annotations

import pandas as pd

METHODS = ("TrigRF", "PosRF", "GERF", "PoisRF", "GeomRF", "OPRF", "PoisRF+", "GeomRF+")
_ROWS: dict[str, tuple[float | None, ...]] = {
    "abalone": (12.0, 16.0, 17.0, 18.0, 18.3, 17.1, 14.0, 15.1),
    "banknote": (66.2, 83.4, 92.4, 84.4, 84.5, 92.6, 80.1, 85.6),
    "car": (66.3, 69.2, 70.9, 66.3, 66.3, 69.5, 66.3, 67.2),
    "yeast": (29.7, 34.4, 42.9, 36.9, 35.8, 44.4, 29.4, 31.0),
    "cmc": (46.6, 45.1, 47.8, 46.6, 47.3, 46.3, 35.5, 43.5),
    "nursery": (31.3, 77.4, 63.8, None, None, 78.9, 77.3, 71.0),
    "wifi": (15.2, 88.8, 93.3, 95.8, 95.8, 93.3, 77.2, 82.9),
    "chess": (16.5, 20.2, 20.4, None, None, 20.2, None, None),
}


def published_accuracies() -> pd.DataFrame:
    """Return the paper's accuracies in percent, a row per data set and a column per method; NaN where not at hand."""
    return pd.DataFrame(_ROWS, index=list(METHODS), dtype=float).T


def beside(ours: pd.DataFrame, near: float = 3.0) -> tuple[pd.DataFrame, str]:
    """Set our accuracies beside the paper's.

    Args:
        ours: In percent, rows named as the paper's; others are shown alone.
        near: Points within which a cell counts as reproduced.

    Returns:
        Cells "ours (paper's)", and a line that counts those near.
    """
    paper = published_accuracies().reindex(index=ours.index, columns=ours.columns)
    cells = pd.DataFrame(
        {
            column: [
                f"{own:.1f}" + ("" if pd.isna(theirs) else f" ({theirs:.1f})")
                for own, theirs in zip(ours[column], paper[column], strict=True)
            ]
            for column in ours.columns
        },
        index=ours.index,
    )
    distance = (ours - paper).abs().stack().dropna()
    return cells, f"{int((distance <= near).sum())} of {len(distance)} published cells lie within {near:g} points."
