"""Kernels are tested on a GPU where there is one, and in Triton's interpreter otherwise."""

from importlib.util import find_spec

import pytest
import torch

spec = find_spec("triton")
INSTALLED = spec is not None and spec.origin is not None  # this folder alone is not it


class SkippedModule(pytest.Module):
    def collect(self):
        pytest.skip("triton is not installed: pip install hf-favorpp[triton]", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if INSTALLED else SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
