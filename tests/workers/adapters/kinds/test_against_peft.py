"""Every kind of adapter that PEFT can make and that is served: its forms give the logits that PEFT gives."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    DeloraConfig,
    GraloraConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    PeftConfig,
    TrainableTokensConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from peft.tuners.lora.config import BdLoraConfig, EvaConfig, KasaConfig, VeloraConfig
from torch import Tensor

from tests.workers.adapters.kinds.harness import check, make, make_base, read
from tests.workers.conftest import AdapterDir, peft_warnings_ignored

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def lora(**fields: Any) -> LoraConfig:
    return LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ALL, "task_type": "CAUSAL_LM"} | fields))


with peft_warnings_ignored():
    KINDS: dict[str, PeftConfig] = {
        "LoRA": lora(),
        "rsLoRA with patterns": lora(use_rslora=True, rank_pattern={"q_proj": 7}, alpha_pattern={"o_proj": 3}),
        "LoRA with VeLoRA's backward pass": lora(velora_config=VeloraConfig()),
        "DoRA": lora(use_dora=True),
        "DoRA with rsLoRA and patterns": lora(
            use_dora=True, use_rslora=True, rank_pattern={"q_proj": 7}, alpha_pattern={"o_proj": 3}
        ),
        "DoRA on some": lora(use_dora=True, target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
        "DoRA on the head": lora(use_dora=True, target_modules=["q_proj", "lm_head"]),
        "DoRA on the embedding": lora(use_dora=True, target_modules=["q_proj", "embed_tokens"]),
        "bias on B": lora(lora_bias=True),
        "bias on B of the head": lora(lora_bias=True, target_modules=["q_proj", "lm_head"]),
        "all biases": lora(bias="all", target_modules=["q_proj", "o_proj"]),
        "biases of targets": lora(bias="lora_only", target_modules=["q_proj", "o_proj"]),
        "all biases, on B too": lora(bias="all", lora_bias=True, target_modules=["q_proj"]),
        "all biases and DoRA": lora(bias="all", use_dora=True, target_modules=["q_proj", "v_proj"]),
        "embedding": lora(target_modules=["embed_tokens", "q_proj"]),
        "head": lora(target_modules=["lm_head", "q_proj"]),
        "embedding and head": lora(target_modules=["embed_tokens", "lm_head"], r=3),
        "embedding and head, tied": lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
        "embedding and head, tied, of rank 1": lora(
            target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True, r=1
        ),
        "embedding, tied": lora(target_modules=["embed_tokens"], ensure_weight_tying=True),
        "head, tied": lora(target_modules=["lm_head", "v_proj"], ensure_weight_tying=True),
        "saved embedding": lora(modules_to_save=["embed_tokens"]),
        "saved head": lora(modules_to_save=["lm_head"]),
        "saved embedding and head": lora(modules_to_save=["lm_head", "embed_tokens"]),
        "saved embedding, tied": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        "saved head, tied": lora(modules_to_save=["lm_head"], ensure_weight_tying=True),
        "saved norms": lora(modules_to_save=["norm"]),
        "saved norms of a place": lora(modules_to_save=["input_layernorm", "model.norm"]),
        "saved head, targeted all the same": lora(modules_to_save=["lm_head"], target_modules=["lm_head", "q_proj"]),
        "trained tokens": lora(trainable_token_indices=[5, 1, 60]),
        "trained tokens of the embedding": lora(trainable_token_indices={"embed_tokens": [13, 5]}),
        "trained tokens of the head": lora(trainable_token_indices={"lm_head": [13, 5]}),
        "trained tokens of both": lora(trainable_token_indices={"model.embed_tokens": [13, 5], "lm_head": [5, 13]}),
        "same trained tokens of both": lora(trainable_token_indices={"embed_tokens": [13, 5], "lm_head": [13, 5]}),
        "trained tokens, tied": lora(trainable_token_indices={"embed_tokens": [13, 5]}, ensure_weight_tying=True),
        "trained tokens beside LoRA on the head": lora(trainable_token_indices=[5, 1], target_modules=["lm_head"]),
        "PiSSA": lora(init_lora_weights="pissa"),
        "PiSSA with rsLoRA": lora(init_lora_weights="pissa", use_rslora=True, target_modules=["q_proj", "down_proj"]),
        "PiSSA with DoRA": lora(init_lora_weights="pissa", use_dora=True, target_modules=["q_proj", "down_proj"]),
        "PiSSA of full rank": lora(init_lora_weights="pissa", r=16, target_modules=["k_proj"]),
        "PiSSA on the head": lora(init_lora_weights="pissa", target_modules=["q_proj", "lm_head"]),
        "KaSA on the head": lora(kasa_config=KasaConfig(), target_modules=["q_proj", "lm_head"]),
        "OLoRA with DoRA on the head": lora(init_lora_weights="olora", use_dora=True, target_modules=["lm_head"]),
        "OLoRA": lora(init_lora_weights="olora"),
        "OLoRA with DoRA": lora(init_lora_weights="OLoRA", use_dora=True),
        "KaSA": lora(kasa_config=KasaConfig()),
        "EVA's label": lora(init_lora_weights="eva", eva_config=EvaConfig()),
        "MiCA's label": lora(init_lora_weights="mica"),
        "BD-LoRA": lora(use_bdlora=BdLoraConfig(["q_proj", "up_proj"], ["o_proj"], 2, match_strict=False)),
        "AdaLoRA": AdaLoraConfig(init_r=6, lora_alpha=5, target_modules=ALL, total_step=10, task_type="CAUSAL_LM"),
        "AdaLoRA without alpha": AdaLoraConfig(init_r=6, lora_alpha=0, target_modules=ALL, total_step=10),
        "LoHa": LoHaConfig(r=3, alpha=5, target_modules=ALL),
        "LoHa with patterns": LoHaConfig(
            r=3, target_modules=ALL, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 3}
        ),
        "LoKr": LoKrConfig(r=2, alpha=3, target_modules=ALL, rank_dropout=0.5),
        "LoKr, both factored": LoKrConfig(r=1, target_modules=ALL, decompose_both=True),
        "LoKr, none factored": LoKrConfig(r=50, target_modules=ALL),
        "LoKr with a factor": LoKrConfig(r=2, target_modules=ALL, decompose_factor=4, rank_pattern={"q_proj": 1}),
        "IA3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "IA3 of outputs": IA3Config(target_modules=ALL, feedforward_modules=[]),
        "IA3, inputs and outputs meet": IA3Config(
            target_modules=["up_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "IA3 by a regular expression": IA3Config(
            target_modules=["v_proj", "down_proj"], feedforward_modules=".*down_.*"
        ),
        "IA3 on the head": IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
        "IA3 on the head's inputs": IA3Config(target_modules=["lm_head"], feedforward_modules=["lm_head"]),
        "IA3 and a saved norm": IA3Config(target_modules=["v_proj"], feedforward_modules=[], modules_to_save=["norm"]),
        "VeRA": VeraConfig(r=8, target_modules=ALL),
        "VeRA by its PRNG": VeraConfig(r=8, target_modules=ALL, save_projection=False, projection_prng_key=7),
        "VeRA with biases": VeraConfig(r=8, target_modules=["q_proj"], bias="all"),
        "VB-LoRA": VBLoRAConfig(r=2, num_vectors=6, vector_length=8, target_modules=ALL),
        "VB-LoRA of rank 1": VBLoRAConfig(r=1, num_vectors=6, vector_length=4, target_modules=ALL),
        "VB-LoRA, best alone": VBLoRAConfig(
            r=2, num_vectors=6, vector_length=8, topk=3, target_modules=ALL, save_only_topk_weights=True
        ),
        "HRA": HRAConfig(r=4, target_modules=ALL),
        "HRA, orthogonal": HRAConfig(r=3, apply_GS=True, target_modules=ALL),
        "MiSS": MissConfig(r=4, target_modules=ALL),
        "MiSS of rank 1": MissConfig(r=1, target_modules=ALL),
        "MiSS, r does not divide": MissConfig(r=5, target_modules=ALL),
        "MiSS, mini": MissConfig(r=4, mini_r=8, init_weights="mini", target_modules=ALL),
        "DeLoRA": DeloraConfig(r=4, target_modules=ALL, rank_pattern={"q_proj": 2}),
        "GraLoRA": GraloraConfig(r=4, gralora_k=2, target_modules=ALL),
        "GraLoRA with a plain one": GraloraConfig(r=4, gralora_k=2, hybrid_r=3, target_modules=ALL),
        "VeRA on the head": VeraConfig(r=8, target_modules=["lm_head", "q_proj"]),
        "VeRA on the head, by its PRNG": VeraConfig(r=8, target_modules=["lm_head", "q_proj"], save_projection=False),
        "VB-LoRA on the head": VBLoRAConfig(r=2, num_vectors=6, vector_length=8, target_modules=["lm_head", "q_proj"]),
        "LoHa on the head": LoHaConfig(r=2, target_modules=["lm_head", "q_proj"]),
        "tokens alone": TrainableTokensConfig(token_indices=[60, 5]),
        "tokens alone, of both": TrainableTokensConfig(
            token_indices=[60, 5], target_modules=["embed_tokens", "lm_head"]
        ),
    }


VOCABULARY = ("head", "embedding", "tokens")
CASES = [(kind, "llama") for kind in KINDS]  # test_engine.py has all of them on qwen3, tied
CASES += [(kind, "qwen2") for kind in KINDS if "bias" in kind or "DoRA" in kind or "IA3" in kind]
CASES += [
    (kind, family)
    for kind, family in itertools.product(KINDS, ("qwen2, tied", "gemma3, tied"))
    if any(word in kind for word in (*VOCABULARY, "IA3 ", "saved"))
]
UNKNOWN_TO_PEFT = [("tokens alone, of both", "tied"), ("biases of targets", "llama"), ("biases of targets", "qwen3")]
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
FUSED |= {"up_proj": "gate_up_proj"}


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_the_forms_of_an_adapter_give_peft_s_logits(tmp_path: Path, kind: str, family: str) -> None:
    if any(kind == odd and where in family for odd, where in UNKNOWN_TO_PEFT):
        pytest.skip("PEFT cannot make it")
    check(make(tmp_path / "a", family, KINDS[kind]))


@pytest.mark.parametrize(
    "kind", ["DoRA on the head", "DoRA on the embedding", "saved head", "trained tokens", "VB-LoRA"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_files_of_other_float_types(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    adapter = make(tmp_path / "a", "llama", KINDS[kind])
    check(adapter.map(lambda name, tensor: (name, tensor.to(dtype) if tensor.is_floating_point() else tensor)))


@pytest.mark.parametrize("kind", ["DoRA", "IA3", "IA3, inputs and outputs meet", "LoKr", "PiSSA", "HRA", "saved norms"])
def test_fused_linears_are_modules_like_others(tmp_path: Path, kind: str) -> None:
    config: Any = copy.deepcopy(KINDS[kind])
    config.target_modules = {FUSED.get(name, name) for name in config.target_modules}
    check(make(tmp_path / "a", "phi3", config))


@pytest.mark.parametrize("family", ["llama", "qwen2, tied"])
def test_a_resized_vocabulary_comes_whole(tmp_path: Path, family: str) -> None:
    def resize(base: Any) -> None:
        torch.manual_seed(3)
        base.resize_token_embeddings(70, mean_resizing=False)

    adapter = make(tmp_path / "a", family, lora(), resize, save_embedding_layers=True)
    forms = check(adapter, resize)
    for form in (forms.embedding, forms.head):
        assert form is not None
        assert form.table_VD is not None
        assert form.table_VD.shape == (70, 32)


@pytest.mark.parametrize("family", ["llama", "qwen2, tied"])
def test_a_resized_vocabulary_with_lora_on_it(tmp_path: Path, family: str) -> None:
    def resize(base: Any) -> None:
        torch.manual_seed(3)
        base.resize_token_embeddings(70, mean_resizing=False)

    check(make(tmp_path / "a", family, lora(target_modules=["embed_tokens", "lm_head"]), resize), resize)


def test_a_copy_of_the_base_s_table_is_left_out(tmp_path: Path) -> None:
    adapter = make(tmp_path / "a", "llama", lora(target_modules=["embed_tokens"]))
    assert any("base_layer" in name for name in adapter.tensors)
    form = read(adapter).embedding
    assert form is not None
    assert form.table_VD is None
    assert read(adapter).head is None


def test_saved_embeddings_that_are_the_base_s_change_nothing(tmp_path: Path) -> None:
    adapter = make(tmp_path / "a", "llama", lora(), save_embedding_layers=True)
    forms = check(adapter)
    assert (forms.embedding, forms.head) == (None, None)


def test_a_pruned_adalora_keeps_the_scale_of_its_first_rank(tmp_path: Path) -> None:
    adapter = make(tmp_path / "a", "llama", AdaLoraConfig(init_r=4, target_modules=["q_proj", "v_proj"], total_step=9))
    masks = {
        f"model.layers.{i}.self_attn.{name}.lora_E": mask
        for i in range(2)
        for name, mask in {"q_proj": [True, False, True, False], "v_proj": [False] * 4}.items()
    }
    adapter.set(rank_pattern=masks)

    def pruned(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        mask = torch.tensor(masks[name.removeprefix("base_model.model.").rpartition(".")[0] + ".lora_E"])
        return name, tensor[:, mask] if name.endswith("lora_B") else tensor[mask]

    forms = check(adapter.map(pruned))
    assert forms.linears.keys() == {f"layers.{i}.self_attn.q_proj" for i in range(2)}


def test_an_activated_lora_is_its_pairs_and_its_tokens(tmp_path: Path) -> None:
    adapter = make(tmp_path / "a", "llama", lora(alora_invocation_tokens=[7, 9]))
    forms = read(adapter)
    assert forms.invocation_tokens == (7, 9)
    assert all(form.out_scale_O is None and form.bias_O is None for form in forms.linears.values())


def test_a_lokr_of_high_rank_stays_a_kronecker_product(tmp_path: Path) -> None:
    adapter = make(tmp_path / "a", "llama", LoKrConfig(r=50, target_modules=["q_proj"]))
    assert all(form.kronecker is not None for form in check(adapter, max_rank=15).linears.values())
    assert all(form.low_rank is not None for form in check(adapter, max_rank=32).linears.values())


def test_an_ia3_scale_of_o_proj_moves_to_the_values_it_reads(tmp_path: Path) -> None:
    adapter = make(tmp_path / "a", "qwen2", IA3Config(target_modules=["o_proj"], feedforward_modules=["o_proj"]))
    per_kv_head = torch.randn(2, 1, 8).expand(2, 2, 8).reshape(1, 32)  # 4 heads of size 8, 2 share a KV head
    forms = check(adapter.map(lambda name, _: (name, per_kv_head.clone())))
    assert forms.linears.keys() == {f"layers.{i}.self_attn.v_proj" for i in range(2)}


def test_ia3_scales_that_all_readers_share_move_to_the_norm(tmp_path: Path) -> None:
    names = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    adapter = make(tmp_path / "a", "gemma3, tied", IA3Config(target_modules=names, feedforward_modules=names))
    same = torch.rand(1, 32) + 0.5
    forms = check(adapter.map(lambda name, _: (name, same.clone())))
    assert not forms.linears
    assert forms.norms.keys() == {
        f"layers.{i}.{name}_layernorm" for i in range(2) for name in ("input", "pre_feedforward")
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_pissa_s_difference_survives_a_small_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Just after initialization the adapter changes nothing, and rounding must not make it change something. PEFT's own
    decomposition is of float32: some 1e-5, more or less by the machine."""
    with peft_warnings_ignored():
        get_peft_model(make_base("llama"), lora(init_lora_weights="pissa")).save_pretrained(str(tmp_path / "a"))
    forms = read(AdapterDir(tmp_path / "a", "llama"))
    for form in forms.linears.values():
        assert form.low_rank is not None
        delta = form.low_rank.b_OR.to(dtype).float() @ form.low_rank.a_RD.to(dtype).float()
        assert delta.abs().max() < 1e-4
