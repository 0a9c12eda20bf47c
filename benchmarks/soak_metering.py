"""Compares the usage log with the usage that clients were told: request by request, and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lorafleet.api.access.usage import TenantUsage


@dataclass(frozen=True, slots=True)
class Told:
    """The usage of one request as its client knows it; all numbers are 0 for a rejected request."""

    tenant: str
    whole: bool  # Whether the client has read the usage of its answer; otherwise it closed the stream early.
    prompt_tokens: int
    completion_tokens: int  # The tokens that the client has received.
    most_completion_tokens: int  # The tokens that the client has requested.


@dataclass(frozen=True, slots=True)
class Metered:
    """The result of comparing the usage log with the clients' usage."""

    faults: list[str]
    by_tenant: dict[str, tuple[int, int]]  # The prompt and completion tokens of the log.
    # The tokens that clients know of; for streams that were closed early, those of the log.
    told_by_tenant: dict[str, tuple[int, int]]
    num_left: int  # The number of streams that were closed early.
    unmetered_tokens: int  # Tokens that clients requested in streams that they closed early, and that were not metered.


def client_s_id(request_id: str) -> str:
    """Returns the client's own id from a line's id, which has the endpoint's prefix before it and a number after it."""
    return request_id.partition("-")[2].rpartition("-")[0]


def compare(usages: dict[str, Told], lines: Iterable[TenantUsage]) -> Metered:
    prompts: Counter[str] = Counter()
    completions: Counter[str] = Counter()
    sums: dict[str, Counter[str]] = {}
    faults = []
    for line in lines:
        own = client_s_id(line.request_id)
        if own not in usages:
            faults.append(f"a line of the unknown request {line.request_id}")
        elif usages[own].tenant != line.tenant:
            faults.append(f"{own} is tenant {usages[own].tenant!r}'s and metered as {line.tenant!r}'s")
        prompts[own] += line.prompt_tokens
        completions[own] += line.completion_tokens
        sums.setdefault(line.tenant, Counter()).update(prompt=line.prompt_tokens, completion=line.completion_tokens)
    clients: dict[str, Counter[str]] = {}
    unmetered = 0
    for own, usage in usages.items():
        seen = prompts[own], completions[own]
        if usage.whole:
            if seen != (usage.prompt_tokens, usage.completion_tokens):
                faults.append(f"{own} was told {(usage.prompt_tokens, usage.completion_tokens)} and is metered {seen}")
            counted = usage.prompt_tokens, usage.completion_tokens
        else:
            least_prompt = usage.prompt_tokens if usage.completion_tokens else 0
            if not (least_prompt <= seen[0] <= usage.prompt_tokens) or not (
                usage.completion_tokens <= seen[1] <= usage.most_completion_tokens
            ):
                faults.append(f"{own} left with {usage} and is metered {seen}")
            counted = seen
            unmetered += usage.most_completion_tokens - seen[1]
        clients.setdefault(usage.tenant, Counter()).update(prompt=counted[0], completion=counted[1])
    num_left = sum(not usage.whole for usage in usages.values())
    return Metered(faults, _pairs(sums), _pairs(clients), num_left, unmetered)


def _pairs(sums: dict[str, Counter[str]]) -> dict[str, tuple[int, int]]:
    """Returns pairs of prompt and completion tokens, without tenants that used none."""
    return {name: (count["prompt"], count["completion"]) for name, count in sorted(sums.items()) if count.total()}
