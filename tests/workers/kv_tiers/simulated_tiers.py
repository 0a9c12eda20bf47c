"""Simulates the ranks that KVTiers gives its orders to. Blocks have contents that a test can compare, and no bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from lorafleet.workers.kv_tiers.tier_orders import EndedJob

Content = tuple[object, ...]  # what is stored for each token of a block


@dataclass
class SimulatedTiers:
    """The contents of all tiers. Copies to the GPU and jobs of the disk end some polls after their order."""

    rng: random.Random
    slot_bytes: int = 16 << 20
    num_ranks: int = 1
    failing_share: float = 0.0  # Share of the blocks whose reading or writing fails.
    fails_writes: bool = False
    gpu: dict[int, list[object]] = field(default_factory=dict)
    host: dict[int, Content] = field(default_factory=dict)
    disk: dict[int, Content] = field(default_factory=dict)
    loading: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    jobs: dict[int, tuple[bool, list[tuple[int, int]]]] = field(default_factory=dict)
    num_orders: int = 0
    is_stuck: bool = False  # Nothing ends.

    def save(self, pairs) -> None:
        for block, slot in pairs:
            assert not any(block == target for load in self.loading.values() for _, target in load)
            self.host[slot] = tuple(self.gpu[block])

    def load(self, pairs) -> int:
        self.num_orders += 1
        self.loading[self.num_orders] = list(pairs)
        return self.num_orders

    def take_loaded(self) -> list[int]:
        ended = []
        while self.loading and not self.is_stuck and self.rng.random() < 0.5:
            load_id = next(iter(self.loading))
            for slot, block in self.loading.pop(load_id):
                self.gpu[block] = list(self.host[slot])
            ended.append(load_id)
        return ended

    def write(self, pairs) -> int:
        return self._job(True, pairs)

    def read(self, pairs) -> int:
        return self._job(False, pairs)

    def take_ended(self) -> list[EndedJob]:
        ended = []
        for job_id in list(self.jobs):
            if self.is_stuck or self.rng.random() < 0.6:
                continue
            writes, pairs = self.jobs.pop(job_id)
            job = EndedJob(job_id, 0)
            for index, (source, target) in enumerate(pairs):
                if self.rng.random() < self.failing_share and (self.fails_writes or not writes):
                    job.failed.add(index)
                    job.fault = "simulated"
                elif writes:
                    self.disk[target] = self.host[source]
                else:
                    self.host[target] = self.disk[source]
            ended.append(job)
        return ended

    def close(self) -> None:
        pass

    def _job(self, writes: bool, pairs) -> int:
        self.num_orders += 1
        self.jobs[self.num_orders] = writes, list(pairs)
        return self.num_orders
