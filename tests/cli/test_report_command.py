"""hf-favorpp report and calibrate: the library's numbers, on data in every format."""

import json

import numpy as np
import pytest
import soundfile
import torch
from command_runs import run, run_json
from PIL import Image
from test_media_families import MEDIA_MODELS
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    ViTModel,
)

from hf_favorpp import FavorppConfig, approximation_report, convert_to_favorpp
from hf_favorpp.nn import converted_layers


def test_the_numbers_are_those_of_the_library(converted, texts):
    found = run_json("report", converted, "--data", texts / "a.txt", "--max-samples", 4, "--max-length", 20)
    lines = [line for line in (texts / "a.txt").read_text().splitlines() if line][::3]
    batch = AutoTokenizer.from_pretrained(converted)(
        lines, truncation=True, max_length=20, padding=True, return_tensors="pt"
    )
    model = AutoModelForSequenceClassification.from_pretrained(converted)
    expected = approximation_report(model, batch).to_dict()
    assert found["num_tokens"] == expected["num_tokens"]
    assert found["layer_errors"] == pytest.approx(expected["layer_errors"], rel=1e-4)
    assert found["end_to_end"] == pytest.approx(expected["end_to_end"], rel=1e-3)
    assert found["data"] == {"kind": "texts", "used": 4, "available": 12, "batches": 1}


def test_all_formats_hold_the_same_texts(converted, texts):
    errors = [
        run_json("report", converted, "--data", texts / name, "--max-samples", 3)["layer_errors"]
        for name in ("a.txt", "a.jsonl", "a.csv", "a.tsv", "each")
    ]
    assert all(each == errors[0] for each in errors)


def test_tables_and_figure(converted, texts, tmp_path):
    data = ["--data", texts / "a.txt", "--max-samples", 2]
    shown = run("report", converted, *data, "--plot", tmp_path / "new" / "heads.png").stdout
    assert (tmp_path / "new" / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert "Worst heads" in shown
    assert "relative distance of the logits" in shown
    assert run("report", converted, *data, "--per-head").stdout.count("━━━━━━━━━━ ") == 2 + 4
    assert "--plot must end in" in run("report", converted, *data, "--plot", "x.gif", code=2).stderr


def test_a_limit_decides_the_exit_code(converted, texts):
    data = ["--data", texts / "a.txt", "--max-samples", 2, "--fail-above"]
    worst = max(run_json("report", converted, *data, 1e9)["layer_errors"])
    document = run_json("report", converted, *data, worst / 2, code=4)
    assert document["layer_errors"], "the result is told all the same"
    run("report", converted, *data, worst * 1.01)


def test_a_softmax_model_has_nothing_to_report(bert, texts):
    assert "is not converted" in run("report", bert, "--data", texts / "a.txt", code=1).stderr
    assert "is not converted" in run("calibrate", bert, "x", "--data", texts / "a.txt", code=1).stderr


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("gone.txt", None, 3, "there is no"),
        ("empty.txt", "\n \n", 1, "holds no text"),
        ("a.pdf", "x", 1, "texts are read from .txt"),
        ("a.jsonl", '{"body": "x"}', 1, "must be an object with a string 'text', and has: body"),
        ("a.jsonl", "{", 1, "line 1 is not JSON"),
        ("a.csv", "body\nx", 1, "has no column 'text'; it has: body"),
    ],
)
def test_data_that_cannot_be_read(converted, tmp_path, name, content, code, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    result = run("report", converted, "--data", tmp_path / name, code=code)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_latin_1_is_told(converted, tmp_path):
    (tmp_path / "a.txt").write_bytes("word caf\xe9".encode("latin-1"))
    assert "must be UTF-8" in run("report", converted, "--data", tmp_path / "a.txt", code=1).stderr


def test_calibrate_writes_a_calibrated_model_and_leaves_its_source(converted, texts, tmp_path):
    before = (converted / "model.safetensors").read_bytes()
    (tmp_path / "source").mkdir()
    for path in converted.iterdir():
        (tmp_path / "source" / path.name).write_bytes(path.read_bytes())
    card = (converted / "README.md").read_text() + "\nWords of mine.\n"
    (tmp_path / "source" / "README.md").write_text(card)
    data = ["--data", texts / "a.csv", "--max-samples", 6, "--batch-size", 4]
    document = run_json("calibrate", tmp_path / "source", tmp_path / "out", *data)
    assert document["calibration"] == {"kind": "texts", "used": 6, "available": 12, "batches": 2}
    assert [layer["calibrated"] for layer in document["layers"]] == [True, True]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert all(layer.calibrated and layer.config.preconditioning == "full" for layer in converted_layers(model))
    assert [layer["calibrated"] for layer in run_json("inspect", tmp_path / "out")["layers"]] == [True, True]
    assert (tmp_path / "source" / "model.safetensors").read_bytes() == before
    assert "Words of mine." in (tmp_path / "out" / "README.md").read_text()
    assert "--overwrite" in run("calibrate", converted, tmp_path / "out", *data, code=2).stderr


def test_images(vit, images, tmp_path):
    options = ["--num-features", 4, "--calibration-data", images, "--max-samples", 5, "--batch-size", 2]
    document = run_json("convert", vit, tmp_path / "out", *options)
    assert document["calibration"] == {"kind": "images", "used": 4, "available": 6, "batches": 2}
    assert "broken.png is no readable image" in document["notes"][0]
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    found = run_json("report", tmp_path / "out", "--data", images, "--max-samples", 4)
    assert found["num_tokens"] == 3 * 17
    assert found["data"]["used"] == 3
    model = ViTModel.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.isfinite(model(pixel_values=torch.zeros(1, 3, 32, 32)).last_hidden_state).all()


def test_a_model_of_images_is_given_texts(vit, texts, tmp_path):
    run("convert", vit, tmp_path / "out", "--num-features", 4)
    assert "the model takes .png" in run("report", tmp_path / "out", "--data", texts, code=3).stderr


SOUND = {
    "wav2vec2": ("Wav2Vec2FeatureExtractor", {}),
    "moonshine": ("Wav2Vec2FeatureExtractor", {}),
    "whisper": ("WhisperFeatureExtractor", {"feature_size": 8, "chunk_length": 1, "n_fft": 400, "hop_length": 160}),
    "audio-spectrogram-transformer": ("ASTFeatureExtractor", {"num_mel_bins": 32, "max_length": 44}),
}


@pytest.mark.parametrize("model_type", SOUND)
def test_recordings_are_made_what_the_model_takes(model_type, tmp_path):
    options = {**MEDIA_MODELS[model_type], **({"max_source_positions": 50} if model_type == "whisper" else {})}
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **options))
    model.save_pretrained(tmp_path / "softmax")
    name, settings = SOUND[model_type]
    extractor = {"feature_extractor_type": name, "sampling_rate": 16000, **settings}
    (tmp_path / "softmax" / "preprocessor_config.json").write_text(json.dumps(extractor))
    for index in range(3):
        noise = np.random.default_rng(index).normal(0, 0.1, 4000 + 1000 * index)
        soundfile.write(tmp_path / f"{index}.wav", noise, 16000)
    data = ["--calibration-data", tmp_path]
    run("convert", tmp_path / "softmax", tmp_path / "converted", "--num-features", 8, *data)
    found = run_json("report", tmp_path / "converted", "--data", tmp_path, "--max-samples", 2, "--max-length", 4000)
    assert found["data"] == {"kind": "recordings", "used": 1, "available": 3, "batches": 1}
    assert len(found["layer_errors"]) == 2
    tokens = {"wav2vec2": 399, "moonshine": 9, "whisper": 50, "audio-spectrogram-transformer": 5 * 7 + 2}
    assert found["num_tokens"] == tokens[model_type]  # of one recording


def tensors(folder):
    return AutoModel.from_pretrained(folder).state_dict()


def agree(first, second):
    return first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_images_are_for_the_image_model_of_clip(clip, images, tmp_path):
    data = ["--max-samples", 5, "--batch-size", 8]
    options = ["--num-features", 4, "--calibration-data", images / "class0", *data]
    document = run_json("convert", clip, tmp_path / "once", *options)
    assert document["calibration"] == {"kind": "images", "used": 3, "available": 3, "batches": 1}
    assert [layer["calibrated"] for layer in document["layers"]] == [None, None, True, True]
    run("convert", clip, tmp_path / "plain", "--num-features", 4)
    run("calibrate", tmp_path / "plain", tmp_path / "twice", "--data", images / "class0", *data)
    pictures = [Image.open(path) for path in sorted((images / "class0").iterdir())]
    batch = dict(AutoImageProcessor.from_pretrained(clip)(images=pictures, return_tensors="pt"))
    expected = convert_to_favorpp(
        AutoModel.from_pretrained(clip), FavorppConfig(num_features=4), calibration_data=[batch]
    )
    for name in ("once", "twice"):
        assert agree(tensors(tmp_path / name), expected.state_dict())
    found = run_json("report", tmp_path / "once", "--data", images / "class0")
    assert found["layer_errors"] == pytest.approx(approximation_report(expected, batch).layer_errors, rel=1e-4)
    assert found["num_tokens"] == 3 * 17


def test_texts_are_for_the_text_model_of_siglip(siglip, images, texts, tmp_path):
    run("convert", siglip, tmp_path / "plain", "--num-features", 4)
    document = run_json("calibrate", tmp_path / "plain", tmp_path / "texts", "--data", texts / "a.txt")
    assert [layer["calibrated"] for layer in document["layers"]] == [True, True, False, False]
    assert "calibrated 2 of 4 converted layers; for the others there were no data." in document["notes"]
    document = run_json("calibrate", tmp_path / "texts", tmp_path / "both", "--data", images)
    assert [layer["calibrated"] for layer in document["layers"]] == [True] * 4
    lines = ["the word was what some have", "it is"]
    (tmp_path / "short.txt").write_text("\n".join(lines))
    found = run_json("report", tmp_path / "both", "--data", tmp_path / "short.txt")
    assert {head["name"].split(".")[0] for head in found["heads"]} == {"text_model"}
    assert found["num_tokens"] == 2 * 24
    batch = AutoTokenizer.from_pretrained(siglip)(lines, max_length=24, padding="max_length", return_tensors="pt")
    assert list(batch) == ["input_ids"]
    report = approximation_report(AutoModel.from_pretrained(tmp_path / "both"), batch)
    assert found["layer_errors"] == pytest.approx(report.layer_errors, rel=1e-4)


@pytest.mark.parametrize("command", ["convert", "calibrate", "report"])
def test_clip_is_given_texts(clip, texts, tmp_path, command):
    if command != "convert":
        run("convert", clip, tmp_path / "plain", "--num-features", 4)
    given = {
        "convert": [clip, tmp_path / "out", "--calibration-data"],
        "calibrate": [tmp_path / "plain", tmp_path / "out", "--data"],
        "report": [tmp_path / "plain", "--data"],
    }
    message = run(command, *given[command], texts / "a.txt", code=1).stderr
    assert (
        "CLIPModel is to be given images (.png, .jpg, .jpeg, .webp, .bmp): the text model of CLIP is causal" in message
    )
    assert not (tmp_path / "out").exists()


def test_recordings(wav2vec2, recordings, tmp_path):
    data = ["--data", recordings, "--max-length", 420]
    document = run_json("convert", wav2vec2, tmp_path / "once", "--num-features", 8, "--calibration-data", *data[1:])
    assert document["calibration"] == {"kind": "recordings", "used": 4, "available": 6, "batches": 4}
    assert [note.partition("recordings0/")[2] for note in document["notes"]] == [
        f"{name}.wav is no readable recording of at least 20 samples and is left out." for name in ("broken", "short")
    ]
    assert (tmp_path / "once" / "preprocessor_config.json").is_file()
    run("convert", wav2vec2, tmp_path / "plain", "--num-features", 8)
    run("calibrate", tmp_path / "plain", tmp_path / "twice", *data)
    extractor, batches = AutoFeatureExtractor.from_pretrained(wav2vec2), []
    for path in sorted(recordings.glob("[0-9].*")):
        wave = soundfile.read(path, dtype="float32", always_2d=True)[0].mean(axis=1)[:420]
        batches.append({"input_values": extractor(wave, sampling_rate=16000, return_tensors="pt")["input_values"]})
    model = AutoModel.from_pretrained(wav2vec2)
    convert_to_favorpp(model, FavorppConfig(num_features=8), calibration_data=batches)
    for name in ("once", "twice"):
        assert agree(tensors(tmp_path / name), model.state_dict())
    found = run_json("report", tmp_path / "once", "--data", recordings / "0.wav")
    assert found["layer_errors"] == pytest.approx(approximation_report(model, batches[0]).layer_errors, rel=1e-4)
    assert found["data"] == {"kind": "recordings", "used": 1, "available": 1, "batches": 1}


def test_recordings_that_cannot_be_used(wav2vec2, recordings, texts, tmp_path):
    run("convert", wav2vec2, tmp_path / "plain", "--num-features", 8)
    soundfile.write(tmp_path / "slow.wav", np.zeros(400), 8000)
    for options, code, message in (
        ([tmp_path / "slow.wav"], 1, "slow.wav has 8000 samples a second, the model takes 16000: resample it first."),
        ([recordings / "broken.wav"], 1, "none of the files is a readable recording of at least 20 samples."),
        ([recordings, "--max-length", 19], 2, "--max-length must be at least 20 samples for"),
        ([texts], 3, "the model takes .wav, .flac, and there is none in"),
    ):
        result = run("report", tmp_path / "plain", "--data", *options, code=code)
        assert message in result.stderr.splitlines()[-1]
