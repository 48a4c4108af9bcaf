"""How a peer comes into a run: by any peer of it, or by founding it when nobody was named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shoal.core.address import Address
from shoal.core.errors import JoinError, MismatchError, RefusedError, RemoteError
from shoal.net.handshake import PENALTY
from shoal.overlay.membership import Membership

RETRY_SECONDS = 0.2
REMEMBERED_SECONDS = 3.0


async def enter(
    members: Membership, run: str, named: Sequence[Address], remembered: Sequence[Address], timeout_seconds: float
) -> None:
    """Join through the first of the named and remembered peers that answers; found the run only if none was named.

    An address where nobody listens is tried again until the time is over: machines start in any order. Raises JoinError
    with one reason per address, or the mismatch that one of them told.
    """
    remembered = [address for address in remembered if address.peer_id != members.me.peer_id]
    reasons: dict[str, str] = {}
    if named or remembered:
        limit = timeout_seconds if named else min(timeout_seconds, REMEMBERED_SECONDS)
        attempts = [
            asyncio.create_task(_try(members, address, reasons, bool(named)), name=f"try {address.peer_id[:6]}")
            for address in (*remembered, *named)
        ]
        try:
            async with asyncio.timeout(limit):
                while attempts:
                    await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
                    if any([attempt.result() for attempt in attempts if attempt.done()]):
                        return
                    attempts = [attempt for attempt in attempts if not attempt.done()]
        except TimeoutError:
            pass  # the reasons say what happened
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
    if members.charter is not None:
        return
    if named:
        wanted = {str(address): reasons.get(str(address), "no answer") for address in (*named, *remembered)}
        raise JoinError(f"no peer of run {run!r} could be joined", _without_secrets(wanted))
    members.found(run)
    members.update()


async def _try(members: Membership, address: Address, reasons: dict[str, str], patient: bool) -> bool:
    """Whether this address let us in. A refusal is final but for a penalty, which ends; the patient try again."""
    while True:
        try:
            await members.meet(list(address.endpoints), address.peer_id)
            return True
        except MismatchError:
            raise
        except RefusedError as error:
            reasons[str(address)] = error.reason
            if error.code != PENALTY:
                return False
        except RemoteError as error:
            reasons[str(address)] = str(error)
        if not patient:
            return False
        await members.host.clock.sleep(RETRY_SECONDS)


def _without_secrets(reasons: dict[str, str]) -> dict[str, str]:
    return {text if text.count("/") < 3 else text.rpartition("/")[0]: reason for text, reason in reasons.items()}
