"""results.json and what it says about the process."""

import json

import numpy as np
import torch

from hf_favorpp.training.results import command_line, describe_run, peak_memory_mib, reset_peak_memory, write_results


def test_results_are_written_whole_and_read_back(tmp_path):
    path = tmp_path / "new" / "results.json"
    write_results(path, {"metrics": {"f1": 0.1 + 0.2}, "folder": tmp_path})
    assert json.loads(path.read_text()) == {"metrics": {"f1": 0.1 + 0.2}, "folder": str(tmp_path)}
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def test_the_command_is_quoted_and_keeps_no_token(monkeypatch):
    words = ["--hub_token", "abc", "--x", "a b", "--api-token=abc", "--tokens=3"]
    monkeypatch.setattr("sys.argv", ["recipes/glue.py", *words])
    assert command_line() == "python recipes/glue.py --hub_token '***' --x 'a b' '--api-token=***' --tokens=3"
    monkeypatch.setattr("sys.argv", ["/home/me/.venv/bin/hf-favorpp", "report", "mine"])
    assert command_line() == "hf-favorpp report mine"


def test_a_run_is_described_with_versions_and_hardware():
    run = describe_run({"seed": 1}, ["pytest", "no-such-package"])
    assert run["arguments"] == {"seed": 1}
    assert run["versions"]["torch"] == torch.__version__
    assert "pytest" in run["versions"]
    assert "no-such-package" not in run["versions"]
    assert run["hardware"]["cores"] >= 1
    assert run["hardware"]["threads"] == torch.get_num_threads()
    assert run["hardware"]["cpu"]


def test_the_peak_counts_what_was_freed_until_it_is_reset():
    reset_peak_memory()
    before = peak_memory_mib()
    block = np.ones(2**25)  # 256 MiB
    del block
    assert 200 < peak_memory_mib() - before < 400
    reset_peak_memory()
    assert peak_memory_mib() < before + 100
