"""What is told of a checkpoint that was written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text
from transformers import PreTrainedModel

from hf_favorpp.cli.data import Batches
from hf_favorpp.cli.inspection import ADDED, describe_layers, facts_table, in_bytes, show_options
from hf_favorpp.cli.sources import WEIGHTS, Source
from hf_favorpp.cli.writing import Agreement


def describe_conversion(
    command: str,
    model: PreTrainedModel,
    source: Source,
    destination: Path,
    agreement: Agreement | None,
    data: Batches | None,
    seconds: float,
) -> dict[str, Any]:
    """Describe what was written.

    Args:
        command: That wrote it.
        model: As saved.
        source: Where it comes from.
        destination: Where it is.
        agreement: How it reloads, or None.
        data: That it was calibrated on, or None.
        seconds: That it took.

    Returns:
        JSON values.
    """
    layers = describe_layers(model)
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if ADDED in name)
    return {
        "command": command,
        "source": source.name,
        "destination": str(destination),
        "model": type(model).__name__,
        "model_type": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": layers,
        "converted_layers": sum(layer["converted"] for layer in layers),
        "calibration": None if data is None else data.to_dict(),
        "files": sorted(str(path.relative_to(destination)) for path in destination.rglob("*") if path.is_file()),
        "checkpoint_bytes": sum(path.stat().st_size for path in destination.iterdir() if path.suffix in WEIGHTS),
        "favorpp_bytes": sum(buffer.numel() * buffer.element_size() for _, buffer in buffers),
        "check": None if agreement is None else agreement.to_dict(),
        "seconds": round(seconds, 3),
    }


def show_conversion(document: Mapping[str, Any], agreement: Agreement | None) -> RenderableType:
    """Draw what was written.

    Args:
        document: As :func:`describe_conversion` returned it.
        agreement: How it reloads.

    Returns:
        A table of facts.
    """
    layers, calibration, destination = document["layers"], document["calibration"], document["destination"]
    facts = facts_table()
    done = "converted" if document["command"] == "convert" else "calibrated"
    facts.add_row(done, f"{document['source']} ({document['model']}, {document['dtype']}) to {destination}")
    facts.add_row(
        "attention", Text(f"FAVOR++ in {document['converted_layers']} of {len(layers)} layers", style="green")
    )
    for title, text in show_options(layers):
        facts.add_row(title, text)
    if calibration is not None:
        used = f"{calibration['used']} of {calibration['available']} {calibration['kind']}"
        facts.add_row("calibrated on", used)
    size = f"{in_bytes(document['checkpoint_bytes'])}, of which FAVOR++ added {in_bytes(document['favorpp_bytes'])}"
    facts.add_row("weights", size)
    facts.add_row("check", "not read back (--no-check)" if agreement is None else str(agreement))
    facts.add_row("took", f"{document['seconds']:.1f} s")
    if not any(layer["calibrated"] for layer in layers):
        facts.add_row("note", "not calibrated: a coarse estimate of softmax; --calibration-data FILE brings it closer")
    facts.add_row("next", f"hf-favorpp report {destination} --data FILE")
    return facts
