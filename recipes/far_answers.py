"""Whether a sentence hundreds of tokens after a question answers it: a task whose evidence lies outside any window.

The questions are those of QNLI's dev.tsv that have an answer. Each is in two documents, with its own sentence and with
that of another question, which in turn gets this one's: every question and every sentence, cut at the same token, is
in as many documents of one class as of the other, with the same filler. Nothing but the pairing tells the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from distant_evidence import DocumentBuilder, Pair, Tokens, read_answers, read_paragraphs
from glue_data import TASKS, TSV_FILES, GlueDataError
from transformers import PreTrainedTokenizerBase

CLASSES = ("no_answer", "answer")
EVERY = 5
"""One question in so many is for validation."""


def load_far_answers(
    data_dir: Path, filler_file: Path, tokenizer: PreTrainedTokenizerBase, length: int
) -> DatasetDict:
    """Build the documents.

    Args:
        data_dir: Folder with QNLI/dev.tsv.
        filler_file: A long plain text, of which the documents consist otherwise: its first half for validation, its
            second half for training. Where it is too short, passages overlap.
        tokenizer: Of the model.
        length: Exact tokens of a document.

    Returns:
        The splits "train" and "validation", which share neither questions nor sentences nor filler, tokenised, with
        "labels".

    Raises:
        GlueDataError: There are too few questions, or too little filler.
    """
    if not filler_file.is_file():
        raise GlueDataError(f"{filler_file} is no file. --filler_file must be a long plain text.")
    path = data_dir / TASKS["qnli"].folder / TSV_FILES["validation"]
    train, validation = split_pairs(read_answers(path))
    paragraphs = read_paragraphs(filler_file)
    half = len(paragraphs) // 2
    builder = DocumentBuilder(tokenizer, length)
    splits = {}
    for split, pairs, own in (("train", train, paragraphs[half:]), ("validation", validation, paragraphs[:half])):
        filler = builder.filler(own)
        if len(filler) < length:
            raise GlueDataError(
                f"half of {filler_file} has {len(filler)} tokens, a document {length}: give a longer text, in "
                "paragraphs that blank lines divide."
            )
        splits[split] = _documents(builder, pairs, filler)
        if not splits[split].num_rows:
            raise GlueDataError(
                f"{path} has {len(pairs)} answered questions for {split}, of which no two can change sentences. "
                "It must be the QNLI file as GLUE distributes it."
            )
    return DatasetDict(splits)


def split_pairs(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Divide questions and their sentences into those to train and those to evaluate on, which share nothing.

    Args:
        pairs: In their order. Every :data:`EVERY`-th one is for validation.

    Returns:
        The pairs to train on, without those of which a part is in the others, and the others.
    """
    validation = list(pairs[EVERY - 1 :: EVERY])
    seen = {part for pair in validation for part in pair}
    return [pair for pair in pairs if seen.isdisjoint(pair)], validation


def swaps(pairs: Sequence[Pair], sentences: Sequence[Tokens]) -> list[tuple[int, int]]:
    """Choose questions that change sentences with each other, of similar length.

    Args:
        pairs: Questions and the sentences that answer them.
        sentences: Tokens of these.

    Returns:
        Places of two questions each, no place twice. Neither sentence answers the other question, and they differ
        where both are cut at the shorter one. What finds no partner is left out.
    """
    answers = set(pairs)

    def fit(one: int, other: int) -> bool:
        crossed = {(pairs[one][0], pairs[other][1]), (pairs[other][0], pairs[one][1])}
        shorter = min(len(sentences[one]), len(sentences[other]))
        return answers.isdisjoint(crossed) and sentences[one][:shorter] != sentences[other][:shorter]

    left = sorted(range(len(pairs)), key=lambda index: len(sentences[index]))
    chosen = []
    while left:
        one = left.pop(0)
        other = next((index for index in left if fit(one, index)), None)
        if other is not None:
            left.remove(other)
            chosen.append((min(one, other), max(one, other)))
    return sorted(chosen)


def _documents(builder: DocumentBuilder, pairs: Sequence[Pair], filler: Tokens) -> Dataset:
    """Build four documents of every two questions, one after the other."""
    questions = builder.tokens([question for question, _ in pairs])
    sentences = builder.tokens([sentence for _, sentence in pairs])
    chosen = [place for swap in swaps(pairs, sentences) for place in swap]
    begins = [index * builder.length % (len(filler) - builder.length + 1) for index in range(len(chosen))]
    own, others = builder.build(
        [questions[place] for place in chosen],
        [sentences[place] for place in chosen],
        [index ^ 1 for index in range(len(chosen))],
        [filler[begin : begin + builder.length] for begin in begins],
    )
    rows = [row for both in zip(own, others, strict=True) for row in both]
    columns = {name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")}
    kinds = Features({
        "input_ids": [Value("int32")],
        "attention_mask": [Value("int8")],
        "labels": ClassLabel(names=list(CLASSES)),
    })
    return Dataset.from_dict({**columns, "labels": [1, 0] * len(chosen)}, features=kinds)
