"""Moshpit reference, section 7, check 30: no network bytes are unpickled; a fuzzed message raises, never executes.

The fuzz targets of each message type are in tests/sim/test_fuzz.py and test_fuzz_decoders.py.
"""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import msgspec
import pytest

import shoal
from fuzzing import message_types
from shoal.core.errors import ProtocolError
from shoal.net.envelope import decode_body, decode_link, decode_stream

EXECUTE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "torch.load", "yaml.load"}


def what_executes(text: str) -> list[str]:
    """Imports and calls that can run what they read."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in EXECUTE]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in EXECUTE:
            found.append(node.module or "")
        elif isinstance(node, ast.Call) and (
            ast.unparse(node.func) in CALLS or any(keyword.arg == "allow_pickle" for keyword in node.keywords)
        ):
            found.append(ast.unparse(node.func))
    return found


def test_check_30_no_line_of_the_library_can_run_what_it_reads() -> None:
    bad = "import pickle\nfrom dill import loads\ntorch.load(file)\neval('1')\nnp.load(file, allow_pickle=True)"
    assert what_executes(bad) == [
        "pickle", "dill", "torch.load", "eval", "np.load",
    ]  # fmt: skip
    folder = Path(shoal.__file__).parent
    assert {
        str(file): found for file in folder.rglob("*.py") if (found := what_executes(file.read_text("utf-8")))
    } == {}


class Trap:
    """Runs when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return open, (str(self.file), "w")  # type: ignore[return-value]


def test_check_30_a_trap_in_the_place_of_any_message_raises_and_does_nothing(tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    for kind in message_types():
        with pytest.raises(ProtocolError):
            decode_body(msgspec.Raw(trap), kind)
    for decode in (decode_link, decode_stream):
        with pytest.raises(ProtocolError):
            decode(trap)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists(), "the trap is none"
