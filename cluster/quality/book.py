"""Stores baselines and standings in the catalogue's store, which every replica reads, so that a restart loses
nothing. A newer record has a higher number, since the store never changes an object.

quality/SET/baseline/NUMBER, quality/SET/standing/NUMBER      SET: the digest of the probes and their model's name
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lorafleet.cluster.catalogue.catalogue_store import Store
from lorafleet.cluster.quality.probes import ProbeSet
from lorafleet.cluster.quality.quality_records import Baseline, Standing
from lorafleet.protocol.errors import StoreError

KEPT = 5  # Records of each kind that are not deleted, for people who look into the store.
MAX_OVERTAKEN = 20

Kind = Literal["baseline", "standing"]


class QualityBook:
    """Reads and writes the records of all sets. It blocks, so it is called in threads. Raises StoreError if the store
    does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def baseline(self, probe_set: ProbeSet) -> Baseline | None:
        content = self._newest(probe_set, "baseline")
        return None if content is None else msgspec.msgpack.decode(content, type=Baseline)

    def standing(self, probe_set: ProbeSet) -> Standing | None:
        content = self._newest(probe_set, "standing")
        return None if content is None else msgspec.msgpack.decode(content, type=Standing)

    def add_baseline(self, probe_set: ProbeSet, baseline: Baseline) -> None:
        self._add(probe_set, "baseline", msgspec.msgpack.encode(baseline))

    def add_standing(self, probe_set: ProbeSet, standing: Standing) -> None:
        self._add(probe_set, "standing", msgspec.msgpack.encode(standing))

    def _newest(self, probe_set: ProbeSet, kind: Kind) -> bytes | None:
        keys = self._store.keys(_prefix(probe_set, kind))
        return self._store.read(keys[-1]) if keys else None

    def _add(self, probe_set: ProbeSet, kind: Kind, content: bytes) -> None:
        prefix = _prefix(probe_set, kind)
        for _ in range(MAX_OVERTAKEN):
            keys = self._store.keys(prefix)
            number = int(keys[-1].removeprefix(prefix)) + 1 if keys else 1
            if self._store.create(f"{prefix}{number:012}", content):
                for key in keys[: 1 - KEPT]:
                    self._store.delete(key)
                return
        raise StoreError(
            f"catalogue {self._store.uri}: other writers stored a {kind} of {probe_set.model!r} first, {MAX_OVERTAKEN} "
            "times in a row. Run its probes again."
        )


def _prefix(probe_set: ProbeSet, kind: Kind) -> str:
    return f"quality/{probe_set.digest}/{kind}/"
