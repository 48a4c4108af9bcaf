"""Runs a user's script in a process of `shoal run`, so that Ctrl-C, or what shoal refuses, ends it without a traceback.

python -m shoal.cli.script SCRIPT ARGS...
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.training.announce import say


def main() -> int:
    """The script's own exit code, or 130 after an interrupt."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    if hasattr(signal, "SIGBREAK"):  # what `shoal run` sends on Windows
        signal.signal(signal.SIGBREAK, signal.default_int_handler)
    try:
        runpy.run_path(script, run_name="__main__")
    except ShoalError as error:
        say(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the goodbye
        atexit._run_exitfuncs()  # says goodbye where the script did not
        say("interrupted; this peer said goodbye")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # tearing torch down takes longer than a person who pressed Ctrl-C waits
    return 0


if __name__ == "__main__":
    sys.exit(main())
