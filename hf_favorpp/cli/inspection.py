"""What a checkpoint holds, told without loading its weights: layers, options, sizes."""

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn
from transformers import PreTrainedModel

from hf_favorpp.cli.failures import CommandError
from hf_favorpp.cli.output import output
from hf_favorpp.cli.sources import WEIGHTS, Source, damaged_weights, model_class, options_of
from hf_favorpp.config import FavorppConfig
from hf_favorpp.errors import FavorppError
from hf_favorpp.families import attention_layers
from hf_favorpp.families.plan import plan_conversion
from hf_favorpp.families.registry import AttentionLayer

ADDED = ".favorpp."
"""Within the names of tensors that a conversion adds."""
NOT_NAMED = "FavorppConfig.layers does not name it"
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""By name: dtype as safetensors names it, and shape."""


def build_without_weights(source: Source, config: Any) -> PreTrainedModel:
    """Build a model on the meta device, where tensors have shapes and no content.

    Args:
        source: The checkpoint.
        config: Its configuration.

    Returns:
        The model.

    Raises:
        CommandError: Transformers cannot build it, or its options are wrong.
        FavorppError: Its tensors are wrong.
    """
    found = model_class(source, config)
    try:
        with torch.device("meta"), options_of(source):
            if isinstance(found, type) and issubclass(found, PreTrainedModel):
                built: PreTrainedModel = found(config)
                return built
            model: PreTrainedModel = found.from_config(config, trust_remote_code=source.trust_remote_code)
            return model
    except FavorppError:
        raise
    except ValueError as error:
        raise CommandError(f"{source.name} cannot be built: {' '.join(str(error).split())}") from error


def describe(source: Source, config: Any, model: PreTrainedModel) -> dict[str, Any]:
    """Describe a checkpoint.

    Args:
        source: The checkpoint.
        config: Its configuration.
        model: As :func:`build_without_weights` made it.

    Returns:
        JSON values: see the keys. Numbers that would need the weights are None.
    """
    tensors = stored_tensors(source)
    layers = describe_layers(model, tensors)
    converted = any(layer["converted"] for layer in layers)
    reason = None
    if not converted:
        try:
            plan_conversion(model, FavorppConfig())
        except FavorppError as error:
            reason = str(error)
    added = {name: size_of(kind, shape) for name, (kind, shape) in (tensors or {}).items() if ADDED in name}
    if tensors is None:
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if ADDED in name)
        added = {name: buffer.numel() * buffer.element_size() for name, buffer in buffers}
    return {
        "source": source.name,
        "model": type(model).__name__,
        "model_type": config.model_type,
        "converted": converted,
        "convertible": not converted and reason is None,
        "reason": reason,
        "layers": layers,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtypes": _dtypes(tensors),
        "checkpoint_bytes": _bytes_on_disk(source, tensors),
        "favorpp_bytes": sum(added.values()),
    }


def describe_layers(model: nn.Module, tensors: Tensors | None = None) -> list[dict[str, Any]]:
    """Describe the attention layers of a model.

    Args:
        model: Any model, on any device.
        tensors: Those of its checkpoint, to tell whether a calibration is among them; None asks the model.

    Returns:
        One entry per attention layer.
    """
    layers = list(attention_layers(model))
    anything = any(layer.features for layer in layers)
    return [_describe_layer(layer, anything, tensors) for layer in layers]


def _describe_layer(layer: AttentionLayer, any_converted: bool, tensors: Tensors | None) -> dict[str, Any]:
    features = layer.features
    num_heads, head_dim = layer.family.geometry(layer.module)
    why = None
    if features is None:
        why = layer.left_out() or (NOT_NAMED if any_converted else None)
    entry: dict[str, Any] = {
        "index": layer.index,
        "name": layer.name,
        "family": layer.family.model_types[0],
        "class": type(layer.module).__name__,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "converted": features is not None,
        "stays_softmax": why,
        "options": None,
        "calibrated": None,
    }
    if features is not None:
        entry["options"] = _plain(features.config)
        stored = f"{layer.name}{ADDED}coefficient" in tensors if tensors is not None else features.calibrated
        entry["calibrated"] = features.config.statistics == "calibrated" and stored
    return entry


def _plain(config: FavorppConfig) -> dict[str, Any]:
    return {**config.to_dict(), "preconditioning": config.preconditioning}  # as it is, not as it was left open


def stored_tensors(source: Source) -> Tensors | None:
    """Read the headers of a checkpoint in safetensors.

    Args:
        source: The checkpoint; on the Hub the headers alone are fetched.

    Returns:
        The tensors; None where they are not to be had, or are in another format.
    """
    if source.folder is None:
        try:
            found = get_safetensors_metadata(source.location, revision=source.revision)
        except Exception as error:  # no safetensors there, no network, no access: the numbers stay unknown
            output.note(f"the weights of {source.name} could not be looked at: {' '.join(str(error).split())[:200]}")
            return None
        files = found.files_metadata.values()
        return {name: (each.dtype, tuple(each.shape)) for file in files for name, each in file.tensors.items()}
    for name in damaged_weights(source):
        output.note(f"{name} of {source.name} is damaged or incomplete: download or save it again.")
    headers = [_read_header(path) for path in sorted(source.folder.glob("*.safetensors"))]
    if not headers or None in headers:
        return None
    each = {name: tensor for header in headers for name, tensor in (header or {}).items() if name != "__metadata__"}
    return {name: (tensor["dtype"], tuple(tensor["shape"])) for name, tensor in each.items()}


def _read_header(path: Path) -> dict[str, Any] | None:
    """Return what a file in safetensors says of its tensors, which may be cut off behind it; None where it is not."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
    except (struct.error, ValueError, MemoryError, OverflowError):
        return None
    return header


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor.

    Args:
        dtype: As safetensors names it.
        shape: Of the tensor.

    Returns:
        Bytes.
    """
    return _BYTES.get(dtype, 1) * math.prod(shape)


def _dtypes(tensors: Tensors | None) -> dict[str, int] | None:
    """Return the numbers of the model's own weights by dtype."""
    if tensors is None:
        return None
    count: Counter[str] = Counter()
    for name, (dtype, shape) in tensors.items():
        if ADDED not in name:
            count[dtype] += math.prod(shape)
    return dict(count.most_common())


def _bytes_on_disk(source: Source, tensors: Tensors | None) -> int | None:
    if source.folder is not None:
        return sum(path.stat().st_size for path in source.folder.iterdir() if path.suffix in WEIGHTS)
    return None if tensors is None else sum(size_of(*each) for each in tensors.values())


def show(description: Mapping[str, Any]) -> RenderableType:
    """Draw a description.

    Args:
        description: As :func:`describe` returned it.

    Returns:
        A table of facts and one of layers.
    """
    facts = facts_table()
    facts.add_row("model", f"{description['model']} ({description['model_type']}), {description['source']}")
    facts.add_row("attention", _summary(description))
    for title, text in show_options(description["layers"]):
        facts.add_row(title, text)
    dtypes = description["dtypes"]
    kinds = [_DTYPE_NAMES.get(name, name) for name in dtypes or () if name[0] not in "IU"]
    said = "" if not kinds else f", {', '.join(kinds)}"
    facts.add_row("parameters", f"{_count(description['parameters'])}{said}")
    size = description["checkpoint_bytes"]
    weights = "unknown" if size is None else in_bytes(size)
    extra = description["favorpp_bytes"]
    facts.add_row("weights", weights + (f", of which FAVOR++ added {in_bytes(extra)}" if extra else ""))
    layers = description["layers"]
    return Group(facts, *([show_layers(layers)] if layers else []), *show_reasons(layers))


def new_table(title: str | None = None) -> Table:
    """Return an empty table of many rows, narrow enough for 80 columns."""
    return Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left", title_style="bold"
    )


def facts_table() -> Table:
    """Return an empty table of titles and texts."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _summary(description: Mapping[str, Any]) -> Text:
    layers = description["layers"]
    if description["converted"]:
        converted = sum(layer["converted"] for layer in layers)
        return Text(f"FAVOR++ in {converted} of {len(layers)} layers", style="green")
    if description["convertible"]:
        able = sum(layer["stays_softmax"] is None for layer in layers)
        return Text(f"softmax; {able} of {len(layers)} layers can be converted", style="cyan")
    return Text(f"softmax; {description['reason']}", style="yellow")


def show_options(layers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the options of the converted layers in words.

    Args:
        layers: As :func:`describe_layers` returned them.

    Returns:
        Titles and texts; nothing where no layer is converted.
    """
    converted = [layer for layer in layers if layer["converted"]]
    if not converted:
        return []
    kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "features": _features,
        "preconditioning": lambda o: str(o["preconditioning"]),
        "exact window": _neighbourhood,
    }
    rows = [
        (title, "; ".join(dict.fromkeys(text(layer["options"]) for layer in converted)))
        for title, text in kinds.items()
    ]
    calibrated = sum(bool(layer["calibrated"]) for layer in converted)
    asked = any(layer["options"]["statistics"] == "calibrated" for layer in converted)
    statistics = "of each sequence; not calibrated"
    if calibrated:
        statistics = f"calibrated ({calibrated} of {len(converted)} layers)"
    elif asked:
        statistics = "to be calibrated, and were not: run hf-favorpp calibrate"
    return [*rows[:2], ("statistics", statistics), rows[2]]


def _features(options: Mapping[str, Any]) -> str:
    kernel = "" if options["kernel"] == "favor++" else f"{options['kernel']}, "  # the row above names that
    return f"{options['num_features']} per head, {kernel}{options['projection']}, seed {options['seed']}"


def _neighbourhood(options: Mapping[str, Any]) -> str:
    window, ends = options["exact_window"], options["exact_ends"]
    if not window and not any(ends):
        return "none"
    parts = [f"tiles of {window[0]} x {window[1]} patches" if isinstance(window, list) else f"{window} tokens"]
    if any(ends):
        parts.append(f"first {ends[0]} and last {ends[1]} for all")
    return ", ".join(parts)


def show_layers(layers: Sequence[Mapping[str, Any]]) -> Table:
    """Draw the attention layers.

    Args:
        layers: As :func:`describe_layers` returned them.

    Returns:
        A table.
    """
    table = new_table()
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("layer", overflow="fold")
    table.add_column("family", no_wrap=True)
    table.add_column("heads", justify="right", no_wrap=True)
    table.add_column("attention", overflow="fold")
    for layer in layers:
        if layer["converted"]:
            features = "" if layer["options"]["kernel"] == "none" else f", {layer['options']['num_features']} features"
            attention = Text(f"{layer['options']['kernel']}{features}", style="green")
        elif layer["stays_softmax"]:
            attention = Text("stays softmax", style="yellow")
        else:
            attention = Text("softmax", style="cyan")
        heads = f"{layer['num_heads']} x {layer['head_dim']}"
        table.add_row(str(layer["index"]), layer["name"], layer["family"], heads, attention)
    return table


def show_reasons(layers: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Tell why layers stay softmax, each reason once.

    Args:
        layers: As :func:`describe_layers` returned them.

    Yields:
        One line per reason.
    """
    for reason in dict.fromkeys(layer["stays_softmax"] for layer in layers if layer["stays_softmax"]):
        indices = [layer["index"] for layer in layers if layer["stays_softmax"] == reason]
        yield Text(f"{_ranges(indices)} stays softmax: {reason}.", style="yellow")


def _ranges(indices: Sequence[int]) -> str:
    """Return ascending numbers as ranges, such as ``0, 2-4``."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def in_bytes(number: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return str(number)
