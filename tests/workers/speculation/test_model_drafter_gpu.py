"""A draft model on a GPU: the demo's model drafts for itself, and its adapters are their own draft LoRAs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from tests.workers.speculation.drafting import speculate

pytestmark = pytest.mark.gpu

DEMO = Path(__file__).parents[3] / "demo"
NAMES = ["json", "pirate", "shout"]
TEXT = "Paris is the capital of France. Rome is the capital of Italy. "
KINDS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    root = tmp_path_factory.mktemp("drafted")
    for name in NAMES:
        shutil.copytree(DEMO / "adapters" / name, root / name)
        shutil.copytree(DEMO / "adapters" / name, root / name / "draft")
    return [None, *(LoRARequest(name, i, str(root / name)) for i, name in enumerate(NAMES, 1))]


def answers(adapters: list[LoRARequest | None], *, drafts: bool, **options: Any) -> tuple[list[list[int]], int, int]:
    """Returns the tokens of 24 answers, and how many tokens were drafted and accepted."""
    config = {"method": "draft_model", "model": str(DEMO / "model")} if drafts else None
    llm = LLM(
        str(DEMO / "model"),
        attention_backend="triton",
        enable_lora=True,
        max_loras=3,
        max_num_seqs=32,
        kv_cache_tokens=16384,
        speculative_config=config,
        **options,
    )
    counts = [0, 0]
    if drafts:
        speculation = llm._engine.scheduler.speculation
        assert speculation is not None and isinstance(speculation.drafter, ModelDrafter)
        made = speculate(llm._engine, speculation.drafter)
        verified = made.verified

        def counted(sequence: Any, num_drafted: int, num_accepted: int) -> None:
            counts[0] += num_drafted
            counts[1] += num_accepted
            verified(sequence, num_drafted, num_accepted)

        made.verified = counted  # type: ignore[method-assign]
    jobs = [(TEXT * (1 + i % 5), KINDS[i % 2], adapters[i // 2 % len(adapters)]) for i in range(24)]
    prompts, kinds, loras = zip(*jobs, strict=True)
    params = [SamplingParams(**({"max_tokens": 48, "ignore_eos": True} | kind)) for kind in kinds]
    outputs = llm.generate(list(prompts), params, list(loras))
    llm.close()
    return [one.token_ids for output in outputs for one in output.outputs], counts[0], counts[1]


@pytest.mark.parametrize("eager", [True, False])
def test_in_float32_answers_are_equal_and_greedy_drafts_are_right(adapters, eager) -> None:
    plain, _, _ = answers(adapters, drafts=False, dtype="float32", enforce_eager=eager)
    drafted, num_drafted, num_accepted = answers(adapters, drafts=True, dtype="float32", enforce_eager=eager)
    assert drafted == plain
    assert num_drafted > 300
    assert num_accepted > 0.6 * num_drafted  # Half of the answers are sampled.
