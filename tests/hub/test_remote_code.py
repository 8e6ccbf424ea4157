"""``trust_remote_code=True`` in a process that never imported the package, and in one that does not have it."""

import json
import subprocess
import sys

import pytest
import torch
from test_vision_families import media_model
from tiny_models import hidden_states, tiny_model, token_batch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertModel,
)

from hf_favorpp import FavorppConfig, convert_to_favorpp
from hf_favorpp.hub import remote
from hf_favorpp.nn import converted_layers

BATCH = token_batch(9, 5)

# Loads the checkpoint in sys.argv[1], with the package hidden, and then with it; prints what happened as JSON.
PROGRAM = """
import json, sys
from transformers import AutoModel, AutoModelForMaskedLM
import torch

torch.set_num_threads(1)
folder, said = sys.argv[1], {}


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_favorpp":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Hidden())
for name, options in {"plain": {}, "trusted": {"trust_remote_code": True}}.items():
    try:
        AutoModel.from_pretrained(folder, **options)
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
said["sdpa"] = AutoModel.from_pretrained(folder, attn_implementation="sdpa").config._attn_implementation
del sys.meta_path[0]
said["imported"] = "hf_favorpp" in sys.modules
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
said["head"] = type(model).__module__
batch = torch.load(folder + "/batch.pt")
with torch.no_grad():
    out = AutoModel.from_pretrained(folder, trust_remote_code=True)(**batch).last_hidden_state
torch.save(out, folder + "/out.pt")
print(json.dumps(said))
"""


@pytest.fixture
def saved(tmp_path):
    convert_to_favorpp(tiny_model("bert"), FavorppConfig(num_features=16)).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_process_that_never_imported_the_package_and_one_without_it(saved):
    model = AutoModel.from_pretrained(saved)
    torch.save(BATCH, saved / "batch.pt")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(saved)], capture_output=True, text=True, check=False, cwd=saved
    )
    assert result.returncode == 0, result.stderr[-2000:]
    said = json.loads(result.stdout.splitlines()[-1])
    assert 'attn_implementation="favorpp"` is not supported' in said["plain"]
    assert said["trusted"].startswith("ImportError")
    assert "pip install -U hf-favorpp" in said["trusted"]
    assert said["sdpa"] == "sdpa"
    assert said["imported"] is False
    assert said["head"] == "transformers.models.bert.modeling_bert"
    output = torch.load(saved / "out.pt")[BATCH["attention_mask"].bool()]
    assert torch.equal(output, hidden_states(model, BATCH))


HEADS = (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)


def test_heads_that_attend_causally_are_left_out(saved):
    entries = json.loads((saved / "config.json").read_text())["auto_map"]
    assert {"AutoModel", *(auto.__name__ for auto in HEADS)} <= set(entries)
    assert "AutoModelForCausalLM" not in entries


@pytest.mark.parametrize("auto", HEADS)
def test_every_head_loads_by_remote_code(saved, auto):
    model = auto.from_pretrained(saved, trust_remote_code=True)
    assert type(model) is type(auto.from_config(AutoConfig.from_pretrained(saved)))
    assert all(layer.omega.shape == (4, 16, 8) for layer in converted_layers(model))
    assert len(converted_layers(model)) == 2


def test_overrides_reach_the_model(saved):
    model = AutoModelForSequenceClassification.from_pretrained(
        saved, trust_remote_code=True, num_labels=5, dtype=torch.bfloat16
    )
    assert model.num_labels == 5
    assert model.dtype == torch.bfloat16
    softmax = AutoModel.from_pretrained(saved, trust_remote_code=True, attn_implementation="sdpa")
    assert not converted_layers(softmax)


def test_a_configuration_alone_builds_a_model_by_remote_code(saved):
    config = AutoConfig.from_pretrained(saved)
    assert converted_layers(AutoModel.from_config(config, trust_remote_code=True))


def test_a_part_and_the_whole_of_a_composite_model_load_by_remote_code(tmp_path):
    model = convert_to_favorpp(media_model("siglip2_vision_model"), FavorppConfig(num_features=16))
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded) is type(model)
    assert len(converted_layers(loaded)) == len(converted_layers(model)) > 0


def test_remote_code_of_another_repository_is_not_named_in_the_saved_configuration(tmp_path):
    model = tiny_model("bert")
    model.config.auto_map = {"AutoModel": "other/repo--modeling_other.OtherModel"}
    convert_to_favorpp(model).save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert set(map(remote.is_ours, entries.values())) == {True}
    assert model.config.auto_map == {"AutoModel": "other/repo--modeling_other.OtherModel"}


def test_a_model_class_of_the_user_keeps_its_own_remote_code(tmp_path):
    class OwnModel(BertModel):
        _auto_class = "AutoModel"

    assert remote.auto_map(OwnModel(tiny_model("bert").config)) == {}


def test_another_name_than_that_of_an_auto_class_is_refused():
    with pytest.raises(AttributeError, match="no Auto class 'BertModel'"):
        remote.auto_class("BertModel")
    assert remote.auto_class("AutoModelForCausalLM").auto is AutoModelForCausalLM
