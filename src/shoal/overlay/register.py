"""The register of a run: its page in the directory, where each member keeps its record and finds whom it has not met.

Members tell each other directly, over their links, what they do. The register is for what that can't do: two peers that
nobody introduced, because they came at once through different peers or because word got lost, find each other here.
"""

from __future__ import annotations

import msgspec

from shoal.core.errors import ProtocolError
from shoal.net.envelope import decode_body, raw
from shoal.overlay.directory import Directory, Entry
from shoal.overlay.member_record import Record
from shoal.overlay.membership import Membership

KEEP_SECONDS, STAY_SECONDS = 10.0, 30.0
FIRST_SECONDS = 0.5
"""After the start: the first links are made by then."""


async def keep_register(members: Membership, directory: Directory) -> None:
    """Keep this peer's record in the register for ever, and dial who is there and unknown here."""
    clock, random = members.host.clock, members.host.random
    await clock.sleep(FIRST_SECONDS)
    await directory.bootstrap()
    while True:
        if members.charter is not None:
            page = f"members of {members.charter.charter_id}"
            await directory.store(page, bytes(raw(members.me)), STAY_SECONDS)
            for peer_id, entry in (await directory.get(page))[page].items():
                _hear_of(members, peer_id, entry)
        await clock.sleep(KEEP_SECONDS * random.uniform(0.75, 1.25))  # not all at once


def _hear_of(members: Membership, peer_id: str, entry: Entry) -> None:
    try:
        record = decode_body(msgspec.Raw(entry.value), Record)
    except ProtocolError as error:
        members.host.log.add("refused", f"its record in the register: {error}", peer_id)
        return
    if record.peer_id == peer_id:
        members.hear_of(record)
