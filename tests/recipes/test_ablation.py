"""ablation.py: which runs there are, that they share a budget, and what is made of them."""

from __future__ import annotations

import json

import ablation
import glue
import pytest
from command_line import parse_arguments
from glue_arguments import GlueArguments

SIZES = ("--task_name", "cola", "--per_device_train_batch_size", "4", "--num_threads", "1", "--max_eval_samples", "9")


@pytest.fixture(scope="module")
def softmax(tiny_bert, glue_dir, tmp_path_factory):
    """A finished softmax run of two steps."""
    folder = tmp_path_factory.mktemp("softmax")
    model = ("--model_name_or_path", str(tiny_bert), "--attention", "softmax", "--max_train_steps", "2")
    glue.main([*SIZES, "--data_dir", str(glue_dir), *model, "--output_dir", str(folder)])
    return folder


def arguments(softmax, glue_dir, output, *more):
    own = ("--teacher", softmax, "--steps", 6, "--num_features", 4, "--output_dir", output)
    return [str(word) for word in (*own, *SIZES, "--data_dir", glue_dir, "--learning_rate", 1e-2, *more)]


def test_every_run_has_the_same_number_of_steps(softmax, glue_dir, tmp_path, capsys):
    figure = tmp_path / "figure.png"
    names = ["published", "learnt", "window"]
    window = ("--exact_window", 8, "--figure", figure, "--methods", *names)
    results = ablation.main(arguments(softmax, glue_dir, tmp_path / "out", *window))
    runs = {(run["method"], run["training"]): run for run in results["runs"]}
    for name in names:
        trainings = ablation.TRAININGS if ablation.METHODS[name].learns else ("zero-shot", "uptrain", "distil+uptrain")
        assert [training for method, training in runs if method == name] == list(trainings)
    for (_, training), run in runs.items():
        assert sum(run["steps"].values()) == (0 if training == "zero-shot" else 6)
        assert set(run["steps"]) == {"task"} | {part for part in ("transfer", "distil") if part in training} | (
            {"transfer", "distil"} if training == "all" else set()
        )
    cost = json.loads((tmp_path / "out" / "window-uptrain" / "results.json").read_text())["favorpp"]
    assert (cost["kernel"], cost["exact_window"], cost["exact_ends"]) == ("none", 12, [1, 1])
    learnt = json.loads((tmp_path / "out" / "learnt-transfer" / "results.json").read_text())
    assert learnt["favorpp"]["learnable"] == "projections"
    assert learnt["metrics"] == runs["learnt", "transfer"]["metrics"]
    fixed = json.loads((tmp_path / "out" / "published-zero-shot" / "results.json").read_text())["favorpp"]
    assert (fixed["preconditioning"], fixed["exact_window"], fixed["learnable"]) == ("none", 8, None)
    assert figure.read_bytes().startswith(b"\x89PNG")
    teacher = json.loads((softmax / "results.json").read_text())["metrics"]["matthews_correlation"]
    assert results["softmax"] == 100 * teacher
    printed = capsys.readouterr().out
    assert "| window of equal cost alone" in printed
    assert "6 optimizer steps in every run" in printed


def test_finished_runs_are_not_repeated_and_a_report_needs_none(softmax, glue_dir, tmp_path, monkeypatch, capsys):
    argv = arguments(softmax, glue_dir, tmp_path, "--methods", "favor+", "--trainings", "zero-shot")
    first = ablation.main(argv)
    monkeypatch.setattr(glue, "main", lambda argv: pytest.fail("a run was repeated"))
    assert ablation.main(argv)["runs"] == first["runs"]
    capsys.readouterr()
    assert ablation.main([*argv, "--report_only"])["runs"] == first["runs"]
    assert "FAVOR+" in capsys.readouterr().out


@pytest.mark.parametrize("name", ablation.METHODS)
@pytest.mark.parametrize("training", ablation.TRAININGS)
def test_the_options_of_every_run_are_those_of_glue(name, training):
    own = ablation.argparse.Namespace(teacher="x", steps=10, num_features=8, exact_window=16)
    words = ablation.options_of(name, training, own)
    if not ablation.METHODS[name].learns and training in ("transfer", "transfer+uptrain", "all"):
        return  # never made
    args = parse_arguments(GlueArguments, words)
    assert args.transfer_steps + args.distil_steps + args.max_train_steps == (0 if training == "zero-shot" else 10)
    assert bool(args.kd_weight) == bool(args.distil_steps)
    assert args.exact_window == (24 if name == "window" else 16)


def test_too_few_steps_to_share_are_refused(capsys):
    with pytest.raises(SystemExit):
        ablation.main(["--teacher", "x", "--steps", "2"])
    assert "--steps must be at least 3, got 2" in capsys.readouterr().err
