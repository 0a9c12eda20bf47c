"""Every form of embedding and head through the engine, against transformers with the adapter in its weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adapter_forms import served_from
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterChanged, AdapterTooLarge, InvalidRequest
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.messages import EngineRequest, Vocabulary
from lorafleet.workers.adapters.forms import AdapterForms
from lorafleet.workers.startup import build_engine
from ranks import start_llm
from tiny_models import VOCAB, make_model, tokenizer
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


def check_all_kinds_in_one_batch(made, tmp_path, monkeypatch, **options) -> None:
    folder, forms = made
    paths = served_from(tmp_path, forms, monkeypatch)
    llm = LLM(str(folder), enable_lora=True, max_num_batched_tokens=48, max_num_seqs=32, **options)
    loras = [None, *(LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(paths.items()))] * 2
    kinds = [None if lora is None else lora.lora_name for lora in loras]
    prompts = [prompt_of(kind, 3 + 7 * i % 40, i) for i, kind in enumerate(kinds)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, loras)
    llm.close()
    models = {None: applied_with_tables(folder, AdapterForms())}
    models |= {kind: applied_with_tables(folder, form) for kind, form in forms.items()}
    for tokens, kind, output in zip(prompts, kinds, outputs, strict=True):
        [completion] = output.outputs
        whole = tokens + completion.token_ids
        want = logits(models[kind], whole).log_softmax(-1)
        found = [p.logprob for p in output.prompt_logprobs[1:]] + [p.logprob for p in completion.logprobs]
        assert found == pytest.approx([want[i, t].item() for i, t in enumerate(whole[1:])], abs=TOLERANCE), kind
        for i, entry in enumerate(completion.logprobs, start=len(tokens) - 1):
            assert entry.top_logprobs == pytest.approx(want[i].topk(3).values.tolist(), abs=TOLERANCE)
            assert entry.rank == 1


@pytest.mark.parametrize("max_loras", [9, 3])
def test_all_kinds_in_one_batch_answer_as_the_changed_model_does(made, tmp_path, monkeypatch, max_loras):
    """Also where they come and go, a slot's next adapter being of another kind."""
    check_all_kinds_in_one_batch(made, tmp_path, monkeypatch, max_loras=max_loras)


@pytest.mark.gpu
@pytest.mark.parametrize("max_loras", [9, 3])
@pytest.mark.parametrize("eager", [False, True])
def test_all_kinds_in_one_batch_on_a_gpu(made, tmp_path, monkeypatch, max_loras, eager):
    """In float32. Its decode steps have no graphs, as their attention has none; those with prompts have."""
    options = {"max_loras": max_loras, "enforce_eager": eager, "attention_backend": "triton", "kv_cache_tokens": 4096}
    check_all_kinds_in_one_batch(made, tmp_path, monkeypatch, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama2", "qwen2"])
def test_captured_decode_steps_of_any_mix_agree_with_the_changed_model(tmp_path, monkeypatch, family):
    pytest.importorskip("flashinfer")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_model(tmp_path / "base", family, **sizes, head_dim=128, initializer_range=0.04, num_hidden_layers=2)
    forms = make_vocab_forms(VOCAB, 512, std=0.04)
    paths = served_from(tmp_path, forms, monkeypatch)
    options = {"max_loras": 5, "kv_cache_tokens": 8192, "max_num_batched_tokens": 256, "max_num_seqs": 32}
    llm = LLM(str(folder), enable_lora=True, dtype="bfloat16", **options)
    assert llm._engine.runner.steps.decode_graphs is not None
    loras = [None, *(LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(paths.items()))] * 2
    kinds = [None if lora is None else lora.lora_name for lora in loras]
    prompts = [{"prompt_token_ids": prompt_of(kind, 3 + 7 * i % 40, i)} for i, kind in enumerate(kinds)]
    silent = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    unseen = llm.generate(prompts, silent, loras)  # by the graphs, whose base tokens are replaced
    seen = llm.generate(prompts, GREEDY, loras)
    llm.close()
    models = {kind: applied_with_tables(folder, form) for kind, form in ({None: AdapterForms()} | forms).items()}
    errors: dict[str | None, list[float]] = {}
    for asked, kind, output, other in zip(prompts, kinds, seen, unseen, strict=True):
        [completion] = output.outputs
        tokens = asked["prompt_token_ids"]
        exact = logits(models[kind], tokens + completion.token_ids).log_softmax(-1)[len(tokens) - 1 : -1]
        found = torch.tensor([p.logprob for p in completion.logprobs])
        want = exact.gather(1, torch.tensor(completion.token_ids).unsqueeze(1)).squeeze(1)
        errors.setdefault(kind, []).append((found - want).abs().mean().item())
        first = other.outputs[0].token_ids[0]
        assert exact[0, first] > exact[0].max() - 0.1, "a greedy token is not the adapter's"
    print({kind: [round(off, 4) for off in offs] for kind, offs in errors.items()})
    assert all(sum(offs) / len(offs) < 0.05 for offs in errors.values()), errors


def test_texts_are_tokenized_by_the_tokenizer_that_an_adapter_brings(tmp_path):
    folder = make_model(tmp_path / "base", "qwen2", num_hidden_layers=1)
    own = copy.deepcopy(tokenizer())
    own.add_tokens([f"<act {i}>" for i in range(VOCAB + NUM_ADDED - len(own))])
    path = make_vocab_adapter(tmp_path / "resized", folder, "resized", own)
    llm = LLM(str(folder), enable_lora=True)
    last = VOCAB + NUM_ADDED - 1
    name = own.convert_ids_to_tokens(last)
    forced = SamplingParams(temperature=0, max_tokens=2, logit_bias={last: 100.0}, skip_special_tokens=False)
    request = LoRARequest("resized", 1, str(path))
    [adapted] = llm.generate(f"the{name}", forced, request)
    [(digest, language)] = llm._languages.items()
    llm._languages[digest] = replace(language, digest="of other files")
    with pytest.raises(AdapterChanged, match="the tokenizer files"):
        llm.generate("the", forced, request)
    llm.close()
    assert adapted.prompt_token_ids == [*own.encode("the"), last]
    assert adapted.outputs[0].text == 2 * name


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


@pytest.fixture
def resized_and_cut(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "base", "qwen2", num_hidden_layers=1)
    forms = make_vocab_forms(VOCAB, 64)
    paths = served_from(tmp_path, {kind: forms[kind] for kind in SIZES}, monkeypatch)
    llm = LLM(str(folder), enable_lora=True)
    yield llm, [None, *(LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(paths.items()))]
    llm.close()


def test_rows_of_several_vocabularies_are_drawn_each_from_its_own(resized_and_cut):
    llm, loras = resized_and_cut
    hot = SamplingParams(temperature=100, max_tokens=60, ignore_eos=True, seed=5, n=6, top_p=0.999, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": [3, 4]}] * 3, hot, loras)
    sizes = [VOCAB, VOCAB + NUM_ADDED, VOCAB - NUM_CUT]
    for output, size in zip(outputs, sizes, strict=True):
        drawn = [token for answer in output.outputs for token in answer.token_ids]
        assert max(drawn) < size and max(drawn) > size - 30


def test_biases_penalties_and_stops_may_name_tokens_that_only_the_adapter_has(resized_and_cut):
    llm, loras = resized_and_cut
    new = VOCAB + 5
    params = {"temperature": 0, "max_tokens": 5, "logit_bias": {new: 100.0}, "repetition_penalty": 1.01}
    prompt = {"prompt_token_ids": [3, new]}
    [forced] = llm.generate(prompt, SamplingParams(**params, ignore_eos=True), loras[1])
    assert forced.outputs[0].token_ids == [new] * 5
    stopping = SamplingParams(**params, stop_token_ids=[new], min_tokens=3)
    [stopped] = llm.generate(prompt, stopping, loras[1])
    assert new not in stopped.outputs[0].token_ids[:3]
    assert stopped.outputs[0].token_ids[3:] == [new] and stopped.outputs[0].stop_reason == new


@pytest.mark.parametrize("index", [0, 2])
def test_a_token_that_the_model_does_not_have_is_refused_by_number(resized_and_cut, index):
    llm, loras = resized_and_cut
    size = [VOCAB, VOCAB + NUM_ADDED, VOCAB - NUM_CUT][index]
    words = f"token( id)? {size}; this model's vocabulary has ids 0 to {size - 1}"
    with pytest.raises(InvalidRequest, match=words):
        llm.generate({"prompt_token_ids": [size]}, None, loras[index])
    with pytest.raises(InvalidRequest, match=words):
        llm.generate({"prompt_token_ids": [1]}, SamplingParams(logit_bias={size: 1.0}), loras[index])


@pytest.mark.parametrize("lora_dtype", ["fp8", "bfloat16"])
def test_tables_are_in_the_adapters_dtype_or_bfloat16(made, tmp_path, monkeypatch, lora_dtype):
    """Beside a base in float32: as exact as the rounding of what the adapter has."""
    folder, forms = made
    rounded = {kind: forms[kind] for kind in ("both_loras", "everything")}
    paths = served_from(tmp_path, rounded, monkeypatch)
    llm = LLM(str(folder), enable_lora=True, lora_config=LoRAConfig(lora_dtype=lora_dtype))
    for i, (kind, path) in enumerate(paths.items()):
        tokens = prompt_of(kind, 9, i)
        request = LoRARequest(kind, i + 1, str(path))
        [output] = llm.generate({"prompt_token_ids": tokens}, GREEDY, request)
        want = logits(applied_with_tables(folder, forms[kind]), tokens).log_softmax(-1)
        found = torch.tensor([p.logprob for p in output.prompt_logprobs[1:]])
        exact = torch.stack([want[j, t] for j, t in enumerate(tokens[1:])])
        assert (found - exact).abs().mean() < 0.15
    llm.close()


def test_the_base_never_answers_for_an_adapter_with_a_vocabulary_of_its_own(tmp_path):
    folder = make_model(tmp_path / "base", "qwen2", num_hidden_layers=1)
    config = EngineConfig(model=str(folder), lora=LoRAConfig(), on_lora_load_failure="base", kv_cache_tokens=1024)
    engine = build_engine(config)
    for name, vocabulary, reason in (("plain", None, "length"), ("own", Vocabulary(VOCAB + 1, [1]), "error")):
        lora = LoRARequest(name, 1, "/nowhere", f"digest of {name}")
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        engine.add(
            EngineRequest(request_id=name, prompt_token_ids=[3], params=params, lora=lora, vocabulary=vocabulary)
        )
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert [output.finish_reason for output in outputs] == [reason]
    engine.close()


def test_more_tokens_than_allowed_are_refused(tmp_path, monkeypatch):
    folder = make_model(tmp_path / "base", "qwen2", num_hidden_layers=1)
    paths = served_from(tmp_path, {"resized": make_vocab_forms(VOCAB, 64)["resized"]}, monkeypatch)
    for most, accepted in ((NUM_ADDED, True), (NUM_ADDED - 1, False)):
        llm = LLM(str(folder), enable_lora=True, lora_config=LoRAConfig(lora_extra_vocab_size=most))
        request = LoRARequest("resized", 1, str(paths["resized"]))
        if accepted:
            llm.add_lora(request)
        else:
            with pytest.raises(AdapterTooLarge, match=f"lora_extra_vocab_size={most}"):
                llm.add_lora(request)
        llm.close()
