"""Evidence far away: a question, and hundreds of tokens later the sentence that belongs to it, or another one.

``[CLS] question, filler, sentence, filler [SEP]`` is built twice, with sentences of equally many tokens, so that all
else is at the same place. What differs in the hidden states of the question came from the sentence. A window that the
two do not share, and whose ends hold neither, cannot carry it, through any number of layers.
"""

from __future__ import annotations

from distant_evidence import Document, DocumentBuilder, Pair, read_answers, read_paragraphs
from fidelity_arguments import FidelityArguments
from fidelity_inputs import POOL, FidelityError, Inputs, existing, split, stack
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedModel


def far_documents(args: FidelityArguments, source: str, model: PreTrainedModel) -> Inputs:
    """Build documents from questions and sentences in the layout of QNLI's dev.tsv.

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
    builder = DocumentBuilder(tokenizer, int(args.max_length or 0))
    own, others = _documents(builder, evaluation, paragraphs[:half])
    calibrating, _ = _documents(builder, calibration, paragraphs[half:])
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


def _documents(
    builder: DocumentBuilder, pairs: list[Pair], paragraphs: list[str]
) -> tuple[list[Document], list[Document]]:
    """Return the documents with their own sentences, and the same with those of other questions."""
    questions = builder.tokens([question for question, _ in pairs])
    sentences = builder.tokens([sentence for _, sentence in pairs])
    length, wanted = builder.length, len(pairs) * builder.length
    filler = builder.filler(paragraphs, wanted)
    if len(filler) < wanted:
        raise FidelityError(
            f"half of --filler_file has {len(filler)} tokens, {len(pairs)} documents of {length} need "
            f"{wanted}. Lower --max_samples or --calibration_samples, or give a longer text."
        )
    passages = [filler[begin : begin + length] for begin in range(0, wanted, length)]
    own, others = builder.build(questions, sentences, _partners(sentences), passages)
    for rows in (own, others):
        for row, question in zip(rows, questions, strict=True):
            row[POOL] = builder.question_mask(question)
    return own, others


def _partners(sentences: list[list[int]]) -> list[int]:
    """Return for each sentence the place of another one, of similar length."""
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
    partners = [0] * len(sentences)
    for place, index in enumerate(order):
        near = sorted(range(len(order)), key=lambda other: abs(other - place))
        partners[index] = next((order[o] for o in near if sentences[order[o]] != sentences[index]), index)
    return partners
