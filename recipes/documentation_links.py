"""What documentation.py adds to Sphinx: names of the API between backticks become links, and where they may lead."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, TypeVar

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

_LITERAL = re.compile(r"(``.+?``)")
_NAME = re.compile(r"(?P<name>[A-Za-z_]\w*(\.\w+)*)(\(.*\))?", re.DOTALL)


class LinkNames(SphinxTransform):
    """Turns ``calibrate(...)`` and ``hf_favorpp.nn`` in Markdown into references, those to be found or warned of."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Transform one page.

        Args:
            **kwargs: Not used.
        """
        if self.env.doc2path(self.env.docname).suffix != ".md":
            return  # docstrings say what is a reference
        for literal in list(self.document.findall(nodes.literal)):
            target = _target(literal.astext(), self.config.documented_package)
            if target is None or isinstance(literal.parent, nodes.reference | addnodes.pending_xref):
                continue
            reference = addnodes.pending_xref(
                refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname, refwarn=True
            )
            literal.replace_self(reference)
            reference += literal


class LinkFolders(SphinxPostTransform):
    """Lets links to folders that exist be plain text: on a page there is nothing to show of them."""

    default_priority = 8  # before MyST, which would warn

    def run(self, **kwargs: Any) -> None:
        """Transform one page.

        Args:
            **kwargs: Not used.
        """
        page = Path(self.env.doc2path(self.env.docname))
        for reference in list(self.document.findall(addnodes.pending_xref)):
            if reference["reftype"] == "myst" and (page.parent / reference["reftarget"]).is_dir():
                reference.replace_self(reference.children)


def _target(text: str, package: str) -> str | None:
    """Return the name of the API that is meant, or None where none is."""
    if not (match := _NAME.fullmatch(text)):
        return None
    name = match["name"]
    if name.startswith(f"{package}."):
        return name
    public = importlib.import_module(package).__all__
    return f"{package}.{name}" if name.partition(".")[0] in public else None


def canonical(target: str) -> str | None:
    """Return where an object is defined that can be imported from elsewhere too.

    Args:
        target: Dotted name.

    Returns:
        Dotted name; None where there is no such object, or it has no name of its own.
    """
    found = _import(target)
    place = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    return place if found is not None and _import(place) is found else None


def public_names(package: str) -> dict[str, str]:
    """Return the names that a package exports, under which they are documented.

    Args:
        package: Its name.

    Returns:
        By the place of their definition.
    """
    names = (f"{package}.{name}" for name in importlib.import_module(package).__all__)
    return {place: name for name in names if (place := canonical(name))}


def _import(target: str) -> Any:
    """Return what has a dotted name, None where nothing has."""
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def _resolve(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element) -> Any:
    """Find what is documented under another name; a type variable is none."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if isinstance(_import(target), TypeVar):
        return content
    place = canonical(target)
    other = public_names(app.config.documented_package).get(place or "", place)
    if other is None or other == target:
        return None
    return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, "obj", other, node, content)


def _read_plainly(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Let |x| be a norm and no substitution, and let Napoleon take no type from "Number of steps: ..."."""
    for index, line in enumerate(lines):
        if "|" in line and not line.lstrip().startswith(".. math::"):
            parts = _LITERAL.split(line)
            parts[::2] = (part.replace("|", r"\|") for part in parts[::2])
            lines[index] = "".join(parts)
    for index in range(1, len(lines)):
        if lines[index - 1].strip() in ("Returns:", "Yields:"):
            text = lines[index].lstrip()
            lines[index] = f"{lines[index].removesuffix(text)}: {text}"  # an empty type
    if what in ("data", "attribute", "property") and lines:
        lines[0] = f": {lines[0]}"


def _skip_fields(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields that the docstring of their class describes: of named tuples, and defaults that are classes."""
    package = app.config.documented_package
    field = type(obj).__name__ == "_tuplegetter"
    return True if field or (isinstance(obj, type) and obj.__module__.partition(".")[0] != package) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register all this.

    Args:
        app: The application.

    Returns:
        What Sphinx asks of an extension.
    """
    app.add_config_value("documented_package", "", "env", frozenset({str}))
    app.add_transform(LinkNames)
    app.add_post_transform(LinkFolders)
    app.connect("missing-reference", _resolve)
    app.connect("autodoc-process-docstring", _read_plainly, priority=400)  # before Napoleon
    app.connect("autodoc-skip-member", _skip_fields)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
