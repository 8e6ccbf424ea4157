"""hf-favorpp report and calibrate: the library's numbers, on data in every format."""

import pytest
import torch
from command_runs import run, run_json
from transformers import AutoModelForSequenceClassification, AutoTokenizer, ViTModel

from hf_favorpp import approximation_report
from hf_favorpp.nn import converted_layers


def test_the_numbers_are_those_of_the_library(converted, texts):
    found = run_json("report", converted, "--data", texts / "a.txt", "--max-samples", 4, "--max-length", 20)
    lines = [line for line in (texts / "a.txt").read_text().splitlines() if line][::3]
    batch = AutoTokenizer.from_pretrained(converted)(
        lines, truncation=True, max_length=20, padding=True, return_tensors="pt"
    )
    model = AutoModelForSequenceClassification.from_pretrained(converted)
    expected = approximation_report(model, batch).to_dict()
    assert found["num_tokens"] == expected["num_tokens"]
    assert found["layer_errors"] == pytest.approx(expected["layer_errors"], rel=1e-4)
    assert found["end_to_end"] == pytest.approx(expected["end_to_end"], rel=1e-3)
    assert found["data"] == {"kind": "texts", "used": 4, "available": 12, "batches": 1}


def test_all_formats_hold_the_same_texts(converted, texts):
    errors = [
        run_json("report", converted, "--data", texts / name, "--max-samples", 3)["layer_errors"]
        for name in ("a.txt", "a.jsonl", "a.csv", "a.tsv", "each")
    ]
    assert all(each == errors[0] for each in errors)


def test_tables_and_figure(converted, texts, tmp_path):
    data = ["--data", texts / "a.txt", "--max-samples", 2]
    shown = run("report", converted, *data, "--plot", tmp_path / "new" / "heads.png").stdout
    assert (tmp_path / "new" / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert "Worst heads" in shown
    assert "relative distance of the logits" in shown
    assert run("report", converted, *data, "--per-head").stdout.count("━━━━━━━━━━ ") == 2 + 4
    assert "--plot must end in" in run("report", converted, *data, "--plot", "x.gif", code=2).stderr


def test_a_limit_decides_the_exit_code(converted, texts):
    data = ["--data", texts / "a.txt", "--max-samples", 2, "--fail-above"]
    worst = max(run_json("report", converted, *data, 1e9)["layer_errors"])
    document = run_json("report", converted, *data, worst / 2, code=4)
    assert document["layer_errors"], "the result is told all the same"
    run("report", converted, *data, worst * 1.01)


def test_a_softmax_model_has_nothing_to_report(bert, texts):
    assert "is not converted" in run("report", bert, "--data", texts / "a.txt", code=1).stderr
    assert "is not converted" in run("calibrate", bert, "x", "--data", texts / "a.txt", code=1).stderr


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("gone.txt", None, 3, "there is no"),
        ("empty.txt", "\n \n", 1, "holds no text"),
        ("a.pdf", "x", 1, "texts are read from .txt"),
        ("a.jsonl", '{"body": "x"}', 1, "must be an object with a string 'text', and has: body"),
        ("a.jsonl", "{", 1, "line 1 is not JSON"),
        ("a.csv", "body\nx", 1, "has no column 'text'; it has: body"),
    ],
)
def test_data_that_cannot_be_read(converted, tmp_path, name, content, code, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    result = run("report", converted, "--data", tmp_path / name, code=code)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_latin_1_is_told(converted, tmp_path):
    (tmp_path / "a.txt").write_bytes("word caf\xe9".encode("latin-1"))
    assert "must be UTF-8" in run("report", converted, "--data", tmp_path / "a.txt", code=1).stderr


def test_calibrate_writes_a_calibrated_model_and_leaves_its_source(converted, texts, tmp_path):
    before = (converted / "model.safetensors").read_bytes()
    (tmp_path / "source").mkdir()
    for path in converted.iterdir():
        (tmp_path / "source" / path.name).write_bytes(path.read_bytes())
    card = (converted / "README.md").read_text() + "\nWords of mine.\n"
    (tmp_path / "source" / "README.md").write_text(card)
    data = ["--data", texts / "a.csv", "--max-samples", 6, "--batch-size", 4]
    document = run_json("calibrate", tmp_path / "source", tmp_path / "out", *data)
    assert document["calibration"] == {"kind": "texts", "used": 6, "available": 12, "batches": 2}
    assert [layer["calibrated"] for layer in document["layers"]] == [True, True]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert all(layer.calibrated and layer.config.preconditioning == "full" for layer in converted_layers(model))
    assert [layer["calibrated"] for layer in run_json("inspect", tmp_path / "out")["layers"]] == [True, True]
    assert (tmp_path / "source" / "model.safetensors").read_bytes() == before
    assert "Words of mine." in (tmp_path / "out" / "README.md").read_text()
    assert "--overwrite" in run("calibrate", converted, tmp_path / "out", *data, code=2).stderr


def test_images(vit, images, tmp_path):
    options = ["--num-features", 4, "--calibration-data", images, "--max-samples", 5, "--batch-size", 2]
    document = run_json("convert", vit, tmp_path / "out", *options)
    assert document["calibration"] == {"kind": "images", "used": 4, "available": 6, "batches": 2}
    assert "broken.png is no readable image" in document["notes"][0]
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    found = run_json("report", tmp_path / "out", "--data", images, "--max-samples", 4)
    assert found["num_tokens"] == 3 * 17
    assert found["data"]["used"] == 3
    model = ViTModel.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.isfinite(model(pixel_values=torch.zeros(1, 3, 32, 32)).last_hidden_state).all()


def test_a_model_of_images_is_given_texts(vit, texts, tmp_path):
    run("convert", vit, tmp_path / "out", "--num-features", 4)
    assert "the model takes .png" in run("report", tmp_path / "out", "--data", texts, code=3).stderr


def test_a_model_of_both_is_told_where_to_go(clip, texts, tmp_path):
    run("convert", clip, tmp_path / "out", "--num-features", 4)
    assert "use calibrate(model, loader)" in run("report", tmp_path / "out", "--data", texts / "a.txt", code=1).stderr
