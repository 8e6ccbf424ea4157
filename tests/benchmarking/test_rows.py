"""Rows and crossover lengths, from made-up measurements."""

from __future__ import annotations

import math

import pytest
from made_up_rows import NAME, left_out, rows_of, timed

from hf_favorpp.benchmarking.rows import crossover, crossovers, fastest, ratio


def test_a_row_holds_times_ratios_and_memory():
    measured = {
        "sdpa": {"forward": timed(10), "train": timed(40, 3.0)},
        NAME: {"forward": timed(4), "train": timed(20, 2.0)},
        "identity": {"forward": timed(1), "train": timed(5, 0.5)},
        "peer M=8": {"forward": timed(6), "train": left_out("out of memory")},
    }
    (row,) = rows_of(64, measured, {"peer": "peer M=8"}, floor_forward_ms=1.0)
    fixed = {
        **{"length": 64, "backend": "cpu", "forward_ms": 4, "sdpa_forward_ms": 10, "forward_speedup": 2.5},
        **{"train_ms": 20, "sdpa_train_ms": 40, "train_speedup": 2.0, "peak_mib": 2.0},
    }
    assert {key: row[key] for key in fixed} == fixed
    assert list(row)[: len(fixed)] == list(fixed)
    expected = {
        **{"requested_backend": "auto", "num_features": 8, "kernel": "favor++", "preconditioning": "center"},
        **{"statistics": "sequence", "exact_window": 0, "sdpa_peak_mib": 3.0},
        **{
            "identity_forward_ms": 1,
            "identity_peak_mib": 0.5,
            "forward_over_identity": 4.0,
            "train_over_identity": 4.0,
        },
        **{"forward_min_ms": 3.6, "sdpa_train_max_ms": 44.0, "forward_repetitions": 5, "forward_peak_mib": 1.0},
        **{"sdpa_forward_backend": "default", "floor_forward_ms": 1.0, "floor_fraction": 0.25},
    }
    assert {key: row[key] for key in expected} == pytest.approx(expected)
    assert (row["exact_ends"], row["reasons"]) == ([0, 0], {})
    peer = row["peers"]["peer"]
    assert (peer["forward_ms"], peer["forward_speedup"]) == (6, 1.5)
    assert (peer["train_ms"], peer["train_speedup"], peer["train_reason"]) == (None, None, "out of memory")


def test_what_was_not_measured_is_none_with_a_reason():
    measured = {
        "sdpa": {"forward": left_out("left out: 80 s"), "train": left_out("out of memory")},
        NAME: {"forward": timed(4), "train": timed(20)},
    }
    (row,) = rows_of(64, measured)
    assert row["sdpa_forward_ms"] is row["forward_speedup"] is row["sdpa_train_ms"] is row["train_speedup"] is None
    assert row["sdpa_forward_repetitions"] == 0
    assert row["forward_ms"] == 4
    assert row["reasons"] == {"sdpa_forward_ms": "left out: 80 s", "sdpa_train_ms": "out of memory"}
    (row,) = rows_of(64, {"sdpa": {"forward": timed(4)}, NAME: {"forward": timed(4)}})
    assert row["train_ms"] is None
    assert row["reasons"] == {"train_ms": "not asked for", "sdpa_train_ms": "not asked for"}


def test_sdpa_is_its_fastest_backend_in_each_pass_and_flash_is_noted():
    measured = {
        "sdpa flash": {"forward": timed(3), "train": left_out("cannot run")},
        "sdpa efficient": {"forward": timed(5), "train": timed(9)},
        "sdpa cudnn": {"forward": timed(2), "train": timed(12)},
        NAME: {"forward": timed(1), "train": timed(3)},
    }
    (row,) = rows_of(64, measured)
    assert (row["sdpa_forward_ms"], row["sdpa_forward_backend"]) == (2, "cudnn")
    assert (row["sdpa_train_ms"], row["sdpa_train_backend"]) == (9, "efficient")
    assert (row["flash_forward_ms"], row["flash_train_ms"]) == (3, None)
    assert (row["forward_speedup_over_flash"], row["train_speedup_over_flash"]) == (3, None)
    name, nothing = fastest({"sdpa flash": {"train": left_out("a")}, "sdpa cudnn": {"train": left_out("b")}}, "train")
    assert (name, nothing.median_ms, nothing.reason) == (None, None, "a; b")


@pytest.mark.parametrize(
    ("speedups", "expected"),
    [
        ({}, None),
        ({128: 0.5}, None),
        ({128: 1.0}, None),
        ({128: 2.0}, 128),
        ({128: 0.5, 512: 2.0}, 256),
        ({512: 2.0, 128: 0.5}, 256),
        ({100: 1.0, 400: 4.0}, 100),
        ({128: 2.0, 256: 0.5, 512: 2.0}, 256 * math.sqrt(2)),
        ({128: 2.0, 256: 3.0, 512: 0.9}, None),
        ({128: 0.25, 256: 0.5, 512: 2.0, 1024: 4.0}, 256 * math.sqrt(2)),
        ({100: 0.1, 1000: 10.0**0.5}, 10 ** (2 + 2 / 3)),
    ],
)
def test_the_crossover_is_where_the_speed_up_stays_above_one(speedups, expected):
    found = crossover(speedups)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_crossovers_go_by_configuration_and_ignore_what_was_not_measured():
    rows = []
    for length, sdpa in ((128, 1.0), (512, 16.0), (2048, None)):
        sdpa_time = left_out("out of memory") if sdpa is None else timed(sdpa)
        measured = {
            "sdpa": {"forward": sdpa_time, "train": sdpa_time},
            NAME: {"forward": timed(4), "train": timed(20)},
        }
        rows += rows_of(length, measured)
    (found,) = crossovers(rows)
    assert found["forward"] == pytest.approx(256)
    assert found["forward_measured"] == [128, 512]
    assert found["train"] is None
    assert (found["num_features"], found["backend"], found["requested_backend"]) == (8, "cpu", "auto")
    other = [{**row, "num_features": 16} for row in rows]
    assert len(crossovers(rows + other)) == 2


def test_ratio_of_nothing_is_nothing():
    assert ratio(3.0, 2.0) == pytest.approx(1.5)
    assert ratio(None, 2.0) is ratio(2.0, None) is None
