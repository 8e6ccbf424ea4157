"""The arguments that every training recipe has: attention, optimisation, output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from command_line import flag

from hf_favorpp.rules import CHOSEN_KERNELS

TransferLoss = Literal["output", "weights"]
Attention = Literal["softmax", "favor++", "favor+", "relu", "elu", "trig", "favor+hyperbolic", "uniform", "none"]
Scheduler = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]
# The names are kept out of FavorppConfig where they are None, so that the library's defaults hold.
FEATURE_ARGUMENTS = (
    *("num_features", "preconditioning", "projection", "statistics", "candidates", "exact_window", "exact_ends"),
    *("layers", "redraw_every", "redraw_until", "recalibrate_every", "recalibrate_until", "learnable"),
)
STAGES = ("transfer_steps", "distil_steps", "kd_weight")


@dataclass
class UptrainingArguments:
    """Train a pretrained encoder on a task, with softmax attention or converted to random features."""

    LEAST: ClassVar[Mapping[str, tuple[float, str]]] = {
        **dict.fromkeys(("num_threads", "max_train_samples", "max_eval_samples", "eval_steps"), (1, "at least")),
        **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), (1, "at least")),
        **dict.fromkeys(("gradient_accumulation_steps", "num_train_epochs"), (1, "at least")),
        "max_train_steps": (0, "at least"),
        **dict.fromkeys(("checkpoint_limit", "calibration_samples"), (1, "at least")),
        **dict.fromkeys(("seed", "num_warmup_steps", "warmup_ratio", "weight_decay"), (0, "at least")),
        **dict.fromkeys(STAGES, (0, "at least")),
        **dict.fromkeys(("learning_rate", "max_grad_norm", "kd_temperature"), (0, "above")),
        **dict.fromkeys(("transfer_learning_rate", "distil_learning_rate", "uptrain_learning_rate"), (0, "above")),
        "feature_learning_rate": (0, "above"),
        "uptrain_epochs": (1, "at least"),
    }
    """The least value of an argument, and whether it may be that."""
    FREE_ON_RESUME: ClassVar[tuple[str, ...]] = (
        *("config", "output_dir", "checkpointing_steps", "checkpoint_limit", "resume_from_checkpoint", "num_threads"),
        *("with_tracking", "report_to", "push_to_hub", "hub_model_id", "twin", "model_name_or_path", "teacher"),
    )
    """Where things lie and how they are shown; everything else must be the same when a run is resumed."""

    config: str | None = flag("YAML file of arguments; the command line wins over it.")
    # data
    max_train_samples: int | None = flag("Use only so many training rows.")
    max_eval_samples: int | None = flag("Use only so many rows of each evaluation split.")
    # model
    model_name_or_path: str | None = flag("Hub id or folder.")
    trust_remote_code: bool = flag("Run model code from the Hub.", False)
    ignore_mismatched_sizes: bool = flag("Replace a head whose size differs.", False)
    # attention
    attention: Attention = field(
        default="favor++",
        metadata={"help": "Softmax, or the random features that replace it; none is the exact neighbourhood alone."},
    )
    num_features: int | None = flag("Random features per head; None is the library's default.")
    preconditioning: str | None = flag("None is the library's default; `none` is attention as published.")
    projection: str | None = flag("How the projections are drawn; None is the library's default.")
    statistics: str | None = flag("`sequence` or `calibrated`, on training rows before training; None is `sequence`.")
    calibration_samples: int = flag("Training rows to calibrate on.", 512)
    candidates: int | None = flag("Projections drawn per feature, from which a calibration chooses; None is 8.")
    exact_window: int | None = flag("Tokens per block that attend to each other exactly; None is 0.")
    exact_ends: list[int] | None = field(
        default=None, metadata={"help": "How many first and last tokens all others see exactly; None is 0 0."}
    )
    layers: list[int] | None = field(
        default=None, metadata={"help": "Layers to convert, the others stay softmax; None converts all."}
    )
    redraw_every: int | None = flag("Optimizer steps between new draws of the features; None never redraws.")
    redraw_until: int | None = flag("Optimizer step of the last redraw.")
    recalibrate_every: int | None = flag("Optimizer steps between new calibrations; None keeps the first.")
    recalibrate_until: int | None = flag("Optimizer step of the last recalibration.")
    learnable: str | None = flag(
        "`projections` are parameters of the model; None is that with transfer_steps, else they are fixed."
    )
    twin: bool = flag("First train a softmax twin in OUTPUT_DIR/softmax with the same hyper-parameters.", False)
    uptrain: bool = flag("With twin: convert the trained twin and train it on, not both from one start.", False)
    uptrain_epochs: int | None = flag("Passes of that second training; None is num_train_epochs.")
    uptrain_learning_rate: float | None = flag("Of that second training; None is learning_rate.")
    evaluate_first: bool = flag("Evaluate before training too, after the conversion and after each stage.", False)
    # stages before the task
    teacher: str | None = flag(
        "Folder or Hub id of a softmax model of the task, which the converted one begins as and learns from; "
        "with twin and uptrain that is the twin."
    )
    transfer_steps: int = flag("Optimizer steps in which each layer's features learn from its softmax attention.", 0)
    transfer_loss: TransferLoss = field(
        default="output", metadata={"help": "What they learn: the outputs of attention, or its weights."}
    )
    transfer_learning_rate: float = flag("Of those steps.", 0.1)
    distil_steps: int = flag("Optimizer steps towards the teacher's hidden states and logits, without labels.", 0)
    distil_learning_rate: float | None = flag("Of those steps; None is learning_rate.")
    kd_weight: float = flag("Share of the teacher's logits in the loss of the task; labels have the rest.", 0.0)
    kd_temperature: float = flag("At which logits are compared.", 2.0)
    # optimisation
    per_device_train_batch_size: int = flag("Rows per process and micro-batch.", 8)
    per_device_eval_batch_size: int = flag("Rows per process.", 8)
    learning_rate: float = flag("Of AdamW, after warm-up.", 5e-5)
    feature_learning_rate: float = flag("Of learnable projections, in distillation and in the task.", 0.01)
    weight_decay: float = flag("Of AdamW; not on biases, norms and projections.", 0.0)
    num_train_epochs: int = flag("Passes over the training data.", 3)
    max_train_steps: int | None = flag("Optimizer steps; overrides num_train_epochs. 0 evaluates alone.")
    gradient_accumulation_steps: int = flag("Micro-batches per optimizer step.", 1)
    lr_scheduler_type: Scheduler = field(default="linear", metadata={"help": "Of the learning rate."})
    num_warmup_steps: int = flag("Optimizer steps of warm-up.", 0)
    warmup_ratio: float = flag("Warm-up as a share of all steps; used where num_warmup_steps is 0.", 0.0)
    max_grad_norm: float | None = flag("Clip the gradient's norm to this.")
    seed: int = flag("Of the head's weights, data order, dropout and features.", 42)
    eval_steps: int | None = flag("Optimizer steps between evaluations, beside the one after each epoch.")
    num_threads: int | None = flag(
        "CPU threads of a process; None keeps those of the environment, or shares the cores where accelerate launch "
        "left one thread on a machine without a GPU."
    )
    # output
    output_dir: str = flag("Receives the model, results.json and checkpoints.", "outputs")
    checkpointing_steps: str | None = flag("Optimizer steps between checkpoints, or `epoch`.")
    checkpoint_limit: int | None = flag("Checkpoints to keep, the newest.")
    resume_from_checkpoint: str | None = flag("Checkpoint folder, or `latest`, which begins anew if there is none.")
    with_tracking: bool = flag("Log to experiment trackers.", False)
    report_to: str = flag("Tracker for with_tracking: tensorboard, wandb, ..., or all that are installed.", "all")
    push_to_hub: bool = flag("Upload the model at the end.", False)
    hub_model_id: str | None = flag("Repository to push to; None is the name of output_dir.")
    hub_token: str | None = flag("Token for push_to_hub; None uses the one you logged in with.")

    def __post_init__(self) -> None:
        """Refuse what would be ignored or cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        for name, (least, rule) in self.LEAST.items():
            value = getattr(self, name)
            if value is not None and not (value > least if rule == "above" else value >= least):
                raise ValueError(f"--{name} must be {rule} {least}, got {value}.")
        if self.warmup_ratio >= 1:
            raise ValueError(f"--warmup_ratio must be below 1, got {self.warmup_ratio}.")
        if self.attention == "none" and not (self.exact_window or any(self.exact_ends or ())):
            raise ValueError("--attention none is the exact neighbourhood alone: give --exact_window or --exact_ends.")
        if self.twin and self.attention == "softmax":
            raise ValueError("--twin compares with softmax: choose another --attention, or --twin false.")
        for name in ("redraw", "recalibrate"):
            if getattr(self, f"{name}_until") is not None and getattr(self, f"{name}_every") is None:
                raise ValueError(f"--{name}_until needs --{name}_every.")
        if not self.push_to_hub and (self.hub_model_id or self.hub_token):
            raise ValueError("--hub_model_id and --hub_token need --push_to_hub.")
        if not self.with_tracking and self.report_to != "all":
            raise ValueError("--report_to needs --with_tracking.")
        if self.checkpoint_limit is not None and self.checkpointing_steps is None:
            raise ValueError("--checkpoint_limit needs --checkpointing_steps.")
        self._check_stages()
        if self.num_warmup_steps and self.warmup_ratio:
            raise ValueError("give --num_warmup_steps or --warmup_ratio, not both.")
        self.checkpoint_interval()

    def checkpoint_interval(self) -> int | str | None:
        """Return ``checkpointing_steps`` as the loop takes it: optimizer steps, "epoch" or None.

        Raises:
            ValueError: If it is something else.
        """
        steps = self.checkpointing_steps
        if steps is None or steps == "epoch":
            return steps
        if not steps.isdecimal() or int(steps) < 1:
            raise ValueError(f"--checkpointing_steps must be a number of at least 1 or `epoch`, got {steps!r}.")
        return int(steps)

    def _check_stages(self) -> None:
        """Refuse stages without a teacher, or with nothing to learn; fill in what a transfer needs."""
        if self.uptrain and not self.twin:
            raise ValueError("--uptrain continues the softmax twin: add --twin.")
        if not self.uptrain and (self.uptrain_epochs or self.uptrain_learning_rate):
            raise ValueError("--uptrain_epochs and --uptrain_learning_rate need --uptrain.")
        if self.teacher is not None and self.twin:
            raise ValueError("--teacher and --twin are two softmax models: give one of them.")
        if self.kd_weight > 1:
            raise ValueError(f"--kd_weight is a share and must be at most 1, got {self.kd_weight}.")
        for name in ("distil_steps", "kd_weight"):
            if getattr(self, name) and self.teacher is None and not self.uptrain:
                raise ValueError(f"--{name} needs a teacher: give --teacher, or --twin and --uptrain.")
        if self.transfer_steps:
            if self.attention not in CHOSEN_KERNELS:
                raise ValueError(
                    f"--transfer_steps learns features: choose --attention {' or '.join(CHOSEN_KERNELS)}, got "
                    f"{self.attention}."
                )
            self.learnable = self.learnable or "projections"
            self.statistics = self.statistics or "calibrated"
        for name in ("redraw_every", "recalibrate_every"):
            if self.learnable and getattr(self, name):
                raise ValueError(f"--{name} would undo what --transfer_steps and --learnable learn: leave it out.")

    def as_twin(self, **changes: Any) -> Self:
        """Return the arguments of the softmax twin, which has no stages and does not go on."""
        at_home = {"push_to_hub": False, "hub_model_id": None, "hub_token": None}
        alone: dict[str, Any] = {**dict.fromkeys(STAGES, 0), "distil_learning_rate": None}
        if self.uptrain:
            alone |= {"uptrain": False, "evaluate_first": False, "uptrain_epochs": None, "uptrain_learning_rate": None}
        return replace(self, attention="softmax", twin=False, **at_home, **alone, **changes)

    def continuing(self, teacher: Path | str) -> Self:
        """Return the arguments of the training that starts from a finished softmax model."""
        return replace(
            self,
            model_name_or_path=str(teacher),
            num_train_epochs=self.uptrain_epochs or self.num_train_epochs,
            learning_rate=self.uptrain_learning_rate or self.learning_rate,
        )

    def as_recorded(self) -> dict[str, Any]:
        """Return the arguments for results.json and trackers, without the token."""
        return {key: value for key, value in asdict(self).items() if key != "hub_token"}

    def identity(self) -> dict[str, Any]:
        """Return the arguments that a run and its continuation must share."""
        return {key: value for key, value in self.as_recorded().items() if key not in self.FREE_ON_RESUME}

    def feature_arguments(self) -> dict[str, Any]:
        """Return those arguments about features that were given."""
        return {name: getattr(self, name) for name in FEATURE_ARGUMENTS if getattr(self, name) is not None}


assert set(FEATURE_ARGUMENTS) <= {argument.name for argument in fields(UptrainingArguments)}
