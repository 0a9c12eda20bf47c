"""The families of family_cases.py over HTTP, against transformers + PEFT in float32: base, LoRA and DoRA at once,
and embeddings."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from torch.nn.functional import normalize

import real_server
from family_cases import CASES, make_case, make_case_adapter
from real_server import BASE
from tests.cluster.harness import greedy_answers
from tiny_models import Reference


@pytest.mark.parametrize("name", CASES)
async def test_base_and_adapters_answer_as_transformers_and_peft_do(tmp_path: Path, prompt, name: str) -> None:
    case = CASES[name]
    base = make_case(tmp_path / "base", case)
    adapters = {
        "lora": make_case_adapter(tmp_path / "lora", base, case, use_rslora=True),
        "dora": make_case_adapter(tmp_path / "dora", base, case, use_dora=True, r=3),
    }
    # The first prompt shares steps with the others' decodes, and the last is prefilled in chunks.
    jobs = [(prompt(length), kind) for length in (3, 45) for kind in (None, *adapters)]
    engine = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "kv_cache_tokens": 2048, "device": "cpu"}
    with real_server.running(tmp_path, base, adapters, {}, **engine) as server:
        answers = await greedy_answers(server.url, jobs, base=BASE, num_tokens=6)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            embedded = [
                await http.post("/v1/embeddings", json={"model": "lora", "input": prompt(45), "pooling": pooling})
                for pooling in ("last", "mean", "cls")
            ]
    reference = Reference(base)
    hidden_TD = reference.hidden(prompt(45), adapters["lora"])
    for vector_D, response in zip((hidden_TD[-1], hidden_TD.mean(dim=0), hidden_TD[0]), embedded, strict=True):
        [entry] = response.json()["data"]
        assert entry["embedding"] == pytest.approx(normalize(vector_D, dim=0).tolist(), abs=1e-3)
    for (ids, kind), answer in zip(jobs, answers, strict=True):
        [choice] = answer.choices
        tokens = choice.model_extra["token_ids"]
        expected = reference.greedy_along(ids, tokens, adapters.get(kind))
        assert len(tokens) == 6 and tokens == expected.tokens
        assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-3)
