"""--trust-remote-code: checkpoints with code of their own, which runs where that is allowed and nowhere else."""

import json

import pytest
import torch
from command_runs import run, run_json
from transformers import AutoModelForSequenceClassification, AutoTokenizer, dynamic_module_utils

from hf_favorpp import FavorppConfig, approximation_report, convert_to_favorpp
from hf_favorpp.nn import converted_layers

TRUST = {"trust_remote_code": True}
CODE = """
from transformers import BertConfig, BertForSequenceClassification


class OwnConfig(BertConfig):
    model_type = "own_bert"


class OwnClassifier(BertForSequenceClassification):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 2 * out.logits
        return out
"""


@pytest.fixture
def own(bert, tmp_path, monkeypatch):
    """The classifier with a configuration and a class of its own, whose logits are twice as large."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    for path in bert.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((bert / "config.json").read_text())
    config |= {"model_type": "own_bert", "architectures": ["OwnClassifier"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_own.OwnConfig",
        "AutoModelForSequenceClassification": "modeling_own.OwnClassifier",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(CODE)
    return folder


def logits(name, **options):
    batch = AutoTokenizer.from_pretrained(name, **options)(
        ["the word was what", "it is"], padding=True, return_tensors="pt"
    )
    model = AutoModelForSequenceClassification.from_pretrained(name, **options)
    if not converted_layers(model):
        convert_to_favorpp(model, FavorppConfig(num_features=8))
    with torch.no_grad():
        return model(**batch).logits


def test_a_checkpoint_with_code_of_its_own_goes_through_all_commands(own, bert, texts, hub, tmp_path):
    found = run_json("inspect", own, "--trust-remote-code")
    assert (found["model"], found["convertible"]) == ("OwnClassifier", True)
    plain, calibrated = tmp_path / "plain", tmp_path / "calibrated"
    document = run_json("convert", own, plain, "--num-features", 8, "--trust-remote-code")
    assert document["check"]["output_difference"] == 0
    assert (plain / "modeling_own.py").read_text() == CODE
    expected = 2 * logits(bert)
    assert torch.equal(logits(plain, **TRUST), expected)

    data = ["--data", texts / "a.txt", "--max-samples", 4, "--trust-remote-code"]
    report = run_json("report", plain, *data)
    batch = AutoTokenizer.from_pretrained(bert)(
        [line for line in (texts / "a.txt").read_text().splitlines() if line][::3],
        truncation=True,
        max_length=64,
        padding=True,
        return_tensors="pt",
    )
    model = AutoModelForSequenceClassification.from_pretrained(plain, **TRUST)
    assert report["layer_errors"] == pytest.approx(approximation_report(model, batch).layer_errors, rel=1e-4)
    document = run_json("calibrate", plain, calibrated, *data)
    assert document["model"] == "OwnClassifier"
    assert all(
        layer.calibrated
        for layer in converted_layers(AutoModelForSequenceClassification.from_pretrained(calibrated, **TRUST))
    )

    run("push", plain, "me/own", "--trust-remote-code")
    assert hub.files("me/own")["modeling_own.py"].decode() == CODE
    assert torch.equal(logits("me/own", **TRUST), expected)
    assert run_json("inspect", "me/own", "--trust-remote-code")["converted"]


@pytest.mark.parametrize("command", ["inspect", "convert", "calibrate", "report", "push"])
def test_code_that_is_not_trusted_does_not_run(own, texts, tmp_path, command):
    (own / "modeling_own.py").write_text("raise SystemExit('the code ran')")
    given = {
        "inspect": [],
        "convert": [tmp_path / "out"],
        "calibrate": [tmp_path / "out", "--data", texts / "a.txt"],
        "report": ["--data", texts / "a.txt"],
        "push": ["me/own"],
    }
    result = run(command, own, *given[command], code=1)
    assert result.stderr == f"error: {own} has code of its own, which is not run without --trust-remote-code.\n"
    assert not (tmp_path / "out").exists()
