"""Judges and prints a round of the quiet tenant: its figures, the bounds that were broken, and the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from noisy.hostile import FAILED
from noisy.quiet import Answer
from noisy.watch import Seen

MAX_TTFT_S = 2.0
MAX_GROWN_MIB = 300.0
ALONE = "alone"
ALL_AT_ONCE = "all at once"


@dataclass(frozen=True, slots=True)
class Times:
    """Percentiles in milliseconds; NaN if there are no values."""

    p50: float
    p99: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        if not seconds:
            return cls(float("nan"), float("nan"), float("nan"))
        values = 1000 * np.asarray(seconds)
        p50, p99 = np.percentile(values, (50, 99))
        return cls(float(p50), float(p99), float(values.max()))


@dataclass(frozen=True, slots=True)
class Round:
    """The results of one attack, as seen by the quiet tenant, the watch and the attack itself."""

    name: str
    num_asked: int
    ttft: Times
    gaps: Times
    statuses: Mapping[int, int]
    faults: Mapping[str, int]
    health_worst_ms: float
    metrics_worst_ms: float
    refused: Mapping[str, int]  # Failed requests to /health and /metrics, and their numbers.
    grown: tuple[str, float]  # The process that grew most, and its growth in MiB.
    lost: Sequence[str]
    num_zombies: int
    others_cpu: float  # The share of the machine that other programs used.
    hostile: Mapping[str, int]  # Answers to the attack itself, by status.

    @classmethod
    def of(cls, name: str, answers: Sequence[Answer], seen: Seen, hostile: Mapping[str, int]) -> Round:
        return cls(
            name=name,
            num_asked=len(answers),
            ttft=Times.of([answer.ttft_s for answer in answers if answer.ttft_s is not None]),
            gaps=Times.of([gap for answer in answers for gap in answer.gaps_s]),
            statuses=dict(Counter(answer.status for answer in answers)),
            faults=dict(Counter(answer.fault for answer in answers if answer.fault is not None)),
            health_worst_ms=Times.of(seen.health_s).worst,
            metrics_worst_ms=Times.of(seen.metrics_s).worst,
            refused=dict(Counter(seen.refused)),
            grown=seen.most_grown,
            lost=seen.lost,
            num_zombies=seen.num_zombies,
            others_cpu=seen.others_cpu,
            hostile=dict(hostile),
        )

    @property
    def broken(self) -> list[str]:
        """The bounds that were broken, each in a few words."""
        found = [f"{count} x {fault}" for fault, count in self.faults.items()]
        if self.ttft.worst > 1000 * MAX_TTFT_S:
            found.append(f"worst TTFT {self.ttft.worst:.0f} ms")
        if self.grown[1] > MAX_GROWN_MIB:
            found.append(f"{self.grown[0]} grew by {self.grown[1]:.0f} MiB")
        if self.lost:
            found.append(f"lost {', '.join(self.lost)}")
        if FAILED in self.hostile:
            found.append(FAILED)
        if not self.num_asked:
            found.append("nothing was asked")
        return found

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"broken": self.broken}


COLUMNS = (
    *("beside", "TTFT p50", "p99", "worst", "gap p50", "p99", "worst", "not 200", "/health", "/metrics"),
    *("most grown", "others' CPU", "kept"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def row(round_: Round) -> str:
    """Returns a line of the table; times are in milliseconds."""
    process, grown_mib = round_.grown
    cells = [
        round_.name,
        *(f"{value:.0f}" for value in (round_.ttft.p50, round_.ttft.p99, round_.ttft.worst)),
        *(f"{value:.0f}" for value in (round_.gaps.p50, round_.gaps.p99, round_.gaps.worst)),
        str(sum(count for status, count in round_.statuses.items() if status != 200)),
        f"{round_.health_worst_ms:.0f}",
        f"{round_.metrics_worst_ms:.0f}",
        f"{process.rpartition(' ')[0]} {grown_mib:+.0f} MiB",
        f"{100 * round_.others_cpu:.0f} %",
        "NO" if round_.broken else "yes",
    ]
    return f"| {' | '.join(cells)} |"


def summary(rounds: Sequence[Round]) -> str:
    """Lists the broken bounds as markdown."""
    lines = [f"- {round_.name}: {'; '.join(round_.broken)}" for round_ in rounds if round_.broken]
    return "\n".join(lines) or f"All bounds were kept beside {len(rounds) - 1} kinds of attack."
