"""Logprobs of the model's own probabilities, and of those that were sampled, beside each other in one batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.sampling.penalties import IN_PROMPT, penalize
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import InvalidRequest

NEVER = float("-inf")
ANSWER = 4
EVERY_FIELD: dict[str, Any] = {
    "temperature": 0.7,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {7: 2.5, 9: -3.0},
    "bad_words_token_ids": [[11], [12, 13]],
    "min_tokens": 3,
    "top_k": 40,
    "top_p": 0.8,
    "min_p": 0.01,
}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 0, "presence_penalty": 1.0, "top_k": 3, "top_p": 0.5},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.6},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 1.0, "allowed_token_ids": [20, 30, 40, 50]},
    EVERY_FIELD,
]


def processed(logits_V: Tensor, params: SamplingParams, prompt: list[int], answer: list[int], stop: int) -> Tensor:
    """Returns the logprobs of the distribution that vLLM would sample from, computed for one token by sorting."""
    logits_V = logits_V.clone()
    if params.allowed_token_ids:
        others = torch.ones_like(logits_V, dtype=torch.bool)
        others[params.allowed_token_ids] = False
        logits_V[others] = NEVER
    for token, bias in (params.logit_bias or {}).items():
        logits_V[token] += bias
    if len(answer) < params.min_tokens:
        logits_V[stop] = NEVER
    for word in params.bad_words_token_ids or ():
        if (*prompt, *answer)[len(prompt + answer) - len(word) + 1 :] == tuple(word[:-1]):
            logits_V[word[-1]] = NEVER
    counts_V = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=len(logits_V)).int()
    counts_V[prompt] += IN_PROMPT
    penalize(logits_V, counts_V, params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if params.greedy:
        return logits_V.log_softmax(-1)
    logits_V = logits_V.double() / params.temperature
    if params.min_p:
        logits_V[logits_V < logits_V.max() + math.log(params.min_p)] = NEVER
    order_V = logits_V.argsort(descending=True, stable=True)
    if params.top_k:
        logits_V[order_V[params.top_k :]] = NEVER
    if params.top_p < 1:
        chance_V = logits_V[order_V].softmax(-1)
        logits_V[order_V[chance_V.cumsum(-1) - chance_V >= params.top_p]] = NEVER
    return logits_V.log_softmax(-1).float()


@pytest.fixture(scope="module")
def made(fleet: Any) -> Any:
    return fleet("llama3")


@pytest.fixture(scope="module")
def llm(made: Any) -> Any:
    engine = LLM(
        str(made.base), enable_lora=True, max_loras=2, kv_cache_tokens=4096, logprobs_mode="processed_logprobs"
    )
    yield engine
    engine.close()


def test_logprobs_are_those_of_the_mode_for_every_field_in_one_batch(llm: LLM, made: Any, prompt: Any) -> None:
    lora = LoRARequest("qv", 1, str(made.adapters["qv"]))
    jobs = [
        (SamplingParams(logprobs=20, logprobs_mode=mode, seed=5, max_tokens=ANSWER, **fields), adapter)
        for fields in REQUESTS
        for mode in (None, "raw_logprobs")
        for adapter in (None, lora)
    ]
    prompts = [prompt(5 + i) for i in range(len(jobs))]
    found = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        [params for params, _ in jobs],
        lora_request=[adapter for _, adapter in jobs],
    )
    stop = llm.tokenizer.eos_token_id
    for (params, adapter), ids, output in zip(jobs, prompts, found, strict=True):
        answer = output.outputs[0]
        for i, entry in enumerate(answer.logprobs):
            before = answer.token_ids[:i]
            path = None if adapter is None else made.adapters["qv"]
            logits_V = made.reference.next_logits([*ids, *before], path)[-1]
            logprobs_V = logits_V.log_softmax(-1)
            if params.logprobs_mode is None:
                logprobs_V = processed(logits_V, params, ids, before, stop)
            assert entry.logprob == pytest.approx(float(logprobs_V[entry.token_id]), abs=1e-3), (params, i)
            assert entry.logprob > NEVER
            assert entry.rank == 1 + int((logprobs_V > logprobs_V[entry.token_id]).sum())
            best = logprobs_V.topk(20).values.tolist()
            assert entry.top_logprobs == pytest.approx(best, abs=1e-3)


def test_without_options_logprobs_are_the_models_own() -> None:
    [mode] = [field.default for field in dataclasses.fields(EngineConfig) if field.name == "logprobs_mode"]
    assert mode == "raw_logprobs"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="use one of raw_logprobs, processed_logprobs"):
        SamplingParams(logprobs_mode="raw_logits")  # type: ignore[arg-type]  # the test's point
