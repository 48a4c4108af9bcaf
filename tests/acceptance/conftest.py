"""Makes the helpers of the tests with real processes importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "net"))
