"""The entry point of ``hf-favorpp``."""

import importlib.util
import os
import sys

NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command, or say in one line what to install for it."""
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(f"error: hf-favorpp needs {' and '.join(absent)}: pip install 'hf-favorpp[cli]'")
    if not sys.stderr.isatty():  # bars are for people; both are read while their packages are imported
        os.environ.setdefault("TQDM_DISABLE", "1")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler that measures memory warns of itself
    from hf_favorpp.cli.app import app

    app(prog_name="hf-favorpp")


if __name__ == "__main__":
    main()
