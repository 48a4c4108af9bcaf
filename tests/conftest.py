"""What holds for every test process, and for the processes that it starts."""

from __future__ import annotations

import os
import signal

os.environ["OMP_NUM_THREADS"] = "1"  # tests share two cores: no thread pools of torch's

# Started in the background of a script, this process ignores Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
