"""Made-up sentences in the layouts of the real data: GLUE's TSV files and the package with the film reviews."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Sequence
from pathlib import Path

import movie_reviews

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"

GOOD = ["warm", "bright", "brave", "clever", "tender", "funny"]
BAD = ["dull", "cold", "noisy", "clumsy", "bitter", "flat"]
PLAIN = ["the", "a", "film", "actor", "story", "song", "scene", "was", "and", "very", "quite", "by", "in", "again"]
WORDS = GOOD + BAD + PLAIN
CHARACTERS = list("abcdefghijklmnopqrstuvwxyz") + ["##" + letter for letter in "abcdefghijklmnopqrstuvwxyz"]


def make_sentence(source: random.Random, good: bool) -> str:
    """Return a few words; the adjectives tell the label."""
    words = [source.choice(PLAIN) for _ in range(source.randint(2, 9))]
    for _ in range(2):
        words.insert(source.randint(0, len(words)), source.choice(GOOD if good else BAD))
    return " ".join(words)


def make_rows(task: str, count: int, seed: int) -> list[list[str]]:
    """Return the data rows of a task's TSV file, in GLUE's own columns."""
    source = random.Random(f"{task} {seed}")
    rows = []
    for index in range(count):
        good = source.random() < 0.5
        one, two = make_sentence(source, good), make_sentence(source, source.random() < 0.5)
        number, label = str(index), str(int(good))
        word = "entailment" if good else "not_entailment"
        rows.append(
            {
                "CoLA": ["me24", label, "" if good else "*", one],
                "SST-2": [one + " ", label],
                "MRPC": [label, number, number, f'" {one}', two],
                "STS-B": [*[number] * 7, one, two, f"{5 * source.random():.3f}"],
                "QQP": [number, number, number, one, two, label],
                "MNLI": [number, one, two, source.choice(["entailment", "neutral", "contradiction"])],
                "QNLI": [number, one, two, word],
                "RTE": [number, one, two, word],
                "WNLI": [number, one, two, label],
            }[task]
        )
    return rows


COLUMNS_STSB = ("index", "genre", "filename", "year", "old_index", "source1", "source2")
HEADERS = {
    "CoLA": None,
    "SST-2": ["sentence", "label"],
    "MRPC": ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    "STS-B": [*COLUMNS_STSB, "sentence1", "sentence2", "score"],
    "QQP": ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
    "MNLI": ["index", "sentence1", "sentence2", "gold_label"],
    "QNLI": ["index", "question", "sentence", "label"],
    "RTE": ["index", "sentence1", "sentence2", "label"],
    "WNLI": ["index", "sentence1", "sentence2", "label"],
}


def write_documents(folder: Path, train: int = 24, validation: int = 10) -> dict[str, Path]:
    """Write two files of documents in two classes, and return the arguments that name them."""
    source = random.Random(0)
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    for path, count in zip(files.values(), (train, validation), strict=True):
        texts = [" ".join(make_sentence(source, label > 0) for _ in range(4)) for label in [0, 1] * (count // 2)]
        rows = [{"text": text, "label": index % 2} for index, text in enumerate(texts)]
        write_json_lines(path, rows)
    return files


def write_book(path: Path, source: random.Random) -> Path:
    """Write a heading and 80 paragraphs."""
    paragraphs = [" ".join(make_sentence(source, False) for _ in range(16)) for _ in range(80)]
    path.write_text("\n\n".join(["chapter 1", *paragraphs]))
    return path


def write_json_lines(path: Path, rows: Sequence[object]) -> Path:
    """Write a JSON value a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_tsv(path: Path, header: list[str] | None, rows: list[list[str]], mark: str = "") -> None:
    """Write a TSV file as GLUE does: no quoting, UTF-8, ``mark`` first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(row) for row in ([header] if header else []) + rows]
    path.write_text(mark + "\n".join(lines) + "\n", encoding="utf-8", newline="")


def review_lines(count: int) -> list[str]:
    """Return lines of a ratings file: identifier, mean rating, sentence; the good ones first, as in the real one."""
    source = random.Random(0)
    ratings = sorted((source.uniform(-4, 4) for _ in range(count)), reverse=True)
    return [f"{number}\t{rating:.8f}\t{make_sentence(source, rating > 0)}" for number, rating in enumerate(ratings, 1)]


def write_review_archive(
    path: Path, lines: list[str], extra: Sequence[tarfile.TarInfo] = (), kind: bytes = b""
) -> Path:
    """Write a source distribution with a ratings file inside an inner archive.

    ``extra`` members go into both archives; ``kind`` replaces the tar type of the ratings file.
    """
    text = ("\r\n".join(lines) + "\r\n").encode()
    inner = _tar({movie_reviews.RATINGS: text}, extra, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_tar({movie_reviews.INNER_ARCHIVE: inner}, extra))
    return path


def _tar(files: dict[str, bytes], extra: Sequence[tarfile.TarInfo], kind: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if kind:
                member.type, member.linkname, member.size = kind, "/etc/hostname", 0
            tar.addfile(member, io.BytesIO(content))
        for member in extra:
            tar.addfile(member)
    return buffer.getvalue()
