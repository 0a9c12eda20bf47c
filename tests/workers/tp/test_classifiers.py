"""Heads of adapters over two ranks, against transformers + PEFT in float32, beside an answer under another adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from classifiers import expected_logits, make_classifier
from engine_steps import step_until_done
from lorafleet.offline.llm import LLM, LoRARequest
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from ranks import start_llm

HEADS = {"topic": ("SEQ_CLS", 3, "classify"), "tags": ("TOKEN_CLS", 5, "token_classify")}


def test_heads_are_those_of_one_rank(tmp_path: Path, fleet: Callable[[str], Any], prompt: Callable[[int], Any]) -> None:
    made = fleet("llama3")
    adapters = {
        name: make_classifier(tmp_path / name, made.base, task_type, num_labels, 50 + i)
        for i, (name, (task_type, num_labels, _)) in enumerate(HEADS.items())
    }
    prompts = [prompt(n) for n in (3, 70, 1)]
    params = SamplingParams(max_tokens=1, temperature=0)
    llm = start_llm(str(made.base), 2, enable_lora=True, lora_config=LoRAConfig(max_loras=2))
    try:
        engine = llm._engine  # LLM itself has no method for heads
        loras = {name: _loaded(llm, LoRARequest(name, 1, str(path))) for name, path in adapters.items()}
        all_linears = _loaded(llm, LoRARequest("all", 3, str(made.adapters["all"])))
        for name, (_, _, pooling) in HEADS.items():
            for i, ids in enumerate(prompts):
                engine.add(
                    EngineRequest(
                        request_id=f"{name} {i}", prompt_token_ids=ids, params=params, lora=loras[name], pooling=pooling
                    )
                )
        greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        engine.add(EngineRequest(request_id="all", prompt_token_ids=prompts[0], params=greedy, lora=all_linears))
        values: dict[str, bytes] = {}
        tokens: list[int] = []
        while engine.num_unfinished:
            for output in engine.step():
                assert output.error is None
                if output.request_id == "all":
                    tokens += output.token_ids
                else:
                    values[output.request_id] = output.embedding
    finally:
        llm.close()
    assert tokens == made.reference.greedy(prompts[0], 8, made.adapters["all"]).tokens
    for name, (task_type, num_labels, _) in HEADS.items():
        for i, logits in enumerate(expected_logits(made.base, adapters[name], task_type, num_labels, prompts)):
            found = np.frombuffer(values[f"{name} {i}"], np.float32).reshape(logits.shape)
            np.testing.assert_allclose(found, logits.numpy(), atol=1e-3)


def _loaded(llm: LLM, lora: LoRARequest) -> LoRARequest:
    """Loads the adapter, and returns it with its digest."""
    loading = llm._engine.load_adapter(lora)
    step_until_done(llm._engine, loading)
    assert loading.result().head_task == HEADS.get(lora.lora_name, (None, None, ""))[2]
    return msgspec.structs.replace(lora, digest=loading.result().digest)
