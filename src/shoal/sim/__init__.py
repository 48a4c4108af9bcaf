"""Floor 5: the simulated world: the real protocol code on a virtual clock and a modelled network.

The world's names are loaded when they are first used: a scenario that needs no torch does not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.sim.replica import VirtualReplica
    from shoal.sim.world import Machine, SimPeer, World

_NEEDS_TORCH = {
    "Machine": "shoal.sim.world",
    "SimPeer": "shoal.sim.world",
    "VirtualReplica": "shoal.sim.replica",
    "World": "shoal.sim.world",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'shoal.sim' has no attribute {name!r}")


__all__ = ["Machine", "SimPeer", "VirtualReplica", "World"]
