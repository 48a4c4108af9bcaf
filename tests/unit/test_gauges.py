"""How long a sender may be silent, and how fast a link is while it is busy."""

from __future__ import annotations

import pytest

from shoal.core.gauges import GAPS_KEPT, Allowance, RateGauge, Silence


def heard(*moments: float) -> Silence:
    """A peer that was met at the first of these moments."""
    silence = Silence(moments[0])
    for moment in moments[1:]:
        silence.heard(moment)
    return silence


def test_before_any_history_a_peer_has_3_seconds() -> None:
    assert heard(10.0).patience_seconds() == 3.0


@pytest.mark.parametrize(("gap", "patience"), [(0.1, 1.0), (0.25, 1.0), (0.5, 2.0), (0.75, 3.0), (9, 3.0)])
def test_patience_is_4_times_the_longest_gap_between_1_and_3_seconds(gap, patience) -> None:
    assert heard(10.0, 10.0 + gap, 10.06 + gap).patience_seconds() == pytest.approx(patience, abs=1e-9)


def test_only_the_last_100_gaps_count() -> None:
    moments = [0.0, 0.7, *(0.7 + 0.1 * (number + 1) for number in range(GAPS_KEPT))]
    assert heard(*moments[:-1]).patience_seconds() == pytest.approx(2.8)
    assert heard(*moments).patience_seconds() == 1.0


def test_the_gaps_inside_a_burst_do_not_push_out_of_memory_how_long_it_can_be_quiet() -> None:
    silence = heard(0.0, 0.7)
    for number in range(10 * GAPS_KEPT):
        silence.heard(0.7 + 0.001 * (number + 1))
    assert silence.patience_seconds() == pytest.approx(2.8)


def test_a_silence_is_counted_from_the_last_byte() -> None:
    assert heard(8.0).last_heard == 8.0
    assert heard(8.0, 11.5, 11.501).last_heard == 11.501


def test_a_silence_that_was_our_own_fault_is_no_gap() -> None:
    silence = heard(10.0, 10.1)
    silence.excuse(20.0)
    assert silence.last_heard == 20.0
    silence.heard(20.1)
    assert silence.patience_seconds() == 1.0


# ---------------------------------------------------------------- rates


def passing(bytes_per_second: float, chunk_bytes: int, seconds: float) -> RateGauge:
    """What a gauge shows of a link that is busy all the time, with bytes counted in chunks of this size."""
    gauge = RateGauge()
    for number in range(1, int(seconds * bytes_per_second / chunk_bytes) + 1):
        gauge.add(chunk_bytes, number * chunk_bytes / bytes_per_second)
    return gauge


def test_there_is_no_rate_before_four_busy_windows() -> None:
    gauge = RateGauge()
    for number in range(5):
        assert gauge.bytes_per_second() is None
        gauge.add(1_000_000, 10.0 + number * 0.0501)
    assert gauge.bytes_per_second() == pytest.approx(20e6, rel=0.01)


@pytest.mark.parametrize("rate", [1e6, 12.5e6, 1e9])
def test_a_busy_link_shows_its_rate(rate) -> None:
    assert passing(rate, 10_000, 2.0 if rate < 1e8 else 0.5).bytes_per_second() == pytest.approx(rate, rel=0.25)


@pytest.mark.parametrize(
    ("rate", "chunk_bytes"),
    [(125e3, 16 * 1024), (125e3, 64 * 1024), (1.25e6, 64 * 1024), (1.25e6, 256 * 1024)],
)
def test_a_slow_link_shows_its_rate_too_though_each_chunk_takes_longer_than_a_window(rate, chunk_bytes) -> None:
    """1 and 10 Mbit/s, in the pieces that TLS records and the transports' slices come in."""
    assert passing(rate, chunk_bytes, 30.0).bytes_per_second() == pytest.approx(rate, rel=0.25)


def test_waiting_for_a_slow_partner_does_not_slow_the_own_link_down() -> None:
    """Busy a third of the time at 10 MB/s: the rate while busy is still about 10 MB/s."""
    gauge, now = RateGauge(), 0.0
    for _ in range(20):
        for _ in range(30):
            now += 0.01
            gauge.add(100_000, now)
        now += 0.6
    assert gauge.bytes_per_second() == pytest.approx(10e6, rel=0.25)


def test_a_trickle_to_a_slow_partner_does_not_slow_the_own_link_down() -> None:
    """2 s at 10 MB/s to all partners, then 6 s at 0.5 MB/s to the last one: most bytes passed at 10 MB/s."""
    gauge, now = passing(10e6, 10_000, 2.0), 2.0
    for _ in range(300):
        now += 0.02
        gauge.add(10_000, now)
    assert gauge.bytes_per_second() == pytest.approx(10e6, rel=0.1)


def test_a_burst_into_a_buffer_is_not_the_rate_of_the_link() -> None:
    """1 MB at once, then 4 MB at 1 MB/s."""
    gauge = RateGauge()
    gauge.add(1_000_000, 0.0)
    for number in range(400):
        gauge.add(10_000, (number + 1) / 100)
    assert gauge.bytes_per_second() == pytest.approx(1e6, rel=0.1)


def test_heartbeats_do_not_make_a_window_busy() -> None:
    gauge = passing(12.5e6, 10_000, 1.0)
    before = gauge.bytes_per_second()
    for number in range(1000):
        gauge.add(30, 2.0 + number * 0.5)
    assert gauge.bytes_per_second() == before


def test_the_total_counts_every_byte() -> None:
    gauge = RateGauge()
    for number in range(10):
        gauge.count(number)
    assert gauge.total_bytes == 45


def test_a_link_that_became_faster_is_measured_anew() -> None:
    gauge = passing(1e6, 10_000, 5.0)
    now = 5.0
    for _ in range(12_000):
        now += 0.001
        gauge.add(10_000, now)
    assert gauge.bytes_per_second() == pytest.approx(10e6, rel=0.25)


def test_an_allowance_is_so_many_at_once_and_so_many_a_second_after_that() -> None:
    allowance = Allowance(3, 10.0, 0.0)
    assert [allowance.take(0.0) for _ in range(5)] == [True, True, True, False, False]
    assert [allowance.take(0.25) for _ in range(4)] == [True, True, False, False]
    assert allowance.has_any(0.31)
    assert [allowance.take(100.0) for _ in range(5)] == [True, True, True, False, False]


def test_an_allowance_survives_a_clock_that_stands_still() -> None:
    allowance = Allowance(1, 1.0, 5.0)
    assert [allowance.take(4.0), allowance.take(4.0)] == [True, False]
