"""The one place where kernels start, and where a report can see what would start instead."""

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_favorpp.attention.triton.settings import assumed_capability

OPTIONS = {"enable_fp_fusion": True}
"""Of every compilation: a product and a sum are one instruction. Triton's own default changes with 3.10."""


class Compilation(NamedTuple):
    """What the compiler is asked for by one launch.

    Attributes:
        name: Of the kernel.
        kernel: The jit function.
        signature: Triton's type of each parameter, ``"constexpr"`` for constants.
        constexprs: The constants by name, arguments that are None among them.
        divisible: Parameters that the compiler may take for multiples of 16, as it does at a launch.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int


_recording: ContextVar[list[Compilation] | None] = ContextVar("recording", default=None)


@contextmanager
def record(capability: int = 9) -> Generator[list[Compilation]]:
    """Note launches instead of doing them: the launch functions then take tensors of the device ``meta``.

    Args:
        capability: Major compute capability of the GPU that tiles are chosen for.

    Yields:
        The list that fills up while the context is open.
    """
    noted: list[Compilation] = []
    token, token_capability = _recording.set(noted), assumed_capability.set(capability)
    try:
        yield noted
    finally:
        _recording.reset(token)
        assumed_capability.reset(token_capability)


def launch(kernel: Any, grid: tuple[int, ...], num_warps: int, num_stages: int, **arguments: Any) -> None:
    """Start a kernel on the device of its tensors.

    Args:
        kernel: The jit function.
        grid: Programs along each axis; none are started where one is 0.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline.
        **arguments: Every parameter by name: tensors, None for a pointer that is not there, numbers, constants.
    """
    noted = _recording.get()
    if noted is not None:
        noted.append(_compilation(kernel, num_warps, num_stages, arguments))
        return
    device = next(value.device for value in arguments.values() if isinstance(value, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages, **OPTIONS)


def _compilation(kernel: Any, num_warps: int, num_stages: int, arguments: dict[str, Any]) -> Compilation:
    """Say what a launch asks the compiler for; strides and sizes are taken as 32-bit numbers."""
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    divisible = []
    unmatched = {parameter.name for parameter in kernel.params} ^ arguments.keys()
    if unmatched:  # the interpreter would not mind
        raise TypeError(
            f"{kernel.fn.__name__} has parameters without an argument, or the reverse: {sorted(unmatched)}."
        )
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = _POINTERS[value.dtype]
            divisible.append(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif parameter.do_not_specialize or value != 1:
            signature[name] = "i32"
            if not parameter.do_not_specialize and value % 16 == 0:
                divisible.append(name)
        else:
            signature[name], constexprs[name] = "constexpr", 1
    return Compilation(kernel.fn.__name__, kernel, signature, constexprs, tuple(divisible), num_warps, num_stages)


_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}
