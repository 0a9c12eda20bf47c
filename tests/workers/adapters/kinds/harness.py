"""Adapters of every kind, made by PEFT with random values, and a model that has their forms applied by plain torch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lorafleet.workers.adapters.forms import AdapterForms, LinearForm, LowRank, VocabForm
from lorafleet.workers.adapters.reader import read_adapter
from tests.workers.conftest import AdapterDir, base_of, peft_warnings_ignored

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, tied": (LlamaConfig, LlamaForCausalLM, TIED),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2 with text": (Qwen2Config, Qwen2ForCausalLM, {"vocab_size": 320}),  # as tiny_models' tokenizer
    "qwen2, tied": (Qwen2Config, Qwen2ForCausalLM, TIED),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3, tied": (Qwen3Config, Qwen3ForCausalLM, TIED),
    "gemma3, tied": (Gemma3TextConfig, Gemma3ForCausalLM, TIED | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"pad_token_id": 0}),
}
TOKENS = torch.tensor([[1, 5, 9, 13, 60, 33, 5, 2]])


@functools.cache
def _base(family: str) -> PreTrainedModel:
    config, model, options = FAMILIES[family]
    torch.manual_seed(0)
    base: PreTrainedModel = model(config(**({"tie_word_embeddings": False} | SIZES | options))).eval()
    randomize(base, ("bias", "norm.weight"))
    return base


def make_base(family: str) -> PreTrainedModel:
    """Returns a model with random biases and norms, which transformers would leave at 0 and 1.

    It is a copy, which PEFT may change. Making a model takes several times as long as copying it.
    """
    base = copy.deepcopy(_base(family))
    torch.manual_seed(0)
    return base


def randomize(model: nn.Module, endings: tuple[str, ...] = (".weight",)) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(endings):
                parameter.normal_(std=0.3)


def make(
    path: Path, family: str, config: PeftConfig, prepare: Callable[[Any], object] = lambda _: None, **saving: Any
) -> AdapterDir:
    """An adapter whose every value is random. prepare: of the base before PEFT has it."""
    base = make_base(family)
    prepare(base)
    with peft_warnings_ignored():
        model = get_peft_model(base, copy.deepcopy(config))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.uniform_(0.1, 1.0) if parameter.dim() == 1 else parameter.normal_(std=0.3)
        model.save_pretrained(str(path), **saving)
    return AdapterDir(path, family)


def peft_logits(
    adapter: AdapterDir, prepare: Callable[[Any], object] = lambda _: None, tokens: Tensor = TOKENS
) -> Tensor:
    base = make_base(adapter.family)
    prepare(base)
    with peft_warnings_ignored(), torch.no_grad():
        logits: Tensor = PeftModel.from_pretrained(base, str(adapter.path)).eval()(tokens).logits
    return logits


def read(adapter: AdapterDir, max_rank: int = 64, dtype: torch.dtype = torch.float32) -> AdapterForms:
    base = base_of(make_base(adapter.family))
    return read_adapter(adapter.path, base=base, max_rank=max_rank, dtype=dtype, name="a").forms


def logits_with(forms: AdapterForms, family: str) -> Tensor:
    with torch.no_grad():
        logits: Tensor = with_forms(make_base(family), forms)(TOKENS).logits
    return logits


def with_forms(base: PreTrainedModel, forms: AdapterForms) -> PreTrainedModel:
    """What forms.py says, word by word."""
    for module, form in forms.linears.items():
        _change(base.get_submodule(f"model.{module}"), form)
    for module, weight in forms.norms.items():
        base.get_submodule(f"model.{module}").weight = nn.Parameter(weight.float())
    own = base.get_input_embeddings().weight.detach().clone()
    head = base.get_output_embeddings().weight.detach().clone()
    embedding = copy.deepcopy(base.get_input_embeddings())
    embedding.weight = nn.Parameter(_table(own, forms.embedding, is_head=False))
    base.set_input_embeddings(embedding)
    lm_head = nn.Linear(1, 1, bias=forms.head is not None and forms.head.bias_V is not None)
    lm_head.weight = nn.Parameter(_table(head, forms.head, is_head=True))
    if forms.head is not None and forms.head.bias_V is not None:
        lm_head.bias = nn.Parameter(forms.head.bias_V)
    base.lm_head = lm_head
    return base


def _change(linear: nn.Linear, form: LinearForm) -> None:
    weight = linear.weight.detach()
    if form.low_rank is not None:
        weight = weight + _delta(form.low_rank)
    if form.kronecker is not None:
        weight = weight + form.kronecker.scaling * torch.kron(form.kronecker.w1, form.kronecker.w2)
    if form.out_scale_O is not None:
        weight = form.out_scale_O.unsqueeze(1) * weight
    linear.weight = nn.Parameter(weight)
    if form.bias_O is not None:
        linear.bias = nn.Parameter(form.bias_O)


def _table(table: Tensor, form: VocabForm | None, is_head: bool) -> Tensor:
    if form is None:
        return table
    if form.table_VD is not None:
        table = form.table_VD.float()
    if form.rows is not None:
        table = table.index_copy(0, form.rows.token_N, form.rows.row_ND.float())
    if form.low_rank is not None:
        table = table + (_delta(form.low_rank) if is_head else _delta(form.low_rank).T)
    return table


def _delta(low_rank: LowRank) -> Tensor:
    return low_rank.scaling * low_rank.b_OR.float() @ low_rank.a_RD.float()


def check(adapter: AdapterDir, prepare: Callable[[Any], object] = lambda _: None, **reading: Any) -> AdapterForms:
    """The forms give PEFT's logits, which are not the base's."""
    expected = peft_logits(adapter, prepare)
    forms = read(adapter, **reading)
    actual = logits_with(forms, adapter.family)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        base = make_base(adapter.family)(TOKENS).logits
    assert expected.shape != base.shape or not torch.allclose(expected, base, atol=1e-2)
    return forms
