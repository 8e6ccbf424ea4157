"""hf-favorpp bench: rows and crossover of the benchmark recipe's own core."""

import pytest
import torch
from command_runs import run, run_json

from hf_favorpp.benchmarking import rows
from hf_favorpp.cli import races

QUICK = ["--seconds-per-length", 0, "--num-features", 4]
TINY = [*QUICK, "--num-heads", 2, "--head-dim", 8]


def test_attention_alone(capsys):
    document = run_json("bench", "--lengths", "8,24", *TINY, "--train")
    assert [row["length"] for row in document["rows"]] == [8, 24]
    for row in document["rows"]:
        assert row["forward_speedup"] == row["sdpa_forward_ms"] / row["forward_ms"]
        assert row["train_ms"] > 0
        assert row["error_to_reference"] < 1e-3
    assert document["crossovers"] == rows.crossovers(document["rows"])
    assert {"hf-favorpp", "torch"} <= set(document["versions"])
    assert document["hardware"]["threads"] == torch.get_num_threads()


def test_tables_and_the_crossover_are_shown(monkeypatch):
    monkeypatch.setattr(races, "describe_crossover", lambda entry, kind: f"faster from 321 tokens on, {kind}.")
    shown = run("bench", "--lengths", "8", *TINY).stdout
    assert "softmax, ms" in shown
    assert "Forward: faster from 321 tokens on, forward." in shown
    assert "orward and backward" not in shown


@pytest.mark.parametrize(
    ("length", "measured", "said"),
    [
        (None, None, "not timed beside softmax at any length."),
        (None, [128, 512], "not faster than softmax up to 512 tokens."),
        (128.0, [128, 512], "faster than softmax from 128 tokens on, the shortest length that was timed."),
        (449.7, [128, 512], "faster than softmax from about 450 tokens on."),
    ],
)
def test_the_crossover_is_a_sentence(length, measured, said):
    assert races.describe_crossover({"forward": length, "forward_measured": measured}, "forward") == said


def test_options_reach_the_attention():
    options = ["--preconditioning", "full", "--calibrated", "--exact-window", 4, "--exact-ends", 1, 1]
    (row,) = run_json("bench", "--lengths", "16", *TINY, *options, "--num-threads", 1)["rows"]
    assert (row["preconditioning"], row["statistics"]) == ("full", "calibrated")
    assert (row["exact_window"], row["exact_ends"]) == (4, [1, 1])


def test_a_model_of_the_shape_of_a_checkpoint(converted, vit):
    document = run_json("bench", "--model", converted, "--lengths", "80", *QUICK[:2])
    assert [row["length"] for row in document["rows"]] == [80], "longer than its positions"
    assert (
        f"{converted} takes 64 tokens at most: a model of its shape with more positions is timed at 80."
        in (document["notes"])
    )
    assert [row["num_features"] for row in document["rows"]] == [8], "its own options"
    assert all(row["identity_forward_ms"] > 0 for row in document["rows"])
    (row,) = run_json("bench", "--model", vit, "--lengths", "48", *QUICK, "--exact-window", "2x2")["rows"]
    assert (row["length"], row["num_features"], row["exact_window"]) == (37, 4, [2, 2])


def test_what_cannot_be_timed(clip, gpt2):
    assert "cannot be timed" in run("bench", "--model", clip, code=1).stderr
    assert "there is no folder" in run("bench", "--model", "./nowhere", code=3).stderr
    assert "--lengths must be at least 1" in run("bench", "--lengths", "0,8", code=2).stderr
    assert "needs a model of images" in run("bench", "--exact-window", "2x2", code=2).stderr
    assert "--dtype must be one of" in run("bench", "--dtype", "int8", code=2).stderr
    assert "--kernel must be one of" in run("bench", "--kernel", "foo", code=2).stderr
