"""How often a peer with many links tells each of them what is not urgent, and gives a sign of life."""

from __future__ import annotations

import pytest

from shoal.net.heartbeat import LINKS_AT_FULL_PACE, news_seconds, pause_seconds
from shoal.net.remote import FIRST_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("links", "seconds"), [(0, 1.0), (1, 1.0), (16, 1.0), (24, 2.0), (32, 3.0), (64, 7.0), (72, 8.0), (1000, 8.0)]
)
def test_news_are_rarer_where_there_are_many_links(links: int, seconds: float) -> None:
    assert news_seconds(links) == seconds


def test_where_there_are_many_links_news_are_the_signs_of_life() -> None:
    assert pause_seconds(LINKS_AT_FULL_PACE) == FIRST_PAUSE_SECONDS
    for links in range(LINKS_AT_FULL_PACE + 1, 200):
        assert pause_seconds(links) > news_seconds(links)


def test_all_links_together_cost_a_peer_at_most_a_message_for_each_of_its_first_ones_per_second() -> None:
    for links in range(1, 73):
        assert links / news_seconds(links) <= LINKS_AT_FULL_PACE + 1
