"""The real recordings beside this repository: their numbers, their lengths, and that a small model learns of them."""

from __future__ import annotations

import pytest
import speech
from skipped_files import SkippedFiles
from speech_arguments import SpeechArguments
from speech_data import load_speech
from tiny_glue import ROOT

SPEECH = ROOT.parent / "shared" / "data" / "speech"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SPEECH.is_dir(), reason="the recordings are not beside this repository, in ../shared/data"),
]


def load(tmp_path, **options):
    args = SpeechArguments(model_type="wav2vec2", **options)
    return load_speech(args, SkippedFiles(tmp_path, True, "recording"))


def test_every_utterance_of_librispeech_has_its_line(tmp_path):
    data = load(tmp_path, data_dir=str(SPEECH / "mini_librispeech"), max_duration_s=30, train_val_split=0.2)
    assert (data.num_train, data.num_validation) == (77, 20)
    assert max(data.seconds) < 17
    letters = set("".join([*data.train["text"], *data.validation["text"]]))
    assert letters <= set(" 'ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    characters = [len(row["text"]) / seconds for row, seconds in zip(data.train, data.seconds, strict=True)]
    assert 8 < sum(characters) / len(characters) < 20, "characters per second of read speech"


def test_all_digits_are_split_as_published(tmp_path):
    data = load(tmp_path, data_dir=str(SPEECH / "fsdd"))
    assert (data.num_train, data.num_validation) == (660, 300)
    assert sorted(data.validation["text"]) == sorted(str(digit) for digit in range(10) for _ in range(30))


def test_a_small_model_learns_spoken_digits_and_survives_the_conversion(tmp_path):
    softmax, converted = tmp_path / "softmax", tmp_path / "converted"
    data = ["--data_dir", str(SPEECH / "fsdd")]
    config = str(ROOT / "configs/speech/spoken_digits_softmax.yaml")
    results = speech.main(["--config", config, *data, "--num_train_epochs", "8", "--output_dir", str(softmax)])
    assert results["metrics"]["wer"] < 0.3
    config = str(ROOT / "configs/speech/spoken_digits.yaml")
    argv = ["--config", config, *data, "--model_name_or_path", str(softmax), "--output_dir", str(converted)]
    uptrained = speech.main([*argv, "--preconditioning", "full", "--num_train_epochs", "1"])
    assert uptrained["initial_metrics"]["wer"] < results["metrics"]["wer"] + 0.15
    assert uptrained["metrics"]["wer"] < results["metrics"]["wer"] + 0.05
