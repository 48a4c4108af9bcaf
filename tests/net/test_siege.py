"""A door that strangers cannot force: real sockets, two honest processes that average all the while.

The full figures are those of tests/acceptance/test_siege.py; this is the same with few of everything.
"""

from __future__ import annotations

import pytest
from siege_run import besieged, check

pytestmark = pytest.mark.timeout(120)


def test_honest_averaging_goes_on_and_nothing_breaks(tmp_path):
    outcome = besieged(tmp_path, stranger_frames=150, peer_frames=200, held=120, flood=8000, window_seconds=2.0, seed=1)
    check(outcome)
