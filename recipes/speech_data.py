"""Rows of recordings and transcripts: from the Hub, LibriSpeech's folders, spoken digits, or dial tones made here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Value
from dial_tones import SAMPLING_RATE, dial_tones, draw_number
from media_rows import Rows, limited, read_hub
from skipped_files import MediaDataError, SkippedFiles
from speech_arguments import DIAL_TONES, SpeechArguments
from speech_audio import UNREADABLE, name_of, open_audio, reason, seconds_of, write_audio
from spoken_digits import NUM_TEST, make_strings, read_digits

COLUMNS = {"audio_column_name": "audio", "text_column_name": "text"}
FEATURES = Features({"audio": {"bytes": Value("binary"), "path": Value("string")}, "text": Value("string")})
"""As Audio(decode=False) has them; Audio itself encodes and decodes with torchcodec alone."""
LAYOUT = (
    "It must hold speaker/chapter/*.flac beside speaker-chapter.trans.txt, as LibriSpeech does, or "
    "digit_speaker_index.wav."
)
NUM_TONES = {"train": 2000, "validation": 200}


@dataclass(frozen=True)
class SpeechData:
    """What to train and evaluate on.

    Attributes:
        train: Rows with "audio", a dictionary of encoded "bytes" or "path", and "text".
        validation: The same.
        num_train: Rows of ``train``.
        num_validation: Rows of ``validation``; None where a stream does not tell.
        seconds: Duration of each training row, s; None where it was not asked for.
    """

    train: Rows
    validation: Rows
    num_train: int
    num_validation: int | None
    seconds: list[float] | None


def load_speech(args: SpeechArguments, skipped: SkippedFiles) -> SpeechData:
    """Load the rows that ``args`` name; what lies in files is not decoded yet.

    Args:
        args: Source, split, limits.
        skipped: Receives the names of recordings that have no transcript or cannot be read.

    Returns:
        The rows.

    Raises:
        MediaDataError: If data are missing or not as they should be.
    """
    if args.dataset_name == DIAL_TONES:
        train, validation = make_dial_tones(args)
    elif args.dataset_name is not None:
        train, validation = read_hub(args, COLUMNS, FEATURES["audio"], "give --data_dir")
    else:
        train, validation = read_folder(args, Path(str(args.data_dir)), skipped)
    if validation is None:
        parts = train.train_test_split(args.train_val_split, seed=args.seed)
        train, validation = parts["train"], parts["test"]
    train, validation, num_train, num_validation = limited(args, train, validation)
    if not args.group_by_length and args.max_duration_s is None:
        return SpeechData(train, validation, num_train, num_validation, None)
    if args.streaming:
        raise MediaDataError("--max_duration_s needs all durations before the training: leave out --streaming.")
    train, seconds = measured(train, args.max_duration_s, skipped)
    return SpeechData(train, validation, len(train), num_validation, seconds)


def read_folder(args: SpeechArguments, folder: Path, skipped: SkippedFiles) -> tuple[Dataset, Dataset | None]:
    """Read a folder as LibriSpeech is laid out or of spoken digits, or the folders below it that the splits name.

    Args:
        args: Splits, strings, seed.
        folder: The folder.
        skipped: Receives the names of recordings that have no transcript or cannot be read.

    Returns:
        Training rows, and validation rows or None where there are none of their own.

    Raises:
        MediaDataError: If the folder is not laid out so.
    """
    if not folder.is_dir():
        raise MediaDataError(f"{folder} is not a folder. {LAYOUT}")
    if any(folder.glob("*.wav")):
        return spoken_digits(args, folder, skipped)
    train, validation = (existing_splits(folder, name) for name in (args.train_split_name, args.validation_split_name))
    return read_librispeech(train or [folder], skipped), read_librispeech(validation, skipped) if validation else None


def existing_splits(folder: Path, names: str) -> list[Path]:
    """Return the folders of splits that are joined by +; none where none of them exists.

    Raises:
        MediaDataError: If some exist and some do not.
    """
    wanted = [folder / name for name in names.split("+")]
    found = [split for split in wanted if split.is_dir()]
    if found and len(found) < len(wanted):
        raise MediaDataError(f"{folder} lacks some of the splits {names}.")
    return found


def read_librispeech(folders: list[Path], skipped: SkippedFiles) -> Dataset:
    """List the recordings of transcripts, sorted by path; a recording without a transcript is skipped."""
    texts: dict[Path, str] = {}
    recordings: set[Path] = set()
    for folder in folders:
        for transcript in folder.rglob("*.trans.txt"):
            for line in transcript.read_text(encoding="utf-8").splitlines():
                name, _, text = line.partition(" ")
                if name:
                    texts[transcript.parent / f"{name}.flac"] = text
        recordings.update(folder.rglob("*.flac"))
    for path in sorted(recordings - set(texts)):
        skipped.add(str(path), "it has no transcript")
    paths = sorted(path for path, text in texts.items() if text.strip())
    if not paths:
        raise MediaDataError(f"{', '.join(map(str, folders))} holds no transcripts. {LAYOUT}")
    audio = [{"bytes": None, "path": str(path)} for path in paths]
    return Dataset.from_dict({"audio": audio, "text": [texts[path] for path in paths]}, features=FEATURES)


def spoken_digits(args: SpeechArguments, folder: Path, skipped: SkippedFiles) -> tuple[Dataset, Dataset]:
    """Return strings of recordings to train on, and as many as there are recordings to evaluate on of others.

    The strings to evaluate on do not depend on ``args.seed``, so that runs can be compared.

    Args:
        args: Longest string, number of strings, seed.
        folder: Of the recordings.
        skipped: Receives the names of those that cannot be read.

    Returns:
        Training rows and validation rows.

    Raises:
        MediaDataError: If there is nothing to train or to evaluate on.
    """
    recordings, rate = read_digits(folder, skipped)
    parts = [[each for each in recordings if (each.index < NUM_TEST) == test] for test in (False, True)]
    if not all(parts):
        raise MediaDataError(f"{folder} must hold recordings of index below {NUM_TEST}, to evaluate on, and others.")
    numbers, seeds = (args.num_strings or len(parts[0]), len(parts[1])), ((args.seed, 0), (0, 1))
    train, validation = (
        Dataset.from_dict(
            make_strings(part, rate, args.digits_per_string, number, np.random.default_rng(seed)), features=FEATURES
        )
        for part, number, seed in zip(parts, numbers, seeds, strict=True)
    )
    return train, validation


def make_dial_tones(args: SpeechArguments) -> tuple[Dataset, Dataset]:
    """Return tones to train on and to evaluate on; the latter do not depend on ``args.seed``."""
    splits = []
    for seed, number in (((args.seed, 0), args.num_strings or NUM_TONES["train"]), ((0, 1), NUM_TONES["validation"])):
        generator = np.random.default_rng(seed)
        numbers = [draw_number(args.digits_per_string, generator) for _ in range(number)]
        audio = [{"bytes": write_audio(dial_tones(each, generator), SAMPLING_RATE), "path": None} for each in numbers]
        columns = {"audio": audio, "text": [" ".join(each) for each in numbers]}
        splits.append(Dataset.from_dict(columns, features=FEATURES))
    return splits[0], splits[1]


def measured(rows: Dataset, longest: float | None, skipped: SkippedFiles) -> tuple[Dataset, list[float]]:
    """Return the rows that have a readable header and last no longer, and their durations.

    Args:
        rows: The rows.
        longest: Duration to leave out from, s; None keeps all.
        skipped: Receives the names of those without a readable header.

    Returns:
        Rows, and the duration of each, s.

    Raises:
        MediaDataError: If none is left.
    """
    kept, seconds = [], []
    for place, row in enumerate(rows):
        try:
            duration = seconds_of(open_audio(row["audio"]))
        except UNREADABLE as error:
            skipped.add(name_of(row["audio"], row["text"]), reason(error))
            continue
        if longest is None or duration <= longest:
            kept.append(place)
            seconds.append(duration)
    if not kept:
        raise MediaDataError("no training recording is left: raise --max_duration_s, or look at the skipped files.")
    return rows.select(kept), seconds
