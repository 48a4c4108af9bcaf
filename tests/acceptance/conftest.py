"""Makes the helpers of all tests importable, those with real processes too."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "net"), str(TESTS / "sim")]
