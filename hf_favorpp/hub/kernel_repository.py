"""Lays the fused attention out as a repository of the Kernel Hub: plain Python and Triton, nothing compiled.

A kernel must bring along what it imports, under names of its own, because several versions may be loaded side by side
and beside the installed package. So the modules below ``hf_favorpp.hub.kernel`` are copied, their absolute imports
made relative and their operators given a namespace of the version.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

import hf_favorpp
from hf_favorpp.errors import ConfigError
from hf_favorpp.hub.kernel import favorpp

NAME = "favorpp"
BACKENDS = ("cpu", "cuda")
"""Each gets a build; the files are the same, since nothing is compiled before it is used."""
PACKAGE = Path(hf_favorpp.__file__).parent
ENTRY = "hub/kernel.py"
_OWN = PACKAGE.name


def write_kernel_repository(folder: Path, version: int = 1) -> None:
    """Write the repository.

    It is uploaded to a repository of type ``kernel`` on the branch ``v<version>``, from where ``kernels`` loads it.
    ``LOCAL_KERNELS=owner/repo=FOLDER`` makes it available under that name without an upload.

    Args:
        folder: Made if it does not exist; must be empty.
        version: Of the kernel's interface, >= 1.

    Raises:
        ConfigError: ``version`` is not a positive integer, or there are files in ``folder``.
    """
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ConfigError(f"version must be an integer of at least 1, got {version!r}.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} must be an empty folder: all that lies in a kernel repository is published.")
    for backend in BACKENDS:
        _write_build(folder / "build" / f"torch-{backend}", backend, version)
    _card().save(folder / "README.md")


def _write_build(build: Path, backend: str, version: int) -> None:
    release = re.sub(r"[^0-9a-z]", "_", hf_favorpp.__version__.lower())
    unique = f"{NAME}_{backend}_{release}_v{version}"
    for path in sorted(_needed(PACKAGE / ENTRY)):
        name = path.relative_to(PACKAGE)
        target = build / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_relocated(path.read_text(encoding="utf-8"), name, unique), encoding="utf-8")
    for parent in sorted({path.parent for path in build.rglob("*.py")} - {build}):
        (parent / "__init__.py").touch()
    (build / "__init__.py").write_text(
        f'"""FAVOR++ attention of hf-favorpp {hf_favorpp.__version__}."""\n\n'
        f"from .hub.kernel import {favorpp.__name__}\n\n"
        f"flash_attn_forward = {favorpp.__name__}  # Transformers takes no kernel as attention without this name\n"
        f'__version__ = "{hf_favorpp.__version__}"\n__all__ = ["{favorpp.__name__}", "flash_attn_forward"]\n',
        encoding="utf-8",
    )
    metadata = {
        "name": NAME,
        "id": f"_{unique}",
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def _needed(entry: Path) -> set[Path]:
    """Return all files of the package that a file imports, directly or not, and itself."""
    found: set[Path] = set()
    waiting = [entry]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        waiting += _imported(path)
        if path.parent.name == "attention":  # backends are imported by name when they are needed
            waiting += [file for name in ("cpu", "triton") for file in (path.parent / name).glob("*.py")]
    return found


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _OWN:
            module = PACKAGE.joinpath(*str(node.module).split(".")[1:])
            if module.with_suffix(".py").is_file():
                yield module.with_suffix(".py")
            else:
                yield module / "__init__.py"
                yield from (file for alias in node.names if (file := module / f"{alias.name}.py").is_file())


def _relocated(source: str, name: Path, unique: str) -> str:
    """Return the source of a module that lies at another place: relative imports, operators of another namespace."""
    dots = "." * len(name.parts)
    source = re.sub(rf"^([ \t]*)from {_OWN}\.(\S+) import", rf"\1from {dots}\2 import", source, flags=re.MULTILINE)
    source = source.replace(f"{_OWN}::", f"{unique}::")
    depth = len(name.parts) - 1
    root = "__package__" if depth == 0 else f"__package__.rsplit('.', {depth})[0]"
    return re.sub(rf'import_module\(f"{_OWN}\.', rf'import_module(f"{{{root}}}.', source)


def _card() -> ModelCard:
    data = ModelCardData(library_name="kernels", license="apache-2.0", tags=["kernel", NAME, "linear-attention"])
    text = f"""
# FAVOR++ attention

Attention linear in length through positive random features, as in
[Chefs' Random Tables](https://arxiv.org/abs/2205.15317), of hf-favorpp {hf_favorpp.__version__}: PyTorch, and Triton
where there is a GPU.

```python
from transformers import AutoModel

model = AutoModel.from_pretrained(
    "google-bert/bert-base-uncased", attn_implementation="OWNER/REPO:{favorpp.__name__}", allow_all_kernels=True
)
```

Encoders only. Each layer gets 128 features, drawn from a seed and its index; `config.favorpp`, a dictionary of
options, changes that. A checkpoint with calibrated features needs the package itself.
"""
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")
