"""Telephone numbers as a push-button telephone dials them, with noise and at varying speed, for a quickstart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SAMPLING_RATE = 8000
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)
KEYS = ("123", "456", "789", "*0#")
FREQUENCIES = {key: (ROWS[i], COLUMNS[j]) for i, row in enumerate(KEYS) for j, key in enumerate(row)}
"""The two frequencies of each key, Hz: ITU-T recommendation Q.23."""
TONE_S, PAUSE_S = (0.05, 0.14), (0.04, 0.12)
"""Least and greatest duration; one string has one speed, and its tones differ from that by up to a fifth."""
DETUNING = 0.015
"""Greatest deviation of a frequency, which a receiver must accept by ITU-T recommendation Q.24."""
SIGNAL_TO_NOISE_DB = (0.0, 20.0)


def dial_tones(number: str, generator: np.random.Generator) -> NDArray[np.float32]:
    """Synthesise the tones of a number in white noise.

    Args:
        number: Of keys.
        generator: Of speed, loudness, detuning, phases and noise.

    Returns:
        Samples in [-1, 1], at 8 kHz.
    """
    speed = generator.uniform()
    pieces = [_pause(speed, generator)]
    for key in number:
        seconds = _duration(TONE_S, speed, generator)
        time = np.arange(round(seconds * SAMPLING_RATE)) / SAMPLING_RATE
        tone = np.zeros_like(time)
        for frequency in FREQUENCIES[key]:
            frequency *= 1 + generator.uniform(-DETUNING, DETUNING)
            tone += generator.uniform(0.7, 1.0) * np.sin(2 * np.pi * (frequency * time + generator.uniform()))
        pieces += [tone, _pause(speed, generator)]
    wave = np.concatenate(pieces)
    noise = 10 ** (-generator.uniform(*SIGNAL_TO_NOISE_DB) / 20)  # a tone has a power of about 0.7
    wave += noise * np.sqrt(0.7) * generator.standard_normal(len(wave))
    return (generator.uniform(0.1, 1.0) * wave / np.abs(wave).max()).astype(np.float32)


def draw_number(longest: int, generator: np.random.Generator) -> str:
    """Return 1 to ``longest`` random keys."""
    return "".join(generator.choice(list(FREQUENCIES), generator.integers(1, longest + 1)))


def _duration(bounds: tuple[float, float], speed: float, generator: np.random.Generator) -> float:
    """Return a duration for a speed in [0, 1), s."""
    fastest, slowest = bounds
    return max(fastest, (slowest + (fastest - slowest) * speed) * generator.uniform(0.8, 1.2))


def _pause(speed: float, generator: np.random.Generator) -> NDArray[np.float64]:
    return np.zeros(round(_duration(PAUSE_S, speed, generator) * SAMPLING_RATE))
