"""All kinds of adapters together in the real engine's batches: each answers as PEFT does alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorafleet.workers.llm import LLM, LoRARequest, SamplingParams
from tests.workers.lora.kinds.harness import TOKENS, make, make_base, peft_logits
from tests.workers.lora.kinds.test_against_peft import CASES, KINDS, UNKNOWN_TO_PEFT
from tiny_models import tokenizer

PROMPT = TOKENS[0].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3, tied"])
def test_every_kind_in_one_batch_answers_as_peft_does(tmp_path: Path, family: str) -> None:
    base = tmp_path / "base"
    make_base(family).save_pretrained(base)
    tokenizer().save_pretrained(base)
    kinds = [
        kind
        for kind in KINDS
        if (kind, family) in CASES and not any(kind == odd and where in family for odd, where in UNKNOWN_TO_PEFT)
    ]
    kinds = [kind for kind in kinds if not any(w in kind for w in ("head", "embedding", "tokens"))]
    adapters = {kind: make(tmp_path / str(i), family, KINDS[kind]) for i, kind in enumerate(kinds)}
    llm = LLM(str(base), enable_lora=True, max_loras=24, max_lora_rank=64, kv_cache_tokens=4096, max_num_seqs=32)
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
