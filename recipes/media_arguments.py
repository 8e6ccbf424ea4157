"""The arguments that the training recipes for images and for speech share: sources of data and model, uptraining."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from command_line import flag
from uptraining_arguments import UptrainingArguments


@dataclass
class MediaArguments(UptrainingArguments):
    """Train a model on files, one that is given or a new one, and uptrain its softmax twin."""

    LEAST: ClassVar = {
        **UptrainingArguments.LEAST,
        **dict.fromkeys(("shuffle_buffer", "uptrain_epochs"), (1, "at least")),
        "num_workers": (0, "at least"),
        **dict.fromkeys(("train_val_split", "uptrain_learning_rate"), (0, "above")),
    }
    FREE_ON_RESUME: ClassVar = (*UptrainingArguments.FREE_ON_RESUME, "strict")
    NAMES: ClassVar[tuple[str, ...]] = ("dataset_name", "model_name_or_path", "model_type")
    """Arguments of which an empty one takes back what a YAML file says."""

    # data
    dataset_name: str | None = flag("Data set on the Hub, or folder that datasets.load_dataset takes.")
    dataset_config_name: str | None = flag("Configuration of the data set on the Hub.")
    train_val_split: float = flag("Share of the training rows to evaluate on where there is no other split.", 0.15)
    train_split_name: str = flag("Split of dataset_name to train on; several are joined by +.", "train")
    validation_split_name: str = flag("Split of dataset_name to evaluate on.", "validation")
    streaming: bool = flag("Read dataset_name while training instead of downloading it first.", False)
    shuffle_buffer: int = flag("Rows among which a stream is shuffled, per worker.", 1000)
    num_workers: int | None = flag("Processes that decode files, per process; None takes its cores, 16 at most.")
    strict: bool = flag("End with an error at the first file that cannot be read, instead of skipping it.", False)
    # model
    model_type: str | None = flag("Instead of model_name_or_path: a new model of this type.")
    config_overrides: str | None = flag(
        "Of the model: a=1,b=2 or, as a YAML file may write it too, {a: 1, b: [2, 3]}."
    )
    # attention
    uptrain: bool = flag("With twin: convert the trained twin and train it on, not both from one start.", False)
    uptrain_epochs: int | None = flag("Passes of that second training; None is num_train_epochs.")
    uptrain_learning_rate: float | None = flag("Of that second training; None is learning_rate.")
    evaluate_first: bool = flag("Evaluate before training too: what the conversion alone costs.", False)

    def __post_init__(self) -> None:
        """Refuse what would be ignored or cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        for name in self.NAMES:
            setattr(self, name, getattr(self, name) or None)
        super().__post_init__()
        if self.train_val_split >= 1:
            raise ValueError(f"--train_val_split is a share and must be below 1, got {self.train_val_split}.")
        if (self.model_name_or_path is None) == (self.model_type is None):
            raise ValueError("give either --model_name_or_path or --model_type.")
        if self.uptrain and not self.twin:
            raise ValueError("--uptrain continues the softmax twin: add --twin.")
        if not self.uptrain and (self.uptrain_epochs or self.uptrain_learning_rate):
            raise ValueError("--uptrain_epochs and --uptrain_learning_rate need --uptrain.")

    def as_twin(self, **changes: Any) -> Self:
        """Return the arguments of the softmax twin."""
        if self.uptrain:
            changes |= dict.fromkeys(("uptrain", "evaluate_first"), False)
            changes |= dict.fromkeys(("uptrain_epochs", "uptrain_learning_rate"))
        return super().as_twin(**changes)

    def continuing(self, twin_dir: Path) -> Self:
        """Return the arguments of the training that starts from the finished softmax twin in a folder."""
        return replace(
            self,
            model_name_or_path=str(twin_dir),
            model_type=None,
            config_overrides=None,
            num_train_epochs=self.uptrain_epochs or self.num_train_epochs,
            learning_rate=self.uptrain_learning_rate or self.learning_rate,
        )

    def identity(self) -> dict[str, Any]:
        """Return the arguments that a run and its continuation must share."""
        identity = super().identity()
        if not self.streaming:  # elsewhere a row's place and changes do not depend on who reads it
            identity.pop("num_workers")
        return identity
