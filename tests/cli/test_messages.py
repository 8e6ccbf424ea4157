"""What hf-favorpp says where something is wrong: the rule, what was given and the remedy, in words of its user."""

import json
import shutil
from dataclasses import fields

import pytest
from command_runs import run
from typer.main import get_command

from hf_favorpp import FavorppConfig
from hf_favorpp.cli import failures, sources
from hf_favorpp.cli.app import app
from hf_favorpp.cli.failures import name_options


def copy(folder, destination, **options):
    """Copy a checkpoint, with other options of its conversion."""
    shutil.copytree(folder, destination)
    config = json.loads((destination / "config.json").read_text())
    config.get("favorpp", {}).update(options)
    (destination / "config.json").write_text(json.dumps(config))
    return destination


def test_what_is_not_converted_is_told_alike_by_every_command(bert, texts, tmp_path):
    expected = f"error: {bert} is not converted: run hf-favorpp convert {bert} DST first.\n"
    for words in (["push", bert, "me/bert"], ["calibrate", bert, tmp_path / "out", "--data", texts]):
        assert run(*words, code=1).stderr == expected


@pytest.mark.parametrize("kept", [40, 4000])
def test_weights_that_were_cut_short_are_told_with_file_and_remedy(bert, converted, tmp_path, kept):
    expected = "cannot be loaded: model.safetensors is damaged or incomplete. Download or save it again.\n"
    for source, words in ((bert, ["convert", tmp_path / "out"]), (converted, ["push", "me/bert"])):
        folder = copy(source, tmp_path / words[0])
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[:kept])
        assert run(words[0], folder, words[1], code=1).stderr == f"error: {folder} {expected}"


def test_options_are_named_as_the_command_line_has_them():
    names = {*failures._NAMES.split("|"), *failures._WORDS.split("|")}
    of_convert = {parameter.name for parameter in get_command(app).commands["convert"].params}
    assert names == ({field.name for field in fields(FavorppConfig)} | {"error_budget"}) & of_convert


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("every entry of exact_ends must be an integer", "every entry of --exact-ends must be an integer"),
        ("kernel='none' with statistics='sequence'", "--kernel none with --statistics sequence"),
        ("exact_window=(8, 7) is a tile", "--exact-window 8x7 is a tile"),
        ("--exact-window 8 and --layers must be", "--exact-window 8 and --layers must be"),
        (
            "layers names layer 9, but X has 6 layers; a kernel and its seed are no options",
            "--layers names layer 9, but X has 6 layers; a kernel and its seed are no options",
        ),
        ("my_num_features and num_features_2 stay", "my_num_features and num_features_2 stay"),
    ],
)
def test_only_whole_words_that_are_options_are_changed(message, said):
    assert name_options(message) == said


def test_an_option_that_the_model_refuses_is_wrong_usage_and_one_of_a_checkpoint_is_not(
    bert, converted, texts, tmp_path
):
    assert "error: --layers names layer 9, but" in run("convert", bert, tmp_path, "--layers", 9, code=2).stderr
    message = run("convert", bert, tmp_path, "--exact-window", "8x8", code=2).stderr
    assert message.startswith("error: --exact-window 8x8 is a tile of patches, but ")
    wrong = copy(converted, tmp_path / "wrong", num_features=0)
    said = (
        f"error: the options in config.json of {wrong} cannot be used: num_features must be an integer >= 1, got 0.\n"
    )
    for words in (["inspect", wrong], ["push", wrong, "me/x"], ["bench", "--model", wrong, "--lengths", 8]):
        assert run(*words, code=1).stderr.endswith(said)
    fixed = copy(converted, tmp_path / "fixed", kernel="favor+", preconditioning="none", candidates=1)
    message = run("calibrate", fixed, tmp_path / "out", "--data", texts / "a.txt", code=1).stderr
    assert "kernel='favor+' with preconditioning='none' uses no statistics" in message


def test_what_the_parser_refuses_names_the_help_of_the_command(bert):
    assert run("convert", bert, "x", "--exact-ends", 1, code=2).stderr.endswith(" convert --help'.\n")


def test_debug_shows_no_traceback_of_a_wrong_command_line(bert):
    for options in (["--num-features", 0], ["--exact-window", "8by8"], ["--bogus"]):
        plain = run("convert", bert, "x", *options, code=2).stderr
        assert run("convert", bert, "x", *options, "--debug", code=2).stderr == plain


def test_push_knows_the_model_of_the_quickstart(bert, monkeypatch, tmp_path):
    shutil.copytree(bert, tmp_path / "model")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: spec)
    name = "all-MiniLM-L6-v2"
    assert f"{name} is not converted: run hf-favorpp convert {name} DST" in run("push", name, "me/x", code=1).stderr
    assert "there is no folder nowhere" in run("push", "nowhere", "me/x", code=3).stderr


def test_the_help_of_push_tells_whose_a_name_is_and_what_a_dry_run_leaves_out():
    shown = " ".join(run("push", "--help").stdout.replace("│", " ").split())
    assert "user/name; name alone is yours" in shown
    assert "The Hub is not asked" in shown


def test_the_report_explains_its_columns(converted, texts):
    shown = " ".join(run("report", converted, "--data", texts / "a.txt", "--max-samples", 1).stdout.split())
    for words in ("entropy: of the softmax weights, in nats", "psi: mean of |query + key|^2"):
        assert words in shown
