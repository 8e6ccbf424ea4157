"""Every YAML in configs/imagenet runs, twins differ in attention only, and what contradicts itself is an error."""

from __future__ import annotations

import json
import re

import imagenet
import pytest
import yaml
from command_line import parse_arguments
from imagenet_arguments import ImageNetArguments
from stage_refusals import STAGES_REFUSED
from tiny_glue import ROOT
from uptraining import favorpp_config

CONFIGS = sorted((ROOT / "configs" / "imagenet").glob("*.yaml"))
MODELS = {"vit_mae": "mae", "vit_in21k": "vit", "deit_small": "classifier", "dinov2_small": "dinov2"}
"""Checkpoints on ImageNet-1k, and which tiny model stands in for each."""
LOCAL = {"hymenoptera", "tiny_imagenet_20"}
TINY_OVERRIDES = (
    "image_size=16,patch_size=4,hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48"
)


def stem(path):
    return path.stem


def test_every_checkpoint_has_its_twins():
    names = {path.stem for path in CONFIGS}
    assert names == {f"{model}{end}" for model in MODELS for end in ("", "_softmax", "_favorplus")} | LOCAL | {
        "quickstart"
    }


@pytest.mark.parametrize("model", MODELS)
def test_twins_differ_in_attention_only(model):
    ends = ("", "_softmax", "_favorplus")
    three = [yaml.safe_load((ROOT / f"configs/imagenet/{model}{end}.yaml").read_text()) for end in ends]
    only = {"attention", "num_features", "preconditioning", "output_dir"}
    first, *others = ({key: value for key, value in each.items() if key not in only} for each in three)
    assert others == [first, first]
    assert [each["attention"] for each in three] == ["favor++", "softmax", "favor+"]
    assert len({each["output_dir"] for each in three}) == 3


@pytest.mark.parametrize("path", CONFIGS, ids=stem)
def test_header_tells_command_hardware_and_expectation(path):
    header = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") and len(line) <= 125 for line in header.splitlines())
    for part in ("accelerate launch", f"--config configs/imagenet/{path.name}", "Hardware: ", "Expected: "):
        assert part in header


def offline(path, photos, hub_photos, tiny_vision):
    """Return the arguments that put generated images and a tiny model in the place of those of a YAML."""
    if path.stem == "quickstart":
        return ["--config_overrides", TINY_OVERRIDES, "--max_train_samples", "64"]
    if path.stem in LOCAL:
        folders = ["--train_dir", str(photos / "train"), "--validation_dir", str(photos / "validation")]
        return [*folders, "--model_name_or_path", str(tiny_vision["vit"])]
    model = next(kind for name, kind in MODELS.items() if path.stem.startswith(name))
    streamed = str(path.stem.endswith("_softmax")).lower()
    return [
        "--dataset_name",
        str(hub_photos),
        "--streaming",
        streamed,
        "--model_name_or_path",
        str(tiny_vision[model]),
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=stem)
def test_two_steps_of_every_config(path, photos, hub_photos, tiny_vision, tmp_path, capfd):
    argv = ["--config", str(path), "--output_dir", str(tmp_path), "--max_train_steps", "2", "--max_eval_samples", "9"]
    argv += ["--per_device_train_batch_size", "4", "--num_workers", "0", "--num_features", "8", "--image_size", "16"]
    argv += offline(path, photos, hub_photos, tiny_vision)
    if path.stem not in ("quickstart", "vit_mae"):
        argv += ["--measure_throughput", "false"]
    imagenet.main(argv)
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["metrics"]) == {"top1", "top5"}
    assert results["completed_steps"] == 2
    assert results["train_images"] == 8
    assert results["saved"] == "last"
    assert results["skipped_files"] == {"count": 0, "names": []}
    assert {"torch", "transformers", "kornia", "pillow"} <= set(results["versions"])
    written = yaml.safe_load(path.read_text())
    assert ("softmax_metrics" in results) == written.get("twin", False)
    assert ("initial_metrics" in results) == written.get("evaluate_first", False)
    assert (results["favorpp"] is None) == (written["attention"] == "softmax")
    printed = capfd.readouterr().out
    assert "the same logits" in printed
    assert "training images / s" in printed
    measured = path.stem in ("quickstart", "vit_mae")
    assert ("loader alone" in printed) == ("loader_images_per_s" in results) == measured


def refusal(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(ImageNetArguments, argv)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


SOURCES = ["--train_dir", "x", "--model_type", "vit"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model_type", "vit"], "give either --dataset_name or --train_dir"),
        ([*SOURCES, "--dataset_name", "y"], "give either --dataset_name or --train_dir"),
        (["--train_dir", "x"], "give either --model_name_or_path or --model_type"),
        (
            ["--dataset_name", "y", "--model_type", "vit", "--validation_dir", "x"],
            "--validation_dir needs --train_dir",
        ),
        ([*SOURCES, "--streaming"], "--streaming needs a --dataset_name"),
        (["--train_dir", "x", "--model_name_or_path", "y", "--config_overrides", "a=1"], "needs --model_type"),
        ([*SOURCES, "--linear_probe", "--layer_decay", "0.5"], "trains the head only"),
        ([*SOURCES, "--uptrain"], "add --twin"),
        ([*SOURCES, "--uptrain_epochs", "2"], "need --uptrain"),
        ([*SOURCES, "--mixup", "-1"], "--mixup must be at least 0, got -1"),
        ([*SOURCES, "--drop_path", "1"], "--drop_path is a share and must be at most 1, got 1"),
        ([*SOURCES, "--label_smoothing", "1.5"], "--label_smoothing is a share"),
        ([*SOURCES, "--crop_ratio", "0"], "--crop_ratio must be above 0"),
        ([*SOURCES, "--randaugment_magnitude", "11"], "--randaugment_magnitude must be at most 10, got 11"),
        ([*SOURCES, "--randaugment_std", "0.5"], "needs --randaugment_magnitude"),
        ([*SOURCES, "--ema_decay", "1.5"], "--ema_decay must be at most 1"),
        ([*SOURCES, "--layer_decay", "0"], "--layer_decay must be above 0"),
        ([*SOURCES, "--image_size", "0"], "--image_size must be at least 1"),
        ([*SOURCES, "--exact_window", "1", "2", "3"], "one number or a tile's two sides"),
        ([*SOURCES, "--twin", "--attention", "softmax"], "--twin compares"),
        *(([*SOURCES, *argv], message) for argv, message in STAGES_REFUSED),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(argv, message, capsys):
    assert re.search(message, refusal(argv, capsys))


def test_an_empty_name_takes_back_what_the_file_says(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("dataset_name: a/b\nmodel_name_or_path: c\n")
    argv = ["--config", str(config), "--dataset_name", "", "--train_dir", "photos/train"]
    args = parse_arguments(ImageNetArguments, argv)
    assert (args.dataset_name, args.train_dir, args.task()) == (None, "photos/train", "photos")


@pytest.mark.parametrize(("given", "window"), [(None, 0), ([3], 3), ([4, 6], (4, 6))])
def test_a_window_may_have_two_sides(given, window):
    args = ImageNetArguments(train_dir="x", model_type="vit", exact_window=given)
    assert favorpp_config(args).exact_window == window


def test_who_reads_an_image_is_free_on_resume_unless_it_is_streamed():
    args = {"dataset_name": "a/b", "model_type": "vit", "num_workers": 3}
    assert "num_workers" not in ImageNetArguments(**args).identity()
    assert ImageNetArguments(**args, streaming=True).identity()["num_workers"] == 3
