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
        "shuffle_buffer": (1, "at least"),
        "num_workers": (0, "at least"),
        "train_val_split": (0, "above"),
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

    def __post_init__(self) -> None:
        """Refuse what would be ignored or cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        for name in self.NAMES:
            setattr(self, name, getattr(self, name) or None)
        if self.model_type is None:
            self.model_name_or_path = self.model_name_or_path or self.teacher
        super().__post_init__()
        if self.train_val_split >= 1:
            raise ValueError(f"--train_val_split is a share and must be below 1, got {self.train_val_split}.")
        if (self.model_name_or_path is None) == (self.model_type is None):
            raise ValueError("give either --model_name_or_path or --model_type.")

    def continuing(self, teacher: Path | str) -> Self:
        """Return the arguments of the training that starts from a finished softmax model."""
        own = replace(self, model_name_or_path=str(teacher), model_type=None, config_overrides=None)
        return super(MediaArguments, own).continuing(teacher)

    def identity(self) -> dict[str, Any]:
        """Return the arguments that a run and its continuation must share."""
        identity = super().identity()
        if not self.streaming:  # elsewhere a row's place and changes do not depend on who reads it
            identity.pop("num_workers")
        return identity
