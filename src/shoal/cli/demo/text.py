"""Real training text without a download: the source of Python's own standard library.

Several megabytes that are on every machine that can run this. Whole files are held out for validation, so that the
validation loss is of text no peer has seen.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Not code to learn from: tests, other people's packages, and directories that are mostly tables of numbers.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data", "__pycache__"}
SMALLEST_FILE_BYTES = 2_000
HELD_OUT_EVERY = 20  # every 20th file is validation text
VOCABULARY_SIZE = 128  # ASCII; any other character becomes "?"


@dataclass(frozen=True)
class Text:
    """Two long rows of character numbers, each 0 to 127."""

    training: Tensor
    validation: Tensor


def source_files() -> list[Path]:
    """The standard library's .py files in a fixed order: top level and packages, no tests, no installed packages."""
    library = Path(sysconfig.get_paths()["stdlib"])
    named = {path.relative_to(library).as_posix(): path for path in library.rglob("*.py")}
    kept = [named[name] for name in sorted(named) if not LEFT_OUT & set(name.split("/"))]
    return [path for path in kept if path.stat().st_size >= SMALLEST_FILE_BYTES]


def read_text() -> Text:
    """Read and number the text; about a tenth of a second."""
    files = source_files()
    if len(files) < 2 * HELD_OUT_EVERY:
        raise RuntimeError(f"the source of the standard library is not on this machine: {len(files)} files found")
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return Text(
        training=_numbered([path for path in files if path not in set(held_out)]),
        validation=_numbered(held_out),
    )


def _numbered(files: list[Path]) -> Tensor:
    characters = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    return torch.frombuffer(bytearray(characters.encode("ascii", errors="replace")), dtype=torch.uint8)


def draw(row: Tensor, count: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` random windows: inputs and targets, both (count, context); a target is the character that follows."""
    starts = torch.randint(len(row) - context - 1, (count,), generator=generator)
    windows = torch.stack([row[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def batches(row: Tensor, batch_size: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random batches; the same seed gives the same batches."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    while True:
        yield draw(row, batch_size, context, generator)
