"""`shoal seed`: an entry peer that does not train."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

from shoal.core.errors import JoinError
from shoal.overlay.member_record import SEED
from shoal.training.announce import invitation, say
from shoal.training.presence import Presence
from shoal.training.settings import Settings, read_settings


def serve_seed(run: str, join: list[str], secret: str | None, listen: str | None, figures: Path | None) -> int:
    """Serve until a signal; returns the exit code."""
    settings = read_settings(run, join, secret, listen, None, None)
    try:
        told = asyncio.run(_serve(settings))
    except JoinError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 0
    if figures is not None:
        figures.write_text(json.dumps(told, indent=2) + "\n")
    return 0


async def _serve(settings: Settings) -> dict[str, object]:
    presence = Presence(settings, SEED, None, lambda event: say(str(event)))
    started_at = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            asyncio.get_running_loop().add_signal_handler(number, presence.stop.set)
        except NotImplementedError:
            break  # Windows: KeyboardInterrupt ends asyncio.run

    def entered() -> None:
        for line in invitation(presence.address, "shoal run SCRIPT", settings.run):
            say(line)

    await presence.live(lambda: None, entered)
    return {
        "address": presence.address,
        "seconds": time.monotonic() - started_at,
        "peers_met": list(presence.members.met),
    }
