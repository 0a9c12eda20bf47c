"""Holds one adapter's weights in host memory as one rank serves them: its part of each, matrices in the serving dtype
and vectors in float32.

reader.py provides the whole adapter. This file knows nothing of slots or tiers; packed_adapter.py and the managers own
them.
"""

# R rank · D in features · O out features

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lorafleet.kernels.extras.kronecker import KroneckerPart
from lorafleet.kernels.moe.expert_lora import padded_rank
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.protocol.adapter_formats.sealed_memory import SealedContent
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.casting import cast
from lorafleet.workers.adapters.content_digest import ContentDigest
from lorafleet.workers.adapters.forms import (
    BASE_ROPE,
    AdapterForms,
    ClassifierForm,
    ExpertsForm,
    Kronecker,
    LinearForm,
    LowRank,
    OwnRope,
    StackedLowRank,
)
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.own_rope import check_scaling_factor
from lorafleet.workers.adapters.parallel_reading import ParallelReader
from lorafleet.workers.adapters.reader import Place, read_adapter
from lorafleet.workers.slots.layer_weights import AffineWeights, LoRALayerWeights
from lorafleet.workers.slots.quantizing import fp8_scales, to_fp8
from lorafleet.workers.slots.vocab_weights import (
    VocabWeights,
    check_vocabulary,
    embedding_part,
    head_part,
    vocab_bytes,
    vocab_dtype,
    vocab_size_of,
)
from lorafleet.workers.tp.adapter_sharding import AdapterSharding

# The weights on a mixture's gate_up, and on its down, as they are packed.
ExpertParts = tuple[StackedLowRank | None, StackedLowRank | None]


@dataclass(frozen=True, slots=True)
class LoRAModel:
    """The weights of one adapter, by module path such as "layers.0.self_attn.q_proj". Each mapping has only the
    modules that the adapter changes.

    In a tensor-parallel group the weights are the rank's part, except that Kronecker factors and norms are whole on
    all ranks.
    """

    name: str
    content: ContentDigest  # sha256 of config and weights
    modules: dict[str, LoRALayerWeights]  # A, B and scaling
    num_bytes: int  # of the whole adapter as served, on every rank
    read_s: float = 0.0  # seconds for reading the values
    check_s: float = 0.0  # seconds for checking the adapter and casting its tensors
    invocation_tokens: tuple[int, ...] = ()  # of an activated LoRA; otherwise empty
    affines: Mapping[str, AffineWeights] = field(default_factory=dict)
    kroneckers: Mapping[str, KroneckerPart] = field(default_factory=dict)
    norms: Mapping[str, Tensor] = field(default_factory=dict)  # float32
    experts: Mapping[str, ExpertParts] = field(default_factory=dict)
    expert_rank: int = 0  # largest rank on experts, before padding
    embedding: VocabWeights | None = None
    head: VocabWeights | None = None
    vocab_size: int | None = None  # None if it is the base's
    language: str = ""  # language_digest of the adapter's files
    own_rope: OwnRope = BASE_ROPE
    classifier: ClassifierForm | None = None  # whole on every rank
    left_out: tuple[str, ...] = ()  # as AdapterForms'
    block: Tensor | None = None  # memory in which A and B may lie as pack() lays them out
    draft: SealedContent | None = None  # its draft LoRA, not checked yet; None if it has none

    @property
    def digest(self) -> str:
        """The confirmed digest (hex). It may have to be waited for; AdapterChanged if another was expected."""
        return self.content.confirm()

    @property
    def rank(self) -> int:
        """The largest of the modules' ranks; 0 if the adapter has no A and B."""
        return max((self.expert_rank, *(layer.rank for layer in self.modules.values())))

    @property
    def target_modules(self) -> list[str]:
        """The leaf names of the changed modules, sorted."""
        tables = {"embed_tokens": self.embedding, "lm_head": self.head}
        stacked = [
            leaf
            for parts in self.experts.values()
            for leaf, part in zip(("gate_up_proj", "down_proj"), parts, strict=True)
            if part is not None
        ]
        names = (*self.modules, *self.affines, *self.kroneckers, *self.norms, *stacked)
        names += tuple(name for name, own in tables.items() if own is not None)
        names += () if self.classifier is None else ("score",)
        return sorted({module.rsplit(".", 1)[-1] for module in names})

    @classmethod
    def from_local_checkpoint(
        cls,
        source: str | os.PathLike[str] | SealedContent,
        *,
        base: Base,
        config: LoRAConfig,
        dtype: torch.dtype,
        name: str,
        expected_digest: str = "",
        sharding: AdapterSharding | None = None,
        reader: ParallelReader | None = None,
        place: Place | None = None,
        keeps_draft: bool = False,
    ) -> LoRAModel:
        """Reads and checks the adapter in a folder or in memory, and casts it to `dtype`, the serving dtype.

        Raises an AdapterError and never returns half an adapter. The whole adapter is checked on every rank, so that
        all ranks come to the same result. Blocks on the disk, so call it in a thread; most of its time is spent
        without the GIL.

        Args:
            source: The folder, or memory whose digest is `expected_digest`.
            base: The whole base model that the adapter is served on.
            name: The adapter's name, for messages.
            expected_digest: If given, other bytes than these raise AdapterChanged.
            sharding: None for the whole adapter.
            reader: Threads that read the values. They may still be computing the digest when this returns.
            place: As read_adapter's.
            keeps_draft: As read_adapter's.
        """
        started = time.perf_counter()
        read = read_adapter(
            source,
            base=base,
            max_rank=config.max_lora_rank,
            dtype=dtype,
            name=name,
            expected_digest=expected_digest,
            reader=reader,
            place=place,
            keeps_draft=keeps_draft,
        )
        with read.content.confirmed_first():
            check_scaling_factor(read.forms, config, name)
            if sharding is not None:
                check_vocabulary(read.forms, sharding.shard.whole.vocab_size, config, name)
        own = cls.of(read.forms, read.content, dtype, name, sharding, started, read.read_s)
        return replace(own, language=read.language, block=read.block, draft=read.draft)

    @classmethod
    def of(
        cls,
        forms: AdapterForms,
        content: ContentDigest,
        dtype: torch.dtype,
        name: str,
        sharding: AdapterSharding | None = None,
        started: float | None = None,
        read_s: float = 0.0,
    ) -> LoRAModel:
        """Builds this rank's part of the forms. `started` is time.perf_counter() when reading began."""
        started = time.perf_counter() if started is None else started
        embedding, head = forms.embedding, forms.head
        shard, tables_dtype = None if sharding is None else sharding.shard, vocab_dtype(dtype)
        modules, affines, kroneckers = {}, {}, {}
        for module, form in yielding_gil(forms.linears.items()):
            if form.low_rank is not None:
                modules[module] = _layer(module, form.low_rank, dtype, sharding)
            if form.out_scale_O is not None or form.bias_O is not None:
                affines[module] = _affine(module, form, sharding)
            if form.kronecker is not None:
                kroneckers[module] = _kronecker(form.kronecker, dtype)
        norms = {norm: _vector(weight_D) for norm, weight_D in forms.norms.items()}
        experts = {module: _experts(form, dtype, sharding) for module, form in yielding_gil(forms.experts.items())}
        own_embedding = None if embedding is None else embedding_part(embedding, shard, tables_dtype)
        own_head = None if head is None else head_part(head, shard, tables_dtype)
        return cls(
            name,
            content,
            modules,
            sum(_num_bytes(form, dtype) for form in forms.linears.values())
            + _norm_bytes(forms)
            + _expert_bytes(forms, dtype)
            + vocab_bytes(embedding, tables_dtype)
            + vocab_bytes(head, tables_dtype)
            + (0 if forms.classifier is None else forms.classifier.num_bytes),
            read_s,
            time.perf_counter() - started - read_s,
            forms.invocation_tokens,
            affines,
            kroneckers,
            norms,
            experts,
            max((stack.rank for form in forms.experts.values() for stack in form.stacks), default=0),
            own_embedding,
            own_head,
            vocab_size_of(forms),
            own_rope=forms.own_rope,
            classifier=forms.classifier,
            left_out=forms.left_out,
        )


def _layer(module: str, low_rank: LowRank, dtype: torch.dtype, sharding: AdapterSharding | None) -> LoRALayerWeights:
    """Returns this rank's part of a module, in the serving dtype."""
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


def _affine(module: str, form: LinearForm, sharding: AdapterSharding | None) -> AffineWeights:
    scale_O, bias_O = form.out_scale_O, form.bias_O
    if sharding is not None:
        ranges = sharding.shard.outputs(module)
        scale_O = None if scale_O is None else torch.cat([scale_O[own] for own in ranges])
        if bias_O is not None:
            bias_O = torch.cat([bias_O[own] for own in ranges]) if sharding.adds_bias(module) else None
    return AffineWeights(
        None if scale_O is None else _vector(scale_O),
        None if bias_O is None else _vector(bias_O),
    )


def _vector(values: Tensor) -> Tensor:
    return cast(values.unsqueeze(0), torch.float32)[0].contiguous()


def _kronecker(form: Kronecker, dtype: torch.dtype) -> KroneckerPart:
    """Casts the factors to the serving dtype. FP8 adapters have them in bfloat16, since they are small."""
    dtype = torch.bfloat16 if dtype == FP8 else dtype
    return KroneckerPart(cast(form.w1, dtype), cast(form.w2, dtype), form.scaling)


def expert_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of A and B on experts, which is bfloat16 for FP8 adapters."""
    return torch.bfloat16 if dtype == FP8 else dtype


def _experts(form: ExpertsForm, dtype: torch.dtype, sharding: AdapterSharding | None) -> ExpertParts:
    """Returns this rank's part, divided as the experts are: gate_up by output, down by input."""
    gate_up, down = form.gate_up, form.down
    if sharding is not None:
        own = sharding.shard.of_expert
        gate_up = None if gate_up is None else replace(gate_up, b_EPOR=gate_up.b_EPOR.part(rows=own))
        down = None if down is None else replace(down, a_EGRD=down.a_EGRD.part(columns=own))
    return _served(gate_up, expert_dtype(dtype)), _served(down, expert_dtype(dtype))


def _served(stack: StackedLowRank | None, dtype: torch.dtype) -> StackedLowRank | None:
    """Returns the stack in this dtype and with the kernels' rank. Zeros fill the ranks that it does not have."""
    if stack is None:
        return None
    rank = padded_rank(stack.rank)
    a_EGRD, b_EPOR = stack.a_EGRD.filled_up(dtype, rows=rank), stack.b_EPOR.filled_up(dtype, columns=rank)
    return StackedLowRank(a_EGRD, b_EPOR, stack.scaling_EG)


def _expert_bytes(forms: AdapterForms, dtype: torch.dtype) -> int:
    stacks = [stack for form in forms.experts.values() for stack in form.stacks]
    return sum(stack.num_values * expert_dtype(dtype).itemsize for stack in stacks)


def _num_bytes(form: LinearForm, dtype: torch.dtype) -> int:
    """Returns the bytes of a whole module as served."""
    total = sum(v.numel() * torch.float32.itemsize for v in (form.out_scale_O, form.bias_O) if v is not None)
    if form.low_rank is not None:
        scale_bytes = torch.float32.itemsize if dtype == FP8 else 0
        inputs, outputs = form.low_rank.a_RD.shape[1], form.low_rank.b_OR.shape[0]
        total += form.low_rank.rank * ((inputs + outputs) * dtype.itemsize + scale_bytes)
    if form.kronecker is not None:
        itemsize = torch.bfloat16.itemsize if dtype == FP8 else dtype.itemsize
        total += (form.kronecker.w1.numel() + form.kronecker.w2.numel()) * itemsize
    return total


def _norm_bytes(forms: AdapterForms) -> int:
    return sum(weight_D.numel() * torch.float32.itemsize for weight_D in forms.norms.values())
