"""Evidence far away: a question, and hundreds of tokens later the sentence that belongs to it, or another one.

``[CLS] question, filler, sentence, filler [SEP]`` is built twice, with sentences of equally many tokens, so that all
else is at the same place. What differs in the hidden states of the question came from the sentence. A window that the
two do not share, and whose ends hold neither, cannot carry it, through any number of layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fidelity_arguments import FidelityArguments
from fidelity_inputs import POOL, FidelityError, Inputs, existing, split, stack
from glue_data import TASKS, read_tsv
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PART = 8
"""A question and a sentence take a max_length / 8 of the tokens at most."""
LEAST_PARAGRAPH = 200
"""Characters of a paragraph of the filler; shorter ones are headings."""

Pair = tuple[str, str]


def far_documents(args: FidelityArguments, source: str, model: PreTrainedModel) -> Inputs:
    """Build documents from questions and sentences in the layout of QNLI's dev.tsv.

    The sentence begins in the middle of the document. So it shares no block with the question, nor with the ends, as
    long as a block is of at most a third of the document.

    Args:
        args: Files, lengths, sizes. The first half of the filler is for evaluation, the second for calibration.
        source: Of the tokenizer.
        model: Not used.

    Returns:
        Batches: first all documents with their own sentence, then all with another, in batches of the same shapes,
        so that what rounding does to both is the same.

    Raises:
        FidelityError: There are fewer than 2 questions to evaluate.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    other = (
        None if args.calibration_file is None else read_answers(existing(args.calibration_file, "calibration_file"))
    )
    rows = read_answers(existing(str(args.data_file), "data_file"))
    evaluation, calibration = split(rows, other, args.max_samples, args.calibration_samples, contents=lambda row: row)
    if len({sentence for _, sentence in evaluation}) < 2:
        raise FidelityError("a sentence of another question is needed: give --max_samples at least 2.")
    paragraphs = read_paragraphs(existing(str(args.filler_file), "filler_file"))
    half = len(paragraphs) // 2
    builder = _Builder(tokenizer, int(args.max_length or 0))
    own, others = builder.build(evaluation, paragraphs[:half])
    calibrating, _ = builder.build(calibration, paragraphs[half:])
    size, count = int(args.batch_size or 1), len(own)
    batches = [
        list(range(begin, min(begin + size, end)))
        for start, end in ((0, count), (count, 2 * count))
        for begin in range(start, end, size)
    ]
    calibrating = [{name: value for name, value in row.items() if name != POOL} for row in calibrating]
    return Inputs(
        DataLoader([*own, *others], batch_sampler=batches, collate_fn=stack),  # type: ignore[arg-type]
        DataLoader(calibrating, size, collate_fn=stack),  # type: ignore[arg-type]
    )


def read_answers(path: Path) -> list[Pair]:
    """Return the questions of a QNLI file with the sentences that answer them."""
    columns = read_tsv(path, TASKS["qnli"])
    rows = zip(columns["question"], columns["sentence"], columns["label"], strict=True)
    return [(str(question), str(sentence)) for question, sentence, label in rows if label == 0]


def read_paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a plain text, which blank lines divide, without headings."""
    paragraphs = path.read_text(encoding="utf-8-sig").split("\n\n")
    return [paragraph for paragraph in paragraphs if len(paragraph) >= LEAST_PARAGRAPH]


class _Builder:
    """Builds documents of ``length`` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.tokenizer, self.length = tokenizer, length
        (bare,) = self._tokens(["a"])
        marked = tokenizer("a")["input_ids"]
        begin = next(i for i in range(len(marked)) if marked[i : i + len(bare)] == bare)
        self.first, self.last = marked[:begin], marked[begin + len(bare) :]

    def build(self, pairs: list[Pair], paragraphs: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the documents with their own sentences, and the same with those of other questions."""
        questions = self._tokens([question for question, _ in pairs])
        sentences = self._tokens([sentence for _, sentence in pairs])
        filler = self._filler(paragraphs, len(pairs))
        own, others = [], []
        for index, other in enumerate(_partners(sentences)):
            length = min(len(sentences[index]), len(sentences[other]))
            begin = index * self.length
            passage = filler[begin : begin + self.length]
            own.append(self._document(questions[index], sentences[index][:length], passage))
            others.append(self._document(questions[index], sentences[other][:length], passage))
        return own, others

    def _document(self, question: list[int], sentence: list[int], filler: list[int]) -> dict[str, Any]:
        before = self.length // 2 - len(self.first) - len(question)
        after = self.length - self.length // 2 - len(sentence) - len(self.last)
        ids = [*self.first, *question, *filler[:before], *sentence, *filler[before : before + after], *self.last]
        begin, end = len(self.first), len(self.first) + len(question)
        pool = [int(begin <= place < end) for place in range(self.length)]
        return {"input_ids": ids, "attention_mask": [1] * self.length, POOL: pool}

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of short texts, cut at their part of the length."""
        return self.tokenizer(texts, add_special_tokens=False, truncation=True, max_length=self.length // PART)[
            "input_ids"
        ]

    def _filler(self, paragraphs: list[str], documents: int) -> list[int]:
        """Return the tokens of as many paragraphs as the documents need, each cut at the length of a document."""
        wanted, tokens, begin = documents * self.length, [], 0
        while len(tokens) < wanted:
            some = paragraphs[begin : begin + 64]
            if not some:
                raise FidelityError(
                    f"half of --filler_file has {len(tokens)} tokens, {documents} documents of {self.length} need "
                    f"{wanted}. Lower --max_samples or --calibration_samples, or give a longer text."
                )
            encoded = self.tokenizer(some, add_special_tokens=False, truncation=True, max_length=self.length)
            tokens += [token for ids in encoded["input_ids"] for token in ids]
            begin += 64
        return tokens


def _partners(sentences: list[list[int]]) -> list[int]:
    """Return for each sentence the place of another one, of similar length."""
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
    partners = [0] * len(sentences)
    for place, index in enumerate(order):
        near = sorted(range(len(order)), key=lambda other: abs(other - place))
        partners[index] = next((order[o] for o in near if sentences[order[o]] != sentences[index]), index)
    return partners
