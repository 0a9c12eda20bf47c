"""One adapter's weights in host memory, as one rank serves them: its part of each matrix, in the serving dtype.

reader.py brings the whole adapter. Knows nothing of slots or tiers: packed_adapter.py and the managers take it from
here.
"""

# R rank · D in features · O out features

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from lorafleet.kernels.fp8 import FP8
from lorafleet.workers.errors import AdapterUnsupported
from lorafleet.workers.lora.casting import cast
from lorafleet.workers.lora.config import LoRAConfig
from lorafleet.workers.lora.forms import AdapterForms, LinearForm, LowRank
from lorafleet.workers.lora.giving_way import giving_way
from lorafleet.workers.lora.kinds.kind import Base
from lorafleet.workers.lora.layer_weights import LoRALayerWeights
from lorafleet.workers.lora.quantising import fp8_scales, to_fp8
from lorafleet.workers.lora.reader import read_adapter
from lorafleet.workers.tp.adapter_sharding import AdapterSharding


@dataclass(frozen=True, slots=True)
class LoRAModel:
    """modules: "layers.0.self_attn.q_proj" -> its A, B and scaling; only those that the adapter has. On a rank of a
    tensor-parallel group they are its part, and num_bytes still the whole adapter's, in the serving dtype."""

    name: str
    digest: str  # sha256 (hex) of config and weights
    modules: dict[str, LoRALayerWeights]
    num_bytes: int
    read_s: float = 0.0  # what reading the values took, with the digest
    check_s: float = 0.0  # the rest
    invocation_tokens: tuple[int, ...] = ()  # of an activated LoRA

    @property
    def rank(self) -> int:
        """The largest of the modules' ranks."""
        return max(layer.rank for layer in self.modules.values())

    @property
    def target_modules(self) -> list[str]:
        """Leaf names, sorted."""
        return sorted({module.rsplit(".", 1)[-1] for module in self.modules})

    @classmethod
    def from_local_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        base: Base,
        config: LoRAConfig,
        dtype: torch.dtype,
        name: str,
        expected_digest: str = "",
        sharding: AdapterSharding | None = None,
    ) -> LoRAModel:
        """Reads and checks the adapter in the folder `path`, and casts it to `dtype`, the serving dtype.

        base: what the adapter is served on, whole. name: for messages. expected_digest: where it is given, other bytes
        than those are AdapterChanged. sharding: None for the whole adapter. What is checked is the whole adapter in any
        case, so that all ranks come to the same end.
        Raises an AdapterError, never half an adapter.
        Blocks on the disk, so call it in a thread; most of its time is spent without the GIL.
        """
        started = time.perf_counter()
        read = read_adapter(
            path,
            base=base,
            max_rank=config.max_lora_rank,
            dtype=dtype,
            name=name,
            expected_digest=expected_digest,
        )
        _refuse_unserved(read.forms, name)
        modules = {}
        for module, form in giving_way(read.forms.linears.items()):
            modules[module] = _layer(module, form, dtype, sharding)
        num_bytes = sum(_num_bytes(form, dtype) for form in read.forms.linears.values())
        check_s = time.perf_counter() - started - read.read_s
        return cls(name, read.digest, modules, num_bytes, read.read_s, check_s, read.forms.invocation_tokens)


def _refuse_unserved(forms: AdapterForms, name: str) -> None:
    """The engine has only low ranks yet."""
    plain = all(
        form.low_rank is not None and form.kronecker is None and form.out_scale_O is None and form.bias_O is None
        for form in forms.linears.values()
    )
    if not plain or forms.embedding is not None or forms.head is not None or forms.norms:
        raise AdapterUnsupported(
            f"adapter {name!r}: DoRA, biases, norms, embeddings and heads of adapters are not served yet."
        )


def _layer(module: str, form: LinearForm, dtype: torch.dtype, sharding: AdapterSharding | None) -> LoRALayerWeights:
    """This rank's part of a module, in the serving dtype."""
    low_rank = _low_rank(form)
    a_RD, b_OR, scaling = low_rank.a_RD, low_rank.b_OR, low_rank.scaling
    own_a, own_b = (a_RD, b_OR) if sharding is None else sharding.part_of(module, a_RD, b_OR)
    if dtype != FP8:
        return LoRALayerWeights(cast(own_a, dtype), cast(own_b, dtype), scaling)
    a_scale_R, b_scale_R = fp8_scales(a_RD, b_OR)
    rows = slice(0, a_RD.shape[0]) if sharding is None else sharding.layout(module).rows(a_RD.shape[0])
    return LoRALayerWeights(
        to_fp8(own_a, a_scale_R[rows].unsqueeze(1)),
        to_fp8(own_b, b_scale_R),
        scaling,
        (a_scale_R * b_scale_R)[rows],
    )


def _low_rank(form: LinearForm) -> LowRank:
    assert form.low_rank is not None, "reader.py gives no other form yet"
    return form.low_rank


def _num_bytes(form: LinearForm, dtype: torch.dtype) -> int:
    low_rank = _low_rank(form)
    scale_bytes = torch.float32.itemsize if dtype == FP8 else 0
    inputs, outputs = low_rank.a_RD.shape[1], low_rank.b_OR.shape[0]
    return low_rank.rank * ((inputs + outputs) * dtype.itemsize + scale_bytes)
