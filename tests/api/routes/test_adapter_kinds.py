"""Adapters of every form over HTTP, in one burst, against transformers + PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import real_server
from lorafleet.protocol.lora_config import LoRAConfig
from tests.cluster.harness import greedy_answers
from tests.workers.adapters.kinds.harness import TOKENS, make, make_base, peft_logits
from tests.workers.adapters.kinds.test_against_peft import KINDS
from tiny_models import tokenizer

FAMILY = "qwen2 with text"
SERVED = (
    "DoRA", "DoRA on the embedding", "PiSSA", "all biases, on B too", "AdaLoRA", "LoHa", "LoKr, none factored", "IA3",
    "VeRA", "HRA", "saved norms", "embedding and head", "saved head", "trained tokens of both",
)  # fmt: skip
PROMPT = TOKENS[0].tolist()


async def test_a_burst_over_all_forms_equals_peft(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_base(FAMILY).save_pretrained(base)
    tokenizer().save_pretrained(base)
    adapters = {f"kind{i}": make(tmp_path / f"kind{i}", FAMILY, KINDS[kind]) for i, kind in enumerate(SERVED)}
    paths = {name: adapter.path for name, adapter in adapters.items()}
    lora = LoRAConfig(max_loras=4, max_lora_rank=16)
    engine: dict[str, Any] = {"kv_cache_tokens": 4096, "max_num_seqs": 8, "device": "cpu"}
    with real_server.running(tmp_path, base, paths, {}, lora=lora, **engine) as server:
        answers = await greedy_answers(server.url, [(PROMPT, name) for name in adapters])
    for kind, adapter, answer in zip(SERVED, adapters.values(), answers, strict=True):
        tokens = answer.choices[0].model_extra["token_ids"]
        expected = peft_logits(adapter, tokens=torch.tensor([[*PROMPT, *tokens]]))[0].log_softmax(-1)
        chosen = expected[len(PROMPT) - 1 : -1]
        assert tokens == chosen.argmax(-1).tolist(), kind
        logprobs = [row[token].item() for row, token in zip(chosen, tokens, strict=True)]
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-3), kind
