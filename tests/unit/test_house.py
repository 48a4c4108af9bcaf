"""The rules of the house, held by a machine. A check that fails names file, line and what to do.

Every check is a function from source text to complaints, and is first shown a text that breaks its rule: a check that
has never failed proves nothing.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
FILES = sorted(SOURCE.rglob("*.py"))

FILE_LINES = 400
FUNCTION_LINES = 70
STRATEGY_LINES = 250
PACKAGE_LINES = 11_000

Complaints = Iterator[tuple[int, str]]
CATCH_ALL = {"Exception", "BaseException"}


def long_file(text: str) -> Complaints:
    lines = len(text.splitlines())
    if lines >= FILE_LINES:
        yield FILE_LINES, f"the file has {lines} lines, it must stay under {FILE_LINES}: find the seam and cut there"


def long_strategy(text: str) -> Complaints:
    lines = len(text.splitlines())
    if lines > STRATEGY_LINES:
        yield STRATEGY_LINES, f"one algorithm, one page: {lines} lines, at most {STRATEGY_LINES}"


def long_function(text: str) -> Complaints:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines >= FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {lines} lines, it must stay under {FUNCTION_LINES}"


def code_lines(text: str) -> int:
    """Lines that are code: neither blank, nor a comment, nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = [line.strip() for line in text.splitlines()]
    return sum(bool(line) and line[0] != "#" and number not in docstrings for number, line in enumerate(lines, 1))


def _names(node: ast.expr | None) -> set[str]:
    """The last words of the exceptions in `except A`, `except a.B`, `except (A, B)`; a bare except catches all."""
    if node is None:
        return CATCH_ALL
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return {ast.unparse(part).rpartition(".")[2] for part in parts}


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)) for s in body)


def swallowing(text: str) -> Complaints:
    """`except Exception: pass`, or the same said with contextlib.suppress."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and CATCH_ALL & _names(node.type) and _does_nothing(node.body):
            yield node.lineno, "this except swallows every error: name the ones you expect, or make an event of it"
        if isinstance(node, ast.Call) and _names(node.func) == {"suppress"}:
            for argument in node.args:
                if CATCH_ALL & _names(argument):
                    yield node.lineno, "this suppress swallows every error: name the ones you expect"


def no_docstring(text: str) -> Complaints:
    if ast.get_docstring(ast.parse(text)) is None:
        yield 1, "the file does not start with a docstring that says what it is for"


def address_order(text: str) -> Complaints:
    """The one helper of asyncio that orders by address and that the virtual-time loop can't put right."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute | ast.Name | ast.alias) and _last_word(node) == "as_completed":
            line = getattr(node, "lineno", 1)
            yield (
                line,
                "as_completed begins coroutines in the order of their addresses: use a TaskGroup or asyncio.wait",
            )


def _last_word(node: ast.Attribute | ast.Name | ast.alias) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else node.name


def complaints(check: Callable[[str], Complaints], files: list[Path]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{line}: {what}" for file in files for line, what in check(file.read_text("utf-8"))
    ]


BREAKS: list[tuple[Callable[[str], Complaints], str, list[int]]] = [
    (long_file, "\n" * 400, [400]),
    (long_file, "\n" * 399, []),
    (long_strategy, "\n" * 251, [250]),
    (long_strategy, "\n" * 250, []),
    (long_function, "class A:\n  async def f():\n" + "    x = 1\n" * 69, [2]),
    (long_function, "def f():\n" + "    x = 1\n" * 68, []),
    (swallowing, "try:\n  f()\nexcept:\n  pass", [3]),
    (swallowing, "try:\n  f()\nexcept Exception:\n  ...", [3]),
    (swallowing, "try:\n  f()\nexcept (OSError, builtins.BaseException) as error:\n  'never mind'\n  pass", [3]),
    (swallowing, "try:\n  f()\nexcept* Exception:\n  pass", [3]),
    (swallowing, "with contextlib.suppress(OSError, Exception):\n  f()", [1]),
    (swallowing, "try:\n  f()\nexcept OSError:\n  pass\nexcept Exception as error:\n  log(error)", []),
    (no_docstring, "import os\n'late'", [1]),
    (no_docstring, "", [1]),
    (no_docstring, "'What it is for.'\nimport os", []),
    (address_order, "import asyncio\nfor f in asyncio.as_completed([]):\n  pass", [2]),
    (address_order, "from asyncio import as_completed", [1]),
    (address_order, "import asyncio\nasyncio.wait([])", []),
]


@pytest.mark.parametrize(("check", "text", "lines"), BREAKS)
def test_each_check_finds_what_it_is_for(check: Callable[[str], Complaints], text: str, lines: list[int]) -> None:
    assert [line for line, _ in check(text)] == lines


@pytest.mark.parametrize("check", [long_file, long_function, swallowing, no_docstring, address_order])
def test_every_file_keeps_the_rule(check: Callable[[str], Complaints]) -> None:
    assert FILES, f"no source under {SOURCE}"
    found = complaints(check, FILES)
    assert not found, "\n" + "\n".join(found)


def test_every_strategy_is_one_page() -> None:
    found = complaints(long_strategy, [file for file in FILES if file.parent.name == "strategies"])
    assert not found, "\n" + "\n".join(found)


def test_lines_of_code_are_counted_without_words() -> None:
    text = '"""A file.\n\nMore.\n"""\n\nx = 1  # one\n# two\n\ndef f():\n    """Words."""\n    return "text"\n'
    assert code_lines(text) == 3


def test_the_whole_package_stays_small() -> None:
    """Without the demo, which is a program on top of it (docs/adr/0001)."""
    library = [file for file in FILES if "demo" not in file.parts]
    sizes = {file: code_lines(file.read_text("utf-8")) for file in library}
    largest = sorted(sizes, key=lambda file: -sizes[file])[:10]
    listing = "\n".join(f"{file.relative_to(ROOT)}:1: {sizes[file]} lines of code" for file in largest)
    assert sum(sizes.values()) < PACKAGE_LINES, f"{sum(sizes.values())} lines of code, the largest files:\n{listing}"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run in the root of this checkout, with this checkout's source first on the path."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False
    )


def test_imports_go_down_only() -> None:
    tool = Path(sys.executable).parent / ("lint-imports.exe" if os.name == "nt" else "lint-imports")
    assert tool.exists(), f"{tool} is missing: install the package with its dev extra"
    done = run(str(tool), "--no-cache")
    assert done.returncode == 0, f"an import contract of pyproject.toml is broken:\n{done.stdout}{done.stderr}"


IMPORTED = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
print(module.__file__, "torch" in sys.modules)
"""


@pytest.mark.parametrize("module", ["shoal", "shoal.cli.main"])
def test_a_command_that_needs_no_torch_does_not_import_it(module: str) -> None:
    if module == "shoal.cli.main" and not (SOURCE / "shoal" / "cli" / "main.py").exists():
        pytest.skip("src/shoal/cli/main.py does not exist yet")
    done = run(sys.executable, "-c", IMPORTED, module)
    assert done.returncode == 0, done.stderr
    file, has_torch = done.stdout.strip().rsplit(" ", 1)
    assert Path(file).is_relative_to(SOURCE), f"{file} is not of this checkout"
    trace = f"{sys.executable} -X importtime -c 'import {module}'"
    assert has_torch == "False", f"{file}:1: `import {module}` imports torch; who does, shows: {trace}"
