"""From files to batches: decoded, resampled, padded; what cannot be read is named."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile
import torch
from media_examples import Examples, StreamedExamples
from skipped_files import MediaDataError, SkippedFiles
from speech_audio import IGNORED, AudioReader, Collator, read_audio, write_audio
from speech_model import make_tokenizer
from tiny_speech import RATE, encoded
from transformers import SeamlessM4TFeatureExtractor, Wav2Vec2FeatureExtractor


def sine(frequency, rate, seconds=1.0):
    return np.sin(2 * np.pi * frequency * np.arange(round(seconds * rate)) / rate)


@pytest.mark.parametrize(("own", "wanted"), [(8000, 16000), (16000, 8000), (44100, 16000), (22050, 16000)])
def test_resampling_keeps_what_the_new_rate_can_hold(own, wanted):
    wave = read_audio(io.BytesIO(encoded(sine(440, own) + sine(3000, own), own)), wanted)
    expected = sine(440, wanted) + sine(3000, wanted)
    assert abs(len(wave) - len(expected)) <= 1
    inside = slice(wanted // 10, -wanted // 10)
    np.testing.assert_allclose(wave[inside], expected[: len(wave)][inside], atol=2e-3)


def test_what_the_new_rate_cannot_hold_does_not_fold_back():
    wave = read_audio(io.BytesIO(encoded(sine(6000, 16000), 16000)), 8000)  # would sound as 2000 Hz
    assert np.abs(wave[800:-800]).max() < 1e-3


def test_the_own_rate_is_left_alone_and_channels_are_averaged():
    left, right = sine(50, RATE).astype("float32"), sine(90, RATE).astype("float32")
    np.testing.assert_array_equal(read_audio(io.BytesIO(encoded(left)), RATE), left)
    stereo = read_audio(io.BytesIO(encoded(np.stack([left, right], 1))), RATE)
    np.testing.assert_allclose(stereo, (left + right) / 2, atol=1e-6)
    again = read_audio(io.BytesIO(write_audio(left, RATE)), RATE)
    np.testing.assert_allclose(again, left, atol=2**-15)


TOKENIZER = make_tokenizer(set("ab c"))


def reader(tmp_path, strict=False, case="lower", rate=RATE):
    return AudioReader(TOKENIZER, case, rate, SkippedFiles(tmp_path, strict, "recording"))


def row(data, text="a", path=None):
    return {"audio": {"bytes": data, "path": path}, "text": text}


GOOD = encoded(sine(50, RATE, 0.5))
BROKEN = {
    "cut.flac": encoded(sine(50, RATE, 9), kind="FLAC", subtype="PCM_16")[:600],
    "none.wav": b"no recording",
    "empty.wav": encoded(np.zeros(0)),
    "numberless.wav": encoded(np.full(99, np.nan)),
}


def test_labels_are_characters_of_the_normalised_transcript(tmp_path):
    example = reader(tmp_path)(row(GOOD, " A b\t C"), 0)
    names = [TOKENIZER.convert_ids_to_tokens(label) for label in example["labels"]]
    assert names == ["a", "|", "b", "|", "c"]
    assert example["wave"].dtype == np.float32
    assert TOKENIZER.batch_decode([example["labels"]], group_tokens=False) == ["a b c"]
    assert TOKENIZER.pad_token_id not in example["labels"]


def test_a_very_short_recording_is_padded_with_silence(tmp_path):
    example = reader(tmp_path)(row(encoded(np.ones(3))), 0)
    assert len(example["wave"]) == RATE // 10
    assert example["wave"].sum() == 3


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_named_or_ends_the_run(name, tmp_path):
    tolerant, strict = reader(tmp_path), reader(tmp_path / "strict", strict=True)
    assert tolerant(row(BROKEN[name], path=name), 0) is None
    assert list(tolerant.skipped.names()) == [name]
    assert " at 0x" not in tolerant.skipped.names()[name], "no address in memory, so that a name counts once"
    with pytest.raises(MediaDataError, match=f"{name} is not a readable recording .*leave out --strict"):
        strict(row(BROKEN[name], path=name), 0)


def test_a_recording_without_a_path_is_named_by_its_transcript(tmp_path):
    tolerant = reader(tmp_path)
    tolerant(row(b"x", "a b"), 0)
    assert "a recording of 'a b' with checksum 8cdc1683" in tolerant.skipped.names()


def test_training_takes_the_next_recording_and_evaluation_ignores(tmp_path):
    rows = [row(GOOD, "a"), row(BROKEN["none.wav"], "b"), row(GOOD, "c")]
    wanted = [TOKENIZER(text).input_ids for text in "ac"]
    train = Examples(rows, reader(tmp_path), replace=True)
    assert [train[i]["labels"] for i in range(3)] == [wanted[0], wanted[1], wanted[1]]
    assert Examples(rows, reader(tmp_path), replace=False)[1]["labels"] == []
    with pytest.raises(MediaDataError, match="none of the 1 training recordings can be read"):
        Examples(rows[1:2], reader(tmp_path), replace=True)[0]
    assert [example["labels"] for example in StreamedExamples(rows, reader(tmp_path), None)] == wanted


def test_a_batch_is_padded_and_says_where(tmp_path):
    read = reader(tmp_path)
    examples = [read(row(GOOD, "ab a"), 0), read(row(encoded(sine(50, RATE, 0.25)), "c"), 0), read.ignored()]
    batch = Collator(Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True))(examples)
    assert set(batch) == {"input_values", "attention_mask", "labels"}
    assert batch["input_values"].shape == (3, 800)
    assert batch["attention_mask"].sum(-1).tolist() == [800, 400, 160]
    assert batch["input_values"][1, :400].var(correction=0).item() == pytest.approx(1, abs=1e-3)
    assert batch["labels"].shape == (3, 4)
    assert (batch["labels"] == IGNORED).sum(-1).tolist() == [0, 3, 4]
    only = Collator(Wav2Vec2FeatureExtractor(sampling_rate=RATE))([read.ignored()])
    assert only["labels"].tolist() == [[IGNORED]]


def test_features_of_other_encoders_come_the_same_way(tmp_path):
    read = reader(tmp_path, rate=16000)
    example = read(row(encoded(sine(440, 16000), 16000), "ab"), 0)
    batch = Collator(SeamlessM4TFeatureExtractor())([example])
    assert set(batch) == {"input_features", "attention_mask", "labels"}
    assert torch.isfinite(batch["input_features"]).all()


def test_soundfile_reads_what_is_written_here():
    assert soundfile.info(io.BytesIO(write_audio(np.zeros(5, dtype=np.float32), 8000))).subtype == "PCM_16"
