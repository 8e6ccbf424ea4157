"""The table over many runs: main metrics, means over seeds and tasks, the share of softmax, and the figure."""

import json

import pytest
from results_table import main


def result(task, metrics, options=None, **more):
    return {"task": task, "metrics": metrics, "favorpp": options, **more}


def options(kernel="favor++", num_features=64, preconditioning="center", **more):
    return {"kernel": kernel, "num_features": num_features, "preconditioning": preconditioning, **more}


def run(folder, capsys, *arguments):
    main([str(folder), *arguments])
    lines = capsys.readouterr().out.strip().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[0], {row[0]: row[1:] for row in rows[2:]}


def test_rows_and_means(tmp_path, capsys):
    runs = [
        result("cola", {"matthews_correlation": 0.4}),
        result("rte", {"accuracy": 0.6}),
        result("cola", {"matthews_correlation": 0.1}, options()),
        result("cola", {"matthews_correlation": 0.3}, options()),
        result("rte", {"accuracy": 0.55}, options()),
        result("rte", {"accuracy": 0.5}, options("favor+", 128, "none")),
    ]
    for index, content in enumerate(runs):
        (tmp_path / f"{index}.json").write_text(json.dumps(content))
    header, rows = run(tmp_path, capsys, "--figure", str(tmp_path / "glue.png"))
    assert header == ["attention", "cola (matthews_correlation)", "rte (accuracy)", "mean", "share of softmax, %"]
    assert list(rows) == ["softmax", "FAVOR+, as published, M = 128", "FAVOR++, centred, M = 64"]
    assert rows["softmax"] == ["40.0", "60.0", "50.0", "100.0"]
    assert rows["FAVOR++, centred, M = 64"] == ["20.0 ± 14.1", "55.0", "37.5", "75.0"], "with the deviation over seeds"
    assert rows["FAVOR+, as published, M = 128"][1] == "50.0"
    assert rows["FAVOR+, as published, M = 128"][2] == "", "no mean where a task is missing"
    assert (tmp_path / "glue.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_with_a_twin_counts_for_both(tmp_path, capsys):
    content = result("mrpc", {"f1": 0.8, "accuracy": 0.7}, options(), softmax_metrics={"f1": 0.9, "accuracy": 0.8})
    (tmp_path / "results.json").write_text(json.dumps(content))
    header, rows = run(tmp_path, capsys)
    assert header[1:] == ["mrpc (accuracy)", "mrpc (f1)", "mean", "share of softmax, %"]
    assert rows["softmax"] == ["80.0", "90.0", "90.0", "100.0"]
    assert rows["FAVOR++, centred, M = 64"] == ["70.0", "80.0", "80.0", "88.9"]


def test_runs_on_images_with_tiles_before_training_and_over_the_steps(tmp_path, capsys):
    def images(top1, before, options=None, size=224):
        steps = [{"epoch": 0.5, "completed_steps": 4, "train_loss": 1.0, "top1": before}]
        steps.append({"epoch": 1, "completed_steps": 8, "train_loss": 0.5, "top1": top1})
        metrics = {"initial_metrics": {"top1": before}, "arguments": {"image_size": size}, "history": steps}
        return result("bees", {"top1": top1}, options, **metrics)

    runs = [
        images(0.9, 0.8),
        images(0.8, 0.5, options("favor+", 128, "none")),
        images(0.7, 0.6, options("favor++", 128, "full", exact_window=[8, 8])),
        images(0.6, 0.4, options("none", 128, "none", exact_window=[12, 16])),
        images(0.5, 0.3, options("favor++", 128, "full", statistics="calibrated"), size=518),
    ]
    for index, content in enumerate(runs):
        (tmp_path / f"{index}.json").write_text(json.dumps(content))
    header, rows = run(tmp_path, capsys, "--curves", str(tmp_path / "curves.svg"))
    assert header[1:5] == [
        *("bees, 224 px (top1)", "bees, 224 px (top1, before training)"),
        *("bees, 518 px (top1)", "bees, 518 px (top1, before training)"),
    ]
    assert list(rows) == [
        *("softmax", "FAVOR+, as published, M = 128", "FAVOR++, full, 8 x 8 tiles, M = 128"),
        *("FAVOR++, full, calibrated, M = 128", "12 x 16 tiles alone"),
    ]
    assert rows["FAVOR++, full, 8 x 8 tiles, M = 128"][:3] == ["70.0", "60.0", ""]
    assert rows["FAVOR++, full, calibrated, M = 128"][:4] == ["", "", "50.0", "30.0"]
    assert "12 x 16 tiles alone" in (tmp_path / "curves.svg").read_text()


def test_of_error_rates_fewer_are_better(tmp_path, capsys):
    def speech(wer, options=None, **more):
        step = {"completed_steps": 4, "train_loss": 1.0, "wer": wer, "cer": wer / 4}
        return result("digits", {"wer": wer, "cer": wer / 4}, options, history=[step], **more)

    runs = [
        speech(0.2),
        speech(0.3, options(), initial_metrics={"wer": 0.6, "cer": 0.2}),
        speech(0.5, options()),
        speech(1.1, options("favor+", 64, "none")),
        speech(0.9, options("favor+", 8, "none"), initial_metrics={"wer": 1.3, "cer": 1.2}),
        speech(0.7, options("uniform", 64, "none"), initial_metrics={"wer": 0.8, "cer": 0.4}),
    ]
    for index, content in enumerate(runs):
        (tmp_path / f"{index}.json").write_text(json.dumps(content))
    figures = ["--curves", str(tmp_path / "curves.svg"), "--features", str(tmp_path / "features.svg")]
    header, rows = run(tmp_path, capsys, *figures)
    assert list(rows)[-1] == "mean of the values", "controls come last"
    assert header[1:] == [
        *("digits (cer)", "digits (cer, before training)", "digits (wer)", "digits (wer, before training)"),
        *("mean", "share of softmax, %"),
    ]
    assert rows["softmax"] == ["5.0", "", "20.0", "", "20.0", "100.0"]
    assert rows["FAVOR++, centred, M = 64"] == ["10.0 ± 3.5", "20.0", "40.0 ± 14.1", "60.0", "40.0", "75.0"]
    assert rows["FAVOR+, as published, M = 64"][-2:] == ["110.0", "-12.5"]
    assert "wer x 100" in (tmp_path / "curves.svg").read_text()
    drawn = (tmp_path / "features.svg").read_text()
    for text in (
        "softmax",
        "FAVOR+, as published",
        "FAVOR++, centred",
        "mean of the values",
        "digits, after training",
    ):
        assert f"<!-- {text} -->" in drawn


def test_an_empty_folder_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "no results.json" in capsys.readouterr().err
