"""Every form of embedding and head through the engine, against transformers with the adapter in its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapter_forms import served_from
from lorafleet.workers.llm import LLM, LoRARequest, SamplingParams
from lorafleet.workers.lora.forms import AdapterForms
from ranks import start_llm
from tiny_models import VOCAB, make_model
from vocab_adapters import VOCAB_ADAPTERS, make_vocab_adapter, peft_logits
from vocab_forms import NUM_ADDED, NUM_CUT, applied_with_tables, make_vocab_forms

TOLERANCE = 1e-3
NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=0)
# Tied, untied, and a head that is capped beside an embedding that is scaled.
FAMILIES = ["qwen2", "llama2", "gemma2"]
SIZES = {"resized": VOCAB + NUM_ADDED, "cut": VOCAB - NUM_CUT}


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory) -> tuple[Path, dict[str, AdapterForms]]:
    folder = make_model(tmp_path_factory.mktemp("vocab") / request.param, request.param, num_hidden_layers=2)
    return folder, make_vocab_forms(VOCAB, 64)


def prompt_of(kind: str | None, num_tokens: int, seed: int) -> list[int]:
    """With the last tokens of the vocabulary among them."""
    size = VOCAB if kind is None else SIZES.get(kind, VOCAB)
    random = torch.Generator().manual_seed(seed)
    return [*torch.randint(size, (num_tokens,), generator=random).tolist(), size - 1, 7, size - 3]


def logits(model, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens])).logits[0].float()


def test_all_kinds_in_one_batch_answer_as_the_changed_model_does(made, tmp_path, monkeypatch):
    folder, forms = made
    paths = served_from(tmp_path, forms, monkeypatch)
    llm = LLM(str(folder), enable_lora=True, max_loras=len(forms), max_num_batched_tokens=48, max_num_seqs=32)
    loras = [None, *(LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(paths.items()))] * 2
    kinds = [None if lora is None else lora.lora_name for lora in loras]
    prompts = [prompt_of(kind, 3 + 7 * i % 40, i) for i, kind in enumerate(kinds)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, loras)
    models = {None: applied_with_tables(folder, AdapterForms())}
    models |= {kind: applied_with_tables(folder, form) for kind, form in forms.items()}
    for tokens, kind, output in zip(prompts, kinds, outputs, strict=True):
        [completion] = output.outputs
        whole = tokens + completion.token_ids
        want = logits(models[kind], whole).log_softmax(-1)
        found = [p.logprob for p in output.prompt_logprobs[1:]] + [p.logprob for p in completion.logprobs]
        assert found == pytest.approx([want[i, t].item() for i, t in enumerate(whole[1:])], abs=TOLERANCE)
        for i, entry in enumerate(completion.logprobs, start=len(tokens) - 1):
            assert entry.top_logprobs == pytest.approx(want[i].topk(3).values.tolist(), abs=TOLERANCE)
            assert entry.rank == 1
    llm.close()


# Tied and untied; a vocabulary that two ranks do not divide evenly.
@pytest.mark.parametrize(("family", "num_ranks"), [("qwen2", 1), ("llama2", 1), ("qwen2", 2), ("llama2", 2)])
def test_adapters_that_peft_saved_answer_as_peft_does(family, num_ranks, tmp_path):
    folder = make_model(tmp_path / "base", family, num_hidden_layers=2, vocab_size=VOCAB + 1)
    paths = {name: make_vocab_adapter(tmp_path / name, folder, name) for name in VOCAB_ADAPTERS}
    llm = start_llm(str(folder), num_ranks, enable_lora=True, max_loras=4)  # fewer slots than adapters
    loras = [None, *(LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(paths.items()))]
    added = [NUM_ADDED if lora is not None and VOCAB_ADAPTERS[lora.lora_name][1] else 0 for lora in loras]
    prompts = [[5, 300, VOCAB + more, 1, 7, VOCAB + more - 2, *range(3 * i)] for i, more in enumerate(added)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, loras)
    llm.close()
    for tokens, lora, more, output in zip(prompts, loras, added, outputs, strict=True):
        [completion] = output.outputs
        whole = tokens + completion.token_ids
        want = peft_logits(folder, None if lora is None else paths[lora.lora_name], whole, more).log_softmax(-1)
        found = [p.logprob for p in output.prompt_logprobs[1:]] + [p.logprob for p in completion.logprobs]
        assert found == pytest.approx([want[i, t].item() for i, t in enumerate(whole[1:])], abs=TOLERANCE), lora
