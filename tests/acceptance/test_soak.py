"""Check 25 of the Moshpit reference, section 7, in full: 1000 averagings that fail, in one process on real sockets."""

from __future__ import annotations

import asyncio

import pytest

from soak import check, soak

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]


def test_check_25_a_thousand_failed_averagings_leave_nothing_behind():
    result = asyncio.run(soak(1000, warm_up=250))
    print(f"\n{result}")
    check(result, most_growth=0.05)
