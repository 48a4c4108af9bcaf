"""A door that strangers cannot force, with all its figures: two honest processes average all the while."""

from __future__ import annotations

import pytest
from siege_run import besieged, check

HELD = 1000

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]


@pytest.fixture
def many_files():
    """As many sockets as the test holds open at once."""
    resource = pytest.importorskip("resource", reason="tells how many files may be open")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * HELD:
        pytest.skip(f"only {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * HELD), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_five_thousand_frames_of_strangers_and_of_a_peer_a_thousand_half_open_connections_and_floods(
    tmp_path, many_files
):
    outcome = besieged(
        tmp_path, stranger_frames=5000, peer_frames=5000, held=HELD, hold_seconds=12.0, flood=50_000,
        window_seconds=10.0, seed=2,
    )  # fmt: skip
    print(f"\n{outcome}")
    check(outcome)
