"""hf-favorpp convert: what is written loads as it was, is whole or not there, and says what it is."""

import json

import pytest
import torch
from command_runs import run, run_json
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from hf_favorpp import FavorppConfig, convert_to_favorpp
from hf_favorpp.cli import writing
from hf_favorpp.cli.failures import ExitCode
from hf_favorpp.nn import converted_layers


def load(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


def outputs(model, tokenizer):
    batch = AutoTokenizer.from_pretrained(tokenizer)(
        ["the word was what some have", "it is"], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        return model(**batch).logits


def test_the_result_is_what_the_library_makes(bert, converted):
    expected = convert_to_favorpp(load(bert), FavorppConfig(num_features=8))
    found = load(converted)
    assert type(found) is type(expected)
    assert [layer.config for layer in converted_layers(found)] == [
        layer.config for layer in converted_layers(expected)
    ]
    assert torch.allclose(outputs(found, converted), outputs(expected, bert), atol=1e-6)
    assert not torch.allclose(outputs(found, converted), outputs(load(bert), bert), atol=1e-4)


def test_tokenizer_comes_along_and_the_card_of_another_model_does_not(bert, converted):
    names = {path.name for path in converted.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert "optimizer.pt" not in names
    assert (converted / "tokenizer.json").read_bytes() == (bert / "tokenizer.json").read_bytes()
    assert "Of the softmax model" not in (converted / "README.md").read_text()
    assert sorted(path.name for path in converted.parent.iterdir()) == [converted.name], "nothing else is left"


def test_options_reach_the_checkpoint(bert, texts, tmp_path):
    options = ["--num-features", 4, "--exact-window", 8, "--exact-ends", 1, 2, "--layers", "1", "--seed", 3]
    data = ["--calibration-data", texts / "a.txt", "--max-samples", 4, "--max-length", 24, "--dtype", "bfloat16"]
    document = run_json("convert", bert, tmp_path / "out", *options, *data)
    stored = FavorppConfig.from_dict(json.loads((tmp_path / "out" / "config.json").read_text())["favorpp"])
    assert (stored.num_features, stored.exact_window, stored.exact_ends, stored.layers) == (4, 8, (1, 2), (1,))
    assert (stored.seed, stored.statistics, stored.preconditioning) == (3, "calibrated", "full")
    assert document["converted_layers"] == 1
    assert [layer["calibrated"] for layer in document["layers"]] == [None, True]
    assert document["calibration"] == {"kind": "texts", "used": 4, "available": 12, "batches": 1}
    assert document["dtype"] == "bfloat16"
    assert document["check"]["output_difference"] <= 2e-2
    assert any("others stay softmax" in note for note in document["notes"])


def test_a_budget_leaves_layers_softmax(bert, texts, tmp_path):
    data = ["--calibration-data", texts / "a.txt", "--max-samples", 2, "--num-features", 2]
    failed = run_json("convert", bert, tmp_path / "out", *data, "--error-budget", 1e-6, code=1)
    assert "no layer keeps to error_budget" in failed["error"]["message"]
    assert not (tmp_path / "out").exists()


def test_a_tile_of_patches(vit, tmp_path):
    document = run_json("convert", vit, tmp_path / "out", "--num-features", 4, "--exact-window", "2X2")
    assert document["layers"][0]["options"]["exact_window"] == [2, 2]
    assert document["check"]["output_difference"] == 0


def test_a_model_made_of_several(clip, tmp_path):
    document = run_json("convert", clip, tmp_path / "out", "--num-features", 4)
    assert document["check"]["output_difference"] is not None
    assert {layer["family"]: layer["converted"] for layer in document["layers"]} == {
        "clip_text_model": False,
        "clip": True,
    }


def test_the_published_method(bert, tmp_path):
    (layer, _) = run_json("convert", bert, tmp_path / "out", "--paper", "--num-features", 4)["layers"]
    assert layer["options"] == FavorppConfig.paper(num_features=4).to_dict()


def test_what_is_there_is_not_replaced_unless_asked(bert, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    run("convert", bert, out, "--num-features", 2)  # an empty folder is as good as none
    (out / "mine.txt").write_text("mine")
    before = (out / "model.safetensors").read_bytes()
    message = run("convert", bert, out, "--num-features", 4, code=2).stderr
    assert "--overwrite" in message
    assert (out / "model.safetensors").read_bytes() == before
    run("convert", bert, out, "--num-features", 4, "--overwrite")
    assert converted_layers(load(out))[0].config.num_features == 4
    assert not (out / "mine.txt").exists()


def test_a_folder_that_is_no_checkpoint_or_holds_the_source_is_never_replaced(bert, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"x")
    assert "no config.json" in run("convert", bert, tmp_path / "photos", "--overwrite", code=2).stderr
    for destination in (bert, bert.parent):
        assert "which is read" in run("convert", bert, destination, "--overwrite", code=2).stderr
    assert "is a file" in run("convert", bert, bert / "config.json", code=2).stderr
    assert (tmp_path / "photos" / "one.jpg").is_file()
    assert (bert / "model.safetensors").is_file()


@pytest.mark.parametrize("existing", [False, True])
def test_nothing_is_left_where_saving_fails(bert, converted, tmp_path, monkeypatch, existing):
    out = tmp_path / "out"
    if existing:
        run("convert", bert, out, "--num-features", 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def fail(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(writing, "_compare", fail)
    message = run("convert", bert, out, "--num-features", 4, "--overwrite", code=1).stderr
    assert "error: OSError: no space left on device" in message
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_model_whose_tensors_do_not_reload_is_not_written(bert, tmp_path, monkeypatch):
    save = PreTrainedModel.save_pretrained

    def spoil(model, folder, **options):
        save(model, folder, **options)
        tensors = load_file(folder / "model.safetensors")
        tensors["classifier.bias"] += 1
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", spoil)
    failed = run_json("convert", bert, tmp_path / "out", "--num-features", 4, code=int(ExitCode.CHECK_FAILED))
    assert "does not reload as it was: classifier.bias differs" in failed["error"]["message"]
    assert not list(tmp_path.iterdir())
    run("convert", bert, tmp_path / "out", "--num-features", 4, "--no-check")


def test_a_model_whose_outputs_differ_is_not_written(bert, tmp_path, monkeypatch):
    outputs = iter([[torch.ones(1)], [torch.ones(1) * 1.01]])
    monkeypatch.setattr(writing, "_outputs", lambda model, inputs: next(outputs))
    failed = run_json("convert", bert, tmp_path / "out", "--num-features", 4, code=int(ExitCode.CHECK_FAILED))
    assert "its outputs differ by 1.0e-02" in failed["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_a_converted_model_is_converted_anew_only_when_asked(converted, bert, tmp_path):
    assert "--anew" in run("convert", converted, tmp_path / "out", code=2).stderr
    run("convert", converted, tmp_path / "out", "--anew", "--num-features", 3)
    again, first = load(tmp_path / "out"), load(bert)
    assert converted_layers(again)[0].config.num_features == 3
    weights = again.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in first.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kernel", "foo"], "--kernel must be one of"),
        (["--num-features", "0"], "--num-features must be an integer >= 1, got 0"),
        (["--exact-window", "8by8"], "--exact-window must be a number of tokens such as 64"),
        (["--layers", "1,x"], "--layers must be numbers and ranges"),
        (["--layers", "5-3"], "ends before it begins"),
        (["--statistics", "calibrated"], "needs --calibration-data"),
        (["--statistics", "sequence", "--calibration-data", "x"], "contradicts"),
        (["--error-budget", "0.5"], "give both"),
        (["--paper", "--kernel", "relu"], "--paper is the published method"),
        (["--dtype", "int8"], "--dtype must be one of"),
        (["--device", "cuda:7"], "--device cuda:7 cannot be used here"),
        (["--bogus"], "No such option: --bogus"),
    ],
)
def test_a_wrong_command_line_is_told_before_anything_is_loaded(bert, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    result = run("convert", bert, tmp_path / "out", *options, code=2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_model_that_cannot_be_converted(gpt2, tmp_path):
    result = run("convert", gpt2, tmp_path / "out", code=1)
    assert "gpt2 cannot be converted: it is a decoder" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
