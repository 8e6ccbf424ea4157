"""What is released: one version, a changelog that tells it, and distributions that hold what they should."""

import re
import tarfile
import tomllib
import zipfile
from datetime import date
from email.parser import Parser
from pathlib import Path

import hatchling.build
import pytest
from packaging.version import Version

import hf_favorpp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_favorpp"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
"""Of changes, in the order of Keep a Changelog."""
SHIPPED = {".py", ".typed"}
"""Suffixes of what the wheel holds: the guides beside the code are for readers of the repository."""


def releases(changelog):
    """Return (title, text) of each section, the newest first."""
    _, *sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    return [tuple(section.split("\n", 1)) for section in sections]


def complaints(changelog, version):
    """Return all that is wrong with a changelog, in words."""
    found, newer = [], None
    for index, (title, text) in enumerate(releases(changelog)):
        kinds = re.findall(r"^### (.+)$", text, re.MULTILINE)
        if kinds != sorted(set(kinds) & set(KINDS), key=KINDS.index):
            found.append(f"{title}: sections {kinds}")
        if re.split(r"^### .+\n", text, flags=re.MULTILINE)[0].strip() or re.search(
            r"^### .+\n\s*(###|\Z)", text, re.M
        ):
            found.append(f"{title}: text outside a section, or a section without text")
        if title == "[Unreleased]":
            if index:
                found.append("[Unreleased] is not at the top")
            continue
        parts = re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", title)
        if not parts:
            found.append(f"{title}: not a version and a date")
            continue
        this = (Version(parts[1]), date.fromisoformat(parts[2]))
        if newer is None and parts[1] != version:
            found.append(f"the newest version is {parts[1]}, that of the package {version}")
        if newer is not None and not (this[0] < newer[0] and this[1] <= newer[1]):
            found.append(f"{title}: not older than the one above")
        if not kinds:
            found.append(f"{title}: no changes")
        newer = this
    return found if newer else [*found, "no version"]


def test_the_changelog_ends_in_the_version_of_the_package():
    assert complaints(CHANGELOG, hf_favorpp.__version__) == []


GOOD = """# Changelog

## [Unreleased]

## [1.1.0] - 2026-01-02

### Fixed

- b

## [1.0.0] - 2026-01-01

### Added

- a
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("1.1.0", "1.2.0", "the newest version is 1.2.0, that of the package 1.1.0"),
        ("1.0.0", "1.1.0", "not older"),
        ("2026-01-01", "2026-02-01", "not older"),
        (" - 2026-01-02", "", "not a version and a date"),
        ("- 2026-01-02", "- soon", "not a version and a date"),
        ("### Fixed", "### Repaired", "sections"),
        ("### Fixed\n\n- b\n\n", "", "no changes"),
        ("- b\n", "", "a section without text"),
        ("- a\n", "", "a section without text"),
        ("### Added\n", "### Fixed\n\n- c\n\n### Added\n", "sections"),
        ("## [Unreleased]\n", "## [Unreleased]\n\n- c\n", "text outside a section"),
        ("## [Unreleased]\n\n", "", None),
        ("## [1.0.0]", "## [Unreleased]\n\n## [1.0.0]", "not at the top"),
    ],
)
def test_a_changelog_is_complained_about(old, new, complaint):
    assert complaints(GOOD, "1.1.0") == []
    found = complaints(GOOD.replace(old, new), "1.1.0")
    assert (complaint is None and not found) or any(complaint in each for each in found), found


def test_the_version_has_one_place():
    assert "version" not in PYPROJECT["project"]
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    (place,) = [file for file in PACKAGE.rglob("*.py") if re.search(r"^__version__\b", file.read_text("utf-8"), re.M)]
    assert place == ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel and the source distribution, built as pip would."""
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return folder / hatchling.build.build_wheel(str(folder)), folder / hatchling.build.build_sdist(str(folder))


def test_the_wheel_holds_the_package_and_nothing_else(distributions):
    wheel, _ = distributions
    names = zipfile.ZipFile(wheel).namelist()
    about = f"hf_favorpp-{hf_favorpp.__version__}.dist-info/"
    shipped = {name for name in names if not name.startswith(about)}
    assert shipped == {str(file.relative_to(ROOT)) for file in PACKAGE.rglob("*") if file.suffix in SHIPPED}
    assert {Path(name).parts[0] for name in shipped} == {"hf_favorpp"}
    assert not [name for name in shipped if {"tests", "data"} & set(Path(name).parts) or "test_" in name]
    assert len(shipped) > 80
    rest = {name.removeprefix(about) for name in names} - shipped
    assert rest - {"entry_points.txt"} == {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}


def test_the_wheel_says_what_it_is_and_what_it_needs(distributions):
    wheel, _ = distributions
    file = f"hf_favorpp-{hf_favorpp.__version__}.dist-info/METADATA"
    metadata = Parser().parsestr(zipfile.ZipFile(wheel).read(file).decode())
    assert (metadata["Name"], metadata["Version"]) == ("hf-favorpp", hf_favorpp.__version__)
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(required) == sorted(PYPROJECT["project"]["dependencies"])
    assert all(">=" in line and "<" not in line for line in required), (
        "a lower bound, which .ci/matrix runs, and no other"
    )
    assert metadata.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_source_distribution_can_be_tested(distributions):
    _, sdist = distributions
    prefix = f"hf_favorpp-{hf_favorpp.__version__}/"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(prefix) for name in archive.getnames()}
    assert {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py")} <= names
    include = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all((ROOT / name).exists() for name in include)
    top = {name.partition("/")[0] for name in names}
    assert top == {*include, "pyproject.toml", "PKG-INFO", ".gitignore"}
