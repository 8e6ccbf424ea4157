"""README and guides: every Python block runs, every command parses, and what they list is what there is."""

import json
import re
import shlex
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import ablation
import pytest
import torch
import typer
from accelerate.commands.launch import launch_command_parser
from attention_picture import PictureArguments
from benchmark_arguments import BenchmarkArguments
from command_line import parse_arguments
from fidelity_arguments import FidelityArguments
from glue_arguments import GlueArguments
from imagenet_arguments import ImageNetArguments
from kernel_regression import RegressionArguments
from kernel_report import KernelReportArguments
from performer_figure2 import Figure2Arguments
from performer_figure4 import Figure4Arguments
from performer_figure14 import Figure14Arguments
from projections import ProjectionArguments
from speech_arguments import SpeechArguments
from tiny_models import VOCABULARY, tiny_model
from transformers import BertTokenizer, dynamic_module_utils
from variance import VarianceArguments

import hf_favorpp
from hf_favorpp import FavorppConfig
from hf_favorpp.families import REFUSED, registry, supported_model_types

ROOT = Path(__file__).parents[1]
README, RECIPES, GUIDES = ROOT / "README.md", ROOT / "recipes" / "README.md", ROOT / "hf_favorpp" / "guides"
PAGES = [README, RECIPES, ROOT / "CONTRIBUTING.md", *sorted(GUIDES.glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ARGUMENTS = {
    "attention_picture.py": PictureArguments,
    "benchmark.py": BenchmarkArguments,
    "fidelity.py": FidelityArguments,
    "glue.py": GlueArguments,
    "imagenet.py": ImageNetArguments,
    "kernel_report.py": KernelReportArguments,
    "performer_figure14.py": Figure14Arguments,
    "performer_figure2.py": Figure2Arguments,
    "performer_figure4.py": Figure4Arguments,
    "projections.py": ProjectionArguments,
    "speech.py": SpeechArguments,
    "kernel_regression.py": RegressionArguments,
    "variance.py": VarianceArguments,
}


def path_of(path):
    return str(path.relative_to(ROOT))


def blocks(page, language):
    return [code for name, code in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language]


# --- Python -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """Tiny random models on disk in place of those of the Hub, by Hub id."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_model("bert").save_pretrained(folder / "bert")
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(VOCABULARY - 5))]
    vocabulary = {word: index for index, word in enumerate(words)}
    BertTokenizer(vocab=vocabulary, model_max_length=96).save_pretrained(folder / "bert")
    return {"google-bert/bert-base-uncased": folder / "bert"}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # Trainer asks for it without a GPU too
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=path_of)
def test_every_python_block_runs(page, stand_ins, tmp_path, monkeypatch, capsys, request):
    """Those of a page run one after the other, as a reader would, in an empty folder."""
    if page.name == "publishing.md":
        request.getfixturevalue("hub")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    words = [f"w{i}" for i in range(40)]
    names = {"texts": [" ".join(words[start:] + words) for start in range(4)]}  # "some hundred texts of yours"
    if page.name == "porting.md":
        in_place_of_the_edit(monkeypatch, blocks(page, "diff")[0])
    for number, code in enumerate(blocks(page, "python"), 1):
        for name, folder in stand_ins.items():
            code = code.replace(f'"{name}"', repr(str(folder)))
        assert re.search(r'from_pretrained\("(?!me/)[\w-]+/', code) is None, "a Hub id without a stand-in"
        torch.manual_seed(0)
        exec(compile(code, f"{path_of(page)}, block {number}", "exec"), names)
        if page.name == "porting.md" and number == 1:
            registry._BY_CLASS[names["ROBERTA_PRELAYERNORM"].attention_classes[0]] = (names["ROBERTA_PRELAYERNORM"],)


def in_place_of_the_edit(monkeypatch, diff):
    """Make sure that the lines which the guide changes are there, and undo what the test puts in their place."""
    lines = (ROOT / "hf_favorpp" / "families" / "registry.py").read_text(encoding="utf-8").splitlines()
    assert all(line[1:] in lines for line in diff.splitlines() if line[0] in " -")
    monkeypatch.setattr(registry, "_BY_CLASS", dict(registry._BY_CLASS))


def test_the_readme_shows_what_its_first_example_says(stand_ins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    code = re.search(r"<!-- example -->\n```python\n(.*?)```", text, re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line]) <= 10
    names = {}
    exec(code.replace('"google-bert/bert-base-uncased"', repr(str(stand_ins["google-bert/bert-base-uncased"]))), names)
    assert names["model"].config.favorpp["num_features"] == 256
    assert "favorpp" in json.loads((tmp_path / "bert-favorpp" / "config.json").read_text())


# --- commands -----------------------------------------------------------------------------------------------------


def commands(page):
    """Return the commands of all bash blocks of a page, as words; comments are gone, "&&" separates."""
    for code in blocks(page, "bash"):
        lines = code.replace("\\\n", " ").splitlines()
        for words in (shlex.split(line, comments=True) for line in lines):
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                yield words[:end]
                words = words[end + 1 :]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")], ids=path_of)
def test_every_command_parses(page, capsys):
    for code in blocks(page, "bash"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)
    for words in commands(page):
        try:
            check_command(*words)
        except SystemExit as error:
            pytest.fail(f"{shlex.join(words)}: {capsys.readouterr().err or error}")


def check_command(program, *words):
    """Raise where a command could not run: an unknown program, option, file or extra."""
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        for name in re.findall(r"\[([\w,]+)\]", words[-1]):
            assert set(name.split(",")) <= set(extras), words
    elif program == "accelerate":
        assert words[0] == "launch"
        parsed = launch_command_parser().parse_args(words[1:])
        check_recipe(parsed.training_script, parsed.training_script_args)
    elif program == "python" and words[0].startswith("recipes/"):
        check_recipe(*words[:1], words[1:])
    elif program == "hf-favorpp":
        check_subcommand(*words)
    elif program in ("pytest", "bash"):
        assert all((ROOT / word).exists() for word in words if "/" in word), words
    else:
        assert program in (".", "python3", "pre-commit", "cd", "docker"), program


def check_recipe(script, words):
    assert (ROOT / script).is_file(), script
    name = Path(script).name
    if name == "ablation.py":
        _, words = ablation.parse(words)
        name = "glue.py"
    if name in ARGUMENTS:
        parse_arguments(ARGUMENTS[name], [str(ROOT / w) if w.startswith("configs/") else w for w in words])
        return
    source = (ROOT / script).read_text(encoding="utf-8")  # results_table.py and documentation.py
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in source or re.search(rf"^    {word[2:]}: ", source, re.MULTILINE), (script, word)
        elif "/" in word:
            assert (ROOT / word).parent.is_dir(), word


def check_subcommand(*words):
    from hf_favorpp.cli.app import app

    group = typer.main.get_command(app)
    with group.make_context("hf-favorpp", [words[0], "--help"], resilient_parsing=True) as context:
        command = group.get_command(context, words[0])
        assert command is not None, words
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        unknown = {word.partition("=")[0] for word in words if word.startswith("-")} - known - {"-h", "--help"}
        assert not unknown, words


@pytest.mark.parametrize(
    "command",
    [
        ["python", "recipes/fidelity.py", "--config", "configs/fidelity/minilm_stsb.yaml", "--data_fil", "X"],
        ["accelerate", "launch", "recipes/glue.py", "--config", "configs/glue/no_such_task.yaml"],
        ["accelerate", "launch", "--no_such_option", "recipes/glue.py"],
        ["pip", "install", "-e", ".[no_such_extra]"],
        ["python", "recipes/no_such_program.py"],
        ["hf-favorpp", "convert", "MODEL", "--no-such-option"],
        ["pytest", "tests/no_such_test.py"],
    ],
    ids=lambda command: command[-1],
)
def test_a_command_that_could_not_run_is_found(command, capsys):
    with pytest.raises((AssertionError, SystemExit)):
        check_command(*command)


# --- what is listed -----------------------------------------------------------------------------------------------


def test_the_readme_is_a_front_page():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 250
    assert all(f"<!-- {mark} -->\n```" in text for mark in ("quickstart", "tests", "example", "fidelity"))
    assert all(paper in text for paper in ("2205.15317", "2009.14794", "likhosherstov2022chefs"))
    assert all(f"(hf_favorpp/guides/{page.name})" in text for page in GUIDES.glob("*.md"))


def test_every_result_is_listed_with_what_made_it():
    results = ROOT / "recipes" / "results"
    rows = [line for line in RECIPES.read_text(encoding="utf-8").splitlines() if line.startswith("| [")]
    listed = {path for row in rows for path in re.findall(r"\]\(results/([^)]*)\)", row)}
    files = {str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()}
    assert not {path for path in listed if not (results / path).exists()}
    assert not {path for path in files if not {path, path.rpartition("/")[0]} & listed}


@pytest.mark.parametrize("name", hf_favorpp.__all__)
def test_every_public_name_is_in_a_guide(name):
    pages = [page for page in PAGES if page != ROOT / "CONTRIBUTING.md"]
    assert any(re.search(rf"\b{name}\b", page.read_text(encoding="utf-8")) for page in pages)


def test_every_option_and_every_model_type_is_in_a_table():
    options = (GUIDES / "how_it_works.md").read_text(encoding="utf-8").partition("## Options")[2]
    assert not {field.name for field in fields(FavorppConfig)} - set(re.findall(r"`(\w+)`", options))
    models = README.read_text(encoding="utf-8").partition("## Which models")[2].partition("\n## ")[0]
    kinds = {re.sub(r"_with_registers|_(vision|text)_model", "", name) for name in supported_model_types()}
    kinds |= {name.removesuffix("-v2").removesuffix("v2") for name in REFUSED}
    assert not {kind for kind in kinds if not re.search(rf"(?<![\w-]){kind}(?![\w-]*\w)", models)}


@pytest.mark.parametrize("page", [README, GUIDES / "uptraining.md"], ids=path_of)
def test_every_number_of_a_table_is_among_the_results(page):
    """Of tables of numbers, that is: those whose cells are numbers beside a title."""
    known = set(re.findall(r"\d+\.\d+|\d+", RECIPES.read_text(encoding="utf-8")))
    rows = [line.split("|")[2:-1] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = {cell.strip() for row in rows for cell in row if re.fullmatch(r"[\d.]+", cell.strip())}
    assert len(cells) > 5
    assert not cells - known
