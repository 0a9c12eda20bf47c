"""An engine on a GPU whose adapters borrow memory of the KV cache beside running steps, against one whose memory is
fixed. With batch_invariant the answers of both are equal to the last bit."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from engine_steps import step_until_done
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_control import SleepEngine, WakeEngine
from lorafleet.workers.pool import pool_cost
from tiny_models import make_adapter, make_model

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
NUM_ADAPTERS = 40
Jobs = list[tuple[list[int], int]]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, list[Path]]:
    root = tmp_path_factory.mktemp("pool")
    base = make_model(root / "base", "llama3", dtype="bfloat16", **SHAPE)
    paths = [make_adapter(root / f"a{i}", base, seed=i, std=0.02, r=64) for i in range(NUM_ADAPTERS)]
    return base, paths


def rounds(prompt: Callable[[int], list[int]]) -> list[Jobs]:
    """Rounds of many adapters, then of long prompts that fill the KV cache, and so on. -1 is the base."""
    random = Random(5)
    made: list[Jobs] = []
    for turn in range(6):
        if turn % 2 == 0:
            made.append([(prompt(random.randint(20, 200)), random.randrange(NUM_ADAPTERS)) for _ in range(24)])
        else:
            made.append([(prompt(1500)[i + turn * 40 :], -1 if i % 3 else 0) for i in range(32)])
    return made


def serve(files: tuple[Path, list[Path]], jobs: list[Jobs], **options) -> tuple[list[list[int]], LLM]:
    base, paths = files
    llm = LLM(
        str(base),
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=NUM_ADAPTERS,
        batch_invariant=True,
        max_num_batched_tokens=1024,
        max_num_seqs=16,
        kv_cache_tokens=32768,
        **options,
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    loras = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]
    answers: list[list[int]] = []
    for batch in jobs:
        requests = [None if which < 0 else loras[which] for _, which in batch]
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens, _ in batch], params, requests)
        answers += [output.outputs[0].token_ids for output in outputs]
    return answers, llm


def test_answers_are_those_of_fixed_memory_while_memory_moves(files, prompt, monkeypatch) -> None:
    monkeypatch.setattr(pool_cost, "RECENT_S", 1.0)  # or a fast GPU would go on for a minute until memory returns
    jobs = rounds(prompt)
    expected, llm = serve(files, jobs, share_lora_memory=False)
    assert llm._engine.loras.filler.pool is None
    fixed = llm._engine.stats()
    del llm
    gc.collect()
    for eager in (False, True):
        # The tiers save the blocks whose memory leaves, and bring them back.
        tiers = {"kv_host_gib": 0 if eager else 1}
        answers, llm = serve(files, jobs, enforce_eager=eager, share_lora_memory=True, **tiers)
        for _ in range(60):  # what adapters have borrowed stays with them for a while
            if llm._engine.stats().lora_memory_moves_total["returned"]:
                break
            for turn in (1, 3):
                assert serve_again(llm, files, jobs[turn]) == of_turn(expected, jobs, turn)
        stats = llm._engine.stats()
        print(
            f"\n{eager=}: moves {stats.lora_memory_moves_total}, borrowed {stats.lora_memory_borrowed_bytes >> 20} "
            f"MiB, memory {stats.memory_bytes}, activations {stats.lora_activations_total} (fixed: "
            f"{fixed.lora_activations_total}), hits {stats.prefix_cache_hits_total} (fixed: "
            f"{fixed.prefix_cache_hits_total})"
        )
        assert stats.lora_memory_moves_total["lent"] > 0 and stats.lora_memory_moves_total["returned"] > 0
        assert answers == expected
        if not eager:
            sleep_and_wake(llm._engine)
        for turn in (0, 1, 2):
            assert serve_again(llm, files, jobs[turn]) == of_turn(expected, jobs, turn)
        del llm
        gc.collect()


def of_turn(answers: list[list[int]], jobs: list[Jobs], turn: int) -> list[list[int]]:
    first = sum(len(batch) for batch in jobs[:turn])
    return answers[first : first + len(jobs[turn])]


def sleep_and_wake(engine) -> None:
    before = torch.cuda.mem_get_info()[0]
    done = engine.control(SleepEngine())
    step_until_done(engine, done)
    done.result()
    freed = torch.cuda.mem_get_info()[0] - before
    memory = engine.stats().memory_bytes
    print(f"freed {freed >> 20} MiB while asleep, memory {memory}")
    assert freed > 500 << 20
    done = engine.control(WakeEngine())
    step_until_done(engine, done)
    done.result()


def serve_again(llm: LLM, files: tuple[Path, list[Path]], batch: Jobs) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    loras = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(files[1])]
    requests = [None if which < 0 else loras[which] for _, which in batch]
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens, _ in batch], params, requests)
    return [output.outputs[0].token_ids for output in outputs]
