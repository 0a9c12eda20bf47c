"""What no form gives exactly is refused, with the reason; and so is every tensor that is missing, stray or of a wrong
size, for every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, VeraConfig

from lorafleet.protocol.errors import AdapterError, AdapterMalformed, AdapterMismatch, AdapterUnsupported, RankTooLarge
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.kinds.table import KINDS as SERVED
from lorafleet.workers.adapters.reader import read_adapter
from tests.workers.adapters.kinds.harness import make, make_base, read
from tests.workers.adapters.kinds.test_against_peft import KINDS, lora
from tests.workers.conftest import AdapterDir, base_of

# One of each method, with as many of its tensors as it can have.
ONE_OF_EACH = [
    "DoRA", "KaSA", "bias on B", "all biases", "AdaLoRA", "LoHa", "LoKr, both factored", "IA3", "VeRA", "VB-LoRA",
    "VB-LoRA, best alone", "HRA", "MiSS", "DeLoRA", "GraLoRA with a plain one", "tokens alone", "embedding",
    "saved embedding", "saved norms", "trained tokens",
]  # fmt: skip


def test_every_method_is_among_these() -> None:
    assert {KINDS[name].peft_type.value for name in ONE_OF_EACH} == SERVED.keys()


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_tensor_that_is_missing_is_an_error(tmp_path: Path, kind: str) -> None:
    adapter = make(tmp_path / "a", "qwen2", KINDS[kind])
    whole = adapter.tensors
    for name in _one_of_each_leaf(whole):
        if not name.endswith("embed_tokens.base_layer.weight"):  # mostly the base's own
            adapter.write({other: tensor for other, tensor in whole.items() if other != name})
            with pytest.raises((AdapterMalformed, AdapterUnsupported)):
                read(adapter)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_tensor_of_another_size_is_an_error(tmp_path: Path, kind: str) -> None:
    adapter = make(tmp_path / "a", "qwen2", KINDS[kind])
    whole = adapter.tensors
    for name in _one_of_each_leaf(whole):
        for axis in range(0 if name.startswith("base_model.vera_") else whole[name].dim()):  # shared, so mostly longer
            longer = torch.cat([whole[name], whole[name].narrow(axis, 0, 1)], dim=axis)
            adapter.write(whole | {name: longer})
            with pytest.raises((AdapterMalformed, AdapterMismatch)):
                read(adapter)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_stray_tensor_is_an_error(tmp_path: Path, kind: str) -> None:
    adapter = make(tmp_path / "a", "qwen2", KINDS[kind])
    whole = adapter.tensors
    own = next(name for name in whole if "layers.1" in name or "embed_tokens" in name)
    for stray in ("base_model.model.model.layers.0.mlp.up_proj.surprise", own.replace("layers.1", "layers.9") + "_t"):
        adapter.write(whole | {stray: torch.ones(2)})
        with pytest.raises(AdapterError):
            read(adapter)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_values_that_are_no_numbers_are_an_error(tmp_path: Path, kind: str) -> None:
    adapter = make(tmp_path / "a", "qwen2", KINDS[kind])
    whole = adapter.tensors
    for name in _one_of_each_leaf(whole):
        if whole[name].is_floating_point() and whole[name].numel():
            adapter.write(whole | {name: whole[name].clone().fill_(float("nan"))})
            with pytest.raises(AdapterMalformed, match="NaN"):
                read(adapter)


def _one_of_each_leaf(tensors: dict[str, torch.Tensor]) -> list[str]:
    return list({name.rpartition("_proj.")[2]: name for name in tensors}.values())


LARGE: dict[str, tuple[PeftConfig, str]] = {
    "LoHa": (
        LoHaConfig(r=5, target_modules=["q_proj"]),
        r"rank 25 \(the rank at which LoHa with r=5 .*max_lora_rank=16",
    ),
    "VeRA": (VeraConfig(r=17, target_modules=["q_proj"]), r"rank 17; .*max_lora_rank=16"),
    "PiSSA": (
        lora(init_lora_weights="pissa", r=9),
        r"rank 18 \(the rank at which LoRA with r=9 .*max_lora_rank=16",
    ),
    "embedding": (lora(target_modules=["embed_tokens"], r=17), r"rank 17; .*max_lora_rank=16"),
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_rank_over_the_limit_is_named_as_it_would_be_served(tmp_path: Path, kind: str) -> None:
    config, words = LARGE[kind]
    with pytest.raises(RankTooLarge, match=words):
        read(make(tmp_path / "a", "llama", config), max_rank=16)


def test_a_large_rank_is_refused_before_its_values_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = make(tmp_path / "a", "llama", LoHaConfig(r=9, target_modules=["q_proj"]))
    monkeypatch.setattr("lorafleet.workers.adapters.weight_files.SafetensorsFile.load", None)
    with pytest.raises(RankTooLarge):
        read(adapter)


def ia3(*names: str) -> IA3Config:
    return IA3Config(target_modules=[*names], feedforward_modules=[*names])


INEXACT: dict[str, tuple[PeftConfig, dict[str, object], str]] = {
    "IA3 on inputs of q": (
        ia3("q_proj"),
        {},
        "inputs of layers.0.self_attn.q_proj .* differently from those of .*k_proj",
    ),
    "IA3 on inputs of all": (ia3("q_proj", "k_proj", "v_proj"), {}, "differently from those of .*k_proj"),
    "IA3 on inputs of gate": (ia3("gate_proj"), {}, "differently from those of .*up_proj"),
    "IA3 on inputs of o": (ia3("o_proj"), {}, "differently for query heads that share a KV head"),
    "IA3 without its list": (ia3("down_proj"), {"feedforward_modules": None}, "feedforward_modules is null"),
    "random PiSSA": (lora(), {"init_lora_weights": "pissa_niter_16"}, "PiSSA with a randomized"),
    "MiSS of blocks": (KINDS["MiSS"], {"init_weights": "bat"}, "'bat'"),
    "targets left open": (KINDS["LoKr"], {"target_modules": None, "peft_type": "IA3"}, "alpha"),
    "QALoRA": (lora(), {"use_qalora": True}, "QALoRA"),
    "layer replication": (lora(), {"layer_replication": [[0, 1]]}, "layer replication"),
    "rsLoRA in AdaLoRA": (KINDS["AdaLoRA"], {"use_rslora": True}, "rsLoRA in AdaLoRA, where PEFT ignores it"),
    "DoRA in AdaLoRA": (KINDS["AdaLoRA"], {"use_dora": True}, "DoRA in AdaLoRA"),
    "tokens past the end": (KINDS["tokens alone"], {"token_indices": [3, 64]}, "token 64 is trained"),
    "tokens over a changed base": (
        lora(trainable_token_indices=[1], target_modules=["lm_head"]),
        {"init_lora_weights": "olora"},
        "save_embedding_layers=True",
    ),
    "two ties": (
        lora(trainable_token_indices={"embed_tokens": [1], "lm_head": [2]}),
        {"ensure_weight_tying": True},
        "ensure_weight_tying",
    ),
}


@pytest.mark.parametrize("case", INEXACT)
def test_what_has_no_exact_form_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    config, changes, words = INEXACT[case]
    with pytest.raises(AdapterError, match=words):
        read(make(tmp_path / "a", "qwen2, tied", config).set(**changes))


def damage(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[AdapterDir], AdapterDir]:
    return lambda adapter: adapter.map(lambda name, tensor: (name, change(name, tensor)))


VALUES: dict[str, tuple[str, Callable[[AdapterDir], AdapterDir], str]] = {
    "reflections that are not determined": (
        "HRA, orthogonal",
        damage(lambda _, tensor: tensor[:, :1].expand_as(tensor)),
        "nearly dependent",
    ),
    "a reflection of length zero": ("HRA", damage(lambda _, tensor: tensor * 0), "length zero"),
    "places outside the bank": (
        "VB-LoRA, best alone",
        damage(lambda name, tensor: tensor + 6 if "indices" in name else tensor),
        "outside the bank",
    ),
    "weights over 1": (
        "VB-LoRA, best alone",
        damage(lambda name, tensor: tensor + 1 if "weights" in name else tensor),
        "not weights from 0 to 1",
    ),
    "ties that differ": (
        "saved embedding, tied",
        damage(lambda name, tensor: tensor + 1 if "lm_head" in name else tensor),
        "PEFT has one tensor for both",
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_mean_nothing_are_refused(tmp_path: Path, case: str) -> None:
    kind, change, words = VALUES[case]
    with pytest.raises(AdapterError, match=words):
        read(change(make(tmp_path / "a", "qwen2, tied", KINDS[kind])))


def test_a_base_without_weights_at_hand_serves_what_needs_none(tmp_path: Path) -> None:
    layout: BaseLayout = base_of(make_base("llama")).layout
    reading: dict[str, Any] = {"base": Base(layout), "max_rank": 64, "dtype": torch.float32, "name": "a"}
    plain = make(tmp_path / "plain", "llama", LoraConfig(r=4, target_modules=["q_proj"]))
    assert read_adapter(plain.path, **reading).forms.linears
    dora = make(tmp_path / "dora", "llama", lora(use_dora=True))
    with pytest.raises(AdapterUnsupported, match="computed from the base's weights"):
        read_adapter(dora.path, **reading)


def test_a_lokr_of_another_base_is_a_mismatch(tmp_path: Path) -> None:
    adapter = make(tmp_path / "a", "llama", LoKrConfig(r=1, target_modules=["q_proj"]))
    with pytest.raises(AdapterMismatch, match="Kronecker product is"):
        read(adapter.map(lambda n, t: (n, t.repeat(2, 1) if n.endswith("w2_a") else t)))
