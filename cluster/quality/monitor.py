"""Runs the sets of quality probes when they are due, on the one replica that holds the lease, or when the operator
requests it.

The results are in the store (book.py). So any replica can report them, and another one continues if this one is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from lorafleet.api.app_state import AppState
from lorafleet.api.served_model import ServedModel
from lorafleet.cluster.quality.book import QualityBook
from lorafleet.cluster.quality.prober import Prober
from lorafleet.cluster.quality.probes import ProbeSet, QualityProbes
from lorafleet.cluster.quality.quality_records import Baseline, Observed, Standing, measure
from lorafleet.protocol.errors import LorafleetError, ModelNotFound

LOOK_S = 15.0  # Interval between checks of the lease and of what is due.
TURN_S = 60.0  # A replica that does not renew its lease for so long loses it.

logger = logging.getLogger("lorafleet.cluster")

TakeTurn = Callable[[], Awaitable[bool]]


class QualityMonitor:
    """Runs the probes and remembers their last standings.

    Args:
        take_turn: Takes or renews the lease for TURN_S, and returns whether this replica holds it.
        clock: Seconds since 1970, the same on all nodes.
    """

    def __init__(
        self,
        state: AppState,
        probes: QualityProbes,
        book: QualityBook,
        take_turn: TakeTurn,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.has_turn = False
        self.standings: dict[str, Standing] = {}  # By model, as far as this replica knows.
        self.runs: Counter[str] = Counter({one.model: 0 for one in probes.sets})  # On this replica, by model.
        self.failures: Counter[str] = Counter({one.model: 0 for one in probes.sets})
        self._probes = probes
        self._book = book
        self._prober = Prober(state)
        self._take_turn = take_turn
        self._clock = clock
        self._running = asyncio.Lock()

    async def keep_running(self) -> None:
        while True:
            try:
                await self.look()
            except Exception as error:  # The directory or the store may be unavailable for a while.
                self.has_turn = False
                logger.warning("quality probes: %r", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Runs the sets that are due, if this replica holds the lease."""
        self.has_turn = await self._take_turn()
        for one in self._probes.sets:
            if not self.has_turn:
                return
            async with self._running:
                standing = await self._standing(one)
                if standing is None or self._clock() - standing.tried_s >= self._probes.interval_s:
                    try:
                        await self._run(one, accept=False)
                    except LorafleetError as error:
                        logger.warning("quality probes of %s failed: %s", one.model, error.message)

    async def run(self, model: str, *, accept: bool) -> Standing:
        """Runs a model's probes now. With `accept`, the result becomes the new baseline. Raises LorafleetError if the
        run fails."""
        one = next((one for one in self._probes.sets if one.model == model), None)
        if one is None:
            known = ", ".join(repr(one.model) for one in self._probes.sets)
            raise ModelNotFound(f"There are no quality probes of `{model}`; there are of {known}.", "name")
        async with self._running:
            return await self._run(one, accept=accept)

    async def show(self) -> list[Standing]:
        """Returns the standings of all sets that have run, on whichever replica."""
        found = [await self._standing(one) for one in self._probes.sets]
        return [standing for standing in found if standing is not None]

    async def _standing(self, one: ProbeSet) -> Standing | None:
        standing = await asyncio.to_thread(self._book.standing, one)
        if standing is not None:
            self.standings[one.model] = standing
        return standing

    async def _run(self, one: ProbeSet, *, accept: bool) -> Standing:
        tried_s = self._clock()
        self.runs[one.model] += 1
        try:
            standing = await self._measured(one, tried_s, accept)
        except LorafleetError as error:
            self.failures[one.model] += 1
            before = await self._standing(one) or Standing(one.model, tried_s)
            await self._keep(one, msgspec.structs.replace(before, tried_s=tried_s, error=error.message))
            raise
        await self._keep(one, standing)
        return standing

    async def _keep(self, one: ProbeSet, standing: Standing) -> None:
        self.standings[one.model] = standing
        await asyncio.to_thread(self._book.add_standing, one, standing)

    async def _measured(self, one: ProbeSet, tried_s: float, accept: bool) -> Standing:
        model = await self._prober.model(one.model)
        digest = "" if model.lora is None else model.lora.digest
        baseline = None if accept else await asyncio.to_thread(self._book.baseline, one)
        observed = await self._observe(one, model, baseline)
        if baseline is None:
            baseline = Baseline(digest, tried_s, observed)
            await asyncio.to_thread(self._book.add_baseline, one, baseline)
        return Standing(
            one.model,
            tried_s,
            at_s=self._clock(),
            digest=digest,
            baseline_digest=baseline.digest,
            baseline_at_s=baseline.at_s,
            measures=measure(baseline.observed, observed),
        )

    async def _observe(self, one: ProbeSet, model: ServedModel, baseline: Baseline | None) -> list[Observed]:
        observed = []
        for at, probe in enumerate(one.probes):
            if self.has_turn:  # A long run renews the lease.
                self.has_turn = await self._take_turn()
            along = None if baseline is None else baseline.observed[at].answer
            observed.append(await self._prober.observe(model, probe, one.max_tokens, along))
        return observed
