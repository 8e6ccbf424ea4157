"""Training rows that are held out to evaluate on."""

from __future__ import annotations

import shutil

import glue_data
import pytest
from datasets import Dataset
from glue_arguments import GlueArguments
from glue_data import GlueDataError, load_task
from glue_splits import UNLABELLED, hold_out, label_names, load_tokenized
from tiny_glue import write_documents
from transformers import AutoTokenizer


def test_every_nth_row_is_held_out_from_the_last_of_the_first_n_on():
    rows = Dataset.from_dict({"label": list(range(11))})
    data = hold_out(rows, 4)
    assert list(data["validation"]["label"]) == [3, 7]
    assert list(data["train"]["label"]) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert list(hold_out(rows, 11)["validation"]["label"]) == [10]
    with pytest.raises(GlueDataError, match=r"--validation_every 12 holds out no row of the 11"):
        hold_out(rows, 12)


@pytest.mark.parametrize("task", ["stsb", "mnli", "cola"])
def test_the_files_of_the_task_to_evaluate_on_need_not_exist(task, glue_dir, tiny_bert, tmp_path):
    folder = glue_data.TASKS[task].folder
    (tmp_path / folder).mkdir()
    shutil.copy(glue_dir / folder / "train.tsv", tmp_path / folder)
    args = GlueArguments(task_name=task, data_dir=str(tmp_path), validation_every=5, max_train_samples=30)
    data = load_tokenized(args, AutoTokenizer.from_pretrained(tiny_bert))
    assert {split: rows.num_rows for split, rows in data.items()} == {"train": 30, "validation": 8}
    assert label_names(data["train"]) == (list(glue_data.TASKS[task].label_names or ()) or None)
    with pytest.raises(GlueDataError, match=r"dev.*\.tsv does not exist"):
        load_task(task, str(tmp_path))


def test_rows_of_documents_reviews_and_the_hub_are_held_out_too(
    glue_dir, tiny_bert, review_archive, tmp_path, monkeypatch
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    documents = str(write_documents(tmp_path, train=24)["train_file"])
    args = GlueArguments(task_name="documents", train_file=documents, validation_every=6)
    data = load_tokenized(args, tokenizer)
    assert (data["train"].num_rows, data["validation"].num_rows) == (20, 4)
    data = load_tokenized(GlueArguments(validation_every=6), tokenizer)
    whole = load_task("movie_reviews")["train"].num_rows
    assert (data["train"].num_rows, data["validation"].num_rows) == (whole - whole // 6, whole // 6)
    on_the_hub = load_task("rte", str(glue_dir))
    del on_the_hub["validation"]
    monkeypatch.setattr(glue_data, "load_dataset", lambda repository, configuration: on_the_hub)
    data = load_tokenized(GlueArguments(task_name="rte", validation_every=4), tokenizer)
    assert (data["train"].num_rows, data["validation"].num_rows) == (33, 11)


def test_altered_copies_are_a_split_of_their_own_beside_the_rows_and_without_labels(glue_dir, tiny_bert):
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    args = GlueArguments(
        task_name="rte", data_dir=str(glue_dir), transfer_steps=1, altered_copies=3, max_train_samples=20
    )
    data = load_tokenized(args, tokenizer)
    plain = load_tokenized(GlueArguments(task_name="rte", data_dir=str(glue_dir), max_train_samples=20), tokenizer)
    assert {*data} == {*plain, UNLABELLED}
    for split in plain:
        assert data[split][:] == plain[split][:]
    assert data[UNLABELLED].num_rows == 80
    assert {*data[UNLABELLED].column_names} == {*plain["train"].column_names} - {"labels"}
    assert data[UNLABELLED][:20]["input_ids"] == plain["train"][:]["input_ids"] != data[UNLABELLED][20:40]["input_ids"]
