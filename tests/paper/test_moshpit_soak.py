"""Check 25 of the Moshpit reference, section 7: failed rounds leave nothing behind. All 1000 of them: acceptance."""

from __future__ import annotations

import asyncio

from soak import check, soak


def test_check_25_failed_averagings_leave_neither_memory_nor_files_nor_tasks_behind() -> None:
    check(asyncio.run(soak(15, warm_up=15)), most_growth=0.08)  # Python and torch are still warming up
