"""Makes the helper modules of this folder importable, here and in the peers that the tests start."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer in this process remembers is of this test alone: no other run of the tests is found again."""
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path_factory.mktemp("state")))
