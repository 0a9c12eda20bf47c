"""The experts of tokens that were drafted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lorafleet.protocol.engine_config import SpeculativeConfig
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import Guesses, speculate

NUM_TOKENS = 30


def experts(stepped: SteppedEngine, prompt: Callable[[int], list[int]], stop: int | None) -> list[bytes]:
    """Returns the experts of each request, as its outputs report them."""
    found = {"a": b"", "b": b""}
    for name in found:
        params = {"max_tokens": NUM_TOKENS, "stop_token_ids": [] if stop is None else [stop]}
        stepped.add(name, prompt(20), params=params, returns_experts=True)
    step = stepped.engine.step

    def recorded() -> Any:
        outputs = step()
        for output in outputs:
            found[output.request_id] += output.routed_experts
        return outputs

    stepped.engine.step = recorded  # type: ignore[method-assign]
    stepped.until(lambda: len(stepped.ended) == 2)
    return list(found.values())


@pytest.mark.parametrize("overlap", [False, True])
def test_the_experts_of_accepted_drafts_are_reported_and_those_of_wrong_ones_are_not(
    fleet: Any, prompt: Callable[[int], list[int]], overlap: bool
) -> None:
    options = {"speculative_config": SpeculativeConfig("ngram"), "enable_return_routed_experts": True}

    def made(answers: dict[str, list[int]] | None) -> SteppedEngine:
        stepped = SteppedEngine(fleet("qwen3_moe").base, async_scheduling=overlap, **options)
        stepped.engine.scheduler.speculation = None
        if answers is not None:
            speculate(stepped.engine, Guesses(answers))
        return stepped

    plain = made(None)
    expected = experts(plain, prompt, None)
    assert len(expected[0]) == (20 + NUM_TOKENS - 1) * 3 * 3, "of all tokens but the last, in three layers"
    assert experts(made(plain.tokens), prompt, None) == expected
    stop = plain.tokens["a"][17]
    shorter = made(None)
    assert experts(made(plain.tokens), prompt, stop) == experts(shorter, prompt, stop)
    assert len(shorter.tokens["a"]) < NUM_TOKENS
