"""Makes the helpers of this folder and those of all tests importable, also in the peers that the tests start."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


@pytest.fixture(autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer in this process remembers is of this test alone: no other run of the tests is found again."""
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path_factory.mktemp("state")))
