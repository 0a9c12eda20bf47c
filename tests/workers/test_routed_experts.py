"""The experts of tokens that an engine returns are those that transformers' routers choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.schedule.routed_rows import RoutedRows

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@torch.inference_mode()
def chosen_by_transformers(made: Any, tokens: list[int], adapter: Path | None, per_token: int) -> list[np.ndarray]:
    """Returns each mixture's experts of each token, [T, K], sorted."""
    model = made.reference.model(adapter)
    logits = model(input_ids=torch.tensor([tokens]), output_router_logits=True).router_logits
    return [layer.view(len(tokens), -1).topk(per_token).indices.sort(-1).values.numpy() for layer in logits]


@pytest.mark.parametrize("overlap", [False, True])
def test_they_are_the_routers_choices_for_every_token_but_the_last(fleet: Any, prompt: Any, overlap: bool) -> None:
    made = fleet("qwen3_moe")  # Its second layer is dense.
    llm = LLM(
        str(made.base),
        enable_lora=True,
        kv_cache_tokens=256,  # Too few for all, so that some are preempted.
        max_num_batched_tokens=16,  # Prompts are computed in chunks.
        max_num_seqs=4,
        async_scheduling=overlap,
        enable_return_routed_experts=True,
    )
    lora = LoRARequest("attention", 1, str(made.adapters["attention"]))
    jobs = [(prompt(70), None), (prompt(70), lora), (prompt(5), lora), (prompt(70), None), (prompt(61), None)]
    # The second time the prompts are in the prefix cache.
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in jobs], PARAMS, [adapter for _, adapter in jobs])
        for (ids, adapter), output in zip(jobs, outputs, strict=True):
            [completion] = output.outputs
            tokens = [*ids, *completion.token_ids[:-1]]
            found = completion.routed_experts
            assert found.dtype == np.uint8 and found.shape == (len(tokens), 3, 3)
            path = None if adapter is None else made.adapters["attention"]
            first, last = chosen_by_transformers(made, tokens, path, 3)
            np.testing.assert_array_equal(np.sort(found[:, 0]), first)
            np.testing.assert_array_equal(np.sort(found[:, 2]), last)
            assert not found[:, 1].any()
    llm.close()


def test_tokens_that_are_computed_again_keep_their_experts() -> None:
    rows = np.arange(12, dtype=np.uint8).reshape(6, 2, 1)
    routed = RoutedRows()
    routed.add(4, rows[:4])
    assert routed.take() == rows[:4].tobytes()
    routed.add(3, rows[:3] + 100)
    routed.add(6, np.concatenate((rows[3:4] + 100, rows[4:])))
    assert routed.take() == rows[4:].tobytes()
    assert routed.take() == b""


def test_a_base_without_experts_is_refused_at_the_start(fleet: Any) -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM is none"):
        LLM(str(fleet("llama3").base), enable_return_routed_experts=True, kv_cache_tokens=256)
