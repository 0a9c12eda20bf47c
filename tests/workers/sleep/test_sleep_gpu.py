"""Sleeps on a GPU: memory that other processes can take, and answers as before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_control import SleepLevel
from tiny_models import make_adapter, make_model

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("is_shared", [False, True], ids=["fixed", "shared"])
def test_the_memory_is_free_while_the_engine_sleeps_and_answers_stay_the_same(
    tmp_path: Path, prompt, eager: bool, is_shared: bool
) -> None:
    base = make_model(tmp_path / "base", "llama3", dtype="bfloat16", **SHAPE)
    paths = {name: make_adapter(tmp_path / name, base, seed=i, std=0.02, r=8) for i, name in enumerate("ab")}
    llm = LLM(
        str(base),
        enable_lora=True,
        max_loras=2,
        max_num_seqs=16,
        kv_cache_tokens=131072,
        enforce_eager=eager,
        share_lora_memory=is_shared,
    )
    jobs = [(prompt(40), None), *((prompt(40), LoRARequest(n, i, str(p))) for i, (n, p) in enumerate(paths.items(), 1))]

    def answers() -> list[list[int]]:
        """Returns the answers of requests that run one after the other."""
        outputs = [llm.generate({"prompt_token_ids": ids}, PARAMS, lora)[0] for ids, lora in jobs]
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = answers()
    steps = llm._engine.runner.steps
    weights = sum(parameter.nbytes for parameter in steps.model.parameters())
    caches = sum(cache.k_NPGD.nbytes + cache.v_NPGD.nbytes for cache in steps.caches)
    levels: tuple[SleepLevel, ...] = (1, 1, 2, 1)
    for level in levels:
        free, reserved, began_s = free_bytes(), torch.cuda.memory_reserved(), time.monotonic()
        llm.sleep(level)
        asleep_s, given = time.monotonic() - began_s, free_bytes() - free
        left = torch.cuda.memory_reserved()
        if not is_shared:  # Otherwise torch's allocator does not know of the KV cache.
            assert reserved - left > 0.9 * (weights + caches)
        assert given > 0.9 * (weights + caches), "other processes cannot take it"
        assert left < 512 << 20  # workspaces
        began_s = time.monotonic()
        llm.wake_up(["weights"])
        weights_s = time.monotonic() - began_s
        llm.wake_up(["kv_cache"])
        print(
            f"level {level}: {given / 2**30:.2f} GiB given back in {asleep_s:.2f} s, {left / 2**20:.0f} MiB left; "
            f"weights back after {weights_s:.2f} s, all after {time.monotonic() - began_s:.2f} s"
        )
        assert answers() == expected
    if not eager:
        assert steps.decode_graphs is not None and len(steps.decode_graphs) > 0
    llm.close()
