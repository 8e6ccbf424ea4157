"""Kernels are tested on a GPU where there is one, and in Triton's interpreter otherwise."""

import os
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

spec = find_spec("triton")
INSTALLED = spec is not None and spec.origin is not None  # this folder alone is not it


class SkippedModule(pytest.Module):
    def collect(self):
        pytest.skip("triton is not installed: pip install hf-favorpp[triton]", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if INSTALLED else SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def _helpers_run_in_the_language_of_their_kernel(monkeypatch):
    """Let a kernel's call of a helper be just that.

    A launch puts the interpreter's operations in the place of those in ``triton.language``. Each call of a helper does
    it anew, which takes longer than most helpers, so that here the launch does it for all of them: also in the module
    ``core``, where the helpers of Triton's own library (``tl.zeros``) look operations up.
    """
    if INSTALLED and os.environ.get("TRITON_INTERPRET") == "1":
        interpreter, language = import_module("triton.runtime.interpreter"), import_module("triton.language")
        enter, modules = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": language, "core": language.core})
        monkeypatch.setattr(
            interpreter.InterpretedFunction, "__call__", lambda self, *args, **more: self.rewrite()(*args, **more)
        )
        monkeypatch.setattr(interpreter, "_patch_lang", lambda function: enter(modules))


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
