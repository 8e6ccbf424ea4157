"""What the commands add to the model card: the base model, the tokenizer, and what was measured."""

import json

import yaml
from command_runs import run, run_json


def card_of(folder):
    _, data, text = (folder / "README.md").read_text().split("---", 2)
    return yaml.safe_load(data), text


def test_the_base_model_can_be_named(bert, hub, tmp_path):
    run("convert", bert, tmp_path / "out", "--num-features", 8, "--base-model", "them/bert")
    data, text = card_of(tmp_path / "out")
    assert data["base_model"] == "them/bert"
    assert "[them/bert](https://huggingface.co/them/bert) whose softmax attention" in text
    run("push", tmp_path / "out", "me/bert", "--base-model", "others/bert", "--token", "hf_test")
    assert hub.front_matter("me/bert")["base_model"] == "others/bert"
    assert card_of(tmp_path / "out")[0]["base_model"] == "them/bert"


def test_the_snippet_loads_the_tokenizer_too(converted):
    _, text = card_of(converted)
    assert "from transformers import AutoModelForSequenceClassification, AutoTokenizer" in text
    assert 'tokenizer = AutoTokenizer.from_pretrained("bert-favorpp")' in text


def test_a_report_is_recorded_for_the_card(bert, texts, hub, tmp_path):
    out = tmp_path / "out"
    run("convert", bert, out, "--num-features", 8)
    assert "See below how close it is" not in card_of(out)[1]
    found = run_json("report", out, "--data", texts / "a.txt", "--record")
    recorded = json.loads((out / "results.json").read_text())
    assert recorded["fidelity"]["layer_errors"] == found["layer_errors"]
    assert recorded["versions"]["torch"]
    (out / "results.json").write_text(json.dumps({**recorded, "task": "cola", "metrics": {"accuracy": 0.5}}))
    run("report", out, "--data", texts / "a.txt", "--max-samples", 2, "--record")
    again = json.loads((out / "results.json").read_text())
    assert again["metrics"] == {"accuracy": 0.5}
    assert again["fidelity"]["num_tokens"] < recorded["fidelity"]["num_tokens"]
    run("push", out, "me/bert", "--token", "hf_test")
    card = hub.card("me/bert")
    assert "See below how close it is" in card
    assert "Relative error of the attention output" in card


def test_results_of_other_weights_are_not_added_to(bert, texts, tmp_path):
    out = tmp_path / "out"
    run("convert", bert, out, "--num-features", 8)
    (out / "results.json").write_text(json.dumps({"metrics": {"accuracy": 0.9}, "weights_sha256": "of another"}))
    run("report", out, "--data", texts / "a.txt", "--record")
    assert "metrics" not in json.loads((out / "results.json").read_text())


def test_a_report_within_the_window_says_so(bert, texts, tmp_path):
    run("convert", bert, tmp_path / "out", "--num-features", 8, "--exact-window", 64)
    assert any(
        "longer than exact_window" in note
        for note in run_json("report", tmp_path / "out", "--data", texts / "a.txt")["notes"]
    )


def test_what_is_not_calibrated_is_called_coarse(bert, texts, tmp_path):
    shown = run("convert", bert, tmp_path / "plain", "--num-features", 8).stdout
    assert "coarse estimate" in " ".join(shown.split())
    shown = run("convert", bert, tmp_path / "out", "--num-features", 8, "--calibration-data", texts / "a.txt").stdout
    assert "coarse estimate" not in " ".join(shown.split())
