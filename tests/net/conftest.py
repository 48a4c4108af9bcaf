"""Makes the helper modules of this folder importable, here and in the peers that the tests start."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
