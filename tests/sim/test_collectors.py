"""The collector of a roll dies, is slow, or there are two: every wait ends, each roll is exact, the next is one again.

3 to 8 peers call for an averaging within half a second; what happens to the collector, and when, follows from the seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from crowd import crowd, next_collector, now, shapes_of_vectors
from on_demand import inputs_of

from shoal.core.errors import NobodyThere, RoundError
from shoal.net.envelope import Message
from shoal.protocols.outcome import Outcome
from shoal.protocols.roll_record import CALL, Here
from shoal.sim import SimPeer, World
from shoal.strategies import AnyStrategy
from shoal.strategies.allreduce import AllReduce
from shoal.strategies.moshpit import Moshpit

TIMEOUT_SECONDS = 8.0
CALLS_SECONDS = 0.5
Result = Outcome | BaseException


def strategy_of(random: Random) -> AnyStrategy:
    if random.random() < 0.5:
        return AllReduce(every_seconds=3600.0, timeout_seconds=TIMEOUT_SECONDS)
    return Moshpit(group_size=3, every_seconds=3600.0, timeout_seconds=TIMEOUT_SECONDS)


class Trial:
    """Peers that call for averagings; each has its own input and weight, whatever the averaging."""

    def __init__(self, peers: list[SimPeer], strategy: AnyStrategy, random: Random) -> None:
        self.peers, self.strategy, self.random = peers, strategy, random
        self.inputs = dict(zip([peer.id for peer in peers], inputs_of(len(peers)), strict=True))
        self.weights = {peer.id: random.choice([0.0, 1.0, random.uniform(0.1, 50)]) for peer in peers}
        self.weights[peers[0].id] = 2.5
        self._calls: dict[str, asyncio.Task[Outcome]] = {}

    async def call(
        self, spread_seconds: float = CALLS_SECONDS, deadline_seconds: float | None = None
    ) -> dict[str, Result]:
        """All that live call, within `spread_seconds`; each wait ends within the timeout. By peer id."""
        self._calls = {
            peer.id: asyncio.create_task(self._one(peer, spread_seconds * self.random.random())) for peer in self.peers
        }
        results = await asyncio.gather(*self._calls.values(), return_exceptions=True)
        living = {peer.id for peer in self.peers}
        by_id = {who: result for who, result in zip(self._calls, results, strict=True) if who in living}
        for result in by_id.values():
            assert isinstance(result, Outcome | RoundError | NobodyThere), repr(result)
        return by_id

    async def _one(self, peer: SimPeer, moment: float) -> Outcome:
        await asyncio.sleep(moment)
        vectors = self.inputs[peer.id]
        began = now()
        try:
            return await self.strategy.all_reduce(
                peer.peer, CALL, vectors, self.weights[peer.id], shapes_of_vectors(vectors)
            )
        finally:
            assert now() <= began + TIMEOUT_SECONDS + 0.5

    async def crash(self, peer: SimPeer) -> None:
        """It dies, with what it called for."""
        self.peers.remove(peer)
        self._calls[peer.id].cancel()
        await peer.crash()

    def check(self, results: dict[str, Result]) -> dict[str, list[str]]:
        """Each roll by itself: its members' results are equal, and the mean over it. Returns who has a result of it."""
        rolls: dict[str, list[str]] = {}
        for who, result in results.items():
            if isinstance(result, Outcome):
                assert who in result.roll.members
                rolls.setdefault(result.roll.roll_id, []).append(who)
        for members in rolls.values():
            for who in members:
                self._check_values(self._outcome(results, who))
            if isinstance(self.strategy, AllReduce):
                assert len({self._outcome(results, who).vectors[0].numpy().tobytes() for who in members}) == 1
        return rolls

    @staticmethod
    def _outcome(results: dict[str, Result], who: str) -> Outcome:
        outcome = results[who]
        assert isinstance(outcome, Outcome)
        return outcome

    def _check_values(self, outcome: Outcome) -> None:
        """Where exact, over the roll; else, in one group, each part over those that it names."""
        values = outcome.vectors[0].double().numpy()
        if outcome.exact:
            pieces: list[tuple[int, int, Sequence[str]]] = [(0, len(values), outcome.roll.members)]
        elif isinstance(self.strategy, AllReduce):
            pieces = [
                (part.start, part.stop, part.contributors) for part in outcome.rounds[0].parts if part.vector == 0
            ]
        else:
            return
        for start, stop, who in pieces:
            weights = [self.weights[one] for one in who]
            if sum(weights) > 0:
                rows = np.stack([self.inputs[one][0][start:stop].double().numpy() for one in who])
                mean = np.average(rows, axis=0, weights=weights)
                assert np.abs(values[start:stop] - mean).max() <= 1e-6 * np.abs(rows).max()

    async def check_next(self) -> None:
        """One averaging of all that live, exact."""
        results = await self.call(spread_seconds=0.1)
        rolls = self.check(results)
        assert len(rolls) == 1, results
        for who in results:
            outcome = self._outcome(results, who)
            assert outcome.exact
            assert set(outcome.roll.members) == {peer.id for peer in self.peers}


def run_trial(seed: int, scenario: Callable[[Trial], object], **line: float) -> None:
    async def main(world: World) -> None:
        random = Random(seed)
        strategy = strategy_of(random)
        trial = Trial(await crowd(world, random.randint(3, 8), strategy), strategy, random)
        for _ in range(random.randrange(3)):
            await trial.check_next()
        await scenario(trial)  # type: ignore[misc]
        await asyncio.sleep(1.5)
        await trial.check_next()

    World(seed=seed, **line).run(main)


# ---------------------------------------------------------------- it dies


@pytest.mark.parametrize("seed", range(20))
def test_it_dies_while_it_gathers(seed: int) -> None:
    """At any moment from just before the first call until just after the last."""

    async def scenario(trial: Trial) -> None:
        collector = next_collector(trial.peers)
        calling = asyncio.create_task(trial.call())
        await asyncio.sleep(trial.random.uniform(0, CALLS_SECONDS * 1.1))
        began = now()
        await trial.crash(collector)
        results = await calling
        assert now() < began + 6
        rolls = trial.check(results)
        with_result = [who for members in rolls.values() for who in members]
        assert len(with_result) == len(results), results

    run_trial(seed, scenario)


@pytest.mark.parametrize("told", ["nobody", "some"])
@pytest.mark.parametrize("seed", range(20))
def test_it_dies_as_it_closes(seed: int, told: str) -> None:
    """The lines are so slow that one record leaves after the other: some have it, the rest go to the next collector."""

    async def scenario(trial: Trial) -> None:
        collector = next_collector(trial.peers)
        book = collector.peer.rolls
        note, dying = book._note, asyncio.Event()

        def closes(series: str, number: int) -> None:
            note(series, number)
            if not dying.is_set():
                dying.set()
                if told == "nobody":
                    collector.transport.crash()

        book._note = closes  # type: ignore[method-assign]
        calling = asyncio.create_task(trial.call())
        await dying.wait()
        if told == "some":
            await asyncio.sleep(trial.random.uniform(0, 0.01 * len(trial.peers)))
        began = now()
        await trial.crash(collector)
        results = await calling
        assert now() < began + TIMEOUT_SECONDS + CALLS_SECONDS
        trial.check(results)
        if told == "nobody":
            assert all(isinstance(result, Outcome) for result in results.values()) or len(results) < 2, results

    run_trial(seed, scenario, bytes_per_second=5e4)


# ---------------------------------------------------------------- it is slow


@pytest.mark.parametrize("pause_seconds", [2.0, 3600.0], ids=["2 s", "for good"])
@pytest.mark.parametrize("seed", range(10))
def test_it_does_not_answer_though_it_lives(seed: int, pause_seconds: float) -> None:
    async def scenario(trial: Trial) -> None:
        collector = next_collector(trial.peers)
        host, answer = collector.peer.host, collector.peer.rolls._here

        async def pause(peer_id: str, here: Here) -> Message:
            await asyncio.sleep(pause_seconds)
            return await answer(peer_id, here)

        host.serve(Here, pause)
        began = now()
        results = await trial.call()
        host.serve(Here, answer)
        assert now() < began + TIMEOUT_SECONDS + CALLS_SECONDS + 0.5
        rolls = trial.check(results)
        if pause_seconds < TIMEOUT_SECONDS / 2:
            assert len(rolls) == 1
            assert all(isinstance(result, Outcome) and result.exact for result in results.values()), results
        else:
            assert not rolls
            reasons = {str(result) for who, result in results.items() if who != collector.id}
            assert all("did not close the roll in time" in reason for reason in reasons), reasons

    run_trial(seed, scenario)


# ---------------------------------------------------------------- there are two


@pytest.mark.parametrize("seed", range(20))
def test_two_collectors_by_different_views(seed: int) -> None:
    """For a moment one or two peers do not know the collector, and ask the next-nearest."""

    async def scenario(trial: Trial) -> None:
        collector = next_collector(trial.peers)
        others = [peer for peer in trial.peers if peer is not collector]
        unknowing = trial.random.sample(others, trial.random.randint(1, min(2, len(others) - 1)))
        records = [peer.peer.members.members.pop(collector.id) for peer in unknowing]
        calling = asyncio.create_task(trial.call())
        await asyncio.sleep(trial.random.uniform(0, CALLS_SECONDS))
        for peer, record in zip(unknowing, records, strict=True):
            peer.peer.members.members.setdefault(collector.id, record)
        results = await calling
        rolls = trial.check(results)
        assert all(isinstance(result, Outcome) and result.exact for result in results.values()), results
        assert len(rolls) == 1, results

    run_trial(seed, scenario)


@pytest.mark.parametrize("seed", range(5))
def test_whoever_does_not_know_the_collector_is_told_by_the_one_that_it_took_for_it(seed: int) -> None:
    """The collector and one caller do not know of each other; another caller is a second late."""

    async def scenario(world: World) -> None:
        strategy = AllReduce(every_seconds=3600.0, timeout_seconds=TIMEOUT_SECONDS)
        peers = await crowd(world, 6, strategy)
        collector = next_collector(peers)
        second = next_collector([peer for peer in peers if peer is not collector])
        stranger, late, *others = (peer for peer in peers if peer not in (collector, second))
        await asyncio.sleep(24)  # the early readings of the register are over
        await stranger.peer.host.part(collector.id)
        await asyncio.sleep(0.1)
        for one, other in ((stranger, collector), (collector, stranger)):
            one.peer.register._page.pop(other.id, None)
            assert other.id not in one.peer.register.everybody()
        vectors = inputs_of(6)

        async def call(peer: SimPeer, after_seconds: float) -> Outcome:
            await asyncio.sleep(after_seconds)
            values = vectors[peers.index(peer)]
            return await strategy.all_reduce(peer.peer, CALL, values, 1.0, shapes_of_vectors(values))

        moments = {collector: 0.0, stranger: 0.3, late: 0.8, **dict.fromkeys([second, *others], 0.1)}
        outcomes = await asyncio.gather(*(call(peer, moment) for peer, moment in moments.items()))
        assert len({outcome.roll.roll_id for outcome in outcomes}) == 1
        assert {len(outcome.roll.members) for outcome in outcomes} == {6}
        assert all(outcome.exact for outcome in outcomes)

    World(seed=seed).run(scenario)
