"""hf-favorpp push: to a Hub and back, in one commit, and nothing of the user's is changed."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
import torch
from command_runs import run, run_json
from hub_server import TOKEN
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_favorpp.nn import converted_layers

REPO = "me/bert"
TEXTS = ["the word was what some have", "it is"]
# Pulls the model in sys.argv[1] and saves what it makes of the texts that follow to sys.argv[2].
PROGRAM = """
import sys
import torch
import hf_favorpp
from transformers import AutoModelForSequenceClassification, AutoTokenizer

torch.set_num_threads(1)
repo, path, *texts = sys.argv[1:]
batch = AutoTokenizer.from_pretrained(repo)(texts, padding=True, return_tensors="pt")
with torch.no_grad():
    torch.save(AutoModelForSequenceClassification.from_pretrained(repo)(**batch).logits, path)
"""


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """The folder of temporary files, of the test's own."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def outputs(name, **options):
    model = AutoModelForSequenceClassification.from_pretrained(name, **options)
    assert len(converted_layers(model)) == 2
    batch = AutoTokenizer.from_pretrained(name, **options)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(**batch).logits


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_pushed_is_pulled_by_this_process_and_by_another(converted, hub, tmp_path):
    document = run_json("push", converted, REPO, "--public")
    assert document["commit_url"].startswith(f"{hub.url}/{REPO}/commit/")
    assert not hub.repositories[REPO].private
    assert hub.repositories[REPO].messages == ["Upload a model with FAVOR++ attention"]
    assert set(hub.files(REPO)) == set(document["files"]) == {path.name for path in converted.iterdir()}
    assert hub.files(REPO)["model.safetensors"] == (converted / "model.safetensors").read_bytes()
    assert f'from_pretrained("{REPO}")' in hub.card(REPO)
    expected = outputs(converted)
    assert torch.equal(outputs(REPO), expected)
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, REPO, tmp_path / "logits.pt", *TEXTS],
        check=True,
        env={**os.environ, **environment},
    )
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_a_private_repository_and_a_branch(converted, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    options = ["--private", "--revision", "v2", "--token", TOKEN, "--commit-message", "Mine"]
    result = run("push", converted, REPO, *options, "--json")
    assert TOKEN not in result.output
    assert hub.repositories[REPO].private
    assert hub.repositories[REPO].messages == ["Mine"]
    assert hub.files(REPO) == {}
    assert set(hub.files(REPO, "v2")) == set(json.loads(result.stdout)["files"])
    assert torch.equal(outputs(REPO, revision="v2", token=TOKEN), outputs(converted))
    with pytest.raises(OSError, match="is not a local folder"):
        outputs(REPO, revision="v2", token=False)


def test_what_is_no_part_of_the_model_stays_here_and_nothing_is_changed(converted, hub, tmp_path, temporary):
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in converted.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for left_out in (".git", "checkpoint-3", "runs"):
        (folder / left_out).mkdir()
        (folder / left_out / "x").write_text("x")
    (folder / "optimizer.bin").write_text("x")
    before = contents(folder)
    run("push", folder, REPO)
    assert set(hub.files(REPO)) == {path.name for path in converted.iterdir()}
    assert contents(folder) == before
    assert not list(temporary.iterdir())


def test_a_dry_run_asks_nobody(converted, hub):
    shown = run("push", converted, REPO, "--dry-run").stdout
    assert "would upload" in shown
    assert "model.safetensors" in shown
    assert hub.requests == []


@pytest.mark.parametrize(
    ("path", "status", "code", "message"),
    [
        ("/api/repos/create", 401, 1, "log in with 'hf auth login'"),
        ("/commit/main", 403, 1, "log in with 'hf auth login'"),
        ("/preupload/main", 404, 1, "the Hub refused: "),
        ("/commit/main", 404, 1, "the Hub refused: "),
        ("/api/repos/create", None, 3, "the Hub cannot be reached: "),
        ("/resolve/main/README.md", None, 3, "the Hub cannot be reached: "),
        ("/commit/main", None, 3, "the Hub cannot be reached: "),
    ],
)
def test_a_push_that_fails_is_one_line_and_can_be_made_again(converted, hub, temporary, path, status, code, message):
    hub.fail_next[path] = status
    before = contents(converted)
    result = run("push", converted, REPO, code=code)
    assert hub.fail_next == {}
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert contents(converted) == before
    assert not list(temporary.iterdir())
    assert REPO not in hub.repositories or hub.files(REPO) == {}
    run("push", converted, REPO)
    assert set(hub.files(REPO)) == {path.name for path in converted.iterdir()}


def test_a_wrong_token_is_told(converted, hub):
    result = run("push", converted, REPO, "--token", "hf_wrong", code=1)
    assert "log in with 'hf auth login', or give --token" in result.stderr
    assert "hf_wrong" not in result.output
    assert hub.repositories == {}


def test_without_a_network(converted):
    assert "HF_HUB_OFFLINE is set" in run("push", converted, REPO, code=3).stderr


def test_what_is_not_pushed(bert, converted, tmp_path, hub):
    assert "is not converted" in run("push", bert, REPO, code=1).stderr
    assert "there is no folder" in run("push", tmp_path / "nowhere", REPO, code=3).stderr
    assert "REPO must be user/name" in run("push", converted, "a/b/c", code=2).stderr
    assert hub.requests == []
