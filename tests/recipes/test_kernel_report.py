"""The report on compiled kernels: what it says, when it fails, and that nothing spills where most of the work is."""

import json
import os
import subprocess
import sys

import pytest

kernel_report = pytest.importorskip("kernel_report", reason="the kernels need triton")

KERNELS = {
    "attend_kernel",
    "ends_kernel",
    "key_gradient_kernel",
    "landmarks_backward_kernel",
    "merge_kernel",
    "moments_kernel",
    "prepare_kernel",
    "projection_gradient_kernel",
    "query_backward_kernel",
    "single_keys_backward_kernel",
    "summarise_kernel",
    "term_kernel",
}
ROW = {
    "kernel": "summarise_kernel",
    "architecture": 80,
    "case": "default",
    "tiles": {},
    "registers": 100,
    "spilled_bytes": 0,
    "shared_kib": 64.0,
    "num_warps": 4,
    "num_stages": 2,
}


@pytest.mark.skipif(not kernel_report.CUOBJDUMP.is_file(), reason="triton came without the tools of NVIDIA")
def test_nothing_spills_on_hopper(tmp_path):
    file = tmp_path / "kernels.json"
    command = [sys.executable, kernel_report.__file__, "--architectures", "90", "--output_json", str(file)]
    # The interpreter, which other tests run kernels in, is chosen when kernels are defined: a process of its own.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [*command, "--cases", "default", "neighbourhood"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))["kernels"]
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["spilled_bytes"] for row in rows} == {0}
    assert all(kernel_report.is_fine(row) for row in rows)


@pytest.mark.parametrize(
    ("change", "fine"),
    [
        ({}, True),
        ({"spilled_bytes": 8}, False),
        ({"spilled_bytes": 8, "case": "float32_256_wide"}, True),
        ({"shared_kib": 164.0}, False),
        ({"shared_kib": 164.0, "architecture": 90}, True),
    ],
)
def test_what_is_fine(change, fine):
    assert kernel_report.is_fine(ROW | change) is fine


@pytest.mark.parametrize(("spilled", "status"), [(0, 0), (16, 1)])
def test_the_exit_status_and_the_file(tmp_path, monkeypatch, capsys, spilled, status):
    row = ROW | {"spilled_bytes": spilled}
    monkeypatch.setattr(kernel_report, "INTERPRETED", False)
    monkeypatch.setattr(kernel_report, "report", lambda names, architectures: iter([row]))
    file = tmp_path / "folder" / "kernels.json"
    assert kernel_report.main(["--cases", "default", "--output_json", str(file)]) == status
    assert json.loads(file.read_text(encoding="utf-8"))["kernels"] == [row]
    assert "registers" in capsys.readouterr().out


def test_the_interpreter_compiles_nothing(monkeypatch):
    monkeypatch.setattr(kernel_report, "INTERPRETED", True)
    with pytest.raises(SystemExit, match="TRITON_INTERPRET"):
        kernel_report.main(["--cases", "default"])


def test_unknown_cases_are_named(capsys):
    with pytest.raises(SystemExit):
        kernel_report.main(["--cases", "defualt"])
    assert "defualt" in capsys.readouterr().err
