"""What the training recipes share beside their arguments: one run, or a softmax twin and then the converted model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from media_arguments import MediaArguments
from publish import create_repository, measure_crossover, measure_fidelity, push_folder
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from uptraining_arguments import UptrainingArguments

from hf_favorpp import FavorppConfig, RedrawSchedule
from hf_favorpp.hub.card import write_card
from hf_favorpp.nn import converted_layers
from hf_favorpp.training.loop import TrainingReport
from hf_favorpp.training.reload import check_reloaded
from hf_favorpp.training.results import available_cores, describe_run, write_results
from hf_favorpp.training.settings import LoopSettings

RESULTS_FILE = "results.json"
TWIN_FOLDER = "softmax"
MOST_WORKERS = 16
Arguments = TypeVar("Arguments", bound=UptrainingArguments)
Run = Callable[[Arguments, Path, dict[str, Any] | None], dict[str, Any]]
"""Trains one model with the arguments in the folder, beside the twin's results if any, and returns its results."""


class ModelError(RuntimeError):
    """The model or its surroundings are not what the recipe needs."""


class Preprocessor(Protocol):
    """A tokenizer, an image processor, or a processor of recordings and their transcripts."""

    def save_pretrained(self, folder: Path) -> object:
        """Save it beside the model."""


def set_threads(num_threads: int | None, processes: Accelerator) -> None:
    """Use the cores of a machine without a GPU, of which ``accelerate launch`` gives a process one by default."""
    launched_with_one = "ACCELERATE_MIXED_PRECISION" in os.environ and torch.get_num_threads() == 1
    if num_threads is None and processes.device.type == "cpu" and launched_with_one:
        num_threads = max(1, available_cores() // processes.num_processes)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def num_workers(args: MediaArguments, processes: Accelerator) -> int:
    """Return how many processes decode files for this process."""
    if args.num_workers is not None:
        return args.num_workers
    return min(MOST_WORKERS, max(1, available_cores() // processes.num_processes))


def run_with_twin(args: Arguments, processes: Accelerator, run: Run[Arguments]) -> dict[str, Any]:
    """Run once, or where ``args.twin`` says so first the softmax twin in a folder of its own.

    Args:
        args: As given.
        processes: Prints.
        run: Trains one model.

    Returns:
        The results of the run, not of the twin.
    """
    output_dir = Path(args.output_dir)
    if args.attention == "softmax" and args.feature_arguments():
        processes.print(f"softmax attention has no use for {', '.join(args.feature_arguments())}: left out")
    if not args.twin:
        return run(args, output_dir, None)
    twin_dir = output_dir / TWIN_FOLDER
    twin_args, own_args = split_resume(args, twin_dir)
    twin = finished_twin(twin_args, twin_dir) or run(twin_args, twin_dir, None)
    return run(own_args, output_dir, twin)


def split_resume(args: Arguments, twin_dir: Path) -> tuple[Arguments, Arguments]:
    """Return the arguments of the softmax twin and of the converted run, each with its own place to resume from."""
    resume = args.resume_from_checkpoint
    in_twin = resume is not None and resume != "latest" and Path(resume).resolve().parent == twin_dir.resolve()
    twin_args = args.as_twin(resume_from_checkpoint=resume if in_twin or resume is None else "latest")
    return twin_args, replace(args, resume_from_checkpoint="latest" if in_twin else resume)


def finished_twin(args: UptrainingArguments, twin_dir: Path) -> dict[str, Any] | None:
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


def make_accelerator(
    args: UptrainingArguments, output_dir: Path, project: str, *, some_unused: bool = False
) -> Accelerator:
    """Return an accelerator for one run: mixed precision and processes as ``accelerate launch`` sets them.

    Args:
        args: Of the run.
        output_dir: Receives what trackers write.
        project: Name for trackers.
        some_unused: Whether a step may leave parameters without a gradient, which several processes must know.

    Returns:
        The accelerator.

    Raises:
        ModelError: If tracking is asked for and no tracker is installed.
    """
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        log_with=args.report_to if args.with_tracking else None,
        project_dir=str(output_dir),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=some_unused)],
    )
    if args.with_tracking:
        if not accelerator.log_with:
            raise ModelError("--with_tracking found no tracker. Install one, for example: pip install tensorboard")
        plain = {name: str(value) for name, value in args.as_recorded().items()}
        accelerator.init_trackers(project, config=plain)
    return accelerator


def favorpp_config(args: UptrainingArguments) -> FavorppConfig:
    """Return the library's configuration; what the arguments leave open keeps the library's default."""
    options: dict[str, Any] = args.feature_arguments()
    for name in ("redraw", "recalibrate"):
        every, until = options.pop(f"{name}_every", None), options.pop(f"{name}_until", None)
        options[name] = None if every is None else RedrawSchedule(every=every, until=until)
    return FavorppConfig(kernel=args.attention, seed=args.seed, **options)


def override(config: PreTrainedConfig, overrides: str | None) -> None:
    """Change a model's configuration in place.

    Args:
        config: Of a model.
        overrides: ``a=1,b=2``, or a mapping as YAML and JSON write it, such as ``{a: 1, b: [2, 3]}``; None changes
            nothing.

    Raises:
        ModelError: If the configuration has no such option, or the text is neither.
    """
    if not overrides:
        return
    try:
        if not overrides.lstrip().startswith("{"):
            config.update_from_string(overrides)
            return
        options: dict[str, Any] = yaml.safe_load(overrides)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ModelError(f"--config_overrides {overrides!r} cannot be applied: {error}") from error
    unknown = [name for name in options if not hasattr(config, name)]
    if unknown:
        raise ModelError(f"--config_overrides: {type(config).__name__} has no {unknown}.")
    for name, value in options.items():
        setattr(config, name, value)


def with_teacher(
    args: Arguments, output_dir: Path, twin: dict[str, Any] | None
) -> tuple[Arguments, str | None, dict[str, Any] | None]:
    """Find the softmax model that a run begins as, and learns from.

    Args:
        args: Of the run.
        output_dir: Of the run.
        twin: Results of the softmax twin.

    Returns:
        The arguments of the training that starts from it, its folder or Hub id, and its results where it has any;
        the arguments as they are, None and the results of the twin where the run starts from something else.
    """
    teacher = str(output_dir / TWIN_FOLDER) if args.uptrain and twin is not None else args.teacher
    if teacher is None:
        return args, None, twin
    path = Path(teacher, RESULTS_FILE)
    if twin is None and path.is_file():
        twin = json.loads(path.read_text(encoding="utf-8"))
    return args.continuing(teacher), teacher, twin


def needs_teacher(args: UptrainingArguments, teacher: str | None) -> bool:
    """Return whether the softmax model is needed while training, not only to begin as."""
    return teacher is not None and bool(args.distil_steps or args.kd_weight)


def loop_settings(args: UptrainingArguments, output_dir: Path) -> LoopSettings:
    """Return what the training loop wants to know."""
    return LoopSettings(
        output_dir=output_dir,
        num_epochs=args.num_train_epochs,
        max_steps=args.max_train_steps,
        lr_scheduler_type=args.lr_scheduler_type,
        warmup_steps=args.num_warmup_steps,
        warmup_ratio=args.warmup_ratio,
        max_grad_norm=args.max_grad_norm,
        evaluate_every=args.eval_steps,
        checkpoint_every=args.checkpoint_interval(),
        checkpoint_limit=args.checkpoint_limit,
        resume_from=args.resume_from_checkpoint,
        seed=args.seed,
        identity=args.identity(),
    )


def describe_results(
    args: UptrainingArguments, task: str, model: nn.Module, report: TrainingReport, units: str, packages: Iterable[str]
) -> dict[str, Any]:
    """Return what every recipe writes to results.json.

    Args:
        args: Of the run.
        task: What was learnt.
        model: As trained.
        report: Of the loop.
        units: What the loop counted, "tokens" or "images".
        packages: Distributions whose versions matter to the recipe.

    Returns:
        JSON-able content.
    """
    return {
        "task": task,
        "attention": args.attention,
        "metrics": report.metrics,
        "wall_time_s": report.wall_seconds,
        "train_time_s": report.train_seconds,
        f"train_{units}": report.tokens,
        f"train_{units}_per_s": report.tokens_per_second,
        "peak_memory_mib": report.peak_memory_mib,
        "seed": args.seed,
        "completed_steps": report.completed_steps,
        "favorpp": getattr(model.config, "favorpp", None),
        "history": report.history,
        **describe_run(args.as_recorded(), packages),
    }


def beside_twin(results: dict[str, Any], twin: dict[str, Any] | None, measurements: Iterable[str]) -> dict[str, Any]:
    """Return the results with the twin's metrics and measurements, where there is a twin."""
    if twin is None:
        return results
    own = {key: twin[key] for key in measurements if key in twin}
    return {**results, "softmax_metrics": twin["metrics"], "softmax": own}


@dataclass(frozen=True)
class Repository:
    """A place on the Hub, made before the training."""

    name: str
    token: str | None

    @classmethod
    def wanted(cls, args: UptrainingArguments, accelerator: Accelerator, output_dir: Path) -> Repository | None:
        """Make the repository that the arguments name; None where nothing is to be pushed, or not by this process."""
        if not args.push_to_hub or not accelerator.is_main_process:
            return None
        name = args.hub_model_id or output_dir.resolve().name
        return cls(create_repository(name, args.hub_token), args.hub_token)


def finish(
    accelerator: Accelerator,
    model: PreTrainedModel,
    preprocessor: Preprocessor,
    output_dir: Path,
    results: dict[str, Any],
    *,
    auto: type[Any],
    batch: dict[str, Tensor],
    repository: Repository | None,
) -> None:
    """Save model, preprocessor and results, check that the saved model predicts the same, and upload all of it.

    Args:
        accelerator: Of the run; its trackers are ended.
        model: Unwrapped.
        preprocessor: Saved beside the model.
        output_dir: Of the run.
        results: Content of results.json; how close a converted model is to softmax is added to it, and where it is
            pushed, from which length on its attention is faster.
        auto: Class whose ``from_pretrained`` loads the model.
        batch: What the model is to predict before and after.
        repository: On the Hub, or None.

    Raises:
        ModelError: If the saved model predicts something else.
    """
    if accelerator.is_main_process:
        preprocessor.save_pretrained(output_dir)
        model.save_pretrained(output_dir, save_function=accelerator.save)
        difference = check_reloaded(model, output_dir, batch, auto)
        if difference is not None:
            raise ModelError(
                f"the model loaded back from {output_dir} does not predict what the trained one does: logits differ "
                f"by up to {difference:.3g}."
            )
        rows = len(next(iter(batch.values())))
        print(f"loaded back from {output_dir} with from_pretrained: the same logits on {rows} validation rows")
        if converted_layers(model):
            results.update(measure_fidelity(model, output_dir, batch))
            if repository is not None:
                results["crossovers"] = measure_crossover(model)
        write_results(output_dir / RESULTS_FILE, results)
        if converted_layers(model):
            write_card(model, output_dir)
        if repository is not None:
            push_folder(repository.name, output_dir, repository.token, model)
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:  # end_training would also end the processes, which a second run needs
        tracker.finish()
