"""All kinds of adapters together in the real engine's batches: each answers as PEFT does alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from tests.workers.adapters.kinds.harness import TOKENS, make, make_base, peft_logits
from tests.workers.adapters.kinds.test_against_peft import KINDS, UNKNOWN_TO_PEFT, VOCABULARY
from tiny_models import tokenizer

FAMILY = "qwen3, tied"
PROMPT = TOKENS[0].tolist()


def test_every_kind_in_one_batch_answers_as_peft_does(tmp_path: Path) -> None:
    odd = [kind for kind, where in UNKNOWN_TO_PEFT if where in FAMILY]
    check_batch(tmp_path, FAMILY, [kind for kind in KINDS if kind not in odd])


def test_embeddings_and_heads_of_their_own_answer_as_peft_s_do(tmp_path: Path) -> None:
    check_batch(tmp_path, "llama", [kind for kind in KINDS if any(word in kind for word in VOCABULARY)])


def test_two_ranks_answer_as_peft_does(tmp_path: Path) -> None:
    """What is computed from the base comes from its files then: no rank has a whole weight."""
    kinds = ["DoRA", "PiSSA", "HRA", "KaSA", "all biases, on B too", "IA3", "LoKr, none factored", "saved norms"]
    check_batch(tmp_path, "qwen2", kinds, tensor_parallel_size=2)


def check_batch(tmp_path: Path, family: str, kinds: list[str], **options: Any) -> None:
    base = tmp_path / "base"
    make_base(family).save_pretrained(base)
    tokenizer().save_pretrained(base)
    adapters = {kind: make(tmp_path / str(i), family, KINDS[kind]) for i, kind in enumerate(kinds)}
    llm = LLM(
        str(base), enable_lora=True, max_loras=24, max_lora_rank=64, kv_cache_tokens=4096, max_num_seqs=32, **options
    )
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPT}] * len(kinds),
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0),
            lora_request=[LoRARequest(kind, i + 1, str(adapters[kind].path)) for i, kind in enumerate(kinds)],
        )
    finally:
        llm.close()
    for kind, output in zip(kinds, outputs, strict=True):
        expected = peft_logits(adapters[kind])[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        found = [place.logprob for place in output.prompt_logprobs[1:] if place is not None]
        teacher = [expected[i, token].item() for i, token in enumerate(PROMPT[1:])]
        assert found == pytest.approx(teacher, abs=1e-3), kind
        [completion] = output.outputs
        assert completion.token_ids == [int(expected[-1].argmax())], kind
