"""Documents with a class: what is read from JSON lines, and what is refused with file, line and rule."""

from __future__ import annotations

import json
import re

import pytest
from glue_arguments import GlueArguments
from glue_data import GlueDataError
from glue_splits import label_names, load_tokenized
from text_documents import load_documents
from tiny_glue import write_documents, write_json_lines
from transformers import AutoTokenizer

GOOD = {"text": "warm", "label": 1}
BAD = {"text": "cold", "label": 0}


def test_classes_are_those_of_the_training_file(tmp_path, tiny_bert):
    rows = [{"text": f"film {word}", "label": index % 3, "id": 7} for index, word in enumerate("abcdef")]
    train = write_json_lines(tmp_path / "train.jsonl", rows)
    train.write_text(train.read_text().replace("\n", "\n\n", 2))  # blank lines are left out
    validation = write_json_lines(tmp_path / "validation.jsonl", [GOOD, BAD])
    args = GlueArguments(task_name="documents", train_file=str(train), validation_file=str(validation))
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    data = load_tokenized(args, tokenizer)
    assert list(data) == ["train", "validation"]
    assert label_names(data["train"]) == label_names(data["validation"]) == ["0", "1", "2"]
    assert data["train"]["labels"] == [0, 1, 2, 0, 1, 2]
    texts = tokenizer.batch_decode(list(data["train"]["input_ids"]), skip_special_tokens=True)
    assert texts == [row["text"] for row in rows]
    assert data["validation"]["labels"] == [1, 0]


def test_long_documents_are_cut(tmp_path, tiny_bert):
    files = {name: str(path) for name, path in write_documents(tmp_path).items()}
    args = GlueArguments(task_name="documents", max_length=12, max_train_samples=5, max_eval_samples=3, **files)
    data = load_tokenized(args, AutoTokenizer.from_pretrained(tiny_bert))
    assert [len(ids) for ids in data["train"]["input_ids"]] == [12] * 5
    assert data["validation"].num_rows == 3


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        (None, [GOOD], r"train\.jsonl is no file"),
        ([GOOD, ["text"]], [GOOD], r"train\.jsonl, line 2 must be a JSON object"),
        ([GOOD, {"text": 5}], [GOOD], r"train\.jsonl, line 2 must be .* string \"text\""),
        ([GOOD, BAD, {"text": "x"}], [GOOD], r"train\.jsonl, line 3: the label must be an integer .* got None"),
        ([GOOD, BAD], [BAD, {**BAD, "label": -1}], r"validation\.jsonl, line 2: .* at least 0, got -1"),
        ([GOOD, {**BAD, "label": True}], [GOOD], r"line 2: the label must be .* got True"),
        ([GOOD, {**BAD, "label": "0"}], [GOOD], r"line 2: the label must be .* got '0'"),
        ([GOOD, BAD], [BAD, GOOD, {**BAD, "label": 2}], r"validation\.jsonl, line 3: .*train\.jsonl.* 0 to 1, got 2"),
        ([GOOD, {**BAD, "label": 3}], [GOOD], r"train\.jsonl: the labels must be 0 to K - 1 .* got \[1, 3\]"),
        ([BAD, BAD], [BAD], r"at least 2 classes, got \[0\]"),
        ([], [BAD], r"train\.jsonl holds no documents"),
        ([GOOD, BAD], [], r"validation\.jsonl holds no documents"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(train, validation, message, tmp_path):
    for name, rows in (("train", train), ("validation", validation)):
        if rows is not None:
            write_json_lines(tmp_path / f"{name}.jsonl", rows)
    with pytest.raises(GlueDataError, match=message):
        load_documents(tmp_path / "train.jsonl", tmp_path / "validation.jsonl")


def test_lines_that_are_no_json_or_no_utf_8_are_refused(tmp_path):
    for line in (b'{"text": ', b'{"text": "\xff", "label": 1}'):
        (tmp_path / "train.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line)
        with pytest.raises(GlueDataError, match=re.escape("train.jsonl, line 3 must be")):
            load_documents(tmp_path / "train.jsonl", None)
