"""Pushed to a Hub and pulled from it: by the model, by Trainer, by a recipe; interrupted, pinned and private."""

import json

import pytest
import torch
from hub_server import TOKEN
from safetensors.torch import load
from tiny_models import tiny_model, token_batch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf_favorpp import FavorppConfig, convert_to_favorpp, revert_to_softmax
from hf_favorpp.nn import converted_layers

REPO = "me/bert-favorpp"
BATCH = token_batch(9, 5)
PUSHED = {"config.json", "model.safetensors", "modeling_favorpp.py", "README.md"}


@pytest.fixture
def model():
    return convert_to_favorpp(
        tiny_model("bert", AutoModelForSequenceClassification), FavorppConfig(num_features=16, seed=5)
    )


def logits(model):
    with torch.no_grad():
        return model(**BATCH).logits


def test_a_pushed_model_is_pulled_to_the_last_bit(hub, model):
    model.push_to_hub(REPO)
    files = hub.files(REPO)
    assert set(files) == PUSHED
    assert json.loads(files["config.json"])["favorpp"] == model.config.favorpp
    assert {name for name in load(files["model.safetensors"]) if "favorpp" in name} == {
        name for name in model.state_dict() if "favorpp" in name
    }
    pulled = AutoModelForSequenceClassification.from_pretrained(REPO)
    assert converted_layers(pulled)
    assert torch.equal(logits(pulled), logits(model))
    assert not hasattr(model.config, "auto_map")


def test_trust_remote_code_gives_the_same_class_and_can_be_pushed_again(hub, model):
    model.push_to_hub(REPO)
    pulled = AutoModelForSequenceClassification.from_pretrained(REPO, trust_remote_code=True)
    assert type(pulled) is type(model)
    assert torch.equal(logits(pulled), logits(model))
    pulled.push_to_hub("me/again")
    assert set(hub.files("me/again")) == PUSHED
    assert hub.files("me/again")["config.json"] == hub.files(REPO)["config.json"]
    assert type(model)._auto_class is None, "or every other model of the class would be saved with its code"


@pytest.mark.parametrize("failure", [500, None])
def test_an_interrupted_upload_leaves_model_and_repository_as_they_were(hub, model, failure):
    hub.fail_next[r"/commit/main$"] = failure
    before = logits(model)
    with pytest.raises(Exception, match=r"500 Internal Server Error|disconnected"):
        model.push_to_hub(REPO)
    assert hub.files(REPO) == {}
    assert not hasattr(model.config, "auto_map")
    assert not hasattr(model.config, "attn_implementation")
    assert torch.equal(logits(model), before)
    model.push_to_hub(REPO)
    assert set(hub.files(REPO)) == PUSHED


def test_what_is_not_there_is_said_as_by_transformers(hub, model):
    with pytest.raises(OSError, match="me/nothing is not a local folder and is not a valid model identifier"):
        AutoModelForSequenceClassification.from_pretrained("me/nothing")
    model.push_to_hub(REPO)
    with pytest.raises(OSError, match="nowhere is not a valid git identifier"):
        AutoModelForSequenceClassification.from_pretrained(REPO, revision="nowhere")
    hub.repositories[REPO].files().pop("modeling_favorpp.py")
    with pytest.raises(OSError, match=r"modeling_favorpp\.py"):
        AutoModelForSequenceClassification.from_pretrained(REPO, trust_remote_code=True)


@pytest.mark.parametrize("remote", [None, True])
def test_a_revision_is_pinned(hub, model, remote):
    model.push_to_hub(REPO)
    first, before = hub.repositories[REPO].branches["main"], logits(model)
    for layer in converted_layers(model):
        layer.redraw_(3)
    model.push_to_hub(REPO)
    model.push_to_hub(REPO, revision="draft")
    assert not torch.equal(logits(model), before)
    for revision, expected in ((first, before), ("main", logits(model)), ("draft", logits(model))):
        pulled = AutoModelForSequenceClassification.from_pretrained(REPO, revision=revision, trust_remote_code=remote)
        assert torch.equal(logits(pulled), expected)


def test_a_private_repository_needs_the_token(hub, model, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    model.push_to_hub(REPO, private=True, token=TOKEN)
    assert hub.repositories[REPO].private
    with pytest.raises(OSError, match=r"is not a local folder|gated|private|authenticated"):
        AutoModelForSequenceClassification.from_pretrained(REPO)
    pulled = AutoModelForSequenceClassification.from_pretrained(REPO, token=TOKEN, trust_remote_code=True)
    assert torch.equal(logits(pulled), logits(model))


def test_saving_with_push_to_hub_uploads_what_is_needed_to_load_it_also_the_second_time(hub, model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id=REPO)
    assert set(hub.files(REPO)) == PUSHED
    assert f'from_pretrained("{REPO}")' in hub.card(REPO)


def test_a_softmax_model_is_pushed_as_ever(hub, model):
    revert_to_softmax(model).push_to_hub(REPO)
    assert set(hub.files(REPO)) == PUSHED - {"modeling_favorpp.py"}
    assert "auto_map" not in json.loads(hub.files(REPO)["config.json"])
    assert "Linear attention" not in hub.card(REPO)


def test_a_pulled_model_that_is_reverted_forgets_how_it_was_loaded(hub, model, tmp_path):
    model.push_to_hub(REPO)
    pulled = revert_to_softmax(AutoModelForSequenceClassification.from_pretrained(REPO, trust_remote_code=True))
    pulled.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert not (tmp_path / "modeling_favorpp.py").exists()


def test_trainer_pushes_model_file_and_card(hub, model, tmp_path):
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        hub_model_id=REPO,
        max_steps=2,
        save_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{**{name: t[0] for name, t in BATCH.items()}, "labels": torch.tensor(1)}] * 4
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    results = {"task": "made_up", "metrics": {"accuracy": 0.75}, "softmax_metrics": {"accuracy": 0.8125}}
    (tmp_path / "run" / "results.json").write_text(json.dumps(results))
    trainer.push_to_hub()
    assert set(hub.files(REPO)) >= {*PUSHED, "training_args.bin"}
    card = hub.card(REPO)
    assert "### Training hyperparameters" in card
    assert "generated_from_trainer" in hub.front_matter(REPO)["tags"]
    assert "favorpp" in hub.front_matter(REPO)["tags"]
    assert "| accuracy | 0.8125 | 0.7500 | 92.3 % |" in card
    assert f'AutoModelForSequenceClassification.from_pretrained("{REPO}")' in card
    pulled = AutoModelForSequenceClassification.from_pretrained(REPO, trust_remote_code=True)
    assert torch.equal(logits(pulled), logits(model.eval()))


def test_a_checkpoint_that_trainer_pushes_while_it_trains_can_be_loaded(hub, model, tmp_path):
    arguments = TrainingArguments(
        str(tmp_path / "run"),
        hub_model_id=REPO,
        push_to_hub=True,
        max_steps=1,
        save_steps=1,
        report_to=[],
        use_cpu=True,
    )
    rows = [{**{name: t[0] for name, t in BATCH.items()}, "labels": torch.tensor(1)}] * 4
    Trainer(model, arguments, train_dataset=rows).train()
    assert set(hub.files(REPO)) >= PUSHED - {"README.md"}
