"""The loaders of the recipes for images and for speech: to train on, to evaluate on, and to calibrate on."""

from __future__ import annotations

from typing import Any, Protocol

from accelerate import Accelerator
from media_arguments import MediaArguments
from media_examples import Examples, Reader, StreamedExamples
from media_rows import Rows
from torch.utils.data import DataLoader, Sampler
from uptraining import num_workers


class MediaData(Protocol):
    """What to train and evaluate on; ``num_validation`` is None where a stream does not tell."""

    train: Rows
    validation: Rows
    num_train: int
    num_validation: int | None


def media_loaders(
    args: MediaArguments,
    accelerator: Accelerator,
    data: MediaData,
    change: Reader,
    still: Reader,
    *,
    collate: Any = None,
    sampler: Sampler[int] | None = None,
) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of the training, of the evaluation, and of training rows to calibrate on.

    Args:
        args: Batch sizes, workers, seed.
        accelerator: Of the run.
        data: Rows by index, or streams.
        change: Makes examples to train on.
        still: Makes all others.
        collate: Makes batches of examples; None stacks them.
        sampler: Order of the training rows by index; None shuffles them.

    Returns:
        The three of them.
    """
    train_size, eval_size = args.per_device_train_batch_size, args.per_device_eval_batch_size
    options: dict[str, Any] = {
        "num_workers": num_workers(args, accelerator),
        "pin_memory": accelerator.device.type == "cuda",
        "collate_fn": collate,
    }
    if args.streaming:
        shuffled = data.train.shuffle(seed=args.seed, buffer_size=args.shuffle_buffer)
        few = StreamedExamples(data.train.take(args.calibration_samples), still, None)
        return (
            DataLoader(StreamedExamples(shuffled, change, data.num_train), train_size, **options),
            DataLoader(StreamedExamples(data.validation, still, data.num_validation), eval_size, **options),
            DataLoader(few, train_size, collate_fn=collate),
        )
    rows = data.train.shuffle(seed=args.seed)
    rows = rows.select(range(min(args.calibration_samples, len(rows))))
    examples = Examples(data.train, change, replace=True)
    return (
        DataLoader(examples, train_size, shuffle=sampler is None, sampler=sampler, **options),
        DataLoader(Examples(data.validation, still, replace=False), eval_size, **options),
        DataLoader(Examples(rows, still, replace=True), train_size, **options),
    )
