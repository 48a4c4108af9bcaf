"""When an averaging is due."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from shoal.core.clock import Clock
from shoal.core.loop import run_virtual
from shoal.protocols.averaging import average_in_background


def test_the_period_begins_when_the_loop_gave_its_values_not_when_it_was_asked() -> None:
    """A loop that paused for an evaluation would otherwise average twice in a row when it comes back."""
    taken: list[float] = []
    pauses = [0.0, 30.0, 0.0, 0.0]

    async def snapshot() -> Any:
        await asyncio.sleep(pauses[len(taken)])
        taken.append(asyncio.get_running_loop().time())
        peer.leaving = len(taken) == len(pauses) - 1
        return SimpleNamespace(vectors=None, weight=1.0, steps=len(taken))

    async def nothing(*args: Any, **options: Any) -> Any:
        return SimpleNamespace(vectors=None)

    peer: Any = SimpleNamespace(
        clock=Clock(), leaving=False, stir=asyncio.Event(), members=SimpleNamespace(has_others=lambda state: True),
        rolls=SimpleNamespace(invited_to=lambda series: False), meetings=SimpleNamespace(invited=False),
        history=SimpleNamespace(averaged=lambda outcome, stale: None, failed=lambda error: None),
    )  # fmt: skip
    replica: Any = SimpleNamespace(steps=0, shapes=[], snapshot=snapshot, offer=nothing)
    run_virtual(average_in_background(peer, replica, nothing, 2.0, None), limit_seconds=100)
    assert taken[:3] == [2.0, 34.0, 36.0]
