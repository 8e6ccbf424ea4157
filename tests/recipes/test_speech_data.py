"""Rows of recordings: LibriSpeech's layout, the Hub, spoken digits, dial tones; what is wrong with them is said."""

from __future__ import annotations

import io
import shutil
from collections import Counter

import numpy as np
import pytest
import soundfile
from skipped_files import MediaDataError, SkippedFiles
from speech_arguments import SpeechArguments
from speech_data import load_speech
from tiny_speech import RATE, text_of, wave, write_digits, write_hub_folder, write_librispeech


def load(tmp_path, strict=False, **options):
    args = SpeechArguments(model_type="wav2vec2", **options)
    return load_speech(args, SkippedFiles(tmp_path / "run", strict, "recording"))


def texts(rows):
    return [row["text"] for row in rows]


def samples(row):
    return soundfile.read(io.BytesIO(row["audio"]["bytes"]))[0]


def test_librispeech_pairs_recordings_with_their_lines(librispeech, tmp_path):
    data = load(tmp_path, data_dir=str(librispeech))
    assert (data.num_train, data.num_validation, data.seconds) == (24, 9, None)
    assert texts(data.train) == [text_of(n) for n in (*range(0, 24, 2), *range(1, 24, 2))]
    row = data.train[13]
    assert row["audio"]["path"] == str(librispeech / "train/84/7/84-7-0003.flac")
    np.testing.assert_allclose(soundfile.read(row["audio"]["path"])[0], wave(row["text"], 3), atol=1e-4)


def test_splits_are_folders_and_may_be_joined(tmp_path):
    for first, name in enumerate(("train-clean-100", "train-other-500", "dev-clean")):
        write_librispeech(tmp_path / "data" / name, 3 + first, first=10 * first)
    folder = str(tmp_path / "data")
    data = load(tmp_path, data_dir=folder, train_split_name="train-clean-100+train-other-500")
    assert data.num_train + data.num_validation == 7, "a share is held out where there is no validation split"
    data = load(tmp_path, data_dir=folder, train_split_name="train-clean-100", validation_split_name="dev-clean")
    assert (data.num_train, data.num_validation) == (3, 5)
    with pytest.raises(MediaDataError, match="lacks some of the splits train-clean-100\\+train-clean-360"):
        load(tmp_path, data_dir=folder, train_split_name="train-clean-100+train-clean-360")


def test_a_folder_of_speakers_alone_is_split(librispeech, tmp_path):
    folder = str(librispeech / "train")
    data, same, other = (load(tmp_path, data_dir=folder, train_val_split=0.25, seed=seed) for seed in (1, 1, 2))
    assert (data.num_train, data.num_validation) == (18, 6)
    paths = [[row["audio"]["path"] for row in part] for part in (data.train, data.validation)]
    assert len({*paths[0], *paths[1]}) == 24
    assert texts(data.validation) == texts(same.validation) != texts(other.validation)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_hub_gives_encoded_recordings_and_lengths(streaming, hub_speech, librispeech, tmp_path):
    data = load(tmp_path, dataset_name=str(hub_speech), streaming=streaming)
    assert (data.num_train, data.num_validation) == (24, 9)
    row = next(iter(data.train))
    assert row["audio"]["bytes"] == (librispeech / "train/19/7/19-7-0000.flac").read_bytes()
    assert texts(data.train) == texts(load(tmp_path, data_dir=str(librispeech)).train)
    both = load(tmp_path, dataset_name=str(hub_speech), streaming=streaming, train_split_name="train+validation")
    assert (both.num_train, len(list(both.train))) == (33, 33)


def test_limits_choose_random_recordings(librispeech, tmp_path):
    data = load(tmp_path, data_dir=str(librispeech), max_train_samples=6, max_eval_samples=100)
    assert (data.num_train, data.num_validation) == (6, 9)
    assert {row["audio"]["path"].split("/")[-3] for row in data.train} == {"19", "84"}


def test_durations_are_measured_and_long_recordings_left_out(librispeech, tmp_path):
    data = load(tmp_path, data_dir=str(librispeech), max_duration_s=0.55)
    assert data.seconds == pytest.approx([len(text) / 10 for text in texts(data.train)])
    assert 0 < data.num_train == len(data.train) < 24
    assert max(data.seconds) <= 0.55
    assert data.num_validation == 9
    grouped = load(tmp_path, data_dir=str(librispeech), group_by_length=True)
    assert len(grouped.seconds) == 24
    with pytest.raises(MediaDataError, match="no training recording is left"):
        load(tmp_path, data_dir=str(librispeech), max_duration_s=0.01)


def test_recordings_without_transcript_or_header_are_named(librispeech, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(librispeech / "train", folder)
    lonely, broken, gone = (folder / "19/7" / f"19-7-{name}.flac" for name in ("9999", "0002", "0004"))
    shutil.copy(broken, lonely)
    broken.write_bytes(b"no recording")
    gone.unlink()
    data = load(tmp_path, data_dir=str(folder), group_by_length=True, train_val_split=0.01)
    names = SkippedFiles(tmp_path / "run", False).names()
    assert names[str(lonely)] == "it has no transcript"
    assert {str(broken), str(gone)} <= set(names)
    assert data.num_train + data.num_validation == 22
    assert not {str(broken), str(gone)} & {row["audio"]["path"] for row in data.train}
    with pytest.raises(MediaDataError, match=r"9999\.flac is not a readable recording \(it has no transcript\)"):
        load(tmp_path, data_dir=str(folder), strict=True)


def test_digits_are_split_by_index_and_kept_whole(tmp_path):
    data = load(tmp_path, data_dir=str(write_digits(tmp_path / "digits")), num_strings=12)
    assert (data.num_train, data.num_validation) == (12, 30)
    for rows, indices in ((data.train, {5, 6}), (data.validation, {0, 1, 2, 3, 4})):
        for row in rows:
            heard = samples(row)
            assert len(heard) == RATE // 10 * (1 + int(row["text"])), "one digit a string is the recording itself"
            loudness = round(100 * heard[0]) - 1
            assert np.allclose(heard, heard[0])
            assert loudness % 10 in indices
    each = {(row["text"], round(100 * samples(row)[0])) for row in data.validation}
    assert len(each) == 30, "every recording once"


def test_strings_hold_digits_of_one_speaker_each_recording_as_often(tmp_path):
    folder = write_digits(tmp_path / "digits", each=8)
    options = {"data_dir": str(folder), "digits_per_string": 4, "num_strings": 400}
    data, same, other = (load(tmp_path, **options, seed=seed) for seed in (1, 1, 2))
    assert {len(text.split()) for text in texts(data.train)} == {1, 2, 3, 4}
    used = Counter()
    for row in data.train:
        heard = samples(row)
        assert heard[0] != 0
        assert heard[-1] != 0
        marks = np.round(100 * heard[heard != 0]).astype(int)
        starts = [0, *(np.flatnonzero(np.diff(np.flatnonzero(heard)) > 1) + 1)]
        assert len(starts) == len(row["text"].split())
        assert len({(mark - 1) // 10 for mark in marks.tolist()}) == 1, "one speaker"
        ends = [*starts[1:], len(marks)]
        lengths = [(end - start) // (RATE // 10) - 1 for start, end in zip(starts, ends, strict=True)]
        assert " ".join(map(str, lengths)) == row["text"]
        used.update((lengths[i], int(marks[start])) for i, start in enumerate(starts))
    assert len(used) == 3 * 2 * 3
    for speaker in (0, 1):
        times = [count for (_, mark), count in used.items() if (mark - 1) // 10 == speaker]
        assert max(times) - min(times) <= 1
    assert texts(data.train) == texts(same.train) != texts(other.train)
    assert data.train[7]["audio"] == same.train[7]["audio"]
    assert data.validation[7] == other.validation[7], "what is evaluated on does not depend on the seed"


def test_other_files_among_digits_are_named(tmp_path):
    folder = write_digits(tmp_path / "digits")
    (folder / "0_ann_5.wav").write_bytes(b"no recording")
    shutil.copy(folder / "0_ann_6.wav", folder / "hello.wav")
    data = load(tmp_path, data_dir=str(folder))
    names = SkippedFiles(tmp_path / "run", False).names()
    assert names[str(folder / "hello.wav")] == "its name is not digit_speaker_index.wav"
    assert set(names) == {str(folder / "hello.wav"), str(folder / "0_ann_5.wav")}
    assert data.num_train == 11, "one string per recording"


def test_dial_tones_need_no_files(tmp_path):
    options = {"dataset_name": "dial_tones", "digits_per_string": 6, "num_strings": 30}
    data, same, other = (load(tmp_path, **options, seed=seed) for seed in (1, 1, 2))
    assert (data.num_train, data.num_validation) == (30, 200)
    assert data.train[3] == same.train[3] != other.train[3]
    assert data.validation[3] == other.validation[3]
    assert {len(text.split()) for text in texts(data.validation)} == {1, 2, 3, 4, 5, 6}
    assert soundfile.info(io.BytesIO(data.train[0]["audio"]["bytes"])).samplerate == 8000
    assert not {tuple(row["audio"]["bytes"]) for row in data.train} & {
        tuple(row["audio"]["bytes"]) for row in data.validation
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_dir": "{}/none"}, r"none is not a folder\. It must hold speaker/chapter"),
        ({"data_dir": "{}/empty"}, "holds no transcripts"),
        ({"data_dir": "{}/digits"}, "must hold recordings of index below 5"),
        ({"data_dir": "{}/names"}, "holds no recording by the name"),
        ({"dataset_name": "{}/none"}, "none could not be loaded .* give --data_dir"),
        ({"dataset_name": "{}/hub", "train_split_name": "all"}, r"no split 'all' but \['train', 'validation'\]"),
        ({"dataset_name": "{}/hub", "text_column_name": "words"}, r"\['words'\].*--audio_column_name and --text_col"),
        ({"dataset_name": "{}/hub", "streaming": True, "max_duration_s": 9.0}, "leave out --streaming"),
        ({"dataset_name": "{}/untold", "streaming": True}, "how many training rows"),
    ],
)
def test_what_is_not_as_it_should_be_is_refused(options, message, librispeech, hub_speech, tmp_path):
    (tmp_path / "hub").symlink_to(hub_speech)
    (tmp_path / "empty").mkdir()
    write_digits(tmp_path / "digits", each=3)
    (tmp_path / "names").mkdir()
    (tmp_path / "names/hello.wav").write_bytes(b"")
    write_hub_folder(tmp_path / "untold", librispeech, tell_length=False)
    with pytest.raises(MediaDataError, match=message):
        load(tmp_path, **{k: v.format(tmp_path) if isinstance(v, str) else v for k, v in options.items()})
