"""Every kind of adapter that PEFT makes, converted and merged: what PEFT says of the source, it says of the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from lorafleet.protocol.errors import AdapterUnsupported, ConfigError
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.convert import convert
from lorafleet.tools.merging import merge
from lorafleet.tools.reading import read_forms
from tests.workers.adapters.kinds.harness import TOKENS, make, make_base, peft_logits
from tests.workers.adapters.kinds.test_against_peft import KINDS, lora
from tests.workers.conftest import AdapterDir, peft_warnings_ignored

FAMILIES = ["llama", "qwen2, tied"]
# Of low rank, whatever they are made of; one or two of each method, since tests/workers/adapters/kinds has them all.
PLAIN = [
    "rsLoRA with patterns", "embedding and head", "PiSSA", "PiSSA of full rank", "OLoRA", "KaSA", "BD-LoRA", "AdaLoRA",
    "all biases",  # of a base that has none
    "LoHa with patterns", "LoKr", "LoKr, both factored", "LoKr, none factored", "VeRA by its PRNG", "VB-LoRA",
    "VB-LoRA, best alone", "HRA", "MiSS", "MiSS, mini", "DeLoRA", "GraLoRA with a plain one", "LoHa on the head",
]  # fmt: skip
KEPT = ["DoRA", "bias on B", "IA3", "saved head", "trained tokens", "tokens alone", "PiSSA with DoRA"]
TIED = [
    "embedding, tied", "head, tied", "embedding and head, tied", "saved embedding, tied", "trained tokens",
    "trained tokens, tied", "trained tokens of the embedding", "tokens alone",
]  # fmt: skip
WITHOUT_BASE = ["AdaLoRA", "LoHa", "LoKr", "DeLoRA", "GraLoRA"]
NEEDS_BASE = ["PiSSA", "OLoRA", "KaSA", "BD-LoRA", "VeRA", "VB-LoRA", "HRA", "MiSS", "LoHa on the head"]
MERGED = [
    "LoRA", "DoRA on the head", "embedding", "embedding and head, tied", "saved embedding and head", "saved head",
    "saved norms", "trained tokens", "trained tokens of the head", "PiSSA", "LoKr, none factored", "IA3",
    "IA3 on the head", "all biases and DoRA", "biases of targets", "tokens alone", "VeRA",
]  # fmt: skip
MERGED_IN = [("qwen2, tied", kind) for kind in MERGED]
MERGED_IN += [("llama", kind) for kind in ("head", "embedding", "saved embedding", "IA3")]
NO_PLACE = {
    "llama": ["bias on B", "bias on B of the head", "all biases, on B too"],
    "qwen2, tied": ["bias on B", "bias on B of the head"],
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for i, family in enumerate(FAMILIES):
        make_base(family).save_pretrained(root / str(i))
    return {family: root / str(i) for i, family in enumerate(FAMILIES)}


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def load(folder: Path, adapter: Path) -> torch.nn.Module:
    with peft_warnings_ignored():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(adapter))


@pytest.mark.parametrize("kind", [*PLAIN, *KEPT])
def test_what_is_of_low_rank_becomes_a_plain_lora_and_the_rest_stays(bases, tmp_path, kind):
    adapter = make(tmp_path / "a", "llama", KINDS[kind])
    with BaseModel.opened(bases["llama"]) as base:
        done = convert(adapter.path, tmp_path / "out", base)
    same(logits_of(load(bases["llama"], tmp_path / "out")), peft_logits(adapter))
    assert (done.kind.startswith("LoRA") and "kept" not in str(done.changes)) == (kind in PLAIN)


@pytest.mark.parametrize("kind", TIED)
def test_what_a_tied_base_ties_stays_tied(bases, tmp_path, kind):
    adapter = make(tmp_path / "a", "qwen2, tied", KINDS[kind])
    with BaseModel.opened(bases["qwen2, tied"]) as base:
        convert(adapter.path, tmp_path / "out", base)
    same(logits_of(load(bases["qwen2, tied"], tmp_path / "out")), peft_logits(adapter))


@pytest.mark.parametrize("kind", WITHOUT_BASE)
def test_some_need_no_base_for_it(bases, tmp_path, kind):
    adapter = make(tmp_path / "a", "llama", KINDS[kind])
    convert(adapter.path, tmp_path / "out", None)
    same(logits_of(load(bases["llama"], tmp_path / "out")), peft_logits(adapter))


@pytest.mark.parametrize("kind", NEEDS_BASE)
def test_the_others_ask_for_one(tmp_path, kind):
    adapter = make(tmp_path / "a", "llama", KINDS[kind])
    with pytest.raises(ConfigError, match="--model"):
        convert(adapter.path, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("family", "kind"), MERGED_IN)
def test_merged_it_gives_pefts_logits(bases, tmp_path, kind, family):
    adapter = make(tmp_path / "a", family, KINDS[kind])
    with BaseModel.opened(bases[family]) as base:
        merge(base, adapter.path, read_forms(adapter.path, base, "a").forms, tmp_path / "out")
    same(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), peft_logits(adapter))


@pytest.mark.parametrize(("family", "kind"), [(family, kind) for family, kinds in NO_PLACE.items() for kind in kinds])
def test_what_the_architecture_has_no_place_for_is_not_merged(bases, tmp_path, kind, family):
    adapter = make(tmp_path / "a", family, KINDS[kind])
    with BaseModel.opened(bases[family]) as base:
        forms = read_forms(adapter.path, base, "a").forms
        with pytest.raises(AdapterUnsupported, match="bias on"):
            merge(base, adapter.path, forms, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [70, 61])
def test_a_resized_vocabulary_is_merged_and_kept(bases, tmp_path, family, size):
    def resize(model: PreTrainedModel) -> None:
        model.resize_token_embeddings(size)

    adapter = make(tmp_path / "a", family, lora(modules_to_save=["embed_tokens", "lm_head"]), resize)
    with BaseModel.opened(bases[family]) as base:
        done = merge(base, adapter.path, read_forms(adapter.path, base, "a").forms, tmp_path / "out")
        convert(adapter.path, tmp_path / "kept", base)
    assert done.vocab_size == size
    same(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), peft_logits(adapter, resize))
    same(peft_logits(AdapterDir(tmp_path / "kept", family), resize), peft_logits(adapter, resize))


def test_an_activated_lora_is_kept_and_not_merged(bases, tmp_path):
    adapter = make(tmp_path / "a", "llama", lora(alora_invocation_tokens=[5, 9]))
    with BaseModel.opened(bases["llama"]) as base:
        done = convert(adapter.path, tmp_path / "out", base)
        with pytest.raises(AdapterUnsupported, match="aLoRA"):
            merge(base, adapter.path, read_forms(adapter.path, base, "a").forms, tmp_path / "merged")
    assert done.kind == "activated LoRA"
    same(logits_of(load(bases["llama"], tmp_path / "out")), peft_logits(adapter))


def test_the_rank_of_a_kind_can_be_lowered_through_its_plain_form(bases, tmp_path):
    adapter = make(tmp_path / "a", "llama", KINDS["PiSSA"])
    with BaseModel.opened(bases["llama"]) as base:
        done = convert(adapter.path, tmp_path / "out", base, rank=3)
        assert done.max_rank == 3
        dora = make(tmp_path / "dora", "llama", KINDS["DoRA"])
        with pytest.raises(AdapterUnsupported, match=r"rank cannot be changed.*DoRA scales rows"):
            convert(dora.path, tmp_path / "other", base, rank=3)
