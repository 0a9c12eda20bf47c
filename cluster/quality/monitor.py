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

from lorafleet.api.access.work_threads import UPKEEP, in_turn
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
        models = [probe_set.model for probe_set in probes.sets]
        self.runs: Counter[str] = Counter(dict.fromkeys(models, 0))  # On this replica, by model.
        self.failures: Counter[str] = Counter(dict.fromkeys(models, 0))
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
                logger.warning("quality probes could not be checked or run: %r", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Runs the sets that are due, if this replica holds the lease."""
        self.has_turn = await self._take_turn()
        for probe_set in self._probes.sets:
            if not self.has_turn:
                return
            async with self._running:
                standing = await self._standing(probe_set)
                if standing is None or self._clock() - standing.tried_s >= self._probes.interval_s:
                    try:
                        await self._run(probe_set, accept=False)
                    except LorafleetError as error:
                        logger.warning("quality probes of %s failed: %s", probe_set.model, error.message)

    async def run(self, model: str, *, accept: bool) -> Standing:
        """Runs a model's probes now. With `accept`, the result becomes the new baseline. Raises LorafleetError if the
        run fails."""
        probe_set = next((probe_set for probe_set in self._probes.sets if probe_set.model == model), None)
        if probe_set is None:
            known = ", ".join(repr(probe_set.model) for probe_set in self._probes.sets)
            raise ModelNotFound(f"There are no quality probes for `{model}`; there are probes for {known}.", "name")
        async with self._running:
            return await self._run(probe_set, accept=accept)

    async def show(self) -> list[Standing]:
        """Returns the standings of all sets that have run, on whichever replica."""
        found = [await self._standing(probe_set) for probe_set in self._probes.sets]
        return [standing for standing in found if standing is not None]

    async def _standing(self, probe_set: ProbeSet) -> Standing | None:
        standing = await in_turn(UPKEEP, self._book.standing, probe_set)
        if standing is not None:
            self.standings[probe_set.model] = standing
        return standing

    async def _run(self, probe_set: ProbeSet, *, accept: bool) -> Standing:
        tried_s = self._clock()
        self.runs[probe_set.model] += 1
        try:
            standing = await self._measured(probe_set, tried_s, accept)
        except LorafleetError as error:
            self.failures[probe_set.model] += 1
            before = await self._standing(probe_set) or Standing(probe_set.model, tried_s)
            await self._keep(probe_set, msgspec.structs.replace(before, tried_s=tried_s, error=error.message))
            raise
        await self._keep(probe_set, standing)
        return standing

    async def _keep(self, probe_set: ProbeSet, standing: Standing) -> None:
        self.standings[probe_set.model] = standing
        await in_turn(UPKEEP, self._book.add_standing, probe_set, standing)

    async def _measured(self, probe_set: ProbeSet, tried_s: float, accept: bool) -> Standing:
        model = await self._prober.model(probe_set.model)
        digest = "" if model.lora is None else model.lora.digest
        baseline = None if accept else await in_turn(UPKEEP, self._book.baseline, probe_set)
        observed = await self._observe(probe_set, model, baseline)
        if baseline is None:
            baseline = Baseline(digest, tried_s, observed)
            await in_turn(UPKEEP, self._book.add_baseline, probe_set, baseline)
        return Standing(
            probe_set.model,
            tried_s,
            at_s=self._clock(),
            digest=digest,
            baseline_digest=baseline.digest,
            baseline_at_s=baseline.at_s,
            measures=measure(baseline.observed, observed),
        )

    async def _observe(self, probe_set: ProbeSet, model: ServedModel, baseline: Baseline | None) -> list[Observed]:
        observed = []
        for index, probe in enumerate(probe_set.probes):
            if self.has_turn:  # A long run renews the lease.
                self.has_turn = await self._take_turn()
            along = None if baseline is None else baseline.observed[index].answer
            observed.append(await self._prober.observe(model, probe, probe_set.max_tokens, along))
        return observed
