"""fidelity.py from end to end on tiny models: every task, resumed, refused, reported."""

from __future__ import annotations

import json

import fidelity
import pytest
from fidelity_inputs import FidelityError
from fidelity_report import SCORES
from tiny_fidelity import (
    command,
    write_bert,
    write_data,
    write_vit,
    write_wav2vec2,
)
from transformers import AutoModel, AutoTokenizer, MPNetConfig, MPNetModel

from hf_favorpp import FavorppError, convert_to_favorpp


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_bert):
    folder = tmp_path_factory.mktemp("models")
    bert = write_bert(folder / "bert", tiny_bert)
    others = {"audio": write_wav2vec2(folder / "wav2vec2")} | dict.fromkeys(
        ("image", "probe"), write_vit(folder / "vit")
    )
    return {**dict.fromkeys(("sts", "text", "far"), bert), **others}


def scores_by_run(results):
    return {(run["method"], run["num_features"], run["seed"]): run["scores"] for run in results["runs"]}


@pytest.mark.parametrize("task", ["sts", "text", "far", "image", "audio"])
def test_every_task(task, models, data, tmp_path, capsys, one_thread):
    output, figure = tmp_path / "out" / f"{task}.json", tmp_path / "figures" / f"{task}.png"
    methods = ["favor++", "elu", "calibrated-full", "calibrated-full+window"]
    window = {"exact_window": [2, 2]} if task == "image" else {"exact_window": 8, "exact_ends": [1, 1]}
    more = {"methods": methods, "num_features": [4, 256], "seeds": 2, "figure": figure, **window}
    results = fidelity.main(command(task, models[task], data[task], output, **more))
    assert json.loads(output.read_text()) == results
    runs = scores_by_run(results)
    assert list(runs)[:5] == [
        ("uniform", None, None),
        *((f"window-only{end}", count, None) for end in ("", "+window") for count in (4, 256)),
    ]
    assert list(runs)[5:] == [
        (method, *more)
        for method in methods
        for more in ([(None, None)] if method == "elu" else [(count, seed) for count in (4, 256) for seed in (0, 1)])
    ]
    for score in SCORES[task]:
        softmax = results["softmax"][score.key]
        assert all(isinstance(scores[score.key], float) for scores in runs.values())
        assert runs["window-only", 256, None][score.key] == pytest.approx(softmax, abs=1e-5), "it sees everything"
        assert runs["window-only", 4, None][score.key] != pytest.approx(softmax, abs=1e-5)
        assert runs["uniform", None, None][score.key] != pytest.approx(softmax, abs=1e-5)
        assert runs["favor++", 4, 0][score.key] != runs["favor++", 4, 1][score.key]
    assert results["settings"]["task"] == task
    assert results["settings"]["exact_ends"] == window.get("exact_ends", [0, 0])
    assert {"torch", "transformers", "scipy"} <= set(results["versions"])
    assert "command" in results
    assert figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "2 attention layers are replaced" in printed
    assert all(name in printed for name in ("softmax", "uniform", "window-only+window", *methods))


def test_learnt_features_come_closer_than_those_they_begin_as(models, data, tmp_path, one_thread):
    methods = ["calibrated-full", "learnt-full", "learnt-favor+"]
    more = {"methods": methods, "num_features": [4], "calibration_samples": 6, "transfer_steps": 60}
    errors = {}
    for name, steps in (
        ("by itself", {}),
        ("and together", {"align_steps": 30}),
        ("weights", {"transfer_loss": "weights"}),
    ):
        output = tmp_path / f"{name}.json"
        results = fidelity.main(command("text", models["text"], data["text"], output, **more, **steps))
        errors[name] = {method: scores["attention_error"] for (method, *_), scores in scores_by_run(results).items()}
    for found in errors.values():
        assert found["learnt-full"] < 0.95 * found["calibrated-full"]
    assert len({found["learnt-full"] for found in errors.values()}) == 3, "all that was asked for is done"
    assert len({found["calibrated-full"] for found in errors.values()}) == 1
    assert errors["by itself"]["learnt-favor+"] != errors["by itself"]["learnt-full"]


def test_a_probe_of_softmax_features_and_one_of_the_features_themselves(models, data, tmp_path, one_thread):
    more = {"methods": ["favor+"], "num_features": [2, 256], "max_samples": 18, "image_size": 40}
    results = fidelity.main(command("probe", models["probe"], data["probe"], tmp_path / "probe.json", **more))
    runs, softmax = scores_by_run(results), results["softmax"]
    assert softmax["zero_shot_accuracy"] == softmax["probe_accuracy"] > 0.8, "brightness is easy to see"
    assert runs["window-only", 256, None] == pytest.approx(softmax, abs=1e-5)
    far = runs["favor+", 2, 0]
    assert far["patch_cosine"] < 0.99
    assert far["probe_accuracy"] >= far["zero_shot_accuracy"]
    assert runs["uniform", None, None]["zero_shot_accuracy"] < softmax["zero_shot_accuracy"]
    fewer = fidelity.main(
        command("probe", models["probe"], data["probe"], tmp_path / "few.json", **more, training_samples=3)
    )
    assert fewer["softmax"]["probe_accuracy"] < softmax["probe_accuracy"]


def test_a_probe_needs_images_of_all_classes(models, data, tmp_path, one_thread):
    files = {"data_file": data["probe"]["data_file"], "calibration_file": data["image"]["calibration_file"]}
    with pytest.raises(FidelityError, match=r"trained on the classes \['ants', 'bees'\].* has images of \['dark'"):
        fidelity.main(command("probe", models["probe"], files, tmp_path / "probe.json"))


def test_images_of_another_size_are_other_features(models, data, tmp_path, one_thread):
    more = {"methods": ["favor+"], "num_features": [4]}
    runs = [
        scores_by_run(
            fidelity.main(
                command("image", models["image"], data["image"], tmp_path / f"{size}.json", image_size=size, **more)
            )
        )
        for size in (32, 48)
    ]
    seen = [run["window-only", 4, None]["patch_cosine"] for run in runs]
    assert seen[0] != pytest.approx(seen[1], abs=1e-3)


def test_more_features_are_closer_to_softmax(models, data, tmp_path, one_thread):
    more = {"methods": ["full"], "num_features": [4, 1024], "seeds": 2}
    runs = scores_by_run(fidelity.main(command("text", models["text"], data["text"], tmp_path / "text.json", **more)))
    for seed in (0, 1):
        few, many = runs["full", 4, seed], runs["full", 1024, seed]
        assert few["cosine"] < runs["uniform", None, None]["cosine"] < many["cosine"] < 1.0001
        assert few["correlation"] < many["correlation"]
        assert many["cosine"] > 0.97


def test_a_converted_checkpoint_is_compared_with_its_softmax_model(models, data, tmp_path, one_thread):
    model = convert_to_favorpp(AutoModel.from_pretrained(models["text"]))
    model.save_pretrained(tmp_path / "converted")
    AutoTokenizer.from_pretrained(models["text"]).save_pretrained(tmp_path / "converted")
    pair = [
        fidelity.main(command("text", folder, data["text"], tmp_path / f"{folder.name}.json", methods=["full"]))
        for folder in (models["text"], tmp_path / "converted")
    ]
    assert scores_by_run(pair[0]) == scores_by_run(pair[1])


def test_far_evidence_passes_through_features_but_through_no_window(models, data, tmp_path, one_thread):
    methods = ["full", "calibrated-full", "calibrated-full+window"]
    more = {"methods": methods, "num_features": [8, 24], "exact_window": 8, "exact_ends": [1, 1], "batch_size": 4}
    runs = scores_by_run(fidelity.main(command("far", models["far"], data["far"], tmp_path / "far.json", **more)))
    for (method, _, _), scores in runs.items():
        if method.startswith("window-only"):
            assert scores == {"delta_cosine": 0.0, "delta_norm_ratio": 0.0}
        else:
            assert scores["delta_norm_ratio"] > 0.01


def test_runs_of_the_file_are_not_repeated(models, data, tmp_path, monkeypatch, capsys, one_thread):
    output = tmp_path / "sts.json"
    measured = []
    measure_run = fidelity.measure_run

    def measure_two(args, run, *rest):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(run.method)
        return measure_run(args, run, *rest)

    argv = command("sts", models["sts"], data["sts"], output, methods=["favor++"])
    monkeypatch.setattr(fidelity, "measure_run", measure_two)
    monkeypatch.setattr("sys.argv", ["recipes/fidelity.py", "--first"])
    with pytest.raises(KeyboardInterrupt):
        fidelity.main(argv)
    assert [run["method"] for run in json.loads(output.read_text())["runs"]] == ["uniform", "window-only"]
    measured.clear()
    monkeypatch.setattr("sys.argv", ["recipes/fidelity.py", "--second"])
    results = fidelity.main(command("sts", models["sts"], data["sts"], output, methods=["favor++", "elu"]))
    assert measured == ["favor++", "elu"]
    assert len(results["runs"]) == 4
    assert results["earlier_commands"] == ["python recipes/fidelity.py --first"]
    assert results["command"] == "python recipes/fidelity.py --second"
    measured.clear()
    monkeypatch.setattr(fidelity, "load_model", None)
    assert fidelity.main(argv) == results
    assert "holds all 3 runs already" in capsys.readouterr().out


def test_a_file_of_other_settings_is_refused(models, data, tmp_path, one_thread):
    output = tmp_path / "sts.json"
    fidelity.main(command("sts", models["sts"], data["sts"], output, methods=["elu"]))
    content = output.read_text()
    with pytest.raises(FidelityError, match=r"with other values of --max_length, --max_samples\. Restore them"):
        fidelity.main(command("sts", models["sts"], data["sts"], output, max_length=12, max_samples=5))
    assert output.read_text() == content


def test_report_only_needs_no_model_and_no_data(models, data, tmp_path, monkeypatch, capsys, one_thread):
    output = tmp_path / "sts.json"
    fidelity.main(command("sts", models["sts"], data["sts"], output, methods=["elu"]))
    capsys.readouterr()
    monkeypatch.setattr(fidelity, "measure", None)
    argv = ["--output_json", str(output), "--report_only", "true", "--markdown", "true"]
    fidelity.main([*argv, "--figure", str(tmp_path / "sts.svg")])
    lines = capsys.readouterr().out.splitlines()
    assert "| attention   | M = 8   |" in lines
    assert (tmp_path / "sts.svg").read_text().startswith("<?xml")
    with pytest.raises(FidelityError, match=r"missing\.json does not exist"):
        fidelity.main(["--report_only", "true", "--output_json", str(tmp_path / "missing.json")])


def test_a_model_that_cannot_be_converted_is_refused_before_anything_is_measured(data, tmp_path, one_thread):
    config = MPNetConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    MPNetModel(config).save_pretrained(tmp_path / "mpnet")
    with pytest.raises(FavorppError, match="mpnet cannot be converted"):
        fidelity.main(command("sts", tmp_path / "mpnet", data["sts"], tmp_path / "out.json"))
    assert not (tmp_path / "out.json").exists()
