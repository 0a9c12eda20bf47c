"""Draws conversations of several turns for benchmarks/fleet.py, and counts the tokens that an endless cache would have.

A conversation belongs to one adapter, whose conversations share a system prompt. Each turn sends all earlier turns
again. The answers in them are drawn in advance and not those of the server, so that every server gets the same calls;
the tokens of earlier prompts are found in a cache all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from http_load import Call


@dataclass(frozen=True, slots=True)
class Conversations:
    """The parameters of a load of conversations. Numbers of tokens are means of what is drawn between half and one and
    a half times as much."""

    rate: float  # Conversations that begin per second.
    duration_s: float  # The time in which they begin.
    adapters: Sequence[str]  # Their popularity follows Zipf's law with exponent 1.
    turns: int
    system_tokens: int
    turn_tokens: int  # Mean tokens of a question, and of an answer.
    think_s: float  # Mean time between two turns.
    token_ids: tuple[int, int]  # The range of token IDs.
    seed: int


def draw(load: Conversations) -> list[Call]:
    """Returns the calls of all turns, by the time at which they are sent."""
    random = np.random.default_rng([load.seed, 12])
    systems = {name: _tokens(random, load, load.system_tokens) for name in load.adapters}
    share = 1 / np.arange(1, len(load.adapters) + 1)
    calls = []
    at_s = 0.0
    while (at_s := at_s + random.exponential(1 / load.rate)) < load.duration_s:
        name = load.adapters[random.choice(len(share), p=share / share.sum())]
        history, turn_s = list(systems[name]), at_s
        for _ in range(load.turns):
            history += _tokens(random, load, load.turn_tokens)
            answer = _tokens(random, load, load.turn_tokens)
            calls.append(Call(turn_s, name, list(history), len(answer)))
            history += answer
            turn_s += random.exponential(load.think_s)
    return sorted(calls, key=lambda call: call.at_s)


def count_endless_hits(calls: Sequence[Call], block_size: int) -> int:
    """Returns the prompt tokens that one cache without bounds would have, in whole blocks, if each call had ended
    before the next. A prompt's last token is always computed."""
    seen: set[tuple[str, int, int]] = set()
    num_hits = 0
    for call in calls:
        chain, is_hit = 0, True
        for end in range(block_size, len(call.prompt) + 1, block_size):
            chain = hash((chain, *call.prompt[end - block_size : end]))
            is_hit = is_hit and (call.model, end, chain) in seen and end < len(call.prompt)
            num_hits += is_hit * block_size
            seen.add((call.model, end, chain))
    return num_hits


def _tokens(random: np.random.Generator, load: Conversations, mean: int) -> list[int]:
    length = int(random.integers(max(1, mean // 2), mean + mean // 2, endpoint=True))
    tokens: list[int] = random.integers(*load.token_ids, length).tolist()
    return tokens
