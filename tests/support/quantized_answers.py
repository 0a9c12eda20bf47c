"""Compares the engine over a quantized base with transformers + PEFT over the plain base with the same values."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from tiny_models import Reference, make_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
ADAPTERS = {"plain": {"r": 4}, "dora": {"r": 4, "use_dora": True}, "some": {"r": 3, "target_modules": ["q_proj"]}}


def adapters_of(values: Path) -> dict[str, Path]:
    """Made over the values, which DoRA's magnitudes are of."""
    return {name: make_adapter(values.parent / f"{values.name}-{name}", values, **o) for name, o in ADAPTERS.items()}


def assert_answers_as(llm: LLM, values: Path, prompt) -> None:
    """Compares the base and adapters in one batch with transformers."""
    adapters = adapters_of(values)
    jobs = [(prompt(n), name) for n in (3, 20) for name in (None, *adapters)]
    loras = [name and LoRARequest(name, 1 + list(adapters).index(name), str(adapters[name])) for _, name in jobs]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in jobs], GREEDY, lora_request=loras)
    reference = Reference(values)
    for (ids, name), output in zip(jobs, outputs, strict=True):
        [answer] = output.outputs
        expected = reference.greedy(ids, GREEDY.max_tokens, adapters.get(name), likely=answer.token_ids)
        assert answer.token_ids == expected.tokens
        assert [p.logprob for p in answer.logprobs] == pytest.approx(expected.logprobs, abs=1e-3)


def served(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), enable_lora=True, kv_cache_tokens=2048, **options)
