"""hf-favorpp push: one commit with everything, and nothing of the user's is changed."""

import json
from types import SimpleNamespace

import pytest
from command_runs import run
from huggingface_hub.errors import HfHubHTTPError

from hf_favorpp.cli import upload


class Hub:
    """Remembers what it was asked."""

    def __init__(self, error=None):
        self.calls, self.files, self.error, self.token = [], {}, error, None

    def __call__(self, token=None):
        self.token = token
        return self

    def create_repo(self, repo, **options):
        if self.error:
            raise self.error
        self.calls.append(("create_repo", repo, options))
        return SimpleNamespace(repo_id=repo)

    def create_branch(self, repo, **options):
        self.calls.append(("create_branch", repo, options))

    def upload_folder(self, *, folder_path, **options):
        self.calls.append(("upload_folder", options.pop("repo_id"), options))
        paths = (path for path in folder_path.rglob("*") if path.is_file())
        self.files = {str(path.relative_to(folder_path)): path.read_bytes() for path in paths}
        return SimpleNamespace(commit_url="https://hub/commit/1")


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setattr(upload, "HfApi", hub)
    return hub


def refusal(status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError(f"{status} Client\nError", response=response)


def test_everything_goes_up_in_one_commit(converted, hub, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in converted.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for left_out in (".git", "checkpoint-3", "runs"):
        (folder / left_out).mkdir()
        (folder / left_out / "x").write_text("x")
    (folder / "optimizer.bin").write_text("x")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    options = ["--private", "--revision", "v2", "--token", "hf_secret", "--commit-message", "Mine"]
    result = run("push", folder, "me/bert", *options, "--json")
    document = json.loads(result.stdout)
    assert document["commit_url"] == "https://hub/commit/1"
    assert set(document["files"]) == set(hub.files)
    assert hub.token == "hf_secret"
    assert "hf_secret" not in result.output
    assert [name for name, *_ in hub.calls] == ["create_repo", "create_branch", "upload_folder"]
    assert hub.calls[0][1:] == ("me/bert", {"private": True, "exist_ok": True})
    assert hub.calls[2][2] == {"revision": "v2", "commit_message": "Mine"}
    assert set(hub.files) == {path.name for path in converted.iterdir()}
    assert hub.files["model.safetensors"] == (converted / "model.safetensors").read_bytes()
    assert b'from_pretrained("me/bert")' in hub.files["README.md"]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_dry_run_asks_nobody(converted, hub):
    shown = run("push", converted, "me/bert", "--dry-run").stdout
    assert "would upload" in shown
    assert "model.safetensors" in shown
    assert hub.calls == []


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (refusal(401), 1, "log in with 'hf auth login'"),
        (refusal(500), 1, "the Hub refused: 500 Client Error"),
        (ConnectionError("no route"), 3, "the Hub cannot be reached: no route"),
    ],
)
def test_a_hub_that_refuses(converted, hub, error, code, message):
    hub.error = error
    result = run("push", converted, "me/bert", code=code)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_a_network(converted):
    assert "HF_HUB_OFFLINE is set" in run("push", converted, "me/bert", code=3).stderr


def test_what_is_not_pushed(bert, converted, tmp_path, hub):
    assert "is not converted" in run("push", bert, "me/bert", code=1).stderr
    assert "there is no folder" in run("push", tmp_path / "nowhere", "me/bert", code=3).stderr
    assert "REPO must be user/name" in run("push", converted, "a/b/c", code=2).stderr
    assert hub.calls == []
