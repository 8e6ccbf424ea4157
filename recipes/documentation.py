"""Build README, guides and the API reference as one set of pages, and fail where a link or a name leads nowhere.

Command:  python recipes/documentation.py
Hardware: one CPU core, under a minute; no network.
Expected: outputs/documentation/html/index.html; exit status 1 and a line per finding where a local link, an anchor, an
          image or a name of the API leads nowhere, or a public name has no docstring.

The reference is generated from the docstrings of every module but those named in LEFT_OUT. In the guides, which are
plain Markdown, a public name between backticks becomes a link to it.
"""

from __future__ import annotations

import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TextIO

from command_line import flag, parse_arguments
from documentation_links import public_names
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "*/guides/*.md", "recipes/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""In the order of the contents."""
LEFT_OUT = (
    r"(hf_favorpp\.attention\.)?triton(\.|$)",  # kernels, which can be imported only where Triton is
    r"(hf_favorpp\.)?cli(\.|$)",  # a program: `hf-favorpp --help` is its reference
    r"(hf_favorpp\.hub\.)?modeling_favorpp$",  # runs from within a checkpoint only
)
OUTSIDE = ("torch", "transformers", "collections", "typing", "types", "numpy", "os", "pathlib", "contextlib")
"""Packages whose names are documented elsewhere, and not looked up here."""
BUILT_IN = (
    *("bool", "int", "float", "str", "bytes", "object", "type", "tuple", "list", "dict", "set", "None", "optional"),
    *("Exception", "ValueError", "RuntimeError", "ImportError", "AttributeError"),
    # as signatures hold them that name what is imported for type checkers only
    *("Accelerator", "Path", r"dict\[str", r"list\[dict\[str"),
)


@dataclass
class DocumentationArguments:
    """Build README, guides and API reference."""

    config: str | None = flag("YAML file of arguments; the command line wins over it.")
    output_dir: str = flag("Receives html/index.html; what was there is replaced.", "outputs/documentation")


def main(argv: list[str] | None = None) -> None:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.
    """
    arguments = parse_arguments(DocumentationArguments, argv)
    output = Path(arguments.output_dir).resolve()
    warnings = build(ROOT, output, "hf_favorpp")
    if warnings:
        sys.exit(f"{warnings} findings.")
    print(f"Open {output / 'html' / 'index.html'}.")


def build(
    root: Path,
    output: Path,
    package: str,
    errors: TextIO | None = None,
    builders: Sequence[str] = ("html", "coverage"),
) -> int:
    """Build the pages of a project, and look for public names that they lack.

    Args:
        root: Folder of the project, with README.md.
        output: Receives html/ and, for the tools, source/, doctrees/ and coverage/.
        package: Name of the package to document; it can be imported.
        errors: Where findings are written, one a line; None is standard error.
        builders: Of Sphinx; "dummy" looks everything up as "html" does, and writes nothing.

    Returns:
        How many there are.
    """
    source = output / "source"
    for name in ("source", "doctrees", "html", "coverage"):
        shutil.rmtree(output / name, ignore_errors=True)
    modules = documented_modules(package)
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern), key=_index_first)]
    _mirror(root, source, pages, (root / ".git", root / ".venv", output))
    names = [str(page.relative_to(root).with_suffix("")) for page in pages]
    (source / "reference").mkdir()
    write_reference(source / "reference", package, modules)
    (source / "index.rst").write_text(_contents(package, [*names, "reference/index"]), encoding="utf-8")
    options = _options(package, [f"{name}.md" for name in names])
    findings = 0
    for builder in builders:
        with patch_docutils(), docutils_namespace():
            warnings = sys.stderr if errors is None else errors
            app = Sphinx(source, None, output / builder, output / "doctrees", builder, options, None, warnings)
            app.build()
        findings += app._warncount
    return findings


def documented_modules(package: str) -> list[str]:
    """Return the modules of a package that the reference is made of.

    Args:
        package: Its name.

    Returns:
        Dotted names, sorted, without private ones and those of ``LEFT_OUT``.
    """
    folder = __import__(package).__path__
    found = (module.name for module in pkgutil.walk_packages(folder, f"{package}.", onerror=lambda _: None))
    return sorted(
        name
        for name in found
        if not any(re.match(pattern, name) for pattern in LEFT_OUT) and not re.search(r"\._", name)
    )


def write_reference(folder: Path, package: str, modules: Sequence[str]) -> None:
    """Write the pages of the reference: one of the public names, and one for each part of the package.

    Args:
        folder: Receives index.rst and PART.rst.
        package: Name of the package.
        modules: Its modules, sorted.
    """
    public = public_names(package)
    parts = {part: list(names) for part, names in groupby(modules, lambda name: name.split(".")[1])}
    text = [*_title("Reference"), f".. automodule:: {package}", "   :members:", "   :member-order: groupwise", ""]
    text += [*_title("Parts", "-"), ".. toctree::", "   :maxdepth: 1", ""]
    (folder / "index.rst").write_text("\n".join([*text, *(f"   {part}" for part in parts), ""]), encoding="utf-8")
    for part, names in parts.items():
        text = _title(f"{package}.{part}")
        for name in names:
            if name.count(".") > 1:
                text += _title(name, "-")
            text += [f".. automodule:: {name}"]
            if not hasattr(sys.modules.get(name) or __import__(name, fromlist=["_"]), "__path__"):
                elsewhere = [place.rpartition(".")[2] for place in public if place.rpartition(".")[0] == name]
                text += ["   :members:", *([f"   :exclude-members: {', '.join(elsewhere)}"] if elsewhere else [])]
                text += ["", *(f"   See also :obj:`{public[f'{name}.{known}']}`." for known in elsewhere)]
            text += [""]
        (folder / f"{part}.rst").write_text("\n".join(text), encoding="utf-8")


def _mirror(root: Path, source: Path, pages: Sequence[Path], without: Sequence[Path]) -> None:
    """Copy the pages, and link all that lies beside them, which they may point to."""
    for folder in {parent for page in pages for parent in page.parents if parent.is_relative_to(root)}:
        (source / folder.relative_to(root)).mkdir(parents=True, exist_ok=True)
    for page in pages:
        shutil.copyfile(page, source / page.relative_to(root))
    for folder in {parent for page in pages for parent in page.parents if parent.is_relative_to(root)}:
        for path in folder.iterdir():
            mirrored = source / path.relative_to(root)
            if not mirrored.exists() and not any(other.is_relative_to(path) for other in without):
                mirrored.symlink_to(path)


def _options(package: str, pages: Sequence[str]) -> dict[str, Any]:
    """Return what conf.py would say."""
    return {
        "project": package,
        "extensions": [
            *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.coverage", "sphinx.ext.mathjax"),
            *("sphinx.ext.viewcode", "myst_parser", "documentation_links"),
        ],
        "documented_package": package,
        "include_patterns": ["index.rst", "reference/*.rst", *pages],
        "suppress_warnings": ["toc.excluded"],
        "nitpicky": True,
        "nitpick_ignore_regex": [("py:.*", rf"({'|'.join(OUTSIDE)})\..*"), ("py:.*", "|".join(BUILT_IN))],
        "autodoc_member_order": "bysource",
        "autodoc_typehints_format": "short",
        "napoleon_numpy_docstring": False,
        "napoleon_attr_annotations": False,
        "myst_heading_anchors": 3,
        "coverage_modules": [package],
        "coverage_ignore_modules": list(LEFT_OUT),
        "coverage_ignore_pyobjects": [rf"^{re.escape(place)}$" for place in public_names(package)],
        "coverage_show_missing_items": True,
        "coverage_statistics_to_stdout": False,
        "html_theme": "alabaster",
        "html_theme_options": {"page_width": "1100px", "sidebar_width": "240px"},
        "html_show_copyright": False,
        "html_show_sourcelink": False,
    }


def _contents(package: str, pages: Sequence[str]) -> str:
    return "\n".join([*_title(package), ".. toctree::", "   :maxdepth: 2", "", *(f"   /{page}" for page in pages), ""])


def _title(text: str, line: str = "=") -> list[str]:
    return [text, line * len(text), ""]


def _index_first(page: Path) -> tuple[bool, str]:
    return page.stem != "README", page.stem


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
