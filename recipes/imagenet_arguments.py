"""The arguments of imagenet.py; their names are those of Transformers' run_image_classification_no_trainer.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from command_line import flag
from media_arguments import MediaArguments

SHARES = ("min_crop_scale", "crop_ratio", "horizontal_flip", "label_smoothing", "drop_path")


@dataclass
class ImageNetArguments(MediaArguments):
    """Train a Vision Transformer to classify images, with softmax attention or converted to random features."""

    LEAST: ClassVar = {
        **MediaArguments.LEAST,
        "image_size": (1, "at least"),
        **dict.fromkeys(("mixup", "cutmix", "randaugment_std", *SHARES), (0, "at least")),
        **dict.fromkeys(("randaugment_magnitude", "layer_decay", "ema_decay"), (0, "above")),
    }
    FREE_ON_RESUME: ClassVar = (
        *MediaArguments.FREE_ON_RESUME,
        *("train_dir", "validation_dir", "measure_throughput"),
    )
    NAMES: ClassVar = (*MediaArguments.NAMES, "train_dir", "validation_dir")

    # data
    dataset_name: str | None = flag(
        "Data set on the Hub, folder that datasets.load_dataset takes, or `digits`: scikit-learn's, without a network."
    )
    train_dir: str | None = flag("Folder with one folder of images per class.")
    validation_dir: str | None = flag("The same for evaluation; its classes must be among those of train_dir.")
    image_column_name: str = flag("Column of the images.", "image")
    label_column_name: str = flag("Column of the classes.", "label")
    measure_throughput: bool = flag("First measure the images/s of the loader alone and of the model alone.", True)
    # model
    model_name_or_path: str | None = flag("Hub id or folder of a Vision Transformer, with or without a class head.")
    image_size: int | None = flag("Pixels of a side; None is the model's. Position embeddings are interpolated.")
    linear_probe: bool = flag("Train the class head only, on the features of the frozen model.", False)
    # attention
    exact_window: list[int] | None = field(
        default=None, metadata={"help": "Tokens per block that attend to each other exactly, or a tile's two sides."}
    )
    # augmentation
    min_crop_scale: float = flag("Least share of an image's area that a training crop covers.", 0.08)
    horizontal_flip: float = flag("Probability that a training image is mirrored.", 0.5)
    randaugment_magnitude: float | None = flag("RandAugment: strength of two operations, up to 10; None is without.")
    randaugment_std: float = flag("Standard deviation of that strength.", 0.0)
    mixup: float = flag("Alpha of mixup; 0 is without.", 0.0)
    cutmix: float = flag("Alpha of CutMix; 0 is without.", 0.0)
    label_smoothing: float = flag("Of the training loss.", 0.0)
    drop_path: float = flag("Probability that a residual branch is skipped: the last layer's, or that of all.", 0.0)
    crop_ratio: float = flag("Side of the centre crop in shortest sides of an evaluated image.", 0.875)
    # optimisation
    layer_decay: float | None = flag("Factor between the learning rates of neighbouring layers; None is one rate.")
    ema_decay: float | None = flag("Also average the weights exponentially, and save the average; None does not.")
    output_dir: str = flag("Receives the model, results.json and checkpoints.", "outputs/imagenet")

    def __post_init__(self) -> None:
        """Refuse what would be ignored or cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        super().__post_init__()
        for name in SHARES:
            if getattr(self, name) > 1 or (getattr(self, name) == 1 and name == "drop_path"):
                raise ValueError(f"--{name} is a share and must be at most 1, got {getattr(self, name)}.")
        for name in ("min_crop_scale", "crop_ratio"):
            if getattr(self, name) == 0:
                raise ValueError(f"--{name} must be above 0, got 0.")
        if (self.randaugment_magnitude or 0) > 10:
            raise ValueError(f"--randaugment_magnitude must be at most 10, got {self.randaugment_magnitude}.")
        if self.randaugment_std and self.randaugment_magnitude is None:
            raise ValueError("--randaugment_std needs --randaugment_magnitude.")
        for name in ("layer_decay", "ema_decay"):
            if (getattr(self, name) or 0) > 1:
                raise ValueError(f"--{name} must be at most 1, got {getattr(self, name)}.")
        self._check_sources()
        if self.linear_probe and (self.layer_decay or self.drop_path):
            raise ValueError("--linear_probe trains the head only: leave out --layer_decay and --drop_path.")
        if self.exact_window is not None and len(self.exact_window) > 2:
            raise ValueError(f"--exact_window takes one number or a tile's two sides, got {self.exact_window}.")

    def _check_sources(self) -> None:
        """Refuse two sources of images or of the model, and options of a source that is not used."""
        if (self.dataset_name is None) == (self.train_dir is None):
            raise ValueError("give either --dataset_name or --train_dir.")
        if self.validation_dir is not None and self.train_dir is None:
            raise ValueError("--validation_dir needs --train_dir.")
        if self.streaming and self.dataset_name in (None, "digits"):
            raise ValueError("--streaming needs a --dataset_name on the Hub.")
        if self.config_overrides and self.model_type is None:
            raise ValueError("--config_overrides describes a new model: it needs --model_type.")

    def feature_arguments(self) -> dict[str, Any]:
        """Return those arguments about features that were given."""
        arguments = super().feature_arguments()
        if len(window := arguments.get("exact_window", ())) == 1:
            arguments["exact_window"] = window[0]
        return arguments

    def task(self) -> str:
        """Return what the data are called in reports."""
        if self.dataset_name is not None:
            return self.dataset_name
        *_, parent, name = ("", "", *str(self.train_dir).replace("\\", "/").rstrip("/").split("/"))
        return parent if name == "train" and parent else name
