"""Makes the helpers of all tests importable. Generated examples take the time they take, whatever else runs."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
settings.register_profile("shoal", deadline=None, database=None)
settings.load_profile("shoal")
