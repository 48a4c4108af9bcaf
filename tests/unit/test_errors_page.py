"""docs/reference/errors.md is true: it has every exception and every kind of event that the source has."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import shoal
from shoal.core import errors
from shoal.core.errors import RoundError, ShoalError
from shoal.core.events import Event

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text()
EXPORTED = sorted(name for name, found in vars(errors).items() if inspect.isclass(found) and name in shoal.__all__)


def kinds_in(text: str) -> set[str]:
    """The kinds that a source passes to `log.add(` literally: `"lost"`, `"left" if polite else "lost"`."""
    kinds = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and re.search(r"\b_?log\.add$", ast.unparse(node.func)) and node.args:
            first = node.args[0]
            values = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
            kinds |= {value.value for value in values if isinstance(value, ast.Constant)}
    return kinds


def kinds_of_the_source() -> set[str]:
    return set().union(*(kinds_in(path.read_text()) for path in (ROOT / "src").rglob("*.py")))


def rows(heading: str) -> dict[str, str]:
    """The rows of the table under a heading of the page, by the word in their first column."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return {found[1]: found[0] for found in re.finditer(r"^\| `(\w+)` \|.*$", section, re.MULTILINE)}


def test_literal_kinds_are_found() -> None:
    assert kinds_in('peer.log.add("left" if a else "lost", b)\nself._log.add("late", c)\nlog.add(kind, d)') == {
        "left", "lost", "late",
    }  # fmt: skip
    assert {"joined", "left", "lost", "averaged", "failed", "diverged"} <= kinds_of_the_source()


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_exception_is_in_the_page(name: str) -> None:
    assert name in rows("Errors"), "a row of the table"
    assert re.search(rf"^[│├└─ ]*{name}\b", PAGE, re.MULTILINE), "a line of the tree"


def test_the_tree_of_the_page_is_that_of_the_source() -> None:
    assert errors.__doc__ is not None
    tree = errors.__doc__[errors.__doc__.index("ShoalError\n") :].rstrip()
    assert tree in PAGE
    for line in tree.splitlines():
        assert issubclass(getattr(errors, re.search(r"\w+", line)[0]), ShoalError)


@pytest.mark.parametrize("kind", sorted(kinds_of_the_source()))
def test_every_kind_of_event_is_in_the_page_and_in_the_docstring(kind: str) -> None:
    assert kind in rows("Events")
    assert re.search(rf"\b{kind}\b", Event.__doc__ or "")


def test_a_failed_averaging_tells_only_what_is_known_of_it() -> None:
    assert str(RoundError("why", 3, ("a", "b"))) == "averaging 3 of 2 members failed: why; nothing was changed"
    assert str(RoundError("why", 3)) == "averaging 3 failed: why; nothing was changed"
    assert str(RoundError("why")) == "an averaging failed: why; nothing was changed"
