"""Processes of a test's own, forked from a server that has imported the libraries once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from typing import Any

from torch.multiprocessing import start_processes

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["accelerate", "datasets", "evaluate", "hf_favorpp", "scipy.stats", "sklearn.metrics"])


def exit_code_of(function: Callable[..., object], *args: Any) -> int | None:
    """Run a function of a module in a process of its own.

    Args:
        function: Called there.
        *args: Its arguments.

    Returns:
        Status of the process; minus the number of the signal that ended it.
    """
    process = SERVER.Process(target=function, args=args)
    process.start()
    process.join()
    return process.exitcode


def run_two_ranks(function: Callable[..., object], *args: Any) -> None:
    """Run a function of a module in two processes that know of each other as those of ``torchrun`` do.

    Args:
        function: Called in each with its rank first.
        *args: Its other arguments.

    Raises:
        ProcessRaisedException: If one raises anything, with its traceback.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_processes(_run_rank, (port, function, args), nprocs=2, start_method="forkserver")


def _run_rank(rank: int, port: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Say who this process is, then run the function."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    function(rank, *args)
