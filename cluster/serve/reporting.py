"""Reports to the directory which adapters a replica holds, how busy it is, and how many tokens each adapter was
asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import msgspec

from lorafleet.cluster.directory.directory_calls import ReportCall
from lorafleet.cluster.directory.membership import Membership
from lorafleet.cluster.directory.residency import Report
from lorafleet.cluster.routing.routing import ReplicaLoad, Tier
from lorafleet.protocol.messages import EngineStats
from lorafleet.protocol.transport.engine_socket import EngineClient

AGAIN_S = 0.1  # Seconds from a report that was not accepted to the next one.
FULL_S = 5.0  # Seconds between full reports.

logger = logging.getLogger("lorafleet.cluster")


class Reporter:
    """Builds each report from the changes since the previous one."""

    def __init__(self, replica_id: str, cpu_loras: int) -> None:
        self._replica_id = replica_id
        self._cpu_loras = cpu_loras
        self._sequence = 0
        self._reported: dict[str, Tier] = {}
        self._load: tuple[ReplicaLoad, list[str]] | None = None
        self._full_at = 0.0
        self._full_wanted = True

    def next(
        self,
        tiers: Mapping[str, Tier],
        load: ReplicaLoad,
        unread: list[str],
        tokens: Mapping[str, int],
        now: float,
    ) -> Report | None:
        """Returns the next report, or None if there is nothing to report. `now` is in seconds, of any clock that
        does not jump."""
        full = self._full_wanted or now >= self._full_at
        known = self._reported
        changed: dict[str, Tier | None] = {digest: tier for digest, tier in tiers.items() if known.get(digest) != tier}
        changed |= dict.fromkeys(known.keys() - tiers.keys())
        # The time for which prompts have been kept grows by itself, so it is no news.
        news = msgspec.structs.replace(load, kept_s=0.0), unread
        if not (full or changed or tokens or news != self._load):
            return None
        self._sequence += 1
        self._reported, self._load = dict(tiers), news
        if full:
            self._full_at, self._full_wanted = now + FULL_S, False
        reported: dict[str, Tier | None] = dict(tiers) if full else changed
        return Report(self._replica_id, self._sequence, full, reported, load, dict(tokens), self._cpu_loras, unread)

    def want_full(self) -> None:
        """Makes the next report a full one, since the directory has missed something: an answer said so, none came,
        or the directory was restarted."""
        self._full_wanted = True


def tiers_of(stats: EngineStats) -> dict[str, Tier]:
    """Returns the best tier of each adapter."""
    tiers: dict[str, Tier] = dict.fromkeys(stats.resident_cpu, "cpu")
    tiers |= dict.fromkeys(stats.waiting_adapters, "coming")
    return tiers | dict.fromkeys(filter(None, stats.resident_slots), "gpu")


def load_of(stats: EngineStats, max_num_seqs: int, now: float) -> ReplicaLoad:
    """Returns the replica's load. `now` is by time.monotonic(), as the times of the stats are."""
    without_slot = set(stats.waiting_adapters).difference(stats.resident_slots)
    return ReplicaLoad(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        queued_tokens=stats.waiting_tokens,
        free_slots=stats.lora_usable - len(without_slot),
        free_places=max_num_seqs - stats.num_running - stats.num_waiting,
        kept_s=max(0.0, now - stats.prefixes_kept_since_s),
    )


def unread_of(stats: EngineStats) -> list[str]:
    """Returns the adapters that requests wait for and that are in no tier yet."""
    held = {*stats.resident_slots, *stats.resident_cpu}
    return [digest for digest in stats.waiting_adapters if digest not in held]


async def keep_reporting(engine: EngineClient, membership: Membership, cpu_loras: int, max_num_seqs: int) -> None:
    """Sends a report whenever the engine's stats say something new, and again until one is accepted. Never returns."""
    reporter, epoch = Reporter(membership.replica_id, cpu_loras), membership.epoch
    accepted = True
    while True:
        if accepted:
            await engine.next_stats()
        else:
            await asyncio.sleep(AGAIN_S)
        stats = engine.stats
        if membership.epoch != epoch:
            epoch = membership.epoch
            reporter.want_full()
        load, unread = load_of(stats, max_num_seqs, now := time.monotonic()), unread_of(stats)
        report = reporter.next(tiers_of(stats), load, unread, engine.tokens_asked, now)
        if report is None:
            continue
        engine.tokens_asked.clear()
        try:
            accepted = await membership.directory.ask(ReportCall(report))
        except Exception as error:  # The directory is being restarted.
            logger.warning("replica %s: the directory did not accept a report: %r", membership.replica_id, error)
            accepted = False
        if not accepted:
            reporter.want_full()
