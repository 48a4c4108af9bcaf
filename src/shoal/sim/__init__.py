"""Floor 5: the simulated world: the real protocol code on a virtual clock and a modelled network."""

from __future__ import annotations

from shoal.sim.replica import VirtualReplica
from shoal.sim.world import Machine, SimPeer, World

__all__ = ["Machine", "SimPeer", "VirtualReplica", "World"]
