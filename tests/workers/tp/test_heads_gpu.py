"""Heads that draft, divided among two GPUs, CUDA graphs on: their drafts are those of a plain implementation, and
answers are those of one GPU without drafts."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lorafleet.offline.llm import LLM, SamplingParams
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from tests.workers.speculation.drafting import record, speculate
from tests.workers.speculation.eagle_reference import EagleReference, make_head
from tests.workers.speculation.mtp_reference import Drafted, MTPReference, make_mtp_checkpoint
from tiny_models import make_model

pytestmark = pytest.mark.gpu(2)
PROMPTS = [[5 + (7 * i + j * j) % 300 for j in range(3 + 9 * i)] for i in range(6)]


def generated(base: Path, size: int, config: dict[str, Any] | None) -> tuple[list[list[int]], list[Drafted]]:
    """Returns the tokens of each answer, and what was drafted. It runs in a process of its own, as a server's ranks do:
    GPUs' memory is shared once a process."""
    llm = LLM(
        str(base), device="cuda", dtype="float32", attention_backend="triton", kv_cache_tokens=4096, max_num_seqs=8,
        max_num_batched_tokens=256, tensor_parallel_size=size, enable_lora=False, speculative_config=config,
    )  # fmt: skip
    drafted: list[Drafted] = []
    behind: list[str] = []  # The requests of those drafts that were made behind a step in flight.
    if config is not None:
        drafter = llm._engine.scheduler.speculation.drafter
        assert isinstance(drafter, ModelDrafter)
        record(drafter, drafted, behind)
        speculate(llm._engine, drafter)
    params = [
        SamplingParams(max_tokens=24, temperature=0.8 if i % 3 == 2 else 0, seed=i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    llm.close()
    assert config is None or len(behind) > len(drafted) // 2
    return [list(output.outputs[0].token_ids) for output in outputs], drafted


def drafts_of_two(base: Path, config: dict[str, Any]) -> list[Drafted]:
    """Returns some of what two GPUs draft, whose answers must be those of one without drafts."""
    found = []
    for size, given in ((1, None), (2, config)):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found.append(process.submit(generated, base, size, given).result())
    assert found[0][0] == found[1][0]
    drafted = found[1][1]
    return drafted[:: max(1, len(drafted) // 40)]


def test_an_eagle_head(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", "llama3", num_hidden_layers=7, head_dim=32)
    head = make_head(tmp_path / "head")
    checked = drafts_of_two(base, {"method": "eagle3", "model": str(head)})
    target, reference = AutoModelForCausalLM.from_pretrained(base), EagleReference(head)
    right = sum(draft == reference.drafts(target, known, len(draft)) for _, known, draft in checked)
    assert right >= 0.9 * len(checked) > 20  # Nearly equal logits may be ordered differently there.


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5"])
def test_a_layer_for_several_tokens(tmp_path: Path, family: str) -> None:
    base = make_mtp_checkpoint(tmp_path / "base", family)
    checked = drafts_of_two(base, {"method": "mtp"})
    wrong = MTPReference(base, family).wrong(AutoModelForCausalLM.from_pretrained(base), checked)
    assert len(wrong) <= 0.1 * len(checked) and len(checked) > 20  # Nearly equal logits, as for the EAGLE head.
