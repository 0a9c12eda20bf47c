"""Answers with drafts on a GPU, by the demo's model and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from tests.workers.speculation.drafting import Guesses, speculate

pytestmark = pytest.mark.gpu

DEMO = Path(__file__).parents[3] / "demo"
TEXT = "Paris is the capital of France. Rome is the capital of Italy. "
KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 1},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0, "frequency_penalty": 1.0, "min_tokens": 4, "logprobs": 1},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "logit_bias": {7: 3.0}, "logprobs": 1},
]


def answers(known: dict[str, list[int]] | None, **options: Any) -> list[tuple[list[int], list[float]]]:
    """Returns tokens and logprobs of 24 answers, with drafts that guess the known ones if there are any."""
    names = ["json", "pirate", "shout"]
    loras = [None, *(LoRARequest(name, i, str(DEMO / "adapters" / name)) for i, name in enumerate(names, 1))]
    llm = LLM(
        str(DEMO / "model"),
        attention_backend="triton",
        enable_lora=True,
        max_loras=3,
        kv_cache_tokens=16384,
        max_num_seqs=32,
        speculative_config={"method": "ngram"},
        **options,
    )
    llm._engine.scheduler.speculation = None
    if known is not None:
        speculate(llm._engine, Guesses(known))
    jobs = [(TEXT * (1 + i % 5), KINDS[i % len(KINDS)], loras[i // len(KINDS) % len(loras)]) for i in range(24)]
    prompts, kinds, adapters = zip(*jobs, strict=True)
    params = [SamplingParams(**({"max_tokens": 48, "ignore_eos": True} | kind)) for kind in kinds]
    outputs = llm.generate(list(prompts), params, list(adapters))
    llm.close()
    found = [completion for output in outputs for completion in output.outputs]
    return [(one.token_ids, [entry.logprob for entry in one.logprobs or ()]) for one in found]


def guessed(expected: list[tuple[list[int], list[float]]]) -> dict[str, list[int]]:
    return {f"{i}-0": tokens for i, (tokens, _) in enumerate(expected)}


def test_in_float32_tokens_are_equal_and_logprobs_nearly() -> None:
    expected = answers(None, dtype="float32")
    for (tokens, logprobs), (plain, plain_logprobs) in zip(
        answers(guessed(expected), dtype="float32"), expected, strict=True
    ):
        assert tokens == plain
        assert logprobs == pytest.approx(plain_logprobs, abs=1e-3)


def test_in_bfloat16_with_batch_invariance_all_bits_are_equal() -> None:
    expected = answers(None, dtype="bfloat16", batch_invariant=True)
    assert answers(guessed(expected), dtype="bfloat16", batch_invariant=True) == expected
