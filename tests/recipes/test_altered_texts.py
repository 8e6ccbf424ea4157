"""Altered copies of training rows: how many words change, which pairs there are, and what they are a function of."""

from __future__ import annotations

from altered_texts import MOST_CHANGED, altered_copies
from datasets import Dataset

ROWS = 300
FIRST = [" ".join(f"a{row}.{place}" for place in range(10)) for row in range(ROWS)]
SECOND = [" ".join(f"b{row}.{place}" for place in range(10)) for row in range(ROWS)]
PAIRS = Dataset.from_dict({"premise": FIRST, "hypothesis": SECOND, "label": [1] * ROWS})


def origin(text: str) -> str:
    """Return the text that most words are of, such as "b7"."""
    texts = [word.partition(".")[0] for word in text.split()]
    return max(sorted(set(texts)), key=texts.count)


def test_every_row_has_its_copies_of_the_texts_alone():
    copies = altered_copies(PAIRS, ["premise", "hypothesis"], 3, seed=0)
    assert copies.column_names == ["premise", "hypothesis"]
    assert copies.num_rows == 3 * ROWS
    assert {origin(text) for text in copies["premise"]} >= {f"a{row}" for row in range(0, ROWS, 50)}


def test_a_pair_is_itself_or_one_text_twice_or_with_another_row_and_half_are_swapped():
    copies = altered_copies(PAIRS, ["premise", "hypothesis"], 3, seed=0)
    origins = [sorted((origin(a), origin(b))) for a, b in zip(copies["premise"], copies["hypothesis"], strict=True)]
    twice = sum(first == second for first, second in origins)
    own = sum(first[1:] == second[1:] and first != second for first, second in origins)
    swapped = sum(origin(text)[0] == "b" for text in copies["premise"])
    for count in (twice, own, 3 * ROWS - twice - own):
        assert 0.28 < count / (3 * ROWS) < 0.39
    assert 0.28 < swapped / (3 * ROWS) < 0.39  # half of the pairs of two different texts


def test_the_words_that_change_are_dropped_or_those_of_other_rows():
    copies = altered_copies(PAIRS, ["premise"], 4, seed=0)
    known = {word for text in FIRST for word in text.split()}
    kept = foreign = moved = 0
    for row, text in enumerate(copies["premise"]):
        words = text.split()
        assert set(words) <= known
        own = [word for word in words if word.startswith(f"a{row % ROWS}.")]
        moved += own != sorted(own)
        kept += len(own)
        foreign += len(words) - len(own)
    total = 4 * ROWS * 10
    assert 1 - MOST_CHANGED / 2 - 0.02 < kept / total < 1 - MOST_CHANGED / 2 + 0.02
    assert moved / (4 * ROWS) < 0.02  # where chance brought a word of its own row
    assert abs(foreign / (total - kept) - 2 / 3) < 0.04


def test_no_text_becomes_empty_but_those_that_are():
    rows = Dataset.from_dict({"sentence": ["one", "", "two words"] * 200})
    copies = altered_copies(rows, ["sentence"], 2, seed=0)
    for before, after in zip(rows["sentence"][:] * 2, copies["sentence"], strict=True):
        assert bool(after) == bool(before)


def test_they_are_a_function_of_the_seed():
    first, again, other = (altered_copies(PAIRS, ["premise", "hypothesis"], 1, seed=seed) for seed in (3, 3, 4))
    assert first[:] == again[:] != other[:]
