"""Lines that differ by four: rates are measured right, nobody is taken for late, and every averaging is exact."""

from __future__ import annotations

from shoal.sim.swarm import Swarm


def test_a_swarm_with_unequal_lines_averages_exactly_and_soon() -> None:
    """Three rounds of groups of up to four. The slowest line needs 5.1 s to send the state once: 16 MB at 3.1 MB/s.

    The first averaging knows no rates; from the second on shares follow what was measured in the one before.
    """
    swarm = Swarm(peers=24, group_size=4, averagings=3, unequal=4.0, every_seconds=40.0)
    figures = swarm.run(0)
    assert figures["exact"] == 1.0
    assert figures["group_rounds"] == 3
    assert figures["round_seconds"] < 7.0
