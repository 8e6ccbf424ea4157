"""What a run measured, as results.json says it: found, told apart from that of other weights, and shown as tables."""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import safe_open

from hf_favorpp.hub.origin import RESULTS_FILE

WEIGHTS_KEY = "weights_sha256"
"""Key of results.json: :func:`weights_digest` of the checkpoint that was measured."""

END_TO_END = {
    "logits_distance": "relative distance of the logits",
    "argmax_agreement": "same prediction",
    "hidden_distance": "relative distance of the hidden states",
    "pooled_cosine": "cosine of the pooled hidden states",
}
"""Titles of the numbers in ``ApproximationReport.end_to_end``."""

ERROR_RATES = frozenset(("wer", "cer"))
"""Metrics of which less is better: a share of that of softmax would read the wrong way."""

_log = logging.getLogger(__name__)


def weights_digest(folder: Path) -> str:
    """Return what tells the tensors of one checkpoint from those of another.

    Args:
        folder: Of the checkpoint, in safetensors, in one file or in several.

    Returns:
        SHA-256 over names, dtypes, shapes and contents, whatever the files are; of nothing where there are none.
    """
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            files.update(dict.fromkeys(tensors.keys(), path))
    digest = hashlib.sha256()
    for name in sorted(files):
        with safe_open(files[name], "pt") as tensors:
            tensor = tensors.get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def find_results(folder: Path, loaded_from: str | None = None) -> dict[str, Any] | None:
    """Return the results of the very weights in a folder.

    They are looked for in the folder and in the one that the model was loaded from. Results of other weights, such as
    those from before a further training, are left out, and a warning says so.

    Args:
        folder: Of the checkpoint.
        loaded_from: Hub id or folder that the model was loaded from, if any.

    Returns:
        Content of results.json, or None.
    """
    places = [folder] if not loaded_from or not Path(loaded_from).is_dir() else [folder, Path(loaded_from)]
    for place in places:
        path = place / RESULTS_FILE
        if not path.is_file():
            continue
        results = _read(path)
        if results is None:
            _log.warning("%s is not a JSON object: the model card leaves it out.", path)
        elif _measured_on(results, place, folder):
            return results
        else:
            _log.warning("%s is of other weights than these: the model card leaves it out.", path)
    return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return results if isinstance(results, dict) else None


def _measured_on(results: Mapping[str, Any], place: Path, folder: Path) -> bool:
    """Return whether results that lie in one folder are of the weights in another, or the same, folder."""
    recorded = results.get(WEIGHTS_KEY)
    if recorded is None and place == folder:
        return True  # who put them there knows
    return bool((recorded or weights_digest(place)) == weights_digest(folder))


def describe_results(results: Mapping[str, Any]) -> str:
    """Return the tables of a model card, in Markdown.

    Args:
        results: Content of results.json; what is not there is not spoken of.

    Returns:
        Scores and speed beside those of the softmax twin, the fidelity report, the crossover length, and how all that
        was measured; "" where there is nothing of these.
    """
    parts = [_scores(results), _fidelity(results.get("fidelity")), _crossover(results.get("crossovers"))]
    found = [part for part in parts if part]
    if not found:
        return ""
    return "\n\n".join([*found, *_how(results)])


def _scores(results: Mapping[str, Any]) -> str:
    """Return metrics, one row each: of the softmax model where it was trained beside, before and after uptraining."""
    metrics = _numbers(results.get("metrics"))
    columns = {
        "softmax": {**_numbers(results.get("softmax_metrics")), **_speeds(results.get("softmax"))},
        "converted, before training": _numbers(results.get("initial_metrics")),
        "converted": {**metrics, **_speeds(results)},
    }
    columns = {title: column for title, column in columns.items() if column}
    if not metrics:
        return ""
    shared = [name for name in columns["converted"] if name in metrics or name in columns.get("softmax", {})]
    rows = []
    for name in shared:
        values = [column.get(name) for column in columns.values()]
        kept = ""
        if "softmax" in columns and name in metrics and name not in ERROR_RATES and columns["softmax"].get(name):
            kept = f"{100 * metrics[name] / columns['softmax'][name]:.1f} %"
        rows.append([name.replace("_", " "), *("" if value is None else _short(value) for value in values), kept])
    header = [str(results.get("task", "")).replace("_", " "), *columns, "of softmax"]
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return _table(header, rows)


def _fidelity(report: Any) -> str:
    """Return relative output errors beside those of uniform attention, and what they come to end to end."""
    if not isinstance(report, Mapping):
        return ""
    errors, uniform = report.get("layer_errors") or [], report.get("layer_uniform_errors") or []
    rows = [
        [title, *(_short(number) for number in (fmean(column), max(column)))]
        for title, column in (("converted", errors), ("mean of the values (control)", uniform))
        if column and all(isinstance(number, int | float) for number in column)
    ]
    lines = []
    if rows:
        lines.append(
            f"Relative error of the attention output against softmax on the same inputs, over "
            f"{len(errors)} converted layers and {report.get('num_tokens', 'some')} tokens:\n\n"
            + _table(["attention", "mean layer", "worst layer"], rows)
        )
    end_to_end = _numbers(report.get("end_to_end"))
    if end_to_end:
        numbers = "; ".join(f"{END_TO_END.get(name, name)} {_short(number)}" for name, number in end_to_end.items())
        lines.append(f"The whole model against itself with softmax attention and the same weights: {numbers}.")
    return "\n\n".join(lines)


def _crossover(entries: Any) -> str:
    """Return from which length on the converted attention is faster than PyTorch's fused softmax attention."""
    lines = []
    for entry in entries if isinstance(entries, list) else []:
        for kind, title in (("forward", "forward"), ("train", "forward and backward")):
            measured = entry.get(f"{kind}_measured")
            if not measured:
                continue
            length, (least, most) = entry.get(kind), measured
            if length is None:
                found = f"slower at every length that was measured ({least} to {most} tokens)"
            elif length <= least:
                found = f"faster at every length that was measured ({least} to {most} tokens)"
            else:
                found = f"faster from about {length:.0f} tokens on (measured from {least} to {most})"
            lines.append(f"- {title}, backend `{entry.get('backend', 'auto')}`: {found}")
    if not lines:
        return ""
    return "Attention alone beside `scaled_dot_product_attention`:\n\n" + "\n".join(lines)


def _how(results: Mapping[str, Any]) -> Iterable[str]:
    """Yield the command and what it ran on."""
    hardware, versions = results.get("hardware") or {}, results.get("versions") or {}
    machine = [*(str(gpu) for gpu in hardware.get("gpus") or []), str(hardware.get("cpu") or "")]
    threads = f"{hardware['threads']} threads" if hardware.get("threads") else ""
    names = ("hf-favorpp", "torch", "transformers")
    parts = [*machine, threads, *(f"{name} {versions[name]}" for name in names if versions.get(name))]
    where = ", ".join(part for part in parts if part)
    if where:
        yield f"Measured on {where}."
    if command := results.get("command"):
        yield f"```bash\n{command}\n```"


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {n: v for n, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _speeds(values: Any) -> dict[str, float]:
    return {n: v for n, v in _numbers(values).items() if n.startswith(("train_", "model_")) and n.endswith("_per_s")}


def _short(number: float) -> str:
    return f"{number:.4f}" if abs(number) < 10 else f"{number:.1f}" if abs(number) < 100 else f"{number:.0f}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
