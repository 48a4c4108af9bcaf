"""Every error shoal raises, as one tree.

ShoalError
├── OptionError        a bad value, refused where it was given: field, value, bounds
├── AddressError       a text that is no shoal:// address
├── IdentityInUse      two processes want one identity file
├── JoinError          nobody could be joined: one reason per address
├── AttachError        this model or optimizer can't be attached
├── LeftError          a call after leave()
├── MismatchError      this peer and the run do not fit
│   ├── CharterMismatch    the strategy or an option differs: the field
│   └── ModelMismatch      the model differs: the first parameter
├── SchemaChanged      the attached model changed its shapes or its trainable parameters
├── TensorError        a tensor that can't be averaged: its index
├── AveragingError     an averaging brought no result; every value is as before
│   ├── NobodyThere        nobody to average with
│   ├── RoundError         the group round failed: the reason
│   └── OutOfStep          this replica is not at the step, or not in the state, of the others
├── DownloadError      no donor could give the whole state
└── RemoteError        the other end is at fault
    ├── RefusedError       it refused us, or we refused it: the reason
    ├── PeerLost           it can't be reached any more
    ├── CallTimeout        it did not answer in time
    └── ProtocolError      it sent what the protocol does not allow
"""

from __future__ import annotations

from collections.abc import Mapping


class ShoalError(Exception):
    """The root: `except shoal.ShoalError` catches all that shoal raises on purpose."""


class OptionError(ShoalError, ValueError):
    """A bad value, refused at construction. `field`, `value`, `bounds` say which, what it was, and what is allowed."""

    def __init__(self, field: str, value: object, bounds: str) -> None:
        super().__init__(f"{field} = {value!r} is not allowed: it must be {bounds}")
        self.field, self.value, self.bounds = field, value, bounds


class AddressError(ShoalError, ValueError):
    """A text that is no address of the form shoal://PEERID@HOST:PORT[,HOST:PORT]...[/SECRET]."""


class IdentityInUse(ShoalError):
    """Another live process holds this identity file: two peers with one identity would be taken for one."""


class JoinError(ShoalError):
    """Nobody could be joined. `reasons` has one line per address that was tried."""

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons = dict(reasons or {})
        lines = [message, *(f"  {address}: {reason}" for address, reason in self.reasons.items())]
        super().__init__("\n".join(lines))


class AttachError(ShoalError):
    """This model or optimizer can't be attached; the message says why and what to do."""


class LeftError(ShoalError):
    """The swarm was left already."""


class MismatchError(ShoalError):
    """This peer and the run do not fit together."""


class CharterMismatch(MismatchError):
    """The founder fixed another value for `field` of the charter."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(
            f"this run's charter says {field} = {theirs}, this peer asks for {ours}; "
            f"give the same value, or no strategy at all to adopt the run's"
        )
        self.field, self.ours, self.theirs = field, ours, theirs


class ModelMismatch(MismatchError):
    """The attached model is not the run's; the message names the first parameter that differs."""


class SchemaChanged(ShoalError):
    """Shapes or requires_grad of the attached model changed after attach."""


class TensorError(ShoalError, ValueError):
    """Tensor number `index` of the list can't be averaged."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"tensor {index}: {problem}")
        self.index, self.problem = index, problem


class AveragingError(ShoalError):
    """An averaging brought no result. Every value is as it was before."""


class NobodyThere(AveragingError):
    """There is nobody to average with."""


class RoundError(AveragingError):
    """The group round failed; `reason` says why, `members` (peer ids) who was in it, `number` which averaging.

    `number` 0 and no members: it failed before it had any.
    """

    def __init__(self, reason: str, number: int = 0, members: tuple[str, ...] = ()) -> None:
        which = f"averaging {number}" if number else "an averaging"
        among = f" of {len(members)} members" if members else ""
        super().__init__(f"{which}{among} failed: {reason}; nothing was changed")
        self.reason, self.number, self.members = reason, number, members


class OutOfStep(AveragingError):
    """This replica is not as the others' (gradient mode). `diverged`: at the same step, but with other values.

    It repairs itself; this never reaches the user's loop.
    """

    def __init__(self, reason: str, *, diverged: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.diverged = reason, diverged


class DownloadError(ShoalError):
    """No donor could give the whole state; the old state is untouched."""


class RemoteError(ShoalError):
    """Something at the other end, or on the way to it, is at fault. Never raised into the user's loop."""


class RefusedError(RemoteError):
    """One end refused the other. `reason` is the text that both ends show; `code` is for programs."""

    def __init__(self, reason: str, code: str = "refused") -> None:
        super().__init__(reason)
        self.reason, self.code = reason, code


class PeerLost(RemoteError):
    """The peer can't be reached: its connection broke or never came about."""


class CallTimeout(RemoteError):
    """The peer did not answer a call before its deadline."""


class ProtocolError(RemoteError):
    """The peer sent what the protocol does not allow. Its connection is closed."""
