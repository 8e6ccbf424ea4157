"""Documents in which a question and the sentence that tells its answer lie far apart, in a text about something else.

A document is ``[CLS] question, filler, sentence, filler [SEP]``, and the sentence begins in its middle: it shares no
block with the question, nor with the ends, as long as a block is of at most a third of the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from glue_data import TASKS, read_tsv
from transformers import PreTrainedTokenizerBase

PART = 8
"""A question and a sentence take a PART-th of a document's tokens at most."""
SHORTEST = 64
"""Tokens of a document at least."""
LEAST_PARAGRAPH = 200
"""Characters of a paragraph of the filler; shorter ones are headings."""

Pair = tuple[str, str]
Tokens = list[int]
Document = dict[str, Tokens]


def read_answers(path: Path) -> list[Pair]:
    """Return the questions of a QNLI file with the sentences that answer them."""
    columns = read_tsv(path, TASKS["qnli"])
    rows = zip(columns["question"], columns["sentence"], columns["label"], strict=True)
    return [(str(question), str(sentence)) for question, sentence, label in rows if label == 0]


def read_paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a plain text, which blank lines divide, without headings."""
    paragraphs = path.read_text(encoding="utf-8-sig").split("\n\n")
    return [paragraph for paragraph in paragraphs if len(paragraph) >= LEAST_PARAGRAPH]


class DocumentBuilder:
    """Builds documents of a fixed number of tokens.

    Attributes:
        first: Special tokens before a text.
        last: Those after it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        """Find the special tokens.

        Args:
            tokenizer: Of the model.
            length: Tokens of a document, with the special ones.
        """
        self.tokenizer, self.length = tokenizer, length
        (bare,) = self.tokens(["a"])
        marked = tokenizer("a")["input_ids"]
        begin = next(i for i in range(len(marked)) if marked[i : i + len(bare)] == bare)
        self.first, self.last = marked[:begin], marked[begin + len(bare) :]

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of questions or sentences, cut at their part of the document."""
        return self._encode(texts, self.length // PART)

    def filler(self, paragraphs: Sequence[str], wanted: int | None = None) -> Tokens:
        """Return the tokens of paragraphs, each cut at the length of a document.

        Args:
            paragraphs: In their order.
            wanted: Take as many paragraphs as give so many tokens, if there are; None takes all.

        Returns:
            The tokens of one paragraph after the other.
        """
        tokens: Tokens = []
        for begin in range(0, len(paragraphs), 64):
            if wanted is not None and len(tokens) >= wanted:
                break
            tokens += [token for ids in self._encode(paragraphs[begin : begin + 64], self.length) for token in ids]
        return tokens

    def build(
        self,
        questions: Sequence[Tokens],
        sentences: Sequence[Tokens],
        partners: Sequence[int],
        passages: Sequence[Tokens],
    ) -> tuple[list[Document], list[Document]]:
        """Build two documents for each question, which differ in the sentence alone.

        Args:
            questions: As :meth:`tokens` returned them.
            sentences: Likewise, those that answer the questions.
            partners: For each question the place of another one, whose sentence takes the place of its own.
            passages: The filler of each question's documents, ``length`` tokens, of which the first ones are used.

        Returns:
            The documents with the questions' own sentences and those with the others. The two sentences of a
            question are cut at the shorter one, so that all else is at the same place.
        """
        own, others = [], []
        for index, other in enumerate(partners):
            length = min(len(sentences[index]), len(sentences[other]))
            own.append(self._document(questions[index], sentences[index][:length], passages[index]))
            others.append(self._document(questions[index], sentences[other][:length], passages[index]))
        return own, others

    def question_mask(self, question: Tokens) -> list[int]:
        """Return 1 for the tokens of a document that are its question, 0 for the others."""
        begin, end = len(self.first), len(self.first) + len(question)
        return [int(begin <= place < end) for place in range(self.length)]

    def _document(self, question: Tokens, sentence: Tokens, filler: Tokens) -> Document:
        before = self.length // 2 - len(self.first) - len(question)
        after = self.length - self.length // 2 - len(sentence) - len(self.last)
        ids = [*self.first, *question, *filler[:before], *sentence, *filler[before : before + after], *self.last]
        return {"input_ids": ids, "attention_mask": [1] * self.length}

    def _encode(self, texts: Sequence[str], length: int) -> list[Tokens]:
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, truncation=True, max_length=length)
        return list(encoded["input_ids"])
