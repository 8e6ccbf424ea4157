"""Train a Vision Transformer to classify images with softmax attention or with random features, or compare the two.

For example ``accelerate launch recipes/imagenet.py --config configs/imagenet/quickstart.yaml``, or without a
configuration ``accelerate launch recipes/imagenet.py --train_dir FOLDER/train --validation_dir FOLDER/val
--model_name_or_path facebook/deit-small-patch16-224 --attention favor++ --num_features 128``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import evaluate
import torch
from accelerate import Accelerator
from command_line import parse_arguments
from imagenet_arguments import ImageNetArguments
from imagenet_data import ImageData, load_images
from imagenet_images import IGNORED, CentreView, Reader, TrainingView
from imagenet_model import (
    NO_DECAY,
    Normalisation,
    build_model,
    find_normalisation,
    image_size,
    make_average,
    make_processor,
)
from media_loaders import media_loaders
from skipped_files import MediaDataError, SkippedFiles
from stages import Stages
from throughput import loader_rate, model_rate, verdict
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForImageClassification
from uptraining import (
    ModelError,
    Repository,
    beside_twin,
    describe_results,
    finish,
    loop_settings,
    make_accelerator,
    needs_teacher,
    num_workers,
    run_with_twin,
    set_threads,
    with_teacher,
)
from uptraining_report import print_table

from hf_favorpp import FavorppCallback, FavorppError, calibrate
from hf_favorpp.training.loop import train
from hf_favorpp.training.mixing import Mixing
from hf_favorpp.training.parameter_groups import parameter_groups
from hf_favorpp.training.results import reset_peak_memory

METRICS_MODULE = Path(__file__).with_name("imagenet_metrics.py")
MEASUREMENTS = {
    "train_images_per_s": "training images / s",
    "model_images_per_s": "model alone, images / s",
    "loader_images_per_s": "loader alone, images / s",
    "wall_time_s": "wall time, s",
    "peak_memory_mib": "peak memory, MiB",
}
RECORDED_PACKAGES = ("datasets", "evaluate", "scikit-learn", "kornia", "pillow")
TOP = 5


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What was written to results.json.
    """
    args = parse_arguments(ImageNetArguments, argv)
    processes = Accelerator()  # starts them as ``accelerate launch`` or ``torchrun`` says; a PartialState would not
    set_threads(args.num_threads, processes)
    skipped = SkippedFiles(Path(args.output_dir), args.strict)
    if args.resume_from_checkpoint is None and processes.is_main_process:
        skipped.clear()
    with processes.main_process_first():  # the others find what it downloaded
        data = load_images(args, skipped)
    results = run_with_twin(args, processes, lambda *which: run(*which, data=data, skipped=skipped))
    if processes.is_main_process:
        print_table(results, MEASUREMENTS)
        print(skipped.summary(), end="\n" if skipped.summary() else "")
    processes.end_training()
    return results


def run(
    args: ImageNetArguments,
    output_dir: Path,
    twin: dict[str, Any] | None,
    *,
    data: ImageData,
    skipped: SkippedFiles,
) -> dict[str, Any]:
    """Train and evaluate one model, save it, load it back, and write its results.json.

    Args:
        args: Everything but the folder.
        output_dir: Receives everything.
        twin: Results of the softmax twin to compare with.
        data: What to train and evaluate on.
        skipped: Receives the names of files that cannot be read.

    Returns:
        The results.
    """
    reset_peak_memory()
    args, teacher, twin = with_teacher(args, output_dir, twin)
    accelerator = make_accelerator(args, output_dir, "imagenet")
    repository = Repository.wanted(args, accelerator, output_dir)
    accelerator.print(f"\n{args.task()}, {args.attention} attention, in {output_dir}")
    model = build_model(args, data.label_names).to(accelerator.device)
    normalise = find_normalisation(args.model_name_or_path)
    size = image_size(model, args)
    train_loader, eval_loader, still_loader = make_loaders(args, accelerator, data, size, skipped)
    if args.attention != "softmax" and args.statistics == "calibrated":
        calibrate(model, model_inputs(still_loader, normalise, accelerator.device))
    loss = make_loss(args, normalise, len(data.label_names))
    rates = measure(args, accelerator, model, lambda model, batch: loss(model, batch)[0], train_loader)
    score = make_evaluate(accelerator, accelerator.prepare(eval_loader), normalise)
    softmax = build_model(args.as_twin(), data.label_names) if needs_teacher(args, teacher) else None
    stages = Stages(
        args, output_dir, accelerator, softmax, lambda batch: {"pixel_values": normalise(batch["pixel_values"])}
    )
    stages.run(model, train_loader, score, layer_decay=args.layer_decay, no_decay=NO_DECAY)
    average = None if args.ema_decay is None else make_average(model, args.ema_decay)
    if average is not None:
        accelerator.register_for_checkpointing(average)
    renewal = None if args.attention == "softmax" else FavorppCallback()

    def end_step(model: nn.Module, completed_steps: int) -> None:
        if renewal is not None:
            renewal.end_step(model, completed_steps)
        if average is not None:
            average.update_parameters(accelerator.unwrap_model(model))

    def evaluate_all(model: nn.Module) -> dict[str, float]:
        averaged = {} if average is None else {f"ema_{name}": value for name, value in score(average.module).items()}
        return score(model) | averaged

    groups = parameter_groups(
        model,
        args.learning_rate,
        args.weight_decay,
        feature_learning_rate=args.feature_learning_rate,
        layer_decay=args.layer_decay,
        no_decay=NO_DECAY,
    )
    report = train(
        accelerator,
        model,
        torch.optim.AdamW(groups, lr=args.learning_rate, fused=True),
        train_loader,
        evaluate_all,
        loop_settings(args, output_dir),
        on_step_begin=renewal and renewal.step,
        on_step_end=end_step,
        compute_loss=stages.loss(loss),
        count_tokens=count_images,
    )
    accelerator.wait_for_everyone()
    names = skipped.names()
    results = describe_results(args, args.task(), model, report, "images", RECORDED_PACKAGES)
    results |= {**stages.report, **rates, "saved": "last" if average is None else "ema"}
    results |= {"skipped_files": {"count": len(names), "names": list(names)}}
    results = beside_twin(results, twin, MEASUREMENTS)
    finish(
        accelerator,
        accelerator.unwrap_model(model, keep_fp32_wrapper=False) if average is None else average.module,
        make_processor(normalise, size, args.crop_ratio),
        output_dir,
        results,
        auto=AutoModelForImageClassification,
        batch=next(model_inputs(eval_loader, normalise, accelerator.device)),
        repository=repository,
    )
    return results


def make_loaders(
    args: ImageNetArguments, accelerator: Accelerator, data: ImageData, size: int, skipped: SkippedFiles
) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of the training, of the evaluation, and of unchanged training images to calibrate on."""
    training = TrainingView(
        size, args.min_crop_scale, args.horizontal_flip, args.randaugment_magnitude, args.randaugment_std, args.seed
    )
    change, still = Reader(training, skipped), Reader(CentreView(size, args.crop_ratio), skipped)
    return media_loaders(args, accelerator, data, change, still)


def model_inputs(
    loader: DataLoader[Any], normalise: Normalisation, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Yield what the model takes, without labels."""
    for batch in loader:
        yield {"pixel_values": normalise(batch["pixel_values"].to(device))}


def make_loss(
    args: ImageNetArguments, normalise: Normalisation, num_classes: int
) -> Callable[[nn.Module, Any], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Return what gives the training loss of a batch, mixed and with smoothed labels, its logits and its inputs."""
    mixing = Mixing(args.mixup, args.cutmix)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        pixels, targets = mixing(normalise(batch["pixel_values"]), batch["labels"], num_classes)
        logits = model(pixel_values=pixels).logits.float()
        value = nn.functional.cross_entropy(logits, targets, label_smoothing=args.label_smoothing)
        return value, logits, {"pixel_values": pixels}

    return loss


def count_images(batch: dict[str, Tensor]) -> Tensor:
    """Return the number of images of a batch."""
    return torch.tensor(len(batch["labels"]), device=batch["labels"].device)


def measure(
    args: ImageNetArguments,
    accelerator: Accelerator,
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    loader: DataLoader[Any],
) -> dict[str, float]:
    """Print and return the images/s of loader and model, each alone, summed over the processes."""
    if not args.measure_throughput:
        return {}
    reads = accelerator.is_main_process or not args.streaming  # a stream is read by the first process, for all
    batch = next(iter(loader))
    batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
    own = (loader_rate(loader) if reads else 0.0, model_rate(model, loss, batch, accelerator.autocast))
    total = accelerator.reduce(torch.tensor(own, device=accelerator.device, dtype=torch.float32), "sum").tolist()
    accelerator.print(verdict(*total, num_workers(args, accelerator)))
    return dict(zip(("loader_images_per_s", "model_images_per_s"), total, strict=True))


def make_evaluate(
    accelerator: Accelerator, loader: DataLoader[Any], normalise: Normalisation
) -> Callable[[nn.Module], dict[str, float]]:
    """Return the function that gives a model's top-1 and, of five classes or more, top-5."""
    with accelerator.main_process_first():
        metric = evaluate.load(str(METRICS_MODULE), keep_in_memory=True)

    @torch.no_grad()
    def score(model: nn.Module) -> dict[str, float]:
        predictions, references = [], []
        for batch in loader:
            with accelerator.autocast():
                logits = model(pixel_values=normalise(batch["pixel_values"])).logits.float()
            likeliest = logits.topk(min(TOP, logits.shape[-1])).indices
            likeliest, labels = accelerator.gather_for_metrics((likeliest, batch["labels"]))
            predictions.append(likeliest[labels != IGNORED].cpu())
            references.append(labels[labels != IGNORED].cpu())
        values = metric.compute(predictions=torch.cat(predictions).tolist(), references=torch.cat(references).tolist())
        return {name: float(value) for name, value in values.items()}

    return score


if __name__ == "__main__":
    try:
        main()
    except (MediaDataError, ModelError, FavorppError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
