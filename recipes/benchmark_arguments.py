"""The arguments of benchmark.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from command_line import flag

from hf_favorpp import FavorppConfig
from hf_favorpp.benchmarking.lineup import Shape
from hf_favorpp.benchmarking.models import MODELS
from hf_favorpp.benchmarking.rows import PASSES

DataType = Literal["float32", "bfloat16", "float16"]
Statistics = Literal["sequence", "calibrated"]

ATTENTION = "attention"
DEVICE_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"batch_size": 1, "num_heads": 12, "dtype": "float32", "num_threads": 2, "longest": 16384},
    "cuda": {"batch_size": 8, "num_heads": 16, "dtype": "bfloat16", "num_threads": None, "longest": 65536},
}
HEAD_DIM = 64
SHORTEST, MODEL_LENGTHS = 128, [512, 1024, 2048, 4096]
IMAGE_SIZES = [224, 384, 518, 768, 1036, 1540]
LEAST = {
    **dict.fromkeys(("lengths", "image_sizes", "batch_size", "num_heads", "head_dim", "num_threads"), 1),
    **dict.fromkeys(("num_features",), 1),
    **dict.fromkeys(("exact_window", "exact_ends", "seconds_per_length", "seed"), 0),
}
SHOWN_ONLY = ("config", "output_json", "figure", "report_only", "markdown")


@dataclass
class BenchmarkArguments:
    """Time FAVOR++ beside softmax, attention alone or in a whole model."""

    config: str | None = flag("YAML file of arguments; the command line wins over it.")
    # what is timed
    model: str = flag(
        "attention: attention alone; else a whole model with random weights.", ATTENTION, choices=[ATTENTION, *MODELS]
    )
    device: str | None = flag("None: cuda if there is a GPU, else cpu.", choices=["cpu", "cuda"])
    lengths: list[int] | None = field(
        default=None,
        metadata={
            "help": "None: powers of 2 from 128, to 16384 on the CPU, to 65536 on a GPU; of models 512 to 4096."
        },
    )
    image_sizes: list[int] | None = field(
        default=None, metadata={"help": "For image models, instead of lengths: pixels along the side."}
    )
    passes: list[str] = field(
        default_factory=lambda: list(PASSES),
        metadata={"help": "train is forward and backward.", "choices": list(PASSES)},
    )
    batch_size: int | None = flag("None: 1 on the CPU, 8 on a GPU.")
    num_heads: int | None = flag("For attention alone. None: 12 on the CPU, 16 on a GPU.")
    head_dim: int | None = flag("For attention alone. None: 64.")
    dtype: DataType | None = field(default=None, metadata={"help": "None: float32 on the CPU, bfloat16 on a GPU."})
    # how FAVOR++ attends; every combination of the lists is one row
    backends: list[str] = field(
        default_factory=lambda: ["auto"], metadata={"help": "As FavorppConfig has them; a row says which one ran."}
    )
    num_features: list[int] = field(default_factory=lambda: [128], metadata={"help": "Random features per head, M."})
    kernel: str = flag("Feature map.", "favor++")
    preconditioning: list[str] | None = field(default=None, metadata={"help": "None: what FavorppConfig chooses."})
    statistics: Statistics = field(
        default="sequence",
        metadata={"help": "sequence: computed in every call, and timed. calibrated: computed before."},
    )
    exact_window: list[int] = field(
        default_factory=lambda: [0],
        metadata={"help": "Tokens a block, or for image models rows and columns of a tile."},
    )
    exact_ends: list[int] = field(
        default_factory=lambda: [0, 0], metadata={"help": "First and last tokens that every query sees exactly."}
    )
    peers: bool = flag("Attention alone: time installed packages of linear attention too.", False)
    # how it is timed
    seconds_per_length: float = flag("Repeat for so long at each length, but at least twice.", 20.0)
    max_seconds: float = flag("Leave out calls that are expected to take longer.", 60.0)
    max_memory_mib: float | None = flag("CPU: stop a call that takes more. None: what the machine has left.")
    num_threads: int | None = flag("CPU threads. None: 2 on the CPU, those of the environment on a GPU.")
    seed: int = flag("Of inputs, weights and projections.", 0)
    # output
    output_json: str | None = flag("File of results. None: outputs/benchmark/MODEL_DEVICE.json")
    figure: str | None = flag("PNG or SVG to draw.")
    report_only: bool = flag("Print and draw what output_json holds, without measuring.", False)
    markdown: bool = flag("Print Markdown tables.", False)

    def __post_init__(self) -> None:
        """Fill in what depends on device and model, and refuse what would be ignored or cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and any(each < least for each in (value if isinstance(value, list) else [value])):
                raise ValueError(f"--{name} must be at least {least}, got {value}.")
        for name in ("max_seconds", "max_memory_mib"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"--{name} must be positive, got {value}.")
        self._fill_in_device()
        self._fill_in_model()
        if len(self.exact_ends) != 2:
            raise ValueError(f"--exact_ends must be two numbers, of first and of last tokens, got {self.exact_ends}.")
        if len(self.exact_window) > (2 if self.images else 1):
            raise ValueError(
                f"--exact_window must be a number of tokens, or for image models rows and columns, got "
                f"{self.exact_window}."
            )
        self.configurations()  # an option that the library refuses, or does not have yet
        if self.output_json is None:
            self.output_json = str(Path("outputs", "benchmark", f"{self.model}_{self.device}.json"))

    def _fill_in_device(self) -> None:
        if self.device is None:
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not self.report_only and not torch.cuda.is_available():
            raise ValueError("--device cuda needs a GPU that PyTorch can use, and there is none; use --device cpu.")
        if self.device == "cuda" and self.max_memory_mib is not None:
            raise ValueError("--max_memory_mib is for the CPU; a GPU has a limit of its own.")
        for name in ("batch_size", "dtype", "num_threads"):
            if getattr(self, name) is None:
                setattr(self, name, DEVICE_DEFAULTS[self.device][name])

    def _fill_in_model(self) -> None:
        if self.model == ATTENTION:
            self.num_heads = self.num_heads or DEVICE_DEFAULTS[str(self.device)]["num_heads"]
            self.head_dim = self.head_dim or HEAD_DIM
        else:
            for name in ("num_heads", "head_dim"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name} is for --model {ATTENTION}; {self.model} has its own.")
            if self.peers:
                raise ValueError(f"--peers is for --model {ATTENTION}.")
        unused, used = ("lengths", "image_sizes") if self.images else ("image_sizes", "lengths")
        if getattr(self, unused) is not None:
            raise ValueError(f"--{unused} has no meaning for --model {self.model}; use --{used}.")
        if getattr(self, used) is None:
            setattr(self, used, self._default_sizes())
        setattr(self, used, sorted(set(getattr(self, used))))

    def _default_sizes(self) -> list[int]:
        if self.images:
            return list(IMAGE_SIZES)
        if self.model != ATTENTION:
            return list(MODEL_LENGTHS)
        longest = DEVICE_DEFAULTS[str(self.device)]["longest"]
        return [SHORTEST * 2**power for power in range((longest // SHORTEST).bit_length())]

    @property
    def images(self) -> bool:
        """Whether sizes are those of images."""
        return self.model != ATTENTION and MODELS[self.model].images

    def sizes(self) -> list[int]:
        """Return lengths, or sides of images, ascending."""
        return list((self.image_sizes if self.images else self.lengths) or [])

    def shape(self) -> Shape:
        """Return what all inputs share; heads are 0 for a model, which has its own."""
        assert self.batch_size is not None
        return Shape(
            batch_size=self.batch_size,
            num_heads=self.num_heads or 0,
            head_dim=self.head_dim or 0,
            dtype=getattr(torch, str(self.dtype)),
            device=torch.device(str(self.device)),
        )

    def configurations(self) -> list[FavorppConfig]:
        """Return the library's options, one for every backend, number of features and preconditioning."""
        window = self.exact_window[0] if len(self.exact_window) == 1 else tuple(self.exact_window)
        combinations = product(self.backends, self.num_features, self.preconditioning or [None])
        configs = [
            FavorppConfig(
                num_features=num_features,
                kernel=self.kernel,
                preconditioning=preconditioning,
                statistics=self.statistics,
                exact_window=window,
                exact_ends=(self.exact_ends[0], self.exact_ends[1]),
                backend=backend,
                seed=self.seed,
            )
            for backend, num_features, preconditioning in combinations
        ]
        return list(dict.fromkeys(configs))

    def settings(self) -> dict[str, Any]:
        """Return the arguments that what is measured depends on."""
        return {key: value for key, value in asdict(self).items() if key not in SHOWN_ONLY}
