"""The API reference builds without a finding, and what is broken in it or in the guides is found."""

import io
import re
import sys

import pytest

pytest.importorskip("sphinx", reason="needs the extra docs")
pytest.importorskip("myst_parser", reason="needs the extra docs")

from documentation import ROOT, build, documented_modules

pytestmark = pytest.mark.filterwarnings("ignore")  # what the tools tell each other

FILES = {
    "README.md": """# A project

See `measure(x)`, [the guide](tiny_project/guides/how.md#what-it-does), [code](tiny_project).
""",
    "tiny_project/guides/how.md": """# How

## What it does

`tiny_project.parts.Part` [back](../../README.md)

![a](a.png)
""",
    "tiny_project/guides/a.png": "",
    "tiny_project/__init__.py": (
        '"""A package."""\n\nfrom tiny_project.parts import measure\n\n__all__ = ["measure"]\n'
    ),
    "tiny_project/parts.py": '''"""Parts; see :func:`tiny_project.measure`."""

from typing import NamedTuple


class Part(NamedTuple):
    """A part.

    Attributes:
        size: |x|, in nats: of all.
    """

    size: int

    def grow(self) -> "Part":
        """Return a larger :class:`Part`."""
        return Part(self.size + 1)


def measure(x: float) -> float:
    """Return |x|.

    Args:
        x: A number.

    Returns:
        The same: without its sign.
    """
    return abs(x)


def combine(first: Part, second: Part) -> Part:
    """Combine two parts."""
    return Part(first.size + second.size)
''',
}


def findings(folder, builders=("dummy", "coverage"), **changes):
    """Build the tiny project with changed files and return what was found."""
    for name, text in {**FILES, **changes}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    errors = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name in [name for name in sys.modules if name.split(".")[0] == "tiny_project"]:
            patch.delitem(sys.modules, name)
        count = build(folder, folder / "outputs", "tiny_project", errors, builders)
        for name in [name for name in sys.modules if name.split(".")[0] == "tiny_project"]:
            del sys.modules[name]
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in errors.getvalue().splitlines()]
    assert (count == 0) == (not lines)
    return lines


def test_what_is_whole_has_no_findings(tmp_path):
    assert findings(tmp_path, ("html", "coverage")) == []
    page = (tmp_path / "outputs" / "html" / "tiny_project" / "guides" / "how.html").read_text(encoding="utf-8")
    assert 'href="../../reference/parts.html#tiny_project.parts.Part"' in page
    front = (tmp_path / "outputs" / "html" / "README.html").read_text(encoding="utf-8")
    assert 'href="reference/index.html#tiny_project.measure"' in front
    reference = (tmp_path / "outputs" / "html" / "reference" / "parts.html").read_text(encoding="utf-8")
    assert "|x|, in nats: of all." in reference


@pytest.mark.parametrize(
    ("file", "old", "new", "finding"),
    [
        ("README.md", "guides/how.md", "guides/why.md", "guides/why.md"),
        ("README.md", "#what-it-does", "#what-it-did", "what-it-did"),
        ("README.md", "(tiny_project)", "(tiny_projects)", "tiny_projects"),
        ("tiny_project/guides/how.md", "../../README.md", "../README.md", "../README.md"),
        ("tiny_project/guides/how.md", "a.png", "b.png", "b.png"),
        ("tiny_project/guides/how.md", "parts.Part", "parts.Parts", "tiny_project.parts.Parts"),
        ("README.md", "`measure(x)`", "`measure.twice`", "tiny_project.measure.twice"),
        ("tiny_project/parts.py", "tiny_project.measure`", "tiny_project.measures`", "tiny_project.measures"),
        ("tiny_project/parts.py", "larger :class:`Part`", "larger :class:`Piece`", "Piece"),
        ("tiny_project/parts.py", '    """Combine two parts."""\n', "", "undocumented python function"),
        ("tiny_project/parts.py", '        """Return a larger :class:`Part`."""\n', "", "undocumented python method"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value),
)
def test_what_is_broken_is_found(file, old, new, finding, tmp_path):
    text = FILES[file].replace(old, new)
    assert text != FILES[file]
    found = findings(tmp_path, **{file: text})
    assert any(finding in line for line in found), found


def test_every_public_class_without_a_docstring_is_found(tmp_path):
    text = FILES["tiny_project/parts.py"] + "\n\nclass Bare:\n    pass\n"
    assert any("undocumented python class" in line for line in findings(tmp_path, **{"tiny_project/parts.py": text}))


def test_this_project_has_no_findings(tmp_path):
    errors = io.StringIO()
    assert build(ROOT, tmp_path, "hf_favorpp", errors, ("dummy", "coverage")) == 0, errors.getvalue()
    assert errors.getvalue() == ""


def test_modules_are_left_out_on_purpose_only():
    modules = documented_modules("hf_favorpp")
    assert {"hf_favorpp.convert", "hf_favorpp.features.gerf", "hf_favorpp.attention.cpu.attend"} <= set(modules)
    assert not [name for name in modules if {"triton", "cli"} & {*name.split(".")}]
