"""Sentences far from their questions: nothing but the pairing tells the class, and the splits share nothing."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from distant_evidence import read_answers, read_paragraphs
from far_answers import load_far_answers, split_pairs, swaps
from glue_arguments import GlueArguments
from glue_data import GlueDataError
from glue_splits import label_names, load_tokenized
from tiny_glue import HEADERS, make_rows, write_book, write_tsv
from transformers import AutoTokenizer

LENGTH = 96
MIDDLE, MOST = LENGTH // 2, LENGTH // 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("far")
    write_tsv(folder / "QNLI" / "dev.tsv", HEADERS["QNLI"], make_rows("QNLI", 90, seed=3))
    write_book(folder / "book.txt", random.Random(0))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tiny_bert):
    return AutoTokenizer.from_pretrained(tiny_bert)


def load(folder, tokenizer, **more):
    files = {"data_dir": str(folder), "filler_file": str(folder / "book.txt")}
    return load_tokenized(GlueArguments(task_name="far_answers", max_length=LENGTH, **files, **more), tokenizer)


def cut(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False, truncation=True, max_length=MOST)["input_ids"]


def found(ids, candidates, begin):
    """Return the longest candidate at a place."""
    return max((tuple(c) for c in candidates if ids[begin : begin + len(c)] == c), key=len)


def test_each_question_has_its_own_sentence_and_another_ones(folder, tokenizer):
    data = load(folder, tokenizer)
    answers = read_answers(folder / "QNLI" / "dev.tsv")
    questions = cut(tokenizer, [question for question, _ in answers])
    own = {tuple(question): sentence for question, (_, sentence) in zip(questions, answers, strict=True)}
    for split in data.values():
        assert label_names(split) == ["no_answer", "answer"]
        assert list(split["labels"]) == [1, 0] * (split.num_rows // 2)
        assert {len(ids) for ids in split["input_ids"]} == {LENGTH}
        assert all(all(mask) for mask in split["attention_mask"])
        rows = list(split["input_ids"])
        for answered, unanswered in zip(rows[0::2], rows[1::2], strict=True):
            assert (answered[0], answered[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
            places = (torch.tensor(answered) != torch.tensor(unanswered)).nonzero().flatten().tolist()
            assert MIDDLE <= min(places) <= max(places) < MIDDLE + MOST
            question = found(answered, questions, 1)
            (sentence,) = cut(tokenizer, [own[question]])
            assert answered[MIDDLE : max(places) + 1] == sentence[: max(places) + 1 - MIDDLE]
            assert len(question) == len(found(unanswered, questions, 1))


def test_questions_and_sentences_are_as_often_in_one_class_as_in_the_other(folder, tokenizer):
    data = load(folder, tokenizer)
    for split in data.values():
        spans = [{0: [], 1: []}, {0: [], 1: []}]
        rows = list(split["input_ids"])
        for four in range(0, split.num_rows, 4):
            differ = torch.tensor(rows[four]) != torch.tensor(rows[four + 1])
            end = int(differ.nonzero().max()) + 1
            for place in range(4):
                spans[0][1 - place % 2].append(tuple(rows[four + place][1 : 1 + 4]))
                spans[1][1 - place % 2].append(tuple(rows[four + place][MIDDLE:end]))
        for by_class in spans:
            assert Counter(by_class[0]) == Counter(by_class[1])
            assert len(set(by_class[0])) > 2


def test_the_splits_share_neither_questions_nor_sentences_nor_filler(folder, tokenizer):
    answers = read_answers(folder / "QNLI" / "dev.tsv")
    shared = [*answers, (answers[0][0], "new"), ("new?", answers[4][1])]
    train, validation = split_pairs(shared)
    assert validation == shared[4::5]
    assert {part for pair in train for part in pair}.isdisjoint(part for pair in validation for part in pair)
    assert len(train) >= len(answers) - len(validation) - 4
    data = load(folder, tokenizer)
    paragraphs = read_paragraphs(folder / "book.txt")
    halves = {"validation": paragraphs[:40], "train": paragraphs[40:]}
    for split, own in halves.items():
        text = " ".join(own)
        tails = [tokenizer.decode(ids[-9:-1]) for ids in data[split]["input_ids"]]
        assert sum(tail in text for tail in tails) > 0.5 * len(tails)  # the others straddle two paragraphs
        questions = [pair[0] for pair in split_pairs(answers)[split == "validation"]]
        known = cut(tokenizer, questions)
        assert all(any(ids[1 : 1 + len(q)] == q for q in known) for ids in data[split]["input_ids"])


def test_the_first_rows_are_balanced_and_the_same_every_time(folder, tokenizer):
    few, all_rows = load(folder, tokenizer, max_train_samples=8, max_eval_samples=4), load(folder, tokenizer)
    assert (few["train"].num_rows, few["validation"].num_rows) == (8, 4)
    assert few["train"][:] == all_rows["train"][:8]


def test_only_sentences_that_do_not_answer_the_other_question_are_swapped():
    pairs = [("a", "x"), ("b", "x"), ("c", "y"), ("a", "y"), ("d", "z")]
    tokens = {"x": [1, 2], "y": [3, 4], "z": [1, 2, 5]}
    chosen = swaps(pairs, [tokens[sentence] for _, sentence in pairs])
    # The pairs of "x" cannot swap with each other, nor ("a", "x") with "y", nor any "x" with "z", which begins alike.
    assert chosen == [(1, 2), (3, 4)]


def test_too_little_is_refused(folder, tokenizer, tmp_path):
    with pytest.raises(GlueDataError, match=r"missing is no file\. --filler_file"):
        load_far_answers(folder, tmp_path / "missing", tokenizer, LENGTH)
    with pytest.raises(GlueDataError, match=r"QNLI.dev\.tsv does not exist"):
        load_far_answers(tmp_path, folder / "book.txt", tokenizer, LENGTH)
    (tmp_path / "short.txt").write_text("the film was quite warm and bright again. " * 6)
    with pytest.raises(GlueDataError, match=r"short\.txt has 54 tokens, a document 96"):
        load_far_answers(folder, tmp_path / "short.txt", tokenizer, LENGTH)
    rows = [["0", "who", "the actor", "entailment"], ["1", "what", "a song", "entailment"]]
    write_tsv(tmp_path / "QNLI" / "dev.tsv", HEADERS["QNLI"], rows)
    with pytest.raises(GlueDataError, match=r"dev\.tsv has 0 answered questions for validation, of which no two"):
        load_far_answers(tmp_path, folder / "book.txt", tokenizer, LENGTH)
