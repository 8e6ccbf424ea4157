"""speech.py from end to end on tiny models: resumed, on two ranks, uptrained from its twin, scored by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jiwer
import pytest
import soundfile
import speech
import stages
import torch
from accelerate import Accelerator
from length_grouping import LengthGroupedSampler
from safetensors.torch import load_file
from skipped_files import MediaDataError
from speech_audio import IGNORED
from speech_model import make_tokenizer
from tiny_speech import CERTAIN, RATE, save_encoder, text_of
from torch.utils.data import DataLoader
from transformers import AutoModelForCTC, Wav2Vec2Model, pipeline

RANDOM = ("--config_overrides", "{mask_time_prob: 0.3, layerdrop: 0.3}", "--redraw_every", "2")


def arguments(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    """Return a short run's command line: 24 recordings in micro-batches of 4 make 6 a pass, 6 optimizer steps of 2."""
    words = {
        "model_name_or_path": model,
        "data_dir": data,
        "output_dir": output,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "num_features": 8,
        "num_workers": 0,
    }
    return [word for name, value in words.items() for word in (f"--{name}", str(value))] + list(more)


def assert_same_end(one: Path, other: Path) -> None:
    """Compare what must not depend on interruptions: metrics and losses of all epochs, and weights, all exact."""
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (one, other))
    for key in ("metrics", "history", "train_frames", "completed_steps"):
        assert first[key] == second[key], key
    weights, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(
    ("streaming", "more"),
    [(False, (*RANDOM, "--group_by_length")), (True, ("--shuffle_buffer", "8", "--vocabulary", "ABC"))],
    ids=["indexed", "streamed"],
)
def test_a_run_resumed_from_any_checkpoint_ends_the_same(
    streaming, more, tiny_speech, librispeech, hub_speech, tmp_path
):
    whole = tmp_path / "whole"
    if streaming:
        more += ("--data_dir", "", "--dataset_name", str(hub_speech), "--streaming")
    more += ("--checkpointing_steps", "1")
    results = speech.main(arguments(tiny_speech, librispeech, whole, *more))
    assert len({entry["train_loss"] for entry in results["history"]}) == 2
    for step in ("2", "4"):
        again = tmp_path / step
        shutil.copytree(whole / f"step_{step}", again / f"step_{step}")
        resumed = ("--resume_from_checkpoint", "latest", "--num_workers", "0" if streaming else "1")
        speech.main(arguments(tiny_speech, librispeech, again, *more, *resumed))
        assert_same_end(whole, again)


def broken(librispeech: Path, folder: Path) -> Path:
    """Return a copy of the recordings with one to train on cut short, and one to evaluate on that is none."""
    shutil.copytree(librispeech, folder)
    cut = folder / "train/84/7/84-7-0003.flac"
    cut.write_bytes(cut.read_bytes()[:300])
    (folder / "validation/19/7/19-7-0100.flac").write_bytes(b"no recording")
    return folder


@pytest.mark.slow  # glue.py shares the loop, and its test is among the fast ones
def test_two_ranks_train_and_evaluate_like_one_with_twice_the_batch(librispeech, tmp_path, child_environment):
    model = save_encoder(tmp_path / "model", **CERTAIN)
    folder = broken(librispeech, tmp_path / "data")
    more = ("--num_threads", "1", "--evaluate_first")
    one, two = tmp_path / "one", tmp_path / "two"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [speech.__file__, *arguments(model, folder, two, *more)]
    child = subprocess.run(command, env=child_environment, capture_output=True, text=True, check=False, timeout=600)
    assert child.returncode == 0, child.stderr[-3000:]
    speech.main(arguments(model, folder, one, *more, "--per_device_train_batch_size", "8"))
    single, double = (json.loads((path / "results.json").read_text()) for path in (one, two))
    assert child.stdout.count("training frames / s") == 1  # only one rank reports
    for key in ("metrics", "initial_metrics"):  # 9 recordings: the ranks share them unevenly
        assert double[key] == pytest.approx(single[key], abs=1e-9)
    assert double["skipped_files"] == single["skipped_files"]
    assert double["skipped_files"]["count"] == 2
    assert double["train_frames"] == single["train_frames"]
    losses = [[entry["train_loss"] for entry in each["history"]] for each in (single, double)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    weights, others = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-3, atol=5e-4, msg=name)


def test_files_that_are_no_recordings_are_named_or_end_the_run(tiny_speech, librispeech, tmp_path, capfd):
    folder = broken(librispeech, tmp_path / "data")
    argv = arguments(tiny_speech, folder, tmp_path / "out", "--attention", "softmax", "--num_train_epochs", "1")
    results = speech.main(argv)
    names = [str(folder / "train/84/7/84-7-0003.flac"), str(folder / "validation/19/7/19-7-0100.flac")]
    assert results["skipped_files"] == {"count": 2, "names": names}
    assert "skipped 2 files that are no readable recordings" in capfd.readouterr().out
    clean = arguments(tiny_speech, librispeech, tmp_path / "out", "--attention", "softmax", "--max_train_steps", "1")
    assert speech.main(clean)["skipped_files"]["count"] == 0, "a new run begins with an empty list"
    with pytest.raises(MediaDataError, match=r"is not a readable recording"):
        speech.main([*argv, "--output_dir", str(tmp_path / "strict"), "--strict"])


def test_the_twin_is_converted_and_trained_on(tiny_speech, librispeech, tmp_path, capfd):
    argv = arguments(tiny_speech, librispeech, tmp_path, "--twin", "--uptrain", "--evaluate_first", "--weight_decay")
    argv += ["0", "--uptrain_epochs", "1", "--uptrain_learning_rate", "1e-12", "--statistics", "calibrated"]
    results = speech.main([*argv, "--calibration_samples", "8", "--num_features", "64"])
    twin = load_file(tmp_path / "softmax" / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    for name, tensor in twin.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert results["initial_metrics"] == results["metrics"]
    assert (results["completed_steps"], results["arguments"]["learning_rate"]) == (3, 1e-12)
    assert results["softmax_metrics"] == json.loads((tmp_path / "softmax/results.json").read_text())["metrics"]
    assert results["favorpp"]["statistics"] == "calibrated"
    assert "wer x 100, before training" in capfd.readouterr().out


STAGES = ("--transfer_steps", "10", "--distil_steps", "20", "--kd_weight", "0.5", "--evaluate_first")


def test_transfer_distillation_and_task_in_one_command(tiny_speech, librispeech, tmp_path, monkeypatch):
    models, moved = {}, {}
    build, transfer = speech.build_model, stages.transfer_attention

    def build_and_keep(args, tokenizer):
        models[args.attention] = build(args, tokenizer)
        return models[args.attention]

    def transfer_and_compare(model, *args, **options):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        transfer(model, *args, **options)
        moved.update((name, not torch.equal(before[name], tensor)) for name, tensor in model.named_parameters())

    monkeypatch.setattr(speech, "build_model", build_and_keep)
    monkeypatch.setattr(stages, "transfer_attention", transfer_and_compare)
    argv = arguments(tiny_speech, librispeech, tmp_path, "--twin", "--uptrain", *STAGES, *RANDOM[:2])
    results = speech.main([*argv, "--distil_learning_rate", "1e-3"])
    written = json.loads((tmp_path / "results.json").read_text())
    assert {"initial_metrics", "transfer", "distil", "metrics", "softmax_metrics"} <= set(written)
    assert [results[stage]["steps"] for stage in ("transfer", "distil")] == [10, 20]
    assert [set(results[stage]["metrics"]) for stage in ("transfer", "distil")] == [{"wer", "cer"}] * 2
    assert {step: len(layers) for step, layers in results["transfer"]["layer_losses"].items()} == {"10": 2}
    assert set(results["distil"]["losses"]) == {"10", "20"}
    assert min(results["distil"]["losses"].values()) > 0
    features = {name for name in moved if ".favorpp." in name}
    assert {name for name, changed in moved.items() if changed} == features != set()
    teacher = AutoModelForCTC.from_pretrained(tmp_path / "softmax").state_dict()
    assert all(torch.equal(tensor, teacher[name]) for name, tensor in models["softmax"].state_dict().items())


def test_the_saved_folder_is_all_that_a_pipeline_needs(tiny_speech, librispeech, tmp_path):
    untrained = ("--max_train_steps", "1", "--learning_rate", "1e-9")  # says something else of each recording
    results = speech.main(arguments(tiny_speech, librispeech, tmp_path, *untrained))
    model = AutoModelForCTC.from_pretrained(tmp_path)
    assert model.config._attn_implementation == "favorpp"
    transcribe = pipeline("automatic-speech-recognition", model=str(tmp_path))
    paths = sorted((librispeech / "validation").rglob("*.flac"))
    heard = [transcribe({"raw": soundfile.read(path)[0], "sampling_rate": RATE})["text"] for path in paths]
    references = [text_of(int(path.stem[-4:])) for path in paths]
    assert len(set(heard)) > 1
    assert results["metrics"]["wer"] == pytest.approx(jiwer.wer(references, heard))
    assert results["metrics"]["cer"] == pytest.approx(jiwer.cer(references, heard))


class Recogniser(torch.nn.Module):
    """Answers with the frames that it was given, and takes three samples to a frame."""

    main_input_name = "input_values"

    def forward(self, input_values, attention_mask):
        frames = input_values[:, ::3].long().clamp(min=0)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(frames, 6).float())

    def _get_feat_extract_output_lengths(self, lengths):
        return lengths // 3


def test_error_rates_by_hand():
    tokenizer = make_tokenizer(set("ABC"))  # blank 0, unknown 1, | 2, A 3, B 4, C 5
    frames = [  # what is heard, and how many frames are real
        ([3, 3, 0, 3, 2, 4, 0, 0], 8),  # AA B
        ([5, 0, 2, 4, 4, 4, 3, 3], 4),  # C B: what comes after is padding
        ([4, 4, 4, 4, 4, 4, 4, 4], 8),  # a recording that could not be read
    ]
    values = torch.tensor([heard for heard, _ in frames]).repeat_interleave(3, dim=1).float()
    mask = torch.stack([torch.arange(24) < 3 * real for _, real in frames]).long()
    labels = torch.full((3, 5), IGNORED)
    labels[0, :4] = torch.tensor([3, 3, 2, 4])  # AA B
    labels[1] = torch.tensor([5, 5, 2, 4, 3])  # CC BA
    batch = {"input_values": values, "attention_mask": mask, "labels": labels}
    processor = SimpleNamespace(tokenizer=tokenizer)
    loader = DataLoader([{name: tensor[row] for name, tensor in batch.items()} for row in range(3)], batch_size=3)
    accelerator = Accelerator(cpu=True)
    metrics = speech.make_evaluate(accelerator, accelerator.prepare(loader), Recogniser(), processor)(Recogniser())
    assert metrics == {"wer": 2 / 4, "cer": 2 / 9}  # two words wrong of four; two of nine characters missing
    assert speech.real_frames(Recogniser(), batch).tolist() == [8, 4, 8]
    del batch["attention_mask"]
    assert speech.real_frames(Recogniser(), batch).tolist() == [8, 8, 8]


class TrainingBeginsError(Exception):
    """Ends a run where its training would begin."""


def capture(monkeypatch, argv):
    """Return what speech.py hands to the training loop."""
    found = {}

    def train(accelerator, model, optimizer, loader, evaluate, settings, **more):
        found.update(accelerator=accelerator, model=model, optimizer=optimizer, loader=loader, evaluate=evaluate)
        found.update(settings=settings, **more)
        raise TrainingBeginsError

    monkeypatch.setattr(speech, "train", train)
    with pytest.raises(TrainingBeginsError):
        speech.main(argv)
    return found


def test_options_arrive(tiny_speech, librispeech, tmp_path, monkeypatch):
    more = ("--freeze_feature_encoder", "--group_by_length", "--weight_decay", "0.1", "--eval_steps", "3")
    overrides = ("--config_overrides", "{mask_time_prob: 0.4, conv_stride: [5, 2, 2], ctc_zero_infinity: false}")
    found = capture(monkeypatch, arguments(tiny_speech, librispeech, tmp_path, *more, *overrides))
    model = found["model"]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "feature_extractor" in name}
    held = {parameter for group in found["optimizer"].param_groups for parameter in group["params"]}
    assert held == {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert {group["weight_decay"] for group in found["optimizer"].param_groups} == {0.1, 0.0}
    assert isinstance(found["loader"].sampler, LengthGroupedSampler)
    assert found["settings"].evaluate_every == 3
    config = model.config
    assert (config.mask_time_prob, config.conv_stride, config.ctc_zero_infinity) == (0.4, [5, 2, 2], False)
    assert (config.ctc_loss_reduction, config.vocab_size, config.pad_token_id) == ("mean", 6, 0)
    batch = next(iter(found["loader"]))
    assert found["count_tokens"](batch) == speech.real_frames(model, batch).sum()
    assert found["accelerator"].ddp_handler.find_unused_parameters


@pytest.mark.parametrize(("share", "labels_matter"), [("1", False), ("0.5", True)])
def test_the_share_of_the_teacher_takes_that_of_the_labels(
    share, labels_matter, tiny_speech, librispeech, tmp_path, monkeypatch
):
    one = arguments(tiny_speech, librispeech, tmp_path / "one", "--attention", "softmax", "--vocabulary", "CBA")
    speech.main([*one, "--max_train_steps", "1"])
    argv = arguments(tiny_speech, librispeech, tmp_path / "two", "--teacher", str(tmp_path / "one"), "--kd_weight")
    found = capture(monkeypatch, [*argv, share, "--attention", "softmax"])
    model, batch = found["model"].eval(), next(iter(found["loader"]))
    others = batch["labels"].flip(0)
    losses = [found["compute_loss"](model, {**batch, "labels": each}).item() for each in (batch["labels"], others)]
    assert (losses[0] != pytest.approx(losses[1], abs=1e-6)) == labels_matter
    assert (losses == pytest.approx([0, 0], abs=1e-6)) != labels_matter, "the student is its teacher"
    with torch.no_grad():
        model.lm_head.bias[0] += 1
    assert found["compute_loss"](model, batch).item() > 0.01


def test_a_teacher_brings_its_characters(tiny_speech, librispeech, tmp_path, monkeypatch):
    one = arguments(tiny_speech, librispeech, tmp_path / "one", "--attention", "softmax", "--vocabulary", "ABCZ")
    speech.main([*one, "--max_train_steps", "1"])
    argv = arguments(tiny_speech, librispeech, tmp_path / "two", "--teacher", str(tmp_path / "one"))
    model = capture(monkeypatch, argv)["model"]
    assert torch.equal(model.lm_head.weight, load_file(tmp_path / "one/model.safetensors")["lm_head.weight"])


def test_spans_of_time_are_masked_in_training_alone(tiny_speech, librispeech, tmp_path, monkeypatch):
    masked = {True: [], False: []}
    mask = Wav2Vec2Model._mask_hidden_states

    def mask_and_tell(self, hidden_states, *args, **kwargs):
        before = hidden_states.detach().clone()
        after = mask(self, hidden_states, *args, **kwargs)
        masked[self.training].append((before != after).any(-1).float().mean().item())
        return after

    monkeypatch.setattr(Wav2Vec2Model, "_mask_hidden_states", mask_and_tell)
    more = ("--attention", "softmax", "--config_overrides", "{mask_time_prob: 0.4}", "--num_train_epochs", "1")
    speech.main(arguments(tiny_speech, librispeech, tmp_path, *more))
    assert min(masked[True]) > 0.1
    assert max(masked[False]) == 0


def test_the_tokenizer_of_a_checkpoint_is_kept(tiny_speech, librispeech, tmp_path, monkeypatch):
    argv = arguments(tiny_speech, librispeech, tmp_path / "one", "--vocabulary", "CBAZ", "--max_train_steps", "1")
    speech.main([*argv, "--attention", "softmax"])
    own = tmp_path / "one"
    model = capture(monkeypatch, arguments(own, librispeech, tmp_path / "two"))["model"]
    assert model.config.vocab_size == 7
    assert torch.equal(model.lm_head.weight, load_file(own / "model.safetensors")["lm_head.weight"])
    more = ("--vocabulary", "ABC", "--ignore_mismatched_sizes")
    assert capture(monkeypatch, arguments(own, librispeech, tmp_path / "three", *more))["model"].config.vocab_size == 6
