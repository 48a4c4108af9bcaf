"""shoal: one PyTorch model, many unequal machines, no coordinator.

    import shoal

    swarm = shoal.join("birds", peers=["shoal://..."])
    model, optimizer = swarm.attach(model, optimizer, batch_size=32)
    with swarm:
        for inputs, targets in loader:
            ...

Names are loaded when they are first used: what needs no torch (a seed, the command line) does not import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal.core.errors import (
    AddressError,
    AttachError,
    AveragingError,
    CallTimeout,
    CharterMismatch,
    DownloadError,
    IdentityInUse,
    JoinError,
    LeftError,
    MismatchError,
    ModelMismatch,
    NobodyThere,
    OptionError,
    PeerLost,
    ProtocolError,
    RefusedError,
    RemoteError,
    RoundError,
    SchemaChanged,
    ShoalError,
    TensorError,
)
from shoal.core.events import Event

if TYPE_CHECKING:
    from shoal.strategies.allreduce import AllReduce
    from shoal.strategies.moshpit import Moshpit
    from shoal.training.report import AveragingReport, PeerInfo, Report
    from shoal.training.swarm import Swarm, join

_NEEDS_TORCH = {
    "AllReduce": "shoal.strategies.allreduce",
    "AveragingReport": "shoal.training.report",
    "Moshpit": "shoal.strategies.moshpit",
    "PeerInfo": "shoal.training.report",
    "Report": "shoal.training.report",
    "Swarm": "shoal.training.swarm",
    "join": "shoal.training.swarm",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


__all__ = [
    "AddressError",
    "AllReduce",
    "AttachError",
    "AveragingError",
    "AveragingReport",
    "CallTimeout",
    "CharterMismatch",
    "DownloadError",
    "Event",
    "IdentityInUse",
    "JoinError",
    "LeftError",
    "MismatchError",
    "ModelMismatch",
    "Moshpit",
    "NobodyThere",
    "OptionError",
    "PeerInfo",
    "PeerLost",
    "ProtocolError",
    "RefusedError",
    "RemoteError",
    "Report",
    "RoundError",
    "SchemaChanged",
    "ShoalError",
    "Swarm",
    "TensorError",
    "join",
]
