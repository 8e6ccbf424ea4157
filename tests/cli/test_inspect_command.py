"""hf-favorpp inspect: layers, options and sizes, from the configuration and the headers alone."""

import io
import json

import pytest
from command_runs import run, run_json
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.bert import BertConfig

from hf_favorpp.cli.inspection import build_without_weights, describe, show
from hf_favorpp.cli.sources import Source, load_config


def test_a_softmax_model(bert):
    found = run_json("inspect", bert)
    assert (found["model"], found["model_type"]) == ("BertForSequenceClassification", "bert")
    assert (found["converted"], found["convertible"], found["reason"]) == (False, True, None)
    model = AutoModelForSequenceClassification.from_pretrained(bert)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["dtypes"] == {"F32": found["parameters"]}
    assert found["checkpoint_bytes"] == (bert / "model.safetensors").stat().st_size + 1  # and optimizer.pt
    assert found["favorpp_bytes"] == 0
    for index, layer in enumerate(found["layers"]):
        assert layer == {
            **{"index": index, "name": f"bert.encoder.layer.{index}.attention.self", "family": "bert"},
            **{"class": "BertSelfAttention", "num_heads": 2, "head_dim": 16, "converted": False},
            **{"stays_softmax": None, "options": None, "calibrated": None},
        }
    assert "2 of 2 layers can be converted" in run("inspect", bert).stdout


def test_a_converted_model(converted):
    found = run_json("inspect", converted)
    assert (found["converted"], found["convertible"]) == (True, False)
    assert [layer["options"]["num_features"] for layer in found["layers"]] == [8, 8]
    assert [layer["options"]["preconditioning"] for layer in found["layers"]] == ["center"] * 2
    assert [layer["calibrated"] for layer in found["layers"]] == [False, False]
    added = {name: t for name, t in load_file(converted / "model.safetensors").items() if ".favorpp." in name}
    assert found["favorpp_bytes"] == sum(t.numel() * t.element_size() for t in added.values()) > 0
    shown = run("inspect", converted).stdout
    assert "FAVOR++ in 2 of 2 layers" in shown
    assert "8 per head, orthogonal, seed 0" in shown
    assert "not calibrated" in shown


def test_no_weights_are_read(converted, tmp_path, monkeypatch):
    """A checkpoint whose tensors were cut off behind its header is inspected all the same."""
    for path in converted.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(whole[:header])
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", None)
    found = run_json("inspect", tmp_path)
    expected = run_json("inspect", converted)
    assert found["layers"] == expected["layers"]
    assert found["favorpp_bytes"] == expected["favorpp_bytes"]
    (tmp_path / "model.safetensors").write_bytes(whole[:40])
    unread = run_json("inspect", tmp_path)
    assert (unread["dtypes"], unread["parameters"]) == (None, expected["parameters"])
    for notes in (found["notes"], unread["notes"]):
        assert "model.safetensors of" in notes[0]
        assert "is damaged or incomplete: download or save it again." in notes[0]


def test_what_stays_softmax_and_why(clip, bert, tmp_path):
    found = run_json("inspect", clip)
    reasons = {layer["name"].split(".")[0]: layer["stays_softmax"] for layer in found["layers"]}
    assert "causal" in reasons["text_model"]
    assert reasons["vision_model"] is None
    assert "0-1 stays softmax: the text model of CLIP is causal" in run("inspect", clip).stdout
    run("convert", bert, tmp_path / "out", "--num-features", 4, "--layers", "1")
    first, second = run_json("inspect", tmp_path / "out")["layers"]
    assert (first["converted"], second["converted"]) == (False, True)
    assert "does not name it" in first["stays_softmax"]


def test_a_model_that_cannot_be_converted(gpt2):
    found = run_json("inspect", gpt2)
    assert (found["converted"], found["convertible"], found["layers"]) == (False, False, [])
    assert found["reason"].startswith("gpt2 cannot be converted: it is a decoder, and only bidirectional encoders")
    assert run("inspect", gpt2).stdout.count("cannot be converted") == 1


def test_a_calibration_that_is_configured_and_missing_is_told(converted, tmp_path):
    config = json.loads((converted / "config.json").read_text())
    config["favorpp"]["statistics"] = "calibrated"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((converted / "model.safetensors").read_bytes())
    assert [layer["calibrated"] for layer in run_json("inspect", tmp_path)["layers"]] == [False, False]
    assert "run hf-favorpp calibrate" in run("inspect", tmp_path).stdout


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("./nowhere", 3, "there is no folder ./nowhere"),
        ("a/b/c", 3, "there is no folder a/b/c"),
        ("nobody/nothing", 3, "cannot be loaded from the Hub (offline: HF_HUB_OFFLINE is set)"),
    ],
)
def test_a_model_that_is_not_there(name, code, message):
    result = run("inspect", name, code=code)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_folder_without_a_model(tmp_path):
    assert "holds no config.json" in run("inspect", tmp_path, code=3).stderr
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    assert "cannot be loaded" in run("inspect", tmp_path, code=1).stderr
    (tmp_path / "config.json").write_text("{")
    assert "cannot be loaded" in run("inspect", tmp_path, code=3).stderr
    assert "is a file" in run("inspect", tmp_path / "config.json", code=2).stderr


def test_options_that_are_wrong_are_told(converted, tmp_path):
    config = json.loads((converted / "config.json").read_text())
    config["favorpp"]["num_featurs"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "Did you mean 'num_features'?" in run("inspect", tmp_path, code=1).stderr


def test_a_class_that_transformers_does_not_have(tmp_path):
    config = BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config.architectures = ["MyOwnBert"]
    config.save_pretrained(tmp_path)
    found = run_json("inspect", tmp_path)
    assert found["model"] == "BertModel"
    assert found["checkpoint_bytes"] == 0
    assert "MyOwnBert, which Transformers does not have" in found["notes"][0]


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(bert, clip, columns):
    for folder in (bert, clip):
        source = Source(folder.name, str(folder))
        config = load_config(source)
        description = describe(source, config, build_without_weights(source, config))
        console = Console(width=columns, record=True, file=io.StringIO())
        console.print(show(description))
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= columns
        for layer in description["layers"] if folder == bert else ():
            assert any(f" {layer['name']} " in line for line in lines), "names are not cut"
