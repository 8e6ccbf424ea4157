"""What is evaluated and what calibrates share nothing; far documents differ in one sentence; pixels and waveforms."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import fidelity_media
import numpy as np
import pytest
import torch
from distant_evidence import read_answers, read_paragraphs
from fidelity_arguments import FidelityArguments
from fidelity_far import far_documents
from fidelity_inputs import POOL, FidelityError, split, spread
from fidelity_measures import spearman
from fidelity_media import images, recordings
from fidelity_text import documents, read_pairs, read_texts, sentence_pairs
from glue_data import GlueDataError
from PIL import Image
from tiny_fidelity import RATE, write_data, write_recording, write_vit
from transformers import AutoModel, AutoTokenizer, ViTImageProcessor, Wav2Vec2FeatureExtractor

LENGTH = 96


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def arguments(task, files, **more):
    return FidelityArguments(task=task, **{name: str(path) for name, path in files.items()}, **more)


def test_odd_rows_evaluate_and_even_rows_calibrate_unless_a_part_of_them_evaluates():
    rows = [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h"), ("h", "i"), ("j", "k")]
    evaluation, calibration = split(rows, None, None, None, contents=lambda row: row)
    assert (evaluation, calibration) == ([rows[1], rows[3], rows[5]], [rows[0], rows[2]])
    assert split(rows, None, 2, 1, contents=lambda row: row) == ([rows[1], rows[3]], [rows[0]])
    assert split([1, 2, 3], [3, 4], None, None) == ([1, 2, 3], [4])
    with pytest.raises(FidelityError, match="nothing to calibrate on: of 2 rows of --data_file and 1 of"):
        split([1, 2], [2], None, None)
    with pytest.raises(FidelityError, match="nothing to evaluate on"):
        split([1], None, None, None)


def test_samples_are_spread_over_the_file():
    assert spread(range(10), 4) == [0, 2, 5, 7]
    assert spread(range(3), 4) == spread(range(3), None) == [0, 1, 2]


def test_sentence_pairs_stay_together_with_their_scores(data, tiny_bert):
    inputs = sentence_pairs(arguments("sts", data["sts"], max_samples=8, batch_size=3), str(tiny_bert), None)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    scores = {(one, two): gold for one, two, gold in read_pairs(data["sts"]["data_file"])[1::2]}
    ids = [row[mask.bool()] for b in inputs.evaluation for row, mask in zip(b["input_ids"], b[POOL], strict=True)]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert len(texts) == 16
    for one, two, gold in zip(texts[0::2], texts[1::2], inputs.gold, strict=True):
        assert scores[one, two] == pytest.approx(float(gold))
    calibration = {text for b in inputs.calibration for text in tokenizer.batch_decode(b["input_ids"], True)}
    assert not calibration & {sentence for pair in scores for sentence in pair}
    assert all(POOL not in batch for batch in inputs.calibration)


def test_spearman_ranks_cosines():
    embeddings = torch.tensor([[1.0, 0], [1, 1], [1, 0], [5, 0], [1, 0], [0, 1]])
    assert spearman(embeddings, torch.tensor([2.0, 3.0, 1.0])) == pytest.approx(1)
    assert np.isnan(spearman(embeddings * torch.nan, torch.tensor([2.0, 3.0, 1.0])))


def test_documents_are_lines_with_a_text(data, tiny_bert, tmp_path):
    inputs = documents(arguments("text", data["text"], max_length=24), str(tiny_bert), None)
    assert [b["input_ids"].shape for b in inputs.evaluation] == [(6, 24)]
    assert len(read_texts(data["text"]["data_file"])) == 6
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n\n{"label": 1}\n')
    with pytest.raises(GlueDataError, match=r"bad\.jsonl, line 3 must be"):
        read_texts(tmp_path / "bad.jsonl")
    with pytest.raises(FidelityError, match="at least 3"):
        documents(arguments("text", data["text"], max_samples=2), str(tiny_bert), None)
    with pytest.raises(FidelityError, match=r"--data_file: .*missing does not exist"):
        documents(arguments("text", {"data_file": "missing"}), str(tiny_bert), None)


def test_far_documents_differ_in_the_sentence_alone(data, tiny_bert):
    args = arguments("far", data["far"], max_length=LENGTH, max_samples=5, calibration_samples=3, batch_size=2)
    inputs = far_documents(args, str(tiny_bert), None)
    batches = list(inputs.evaluation)
    assert [len(b["input_ids"]) for b in batches] == [2, 2, 1, 2, 2, 1]
    own, others = (torch.cat([b["input_ids"] for b in half]) for half in (batches[:3], batches[3:]))
    pools = torch.cat([b[POOL] for b in batches])
    assert torch.equal(*pools.chunk(2))
    assert own.shape == (5, LENGTH)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    answers = read_answers(data["far"]["data_file"])
    flat = [text for pair in read_answers(data["far"]["data_file"]) for text in pair]
    cut = tokenizer(flat, add_special_tokens=False, truncation=True, max_length=LENGTH // 8)["input_ids"]
    answers = [tuple(pair) for pair in zip(cut[0::2], cut[1::2], strict=True)]
    for a, b, pool in zip(own, others, pools, strict=False):
        places = (a != b).nonzero().flatten()
        assert len(places) > 0
        assert places.min() >= LENGTH // 2
        assert places.max() < LENGTH // 2 + LENGTH // 8
        assert a[0] == tokenizer.cls_token_id
        assert a[-1] == tokenizer.sep_token_id
        shared = [s for q, s in answers if q == a[pool.bool()].tolist()]
        found = a[LENGTH // 2 : places.max() + 1].tolist()
        assert any(sentence[: len(found)] == found for sentence in shared), "the question's own sentence"
    calibrating = torch.cat([b["input_ids"] for b in inputs.calibration])
    halves = read_paragraphs(data["far"]["filler_file"])
    seen = {tokenizer.decode(row[40:44]) for row in calibrating}
    assert all(len(words.split()) == 4 for words in seen)
    second = " ".join(halves[len(halves) // 2 :])
    assert sum(words in second for words in seen) >= 2  # those that do not straddle two paragraphs


def test_far_needs_enough_filler_and_another_sentence(data, tiny_bert, tmp_path):
    (tmp_path / "short.txt").write_text("\n\n".join(["the film was quite warm and bright again. " * 6] * 4))
    files = {**data["far"], "filler_file": tmp_path / "short.txt"}
    with pytest.raises(FidelityError, match=r"tokens, 6 documents of 96 need 576\. Lower"):
        far_documents(arguments("far", files, max_length=LENGTH, max_samples=6), str(tiny_bert), None)
    with pytest.raises(FidelityError, match="another question"):
        far_documents(arguments("far", data["far"], max_length=LENGTH, max_samples=1), str(tiny_bert), None)


def test_images_are_cut_and_normalised_as_by_the_checkpoints_processor_or_as_for_imagenet(data, tmp_path, capsys):
    folder = write_vit(tmp_path / "vit")
    model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16)
    inputs = images(arguments("image", data["image"], max_samples=4), str(folder), model)
    assert "no image processor" in capsys.readouterr().out
    (batch,) = inputs.evaluation
    assert (batch["pixel_values"].shape, batch["pixel_values"].dtype) == ((4, 3, 32, 32), torch.bfloat16)
    Image.new("RGB", (64, 48), (255, 0, 128)).save(tmp_path / "plain.png")
    pixels = fidelity_media._prepare_image(tmp_path / "plain.png", (32, 32), torch.float32)["pixel_values"]
    expected = (torch.tensor([1, 0, 128 / 255]) - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([
        0.229,
        0.224,
        0.225,
    ])
    torch.testing.assert_close(pixels, expected[:, None, None].expand(3, 32, 32))
    processor = ViTImageProcessor(size={"height": 24, "width": 24}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor.save_pretrained(folder)
    (batch,) = images(arguments("image", data["image"], max_samples=4), str(folder), model).evaluation
    assert batch["pixel_values"].shape == (4, 3, 24, 24)


def test_recordings_are_read_one_by_one_at_the_rate_of_the_model(tmp_path, monkeypatch, capsys):
    for index, channels in enumerate((1, 2, 1, 1)):
        write_recording(tmp_path / "speech" / f"{index}.wav", 500 + index, channels=channels)
    model, args = SimpleNamespace(dtype=torch.float32), arguments("audio", {"data_file": tmp_path / "speech"})
    shapes = [b["input_values"].shape for b in recordings(args, str(tmp_path), model).evaluation]
    assert shapes == [(1, 501), (1, 503)]
    assert f"{RATE} Hz" in capsys.readouterr().out
    args.max_length = 400
    batch = next(iter(recordings(args, str(tmp_path), model).evaluation))
    assert batch["input_values"].shape == (1, 400)
    assert batch["input_values"].mean().abs() < 1e-4
    assert batch["input_values"].std() == pytest.approx(1, rel=0.01)
    Wav2Vec2FeatureExtractor(sampling_rate=8000).save_pretrained(tmp_path)
    batch = next(
        iter(recordings(arguments("audio", {"data_file": tmp_path / "speech"}), str(tmp_path), model).evaluation)
    )
    assert batch["input_values"].shape == (1, 251), "resampled"
    (tmp_path / "speech" / "1.wav").write_bytes(b"no recording")
    with pytest.raises(FidelityError, match=r"1\.wav: .*"):
        next(iter(recordings(args, str(tmp_path), model).evaluation))
    monkeypatch.setitem(sys.modules, "speech_audio", None)
    with pytest.raises(FidelityError, match="packages soundfile and soxr"):
        recordings(args, str(tmp_path), model)
    with pytest.raises(FidelityError, match=r"there is no \.wav, \.flac file below"):
        fidelity_media.find_files(tmp_path / "nothing", (".wav", ".flac"))


def test_recordings_are_joined_into_ones_of_equal_length(tmp_path):
    for index in range(9):
        write_recording(tmp_path / "speech" / f"{index}.wav", 300 + index)
    model, seconds = SimpleNamespace(dtype=torch.float32), 600 / RATE
    args = arguments("audio", {"data_file": tmp_path / "speech"}, joined_seconds=seconds)
    inputs = recordings(args, str(tmp_path), model)
    batches = [*inputs.evaluation, *inputs.calibration]
    assert [batch["input_values"].shape for batch in batches] == [(1, 600)] * 4
    pieces = [piece for part in (inputs.evaluation, inputs.calibration) for piece in part.dataset.paths]
    files = [path for piece in pieces for path in piece]
    assert len(files) == len(set(files)) == 8
    assert any(abs(int(one.stem) - int(other.stem)) != 1 for one, other in pieces), "neighbours are often alike"
