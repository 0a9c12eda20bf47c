"""Holds the usage log against what clients were told: request by request, and in the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lorafleet.api.access.usage import TenantUsage


@dataclass(frozen=True, slots=True)
class Told:
    """What a client knows of one request. whole: it has read the usage of its answer; else it left, having received
    completion_tokens and asked for most_completion_tokens. Of a refused one all is 0."""

    tenant: str
    whole: bool
    prompt_tokens: int
    completion_tokens: int
    most_completion_tokens: int


@dataclass(frozen=True, slots=True)
class Metered:
    """unmetered_tokens: asked for by clients that left, and not metered."""

    faults: list[str]
    by_tenant: dict[str, tuple[int, int]]  # prompt and completion tokens of the log
    told_by_tenant: dict[str, tuple[int, int]]  # of clients, and of those that left what the log says of them
    num_left: int
    unmetered_tokens: int


def client_s_id(request_id: str) -> str:
    """Of a line's, which has the endpoint's prefix before it and a number behind."""
    return request_id.partition("-")[2].rpartition("-")[0]


def compare(told: dict[str, Told], lines: Iterable[TenantUsage]) -> Metered:
    prompts: Counter[str] = Counter()
    completions: Counter[str] = Counter()
    sums: dict[str, Counter[str]] = {}
    faults = []
    for line in lines:
        own = client_s_id(line.request_id)
        if own not in told:
            faults.append(f"a line of the unknown request {line.request_id}")
        elif told[own].tenant != line.tenant:
            faults.append(f"{own} is tenant {told[own].tenant!r}'s and metered as {line.tenant!r}'s")
        prompts[own] += line.prompt_tokens
        completions[own] += line.completion_tokens
        sums.setdefault(line.tenant, Counter()).update(prompt=line.prompt_tokens, completion=line.completion_tokens)
    clients: dict[str, Counter[str]] = {}
    unmetered = 0
    for own, one in told.items():
        seen = prompts[own], completions[own]
        if one.whole:
            if seen != (one.prompt_tokens, one.completion_tokens):
                faults.append(f"{own} was told {(one.prompt_tokens, one.completion_tokens)} and is metered {seen}")
            counted = one.prompt_tokens, one.completion_tokens
        else:
            least_prompt = one.prompt_tokens if one.completion_tokens else 0
            if not (least_prompt <= seen[0] <= one.prompt_tokens) or not (
                one.completion_tokens <= seen[1] <= one.most_completion_tokens
            ):
                faults.append(f"{own} left with {one} and is metered {seen}")
            counted = seen
            unmetered += one.most_completion_tokens - seen[1]
        clients.setdefault(one.tenant, Counter()).update(prompt=counted[0], completion=counted[1])
    num_left = sum(not one.whole for one in told.values())
    return Metered(faults, _pairs(sums), _pairs(clients), num_left, unmetered)


def _pairs(sums: dict[str, Counter[str]]) -> dict[str, tuple[int, int]]:
    """Without tenants that used nothing."""
    return {name: (one["prompt"], one["completion"]) for name, one in sorted(sums.items()) if one.total()}
