"""imagenet.py from end to end on tiny models: resumed, on two ranks, averaged, uptrained from its twin."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import evaluate
import imagenet
import pytest
import stages
import torch
from imagenet_images import CentreView
from imagenet_model import Normalisation
from PIL import Image
from safetensors.torch import load_file
from skipped_files import MediaDataError
from tiny_images import CLASSES, photo
from transformers import AutoModelForImageClassification, pipeline

PAPER = ("--randaugment_magnitude", "9", "--randaugment_std", "0.5", "--mixup", "0.8", "--cutmix", "1.0")
PAPER += ("--label_smoothing", "0.1", "--drop_path", "0.2", "--layer_decay", "0.65", "--ema_decay", "0.9")


def arguments(model: Path, photos: Path, output: Path, *more: str) -> list[str]:
    """Return a short run's command line: 24 images in micro-batches of 4 make 6 a pass, 6 optimizer steps of 2."""
    words = {
        "model_name_or_path": model,
        "train_dir": photos / "train",
        "validation_dir": photos / "validation",
        "output_dir": output,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 3e-3,
        "num_features": 8,
        "num_workers": 0,
        "measure_throughput": "false",
    }
    return [word for name, value in words.items() for word in (f"--{name}", str(value))] + list(more)


def assert_same_end(one: Path, other: Path) -> None:
    """Compare what must not depend on interruptions: metrics and losses of all epochs, and weights, all exact."""
    first, second = (json.loads((folder / "results.json").read_text()) for folder in (one, other))
    for key in ("metrics", "history", "train_images", "completed_steps"):
        assert first[key] == second[key], key
    weights, others = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(
    ("streaming", "more"),
    [(False, (*PAPER, "--redraw_every", "2")), (True, ("--shuffle_buffer", "8"))],
    ids=["indexed", "streamed"],
)
def test_a_run_resumed_from_any_checkpoint_ends_the_same(streaming, more, tiny_vision, photos, hub_photos, tmp_path):
    whole = tmp_path / "whole"
    if streaming:
        more += ("--train_dir", "", "--validation_dir", "", "--dataset_name", str(hub_photos), "--streaming")
    more += ("--checkpointing_steps", "1")
    results = imagenet.main(arguments(tiny_vision["vit"], photos, whole, *more))
    assert len({entry["train_loss"] for entry in results["history"]}) == 2
    for step in ("2", "4"):
        again = tmp_path / step
        shutil.copytree(whole / f"step_{step}", again / f"step_{step}")
        resumed = ("--resume_from_checkpoint", "latest", "--num_workers", "0" if streaming else "1")
        imagenet.main(arguments(tiny_vision["vit"], photos, again, *more, *resumed))
        assert_same_end(whole, again)


def test_the_average_is_scored_and_saved(tiny_vision, photos, tmp_path):
    argv = arguments(tiny_vision["vit"], photos, tmp_path / "ema", "--ema_decay", "0.5", "--attention", "softmax")
    results = imagenet.main([*argv, "--seed", "1"])
    assert results["saved"] == "ema"
    assert set(results["metrics"]) == {"top1", "top5", "ema_top1", "ema_top5"}
    argv = arguments(tiny_vision["vit"], photos, tmp_path / "last", "--attention", "softmax")
    last = imagenet.main([*argv, "--seed", "1"])
    assert {name: results["metrics"][name] for name in last["metrics"]} == last["metrics"]
    averaged, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("ema", "last"))
    distance = {name: (tensor - plain[name]).abs().max().item() for name, tensor in averaged.items()}
    assert all(0 < value < 1e-2 for value in distance.values()), distance


def test_the_twin_is_converted_and_trained_on(tiny_vision, photos, tmp_path, capfd):
    argv = arguments(tiny_vision["vit"], photos, tmp_path, "--twin", "--uptrain", "--evaluate_first")
    argv += ["--uptrain_epochs", "1", "--uptrain_learning_rate", "1e-12", "--num_features", "256"]
    results = imagenet.main([*argv, "--weight_decay", "0"])
    twin = load_file(tmp_path / "softmax" / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    for name, tensor in twin.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-6, msg=name)
    assert results["initial_metrics"] == results["metrics"]
    assert (results["completed_steps"], results["arguments"]["learning_rate"]) == (3, 1e-12)
    assert results["softmax_metrics"] == json.loads((tmp_path / "softmax/results.json").read_text())["metrics"]
    assert "top1 x 100, before training" in capfd.readouterr().out
    written = (tmp_path / "softmax/results.json").stat().st_mtime_ns
    again = imagenet.main([*argv, "--weight_decay", "0", "--resume_from_checkpoint", "latest"])
    assert (tmp_path / "softmax/results.json").stat().st_mtime_ns == written, "a finished twin does not run again"
    assert again["history"] == results["history"]


STAGES = ("--transfer_steps", "10", "--distil_steps", "20", "--kd_weight", "0.5", "--statistics", "calibrated")


def stage_run(monkeypatch, argv):
    """Run imagenet.py; return its results, its models by attention, and which parameters the transfer changed."""
    models, moved = {}, {}
    build, transfer = imagenet.build_model, stages.transfer_attention

    def build_and_keep(args, label_names):
        models[args.attention] = build(args, label_names)
        return models[args.attention]

    def transfer_and_compare(model, *args, **options):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        transfer(model, *args, **options)
        moved.update((name, not torch.equal(before[name], tensor)) for name, tensor in model.named_parameters())

    monkeypatch.setattr(imagenet, "build_model", build_and_keep)
    monkeypatch.setattr(stages, "transfer_attention", transfer_and_compare)
    return imagenet.main(argv), models, moved


def test_transfer_distillation_and_task_in_one_command(tiny_vision, photos, tmp_path, monkeypatch):
    more = (*STAGES, *PAPER, "--teacher", str(tiny_vision["classifier"]), "--evaluate_first")
    results, models, moved = stage_run(monkeypatch, arguments(tiny_vision["vit"], photos, tmp_path, *more))
    assert {"initial_metrics", "transfer", "distil", "metrics"} <= set(
        json.loads((tmp_path / "results.json").read_text())
    )
    assert [results[stage]["steps"] for stage in ("transfer", "distil")] == [10, 20]
    assert [set(results[stage]["metrics"]) for stage in ("transfer", "distil")] == [{"top1", "top5"}] * 2
    assert {step: len(layers) for step, layers in results["transfer"]["layer_losses"].items()} == {"10": 2}
    losses = results["distil"]["losses"]
    assert set(losses) == {"10", "20"}
    assert 0 < losses["20"] < losses["10"]
    features = {name for name in moved if ".favorpp." in name}
    assert {name for name, changed in moved.items() if changed} == features != set()
    teacher = AutoModelForImageClassification.from_pretrained(tiny_vision["classifier"]).state_dict()
    assert all(torch.equal(tensor, teacher[name]) for name, tensor in models["softmax"].state_dict().items())
    assert (results["saved"], results["completed_steps"]) == ("ema", 6)
    averaged = dict(AutoModelForImageClassification.from_pretrained(tmp_path).named_parameters())
    distance = {name: (tensor - averaged[name]).abs().max() for name, tensor in models["favor++"].named_parameters()}
    assert max(distance.values()) < 0.05, "the average begins with what the stages made"


def test_a_linear_probe_leaves_the_model_as_it_was(tiny_vision, photos, tmp_path):
    imagenet.main(arguments(tiny_vision["vit"], photos, tmp_path, "--linear_probe", "--statistics", "calibrated"))
    before, after = load_file(tiny_vision["vit"] / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    for name, tensor in before.items():
        assert torch.equal(after[f"vit.{name}"], tensor), name
    assert any(name.endswith("favorpp.omega") for name in after)


def broken(photos: Path, folder: Path) -> Path:
    """Return a copy of the images with one to train on overwritten, and one more to evaluate on that is none."""
    shutil.copytree(photos, folder)
    for name in ("train/bee/3.png", "validation/ant/text.jpg"):
        (folder / name).write_bytes(b"no image")
    return folder


def test_files_that_are_no_images_are_named_or_end_the_run(tiny_vision, photos, tmp_path, capfd):
    folder = broken(photos, tmp_path / "photos")
    argv = arguments(tiny_vision["vit"], folder, tmp_path / "out", "--max_train_steps", "4", "--attention", "softmax")
    results = imagenet.main(argv)
    names = [str(folder / "train/bee/3.png"), str(folder / "validation/ant/text.jpg")]
    assert results["skipped_files"] == {"count": 2, "names": names}
    assert "skipped 2 files that are no readable images" in capfd.readouterr().out
    clean = imagenet.main(arguments(tiny_vision["vit"], photos, tmp_path / "out", "--max_train_steps", "1"))
    assert clean["skipped_files"]["count"] == 0, "a new run begins with an empty list"
    with pytest.raises(MediaDataError, match=r"bee/3\.png is not a readable image"):
        imagenet.main([*argv, "--output_dir", str(tmp_path / "strict"), "--strict"])


@pytest.mark.slow  # glue.py shares the loop, and its test is among the fast ones
def test_two_ranks_train_and_evaluate_like_one_with_twice_the_batch(tiny_vision, photos, tmp_path, child_environment):
    folder = broken(photos, tmp_path / "photos")
    more = ("--num_threads", "1", "--measure_throughput", "true", "--randaugment_magnitude", "5")
    one, two = tmp_path / "one", tmp_path / "two"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [imagenet.__file__, *arguments(tiny_vision["vit"], folder, two, *more)]
    child = subprocess.run(command, env=child_environment, capture_output=True, text=True, check=False, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
    imagenet.main(arguments(tiny_vision["vit"], folder, one, *more, "--per_device_train_batch_size", "8"))
    single, double = (json.loads((path / "results.json").read_text()) for path in (one, two))
    assert child.stdout.count("training images / s") == 1  # only one rank reports
    assert double["metrics"] == single["metrics"]  # 13 images: the ranks share them unevenly
    assert double["skipped_files"] == single["skipped_files"]
    assert double["skipped_files"]["count"] == 2
    losses = [[entry["train_loss"] for entry in each["history"]] for each in (single, double)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    weights, others = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-3, atol=5e-4, msg=name)


def evaluation_inputs(photos: Path) -> list[torch.Tensor]:
    """Return what a model of 24 pixels takes of each image to evaluate on, in order."""
    view, normalise = CentreView(24), Normalisation()
    images = [Image.open(path).convert("RGB") for path in sorted((photos / "validation").rglob("*.png"))]
    return [normalise(view(image, (0, 0))[None]) for image in images]


def test_the_saved_folder_is_all_that_a_pipeline_needs(tiny_vision, photos, tmp_path):
    more = ("--learning_rate", "1e-2", "--image_size", "24")
    results = imagenet.main(arguments(tiny_vision["vit"], photos, tmp_path, *more))
    model = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert (model.config._attn_implementation, model.config.image_size) == ("favorpp", 24)
    answers = [model(pixels).logits[0].argsort(descending=True) for pixels in evaluation_inputs(photos)]
    labels = [label for label in range(6) for _ in range(2)]
    places = [answer.tolist().index(label) for answer, label in zip(answers, labels, strict=True)]
    top1, top5 = (sum(place < k for place in places) / 12 for k in (1, 5))
    assert results["metrics"] == pytest.approx({"top1": top1, "top5": top5})
    assert len({answer[0].item() for answer in answers}) > 1
    found = pipeline("image-classification", model=str(tmp_path))(photo(1, 0), top_k=6)
    assert {each["label"] for each in found} == set(CLASSES)


def test_top_1_and_top_5_count_places():
    metric = evaluate.load(str(imagenet.METRICS_MODULE), keep_in_memory=True)
    likeliest = [[3, 1, 0, 2, 4], [0, 1, 2, 3, 5], [5, 4, 3, 2, 1], [1, 0, 2, 3, 4]]
    assert metric.compute(predictions=likeliest, references=[3, 4, 1, 1]) == {"top1": 0.5, "top5": 0.75}
    assert metric.compute(predictions=[[1, 0], [0, 1]], references=[0, 0]) == {"top1": 0.5}


class TrainingBeginsError(Exception):
    """Ends a run where its training would begin."""


def capture(monkeypatch, argv):
    """Return what imagenet.py hands to the training loop."""
    found = {}

    def train(accelerator, model, optimizer, loader, evaluate, settings, **more):
        found.update(model=model, optimizer=optimizer, loader=loader, settings=settings, **more)
        raise TrainingBeginsError

    monkeypatch.setattr(imagenet, "train", train)
    with pytest.raises(TrainingBeginsError):
        imagenet.main(argv)
    return found


def test_every_option_of_the_augmentation_and_the_optimisation_arrives(tiny_vision, photos, tmp_path, monkeypatch):
    argv = arguments(tiny_vision["vit"], photos, tmp_path, *PAPER, "--weight_decay", "0.05", "--min_crop_scale", "0.3")
    found = capture(monkeypatch, [*argv, "--horizontal_flip", "0.2", "--seed", "7"])
    rates = sorted({group["lr"] for group in found["optimizer"].param_groups})
    assert rates == pytest.approx([3e-3 * 0.65**depth for depth in (3, 2, 1, 0)])
    assert {group["weight_decay"] for group in found["optimizer"].param_groups} == {0.05, 0.0}
    held = {parameter for group in found["optimizer"].param_groups for parameter in group["params"]}
    assert held == set(found["model"].parameters())
    view = found["loader"].dataset.reader.view
    assert (view.size, view.min_scale, view.flip, view.magnitude, view.magnitude_std, view.seed) == (
        *(16, 0.3, 0.2),
        *(9, 0.5, 7),
    )
    batch = {"pixel_values": torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "labels": torch.tensor([1, 1])}
    loss = found["compute_loss"](SureOf(1, logit=5.0), batch)  # mixing leaves equal labels as they are
    logs = torch.tensor([0.0, 5.0, 0.0, 0.0, 0.0, 0.0]).log_softmax(0)
    assert loss.item() == pytest.approx(-(0.9 * logs[1] + 0.1 * logs.mean()).item(), abs=1e-6)


class SureOf(torch.nn.Module):
    """Answers with one class, whatever it sees."""

    def __init__(self, label: int, logit: float) -> None:
        super().__init__()
        self.logits = torch.zeros(6)
        self.logits[label] = logit

    def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        assert pixel_values.dtype == torch.float32
        return SimpleNamespace(logits=self.logits.expand(len(pixel_values), 6))


@pytest.mark.parametrize(("share", "labels_matter"), [("1", False), ("0.5", True)])
def test_the_teacher_sees_the_mixed_images_and_its_share_takes_that_of_the_labels(
    share, labels_matter, tiny_vision, photos, tmp_path, monkeypatch
):
    more = ("--teacher", str(tiny_vision["classifier"]), "--kd_weight", share, "--mixup", "0.8", "--cutmix", "1")
    found = capture(monkeypatch, arguments(tiny_vision["vit"], photos, tmp_path, *more, "--attention", "softmax"))
    model, batch = found["model"].eval(), next(iter(found["loader"]))
    losses = []
    for shift in (0, 1):
        torch.manual_seed(0)
        labels = (batch["labels"] + shift) % len(CLASSES)
        losses.append(found["compute_loss"](model, {**batch, "labels": labels}).item())
    assert (losses[0] != pytest.approx(losses[1])) == labels_matter
    assert (losses == pytest.approx([0, 0], abs=1e-6)) != labels_matter, "the student is its teacher"
    torch.manual_seed(0)
    with torch.no_grad():
        model.classifier.weight.add_(torch.randn_like(model.classifier.weight))
    assert found["compute_loss"](model, batch).item() > 0.01


def test_the_stages_know_what_must_not_decay(tiny_vision, photos, tmp_path, monkeypatch):
    held = {}

    def train(accelerator, model, optimizer, *args, **more):
        held.update({id(parameter): group for group in optimizer.param_groups for parameter in group["params"]})
        held.update(model=model)
        raise TrainingBeginsError

    monkeypatch.setattr(stages, "train", train)
    more = ("--teacher", str(tiny_vision["classifier"]), "--distil_steps", "1", "--distil_learning_rate", "1e-3")
    more += ("--weight_decay", "0.1", "--layer_decay", "0.5")
    with pytest.raises(TrainingBeginsError):
        imagenet.main(arguments(tiny_vision["vit"], photos, tmp_path, *more))
    parameters = dict(held["model"].named_parameters())
    groups = {name: held[id(parameter)] for name, parameter in parameters.items()}
    assert groups["vit.embeddings.cls_token"]["weight_decay"] == 0
    assert groups["classifier.weight"]["weight_decay"] == pytest.approx(0.1)
    assert [groups[name]["lr"] for name in ("vit.embeddings.cls_token", "classifier.weight")] == pytest.approx([
        1.25e-4,
        1e-3,
    ])


def test_without_options_the_loss_is_cross_entropy_and_nothing_is_mixed(tiny_vision, photos, tmp_path, monkeypatch):
    found = capture(monkeypatch, arguments(tiny_vision["vit"], photos, tmp_path, "--attention", "softmax"))
    batch = next(iter(found["loader"]))
    model = found["model"].eval()
    pixels = Normalisation()(batch["pixel_values"])
    expected = torch.nn.functional.cross_entropy(model(pixels).logits, batch["labels"])
    torch.testing.assert_close(found["compute_loss"](model, batch), expected)
    assert {group["lr"] for group in found["optimizer"].param_groups} == {3e-3}
