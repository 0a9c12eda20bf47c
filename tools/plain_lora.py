"""Holds a plain LoRA in memory: a low-rank pair for each module, whatever kind of adapter it was read from. It also
gives PEFT's config and tensors, which peft_files.py writes."""

# R rank · D in features · O out features

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.tools.low_rank import from_kronecker, no_larger_than_the_matrix
from lorafleet.tools.peft_files import PEFTFiles
from lorafleet.workers.adapters.forms import BASE_ROPE, AdapterForms, LinearForm, LowRank, VocabForm

HEAD, EMBEDDING = "lm_head", "embed_tokens"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
# The order in which the modules of a decoder layer run. Others follow by name.
_ORDER = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class PlainLoRA:
    """An adapter that has only low-rank pairs."""

    # Named as in forms.py. "embed_tokens" (A [R, V], B [D, R]) and "lm_head" may stand beside the linears.
    modules: Mapping[str, LowRank]
    base_name: str | None = None

    @classmethod
    def from_forms(cls, forms: AdapterForms, base_name: str | None = None) -> PlainLoRA:
        """Converts an adapter's forms. Raises AdapterUnsupported, which names what a plain LoRA cannot hold."""
        if forms.invocation_tokens:
            raise AdapterUnsupported("an activated LoRA (aLoRA) has no effect before its invocation; a plain LoRA has.")
        if forms.own_rope != BASE_ROPE:
            raise AdapterUnsupported(
                "it has a rope scaling or a context length of its own, which a plain LoRA cannot hold."
            )
        if forms.classifier is not None:
            raise AdapterUnsupported("it has a classification head, which a plain LoRA cannot hold.")
        if forms.norms:
            raise AdapterUnsupported(f"it replaces the norm {min(forms.norms)}, which a plain LoRA cannot hold.")
        if forms.experts:
            raise AdapterUnsupported(f"it changes {min(forms.experts)}, where each expert has matrices of its own.")
        modules = {name: _of_linear(name, form) for name, form in forms.linears.items()}
        for name, form in ((EMBEDDING, forms.embedding), (HEAD, forms.head)):
            if form is not None:
                modules[name] = _of_vocabulary(name, form)
        return cls({name: modules[name] for name in sorted(modules, key=module_order)}, base_name)

    @property
    def max_rank(self) -> int:
        return max(pair.rank for pair in self.modules.values())

    def to_files(self, changes: Iterable[str] = ()) -> PEFTFiles:
        ranks = {name: pair.rank for name, pair in self.modules.items()}
        common = _most_frequent(ranks.values())
        alpha = _most_frequent(_alpha(pair) for pair in self.modules.values() if pair.rank == common)
        config: dict[str, object] = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base_name,
            "inference_mode": True,
            "r": common,
            "lora_alpha": alpha,
            "rank_pattern": {_full_name(name): rank for name, rank in ranks.items() if rank != common},
            "alpha_pattern": {_full_name(n): _alpha(pair) for n, pair in self.modules.items() if _alpha(pair) != alpha},
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": False,
            "init_lora_weights": True,
            "target_modules": [_full_name(name) for name in self.modules],
        }
        tensors: dict[str, Tensor] = {}
        for name, pair in self.modules.items():
            a, b = ("lora_embedding_A", "lora_embedding_B") if name == EMBEDDING else ("lora_A.weight", "lora_B.weight")
            tensors[f"base_model.model.{_full_name(name)}.{a}"] = pair.a_RD
            tensors[f"base_model.model.{_full_name(name)}.{b}"] = pair.b_OR
        return PEFTFiles(config, tensors, [*changes])


def module_order(name: str) -> tuple[int, int, str]:
    """Returns a sort key for the base's own order: embedding, layers, head."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return (-1 if name == EMBEDDING else 1 << 30, 0, name)
    leaf = name.rsplit(".", 1)[-1]
    return int(match[1]), _ORDER.index(leaf) if leaf in _ORDER else len(_ORDER), name


def cast_all(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Casts floating-point tensors and leaves indices as they are. Raises AdapterMalformed for values that the dtype
    cannot hold."""
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    for name, tensor in cast.items():
        if not tensor.isfinite().all():
            largest = tensors[name].abs().max().item()
            raise AdapterMalformed(f"the tensor {name!r} has values up to {largest:.3g}, which {dtype} cannot hold.")
    return cast


def _of_linear(name: str, form: LinearForm) -> LowRank:
    if form.out_scale_O is not None:
        raise AdapterUnsupported(f"{name} has its output scaled (as DoRA and IA3 do), which is not a low-rank change.")
    if form.bias_O is not None:
        raise AdapterUnsupported(f"{name} has a trained bias, which a plain LoRA cannot hold.")
    if form.kronecker is not None:
        return from_kronecker(form.kronecker)
    assert form.low_rank is not None, f"{name} has a form that changes nothing"
    return no_larger_than_the_matrix(form.low_rank)


def _of_vocabulary(name: str, form: VocabForm) -> LowRank:
    if form.low_rank is None or form.table_VD is not None or form.rows is not None or form.bias_V is not None:
        raise AdapterUnsupported(f"{name} has rows or a bias of its own, which a plain LoRA cannot hold.")
    return form.low_rank


def _full_name(name: str) -> str:
    return name if name == HEAD else f"model.{name}"


def _alpha(pair: LowRank) -> float:
    return pair.scaling * pair.rank


def _most_frequent(values: Iterable[float]) -> float | int:
    found = list(values)
    return max(dict.fromkeys(found), key=found.count)
