"""Makes the helper modules of this folder importable, here and in the peers that the tests start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
