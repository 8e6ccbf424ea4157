"""Dial tones: a plain receiver by Goertzel's algorithm hears the number that was dialled."""

from __future__ import annotations

import math
from itertools import groupby

import dial_tones
import numpy as np
import pytest

ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)
KEYPAD = {(697, 1209): "1", (697, 1336): "2", (697, 1477): "3", (770, 1209): "4", (770, 1336): "5", (770, 1477): "6"}
KEYPAD |= {(852, 1209): "7", (852, 1336): "8", (852, 1477): "9", (941, 1209): "*", (941, 1336): "0", (941, 1477): "#"}
WINDOW, HOP = 160, 40


def goertzel(samples: np.ndarray, frequency: float) -> float:
    """Return the power at a frequency, by Goertzel's recurrence, per squared sample."""
    coefficient = 2 * math.cos(2 * math.pi * frequency / 8000)
    before = last = 0.0
    for sample in samples.tolist():
        before, last = last, sample + coefficient * last - before
    return (last**2 + before**2 - coefficient * last * before) / len(samples) ** 2


def hear(wave: np.ndarray) -> str:
    """Return the keys whose two frequencies hold most of the power for two windows or more."""
    keys = []
    for start in range(0, len(wave) - WINDOW + 1, HOP):
        samples = wave[start : start + WINDOW]
        row, column = (max(band, key=lambda f, s=samples: goertzel(s, f)) for band in (ROWS, COLUMNS))
        share = 2 * (goertzel(samples, row) + goertzel(samples, column)) / np.mean(samples**2)
        keys.append(KEYPAD[row, column] if share > 0.6 else None)
    return "".join(key for key, run in groupby(keys) if key and len(list(run)) >= 2)


def test_a_receiver_hears_the_number(monkeypatch):
    monkeypatch.setattr(dial_tones, "SIGNAL_TO_NOISE_DB", (20.0, 20.0))
    generator = np.random.default_rng(0)
    numbers = ["0123456789*#", "1100", *(dial_tones.draw_number(8, generator) for _ in range(6))]
    assert [hear(dial_tones.dial_tones(number, generator)) for number in numbers] == numbers


def test_speed_loudness_and_noise_vary():
    generator = np.random.default_rng(0)
    waves = [dial_tones.dial_tones("5555", generator) for _ in range(40)]
    lengths = [len(wave) for wave in waves]
    assert max(lengths) > 1.5 * min(lengths)
    assert min(lengths) / 8000 >= 4 * dial_tones.TONE_S[0] + 5 * dial_tones.PAUSE_S[0] - 1e-3
    peaks = [np.abs(wave).max() for wave in waves]
    assert max(peaks) <= 1
    assert max(peaks) > 3 * min(peaks)
    silence = [np.std(wave[: int(0.04 * 8000)]) / np.std(wave) for wave in waves]
    assert max(silence) > 3 * min(silence)
    assert waves[0].dtype == np.float32


def test_a_seed_is_a_number_and_its_tones():
    drawn = [dial_tones.draw_number(5, np.random.default_rng(seed)) for seed in range(200)]
    assert {len(number) for number in drawn} == {1, 2, 3, 4, 5}
    assert set("".join(drawn)) == set("0123456789*#")
    one, same, other = (dial_tones.dial_tones("12", np.random.default_rng(seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one, same)
    assert one.shape != other.shape or not np.allclose(one, other)


@pytest.mark.parametrize("key", list(KEYPAD.values()))
def test_each_key_has_its_frequencies(key):
    row, column = dial_tones.FREQUENCIES[key]
    assert KEYPAD[row, column] == key
