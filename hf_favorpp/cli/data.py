"""What a model is calibrated or measured on: texts, images or recordings from files, as batches that it takes."""

import csv
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer, PreTrainedModel

from hf_favorpp.cli.failures import CommandError, NotFoundError, UsageError
from hf_favorpp.cli.output import output
from hf_favorpp.cli.sources import Source
from hf_favorpp.families import attention_layers
from hf_favorpp.observing import has_towers

TEXTS = (".txt", ".jsonl", ".csv", ".tsv")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
RECORDINGS = (".wav", ".flac")
LONGEST = 512
"""Tokens of a text where neither tokenizer nor model sets a limit."""
ROW = 2**31 - 1
"""Largest field of a CSV file, bytes."""

Row = TypeVar("Row")
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class DataOptions:
    """How data are read.

    Attributes:
        path: File or folder.
        field: Of a JSON line or a row that holds the text.
        max_samples: How many inputs to use, evenly spaced.
        max_length: Tokens of a text or samples of a recording; None is what the model takes.
        batch_size: Inputs a batch.
    """

    path: Path
    field: str = "text"
    max_samples: int = 256
    max_length: int | None = None
    batch_size: int = 8


@dataclass(frozen=True)
class Batches:
    """Batches, made when they are asked for, as often as they are.

    Attributes:
        groups: The inputs of each batch.
        make: Makes the batch of some inputs.
        kind: What they are: ``"texts"``, ``"images"`` or ``"recordings"``.
        available: How many inputs there were to choose from.
    """

    groups: Sequence[Sequence[Any]]
    make: Callable[[Sequence[Any]], Batch]
    kind: str
    available: int

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.make, self.groups)

    @property
    def used(self) -> int:
        """How many inputs are used."""
        return sum(map(len, self.groups))

    def first(self) -> "Batches":
        """Return the first batch alone."""
        return replace(self, groups=self.groups[:1])

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON tells of them."""
        return {"kind": self.kind, "used": self.used, "available": self.available, "batches": len(self)}


def read_batches(options: DataOptions, source: Source, model: PreTrainedModel) -> Batches:
    """Read the data that a model takes.

    Args:
        options: File or folder, and limits.
        source: Of the tokenizer or processor.
        model: Tells what it takes; CLIP and its like take images or texts, whichever there are.

    Returns:
        Batches.

    Raises:
        CommandError: The model takes something else.
        NotFoundError: There is nothing.
    """
    if not options.path.exists():
        raise NotFoundError(f"there is no {options.path} to read data from.")
    takes = model.main_input_name
    if has_towers(model):
        takes = "pixel_values" if any(_files(options.path, IMAGES)) else "input_ids"
        reasons = [layer.left_out() for layer in attention_layers(model.get_submodule("text_model"))]
        if takes == "input_ids" and reasons and all(reasons):
            raise CommandError(f"{type(model).__name__} is to be given images ({', '.join(IMAGES)}): {reasons[0]}.")
    elif hasattr(model.config, "vision_config") and takes == "input_ids":
        raise CommandError(
            f"{type(model).__name__} takes images together with texts, which this command does not read: use "
            f"calibrate(model, loader) and approximation_report(model, batch) in Python."
        )
    if takes == "input_ids":
        return _chosen(read_texts(options.path, options.field), options, _text_maker(options, source, model), "texts")
    if takes == "pixel_values":
        paths = find_files(options.path, IMAGES)
        make = _image_maker(source, model)
        chosen = _readable(spread(paths, options.max_samples), "image", _check_image)
        return replace(_chosen(chosen, options, make, "images"), available=len(paths))
    if takes in ("input_values", "input_features"):
        paths, shortest = find_files(options.path, RECORDINGS), samples_of_a_frame(model.config)
        make = _wave_maker(options, source, model, shortest)
        kind = f"recording of at least {shortest} samples"
        chosen = _readable(spread(paths, options.max_samples), kind, partial(_check_wave, shortest=shortest))
        # one at a time: without a mask padding would be heard
        return replace(_chosen(chosen, options, make, "recordings", 1), available=len(paths))
    raise CommandError(
        f"{type(model).__name__} takes {takes}, and this command reads texts, images and recordings: use "
        f"calibrate(model, loader) or approximation_report(model, batch) in Python."
    )


def read_texts(path: Path, field: str = "text") -> list[str]:
    """Read texts.

    Args:
        path: A .txt file, one text a line; a .jsonl, .csv or .tsv file; or a folder of .txt files, one text each.
        field: Of a JSON line or a row.

    Returns:
        The texts that are not blank.

    Raises:
        CommandError: It is no such file, a line has no such field, or there is no text.
    """
    if path.is_dir():
        files = find_files(path, (".txt",))
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    elif path.suffix.lower() not in TEXTS:
        raise CommandError(f"texts are read from {', '.join(TEXTS)} or from a folder of .txt, got {path}.")
    else:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                texts = list(_rows(path, file, field))
        except UnicodeDecodeError as error:
            raise CommandError(f"{path} must be UTF-8, and byte {error.start} is not.") from error
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise CommandError(f"{path} holds no text.")
    return texts


def _rows(path: Path, lines: Iterable[str], field: str) -> Iterator[str]:
    kind = path.suffix.lower()
    if kind == ".txt":
        yield from (line.strip() for line in lines)
        return
    if kind == ".jsonl":
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                raise CommandError(f"{path}, line {number} is not JSON.") from None
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                fields = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise CommandError(
                    f"{path}, line {number} must be an object with a string {field!r}, and has: {fields}. Name "
                    f"another with --field."
                )
            yield row[field]
        return
    csv.field_size_limit(ROW)
    table = csv.DictReader(lines, delimiter="\t" if kind == ".tsv" else ",")
    if field not in (table.fieldnames or ()):
        columns = ", ".join(table.fieldnames or ()) or "none"
        raise CommandError(f"{path} has no column {field!r}; it has: {columns}. Name another with --field.")
    yield from (row[field] or "" for row in table)


def find_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Find files below a folder.

    Args:
        folder: The folder, or one such file.
        suffixes: In lower case.

    Returns:
        The paths, sorted.

    Raises:
        NotFoundError: There is none.
    """
    paths = sorted(_files(folder, suffixes))
    if not paths:
        raise NotFoundError(f"the model takes {', '.join(suffixes)}, and there is none in {folder}.")
    return paths


def _files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    paths = [folder] if folder.is_file() else folder.rglob("*")
    return (path for path in paths if path.suffix.lower() in suffixes and path.is_file())


def spread(rows: Sequence[Row], count: int) -> list[Row]:
    """Return ``count`` evenly spaced rows, since files are sorted by class or date; all where there are fewer."""
    if count >= len(rows):
        return list(rows)
    return [rows[index * len(rows) // count] for index in range(count)]


def _chosen(
    rows: Sequence[Any],
    options: DataOptions,
    make: Callable[[Sequence[Any]], Batch],
    kind: str,
    batch_size: int | None = None,
) -> Batches:
    chosen, size = spread(rows, options.max_samples), batch_size or options.batch_size
    groups = [chosen[start : start + size] for start in range(0, len(chosen), size)]
    return Batches(groups, make, kind, len(rows))


def _text_maker(options: DataOptions, source: Source, model: PreTrainedModel) -> Callable[[Sequence[str]], Batch]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.options)
    except (OSError, ValueError) as error:
        raise CommandError(f"{source.name} has no tokenizer that could be loaded, which texts need.") from error
    longest = longest_text(tokenizer, model.config.text_config if has_towers(model) else model.config)
    if options.max_length is not None and options.max_length > longest:
        output.note(f"texts are cut after {longest} tokens, which is what {source.name} takes.")
    length = longest if options.max_length is None else min(options.max_length, longest)
    padding = "max_length" if has_towers(model) else "longest"  # SigLIP reads padding, and was trained with all of it

    def make(texts: Sequence[str]) -> Batch:
        encoded = tokenizer(list(texts), truncation=True, max_length=length, padding=padding, return_tensors="pt")
        return {name: encoded[name] for name in encoded if name != "token_type_ids" or _has_types(model)}

    return make


def _has_types(model: PreTrainedModel) -> bool:
    return getattr(model.config, "type_vocab_size", 0) > 0


def longest_text(tokenizer: Any, config: Any) -> int:
    """Return how many tokens a model takes.

    Args:
        tokenizer: Its ``model_max_length`` holds where one is set.
        config: Of the model.

    Returns:
        Tokens.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < 10**6 else []
    if (positions := positions_of(config)) is not None:
        limits.append(positions)
    return min(limits, default=LONGEST)


def positions_of(config: Any) -> int | None:
    """Return for how many tokens a model has positions.

    Args:
        config: Of the model; RoBERTa and its like leave out those up to the padding.

    Returns:
        Tokens, or None where the configuration does not tell.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int):
        return None
    return positions - ((config.pad_token_id or 0) + 1 if config.model_type in _OFFSET_POSITIONS else 0)


_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "esm")


def _readable(paths: Sequence[Path], kind: str, check: Callable[[Path], None]) -> list[Path]:
    good = []
    for path in tqdm(paths, "looking at the files", leave=False, delay=1):
        try:
            check(path)
        except (OSError, RuntimeError, SyntaxError, ValueError):  # as Pillow and soundfile have it
            output.note(f"{path} is no readable {kind} and is left out.")
        else:
            good.append(path)
    if not good:
        raise CommandError(f"none of the files is a readable {kind}.")
    return good


def _check_image(path: Path) -> None:
    with _imported("PIL.Image", "pillow", "images").open(path) as file:
        file.verify()


def _check_wave(path: Path, shortest: int) -> None:
    samples = _imported("soundfile", "soundfile", "recordings").info(path).frames
    if samples < shortest:
        raise ValueError(f"{samples} samples")


def samples_of_a_frame(config: Any) -> int:
    """Return how many samples of a waveform a model needs at least.

    Args:
        config: Of the model; its convolutions make one frame of so many samples, where it tells them.

    Returns:
        Samples.
    """
    samples = 1
    if not hasattr(config, "conv_kernel"):
        return samples
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        samples = (samples - 1) * stride + kernel
    return int(samples)


def _preprocessor(auto: Any, source: Source, name: str, inputs: str) -> Any:
    try:
        return auto.from_pretrained(source.location, **source.options)
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{source.name} has no {name} that could be loaded, so its {inputs} cannot be prepared: put "
            f"preprocessor_config.json beside it."
        ) from error


def _image_maker(source: Source, model: PreTrainedModel) -> Callable[[Sequence[Path]], Batch]:
    image = _imported("PIL.Image", "pillow", "images")
    processor = _preprocessor(AutoImageProcessor, source, "image processor", "images")

    def make(paths: Sequence[Path]) -> Batch:
        pictures = []
        for path in paths:
            with image.open(path) as file:
                pictures.append(file.convert("RGB"))
        encoded = processor(images=pictures, return_tensors="pt")
        return {name: t.to(model.dtype) if t.is_floating_point() else t for name, t in encoded.items()}

    return make


def _wave_maker(
    options: DataOptions, source: Source, model: PreTrainedModel, shortest: int
) -> Callable[[Sequence[Path]], Batch]:
    if options.max_length is not None and options.max_length < shortest:
        raise UsageError(
            f"--max-length must be at least {shortest} samples for {source.name}, got {options.max_length}."
        )
    soundfile = _imported("soundfile", "soundfile", "recordings")
    extractor = _preprocessor(AutoFeatureExtractor, source, "feature extractor", "recordings")
    decodes = "decoder_input_ids" in inspect.signature(model.forward).parameters
    # any word will do: the encoder, which is what is converted, does not see it
    words = {"decoder_input_ids": torch.tensor([[model.config.decoder_start_token_id or 0]])} if decodes else {}

    def make(paths: Sequence[Path]) -> Batch:
        (path,) = paths
        samples, rate = soundfile.read(path, dtype="float32")
        if rate != extractor.sampling_rate:
            raise CommandError(
                f"{path} has {rate} samples a second, the model takes {extractor.sampling_rate}: resample it first."
            )
        wave = samples.mean(axis=1) if samples.ndim == 2 else samples
        values = extractor(wave[: options.max_length], sampling_rate=rate, return_tensors="pt")[model.main_input_name]
        return {model.main_input_name: torch.as_tensor(values).to(model.dtype), **words}

    return make


def _imported(module: str, package: str, purpose: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CommandError(f"{purpose} are read with {package}: pip install 'hf-favorpp[cli]'.") from error
