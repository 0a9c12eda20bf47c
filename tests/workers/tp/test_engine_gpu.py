"""A whole engine over several GPUs, CUDA graphs and overlap on, against the same engine on one: how far the logprobs of
each are from transformers + PEFT in float32."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import pytest
import torch

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.rank_processes import RankProcesses
from lorafleet.workers.startup import build_engine
from lorafleet.workers.tp.sharding_choice import with_sharding
from tiny_models import Reference, make_adapter, make_model

pytestmark = pytest.mark.gpu(2)
ADAPTERS = {
    "all": {"r": 16},
    "few": {"r": 5, "target_modules": ["q_proj", "o_proj", "down_proj"]},
    "one": {"r": 1, "target_modules": ["v_proj", "up_proj"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("base"), "llama3", dtype="bfloat16", hidden_size=512, intermediate_size=1536,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(root / name, base, seed=i, **o) for i, (name, o) in enumerate(ADAPTERS.items())}


def generated(
    base: Path,
    size: int,
    fully: bool,
    prompts: list[list[int]],
    params: list[SamplingParams],
    loras: list[LoRARequest | None],
    repeats: int = 1,
) -> list[tuple[list[int], list[float]]]:
    """Token ids and their logprobs, of the last of so many engines one after another. In a process of its own, as a
    server's ranks are: GPUs' memory is shared once a process."""
    for _ in range(repeats):
        llm = LLM(
            str(base), device="cuda", kv_cache_tokens=8192, max_num_seqs=16, tensor_parallel_size=size,
            enable_lora=True, lora_config=LoRAConfig(max_loras=2, max_lora_rank=16, fully_sharded_loras=fully),
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, loras)
        llm.close()
    return [(o.outputs[0].token_ids, [entry.logprob for entry in o.outputs[0].logprobs or []]) for o in outputs]


@pytest.fixture(scope="module")
def errors(base, adapters, prompt):
    """By size and layout: of each adapter's generated tokens, the mean error of their logprobs."""
    exact = Reference(base, device="cuda")
    jobs = [(prompt(5 + 23 * i), name) for i, name in enumerate([None, *adapters] * 4)]
    loras = {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(adapters.items(), 1)}
    params = [
        SamplingParams(max_tokens=24, temperature=0 if i % 2 else 0.8, seed=i, logprobs=0, ignore_eos=True)
        for i in range(len(jobs))
    ]

    def of(size: int, fully: bool) -> dict[str | None, float]:
        prompts = [p for p, _ in jobs]
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            answers = process.submit(
                generated, base, size, fully, prompts, params, [loras.get(name) for _, name in jobs]
            ).result()
        found: dict[str | None, list[float]] = {}
        for (p, name), (token_ids, logprobs) in zip(jobs, answers, strict=True):
            truth = exact.logprobs(p + token_ids, adapters.get(name))[len(p) - 1 :]
            found.setdefault(name, []).append(mean(abs(a - b) for a, b in zip(logprobs, truth, strict=True)))
        return {name: mean(of_name) for name, of_name in found.items()}

    return of


@pytest.fixture(scope="module")
def alone(errors):
    return errors(1, False)


@pytest.mark.parametrize("fully", [False, True])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_logprobs_are_as_near_to_float32_as_those_of_one_gpu(alone, errors, size, fully):
    for name, error in errors(size, fully).items():
        print(f"tp {size}, fully sharded {fully}, {name}: error {error:.4f}, of one GPU {alone[name]:.4f}")
        assert error < 1.5 * alone[name] + 0.002


def test_a_process_may_have_one_replica_after_another(base, prompt):
    params = [SamplingParams(max_tokens=4, temperature=0, logprobs=0)]
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        [(token_ids, _)] = process.submit(generated, base, 2, True, [prompt(20)], params, [None], repeats=2).result()
    assert len(token_ids) == 4


def slot_bytes(base: Path, max_num_seqs: int, fully: bool | None) -> int:
    """Returns the bytes of rank 0's slots."""
    lora = LoRAConfig(max_loras=2, max_lora_rank=16, fully_sharded_loras=fully)
    config = EngineConfig(
        str(base), device="cuda", kv_cache_tokens=8192, max_num_seqs=max_num_seqs, tensor_parallel_size=2, lora=lora,
        attention_backend="triton",
    )  # fmt: skip
    ranks = RankProcesses(config)
    engine = build_engine(config, addresses=ranks.addresses)
    assert engine.loras is not None
    found = engine.loras.model_manager.arena_bytes
    engine.close()
    ranks.close()
    return found


@pytest.mark.skipif(
    not torch.cuda.is_available() or with_sharding(LoRAConfig(), torch.cuda.get_device_name(), 2, 8) == LoRAConfig(),
    reason="needs a GPU with measured layouts of adapters",
)
def test_a_small_replica_has_the_layout_that_was_measured_as_faster(base):
    def on_new_process(fully: bool | None) -> int:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(slot_bytes, base, 8, fully).result()

    assert on_new_process(None) == on_new_process(False) > on_new_process(True)
