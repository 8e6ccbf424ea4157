"""The shape of the code: what is public, which way imports point, how long a file may be."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_favorpp

PACKAGE = Path(hf_favorpp.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
ORDER = (
    "errors",
    "rules",
    "config",
    "features",
    "kernel_methods",
    "attention",
    "nn",
    "observing",
    "families",
    "calibration",
    "report_table",
    "report",
    "convert",
    "hub",
    "attention_maps",
    "pretrained",
    "registration",
    "training",
    "benchmarking",
    "cli",
)
"""From the bottom up: a part imports only parts before it, and itself."""


def path_of(file):
    return str(file.relative_to(PACKAGE))


def imported_modules(file):
    """Return the absolute names of all modules that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return names


def part_of(file):
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_public_names():
    assert hf_favorpp.__all__ == [
        "FavorppCallback",
        "FavorppConfig",
        "FavorppError",
        "RedrawSchedule",
        "approximation_report",
        "attention_matrix",
        "calibrate",
        "convert_to_favorpp",
        "favorpp_attention",
        "revert_to_softmax",
        "transfer_attention",
    ]
    assert all(hasattr(hf_favorpp, name) for name in hf_favorpp.__all__)


def test_every_part_has_its_place_in_the_order():
    assert {part_of(file) for file in FILES} - {"__init__"} <= set(ORDER)


@pytest.mark.parametrize("file", FILES, ids=path_of)
def test_imports_point_downward_only(file):
    part = part_of(file)
    if part == "__init__":
        return  # the package itself gathers the public names
    imported = {name.split(".")[1] for name in imported_modules(file) if name.startswith("hf_favorpp.")}
    above = ORDER[ORDER.index(part) + 1 :]
    assert not imported & set(above), f"{part} must not import {sorted(imported & set(above))}"


@pytest.mark.parametrize(
    "part", ["errors", "rules", "config", "features", "attention", "nn", "observing", "families", "calibration"]
)
def test_below_the_conversion_nothing_knows_transformers(part):
    files = [file for file in FILES if part_of(file) == part]
    assert files
    for file in files:
        outside = {name.split(".")[0] for name in imported_modules(file)}
        assert not outside & {"transformers", "accelerate", "huggingface_hub"}, file


def test_the_mathematics_knows_only_torch():
    outside = set()
    for file in FILES:
        if part_of(file) == "features" and file.name != "optimum.py":  # that one searches with SciPy
            outside |= {name.split(".")[0] for name in imported_modules(file)}
    assert outside <= {
        "torch",
        "hf_favorpp",
        "math",
        "cmath",
        "numbers",
        "hashlib",
        "typing",
        "collections",
        "dataclasses",
    }


KERNELS = PACKAGE / "attention" / "triton"


@pytest.mark.parametrize("file", [file for file in FILES if KERNELS not in file.parents], ids=path_of)
def test_only_the_kernels_import_triton_and_nothing_imports_the_kernels(file):
    """Those who use them call ``importlib`` when they are needed."""
    imported = imported_modules(file)
    assert not any(name.split(".")[0] == "triton" for name in imported)
    assert not any(f"{name}.".startswith("hf_favorpp.attention.triton.") for name in imported)


def test_the_package_works_without_triton():
    program = """
import sys
sys.modules["triton"] = None  # importing it is an error
import torch, hf_favorpp
x = torch.ones(1, 1, 3, 2)
assert hf_favorpp.favorpp_attention(x, x, x, x[0], backend="cpu").shape == x.shape
hf_favorpp.FavorppConfig(backend="triton")
loaded = [name for name in sys.modules if name.startswith(("triton.", "hf_favorpp.attention.triton"))]
assert not loaded, loaded
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.parametrize("file", FILES, ids=path_of)
def test_a_file_is_one_thought(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("name", ["utils", "helpers", "common", "base", "misc"])
def test_no_file_is_a_grab_bag(name):
    assert not [file for file in FILES if file.stem == name]


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_the_version_is_the_newest_one_of_the_changelog():
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions[0] == hf_favorpp.__version__
