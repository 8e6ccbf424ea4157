"""Recordings of single spoken digits, as the Free Spoken Digit Dataset names them, put together into strings."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from skipped_files import MediaDataError, SkippedFiles
from speech_audio import UNREADABLE, read_audio, reason, write_audio

NAME = re.compile(r"(\d)_(\w+)_(\d+)")
NUM_TEST = 5
"""Recordings 0 to 4 of each digit and speaker are the test set of the Free Spoken Digit Dataset."""
PAUSE_S = (0.02, 0.15)


@dataclass(frozen=True)
class Recording:
    """A spoken digit: what was said, by whom, the place among that speaker's recordings of it, and the samples."""

    digit: str
    speaker: str
    index: int
    wave: NDArray[np.float32]


def read_digits(folder: Path, skipped: SkippedFiles) -> tuple[list[Recording], int]:
    """Read all recordings of a folder.

    Args:
        folder: Holds ``digit_speaker_index.wav``.
        skipped: Receives the names of other files, and of those that cannot be read.

    Returns:
        The recordings, sorted by name, and their sampling rate, Hz: that of the first, to which others are resampled.

    Raises:
        MediaDataError: If there is none.
    """
    recordings, rate = [], 0
    for path in sorted(folder.glob("*.wav")):
        name = NAME.fullmatch(path.stem)
        if name is None:
            skipped.add(str(path), "its name is not digit_speaker_index.wav")
            continue
        try:
            rate = rate or soundfile.info(path).samplerate
            recordings.append(Recording(name[1], name[2], int(name[3]), read_audio(path, rate)))
        except UNREADABLE as error:
            skipped.add(str(path), reason(error))
    if not recordings:
        raise MediaDataError(f"{folder} holds no recording by the name digit_speaker_index.wav.")
    return recordings, rate


def make_strings(
    recordings: list[Recording], rate: int, longest: int, number: int, generator: np.random.Generator
) -> dict[str, list[object]]:
    """Put recordings of one speaker at a time together, with short pauses.

    Args:
        recordings: To choose from; all are used equally often, up to one more or less: strings of one digit over all
            speakers, so that as many strings as recordings are each of them once, longer ones for each speaker.
        rate: Of the recordings, Hz.
        longest: Digits of a string, at most; a string has 1 to so many, each number as likely.
        number: Of strings.
        generator: Of everything random.

    Returns:
        The columns "audio", encoded, and "text", the digits with spaces between them.
    """
    by_speaker = defaultdict(list)
    for recording in recordings:
        by_speaker["" if longest == 1 else recording.speaker].append(recording)
    speakers = sorted(by_speaker)
    left: dict[str, list[Recording]] = {speaker: [] for speaker in speakers}
    audio: list[object] = []
    texts: list[object] = []
    for speaker in generator.choice(speakers, number):
        chosen, pieces = [], []
        for _ in range(generator.integers(1, longest + 1)):
            if not left[speaker]:
                left[speaker] = [
                    by_speaker[speaker][place] for place in generator.permutation(len(by_speaker[speaker]))
                ]
            chosen.append(left[speaker].pop())
            pause = np.zeros(round(generator.uniform(*PAUSE_S) * rate), dtype=np.float32)
            pieces += [pause, chosen[-1].wave]
        audio.append({"bytes": write_audio(np.concatenate(pieces[1:]), rate), "path": None})
        texts.append(" ".join(recording.digit for recording in chosen))
    return {"audio": audio, "text": texts}
