"""Computes what serving a base's checkpoint takes on each GPU, and the KV cache that remains.

The engine's own classes are built on torch's meta device, which has shapes and no memory, and the engine's own
functions size the KV cache. An engine on a GPU measures the activations of its largest step. Here they come from the
same step on the meta device, whose operations are those of a CPU, so they are an estimate.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import LoRATables
from lorafleet.kernels.moe.expert_codes import WRITTEN_PAIRS, ExpertCodes, written_experts
from lorafleet.kernels.quant.four_bit_cuda import WGMMA_CAPABILITY
from lorafleet.kernels.quant.tiled_weight import is_tileable
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import MAX_LORAS_BOUND, LoRAConfig
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.auto_options import base_dtype, check_fp8, kv_dtype
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.device.state_cache import StateCache
from lorafleet.workers.kv_cache_sizing import (
    CPU_CACHE_BYTES,
    allocate_caches,
    budget_bytes,
    bytes_per_token,
    cache_tokens,
    check_context,
    check_tiers,
    draft_states_for,
    largest_step,
    longest_sequence,
    snapshots_for,
    unmeasured_bytes,
)
from lorafleet.workers.model_loading import weight_bytes
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.slots.packed_adapter import slot_bytes
from lorafleet.workers.slots.slot_layers import SlotLayers
from lorafleet.workers.speculation.draft_model import draft_lora_config, late_draft_bytes, make_drafting_model
from lorafleet.workers.tp.adapter_sharding import AdapterSharding
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.sharding_choice import with_sharding

META, CUDA, CPU = torch.device("meta"), torch.device("cuda"), torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU of each rank. `other_bytes` is what the driver, the libraries and other processes take of it."""

    name: str
    total_bytes: int
    capability: tuple[int, int] | None = None  # None if it is not known.
    cuda_name: str | None = None  # The name that CUDA reports, by which data of the GPU are found. None if unknown.
    other_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """The bytes that the model or head of speculative_config needs on the first rank."""

    weights: int
    adapters: int  # A and B of the draft LoRAs in slots, with the tables of the slots. 0 without them.
    steps: int  # Set aside for its steps and CUDA graphs. 0 on a CPU.
    kv_token: int  # Keys and values of a token, and what a head reads of it.


@dataclass(frozen=True, slots=True)
class Needs:
    """The bytes that the first rank needs. The parts of the base on all ranks are equally large, except for a few
    biases."""

    weights: int
    adapter: int  # A and B of one adapter of max_lora_rank on every projection. 0 without adapters.
    adapters: int  # A and B of all adapters in slots, with the tables of the slots. 0 without adapters.
    activations: int  # Of the largest step, estimated.
    others: int  # Sampling, CUDA graphs, LoRA on experts and a reserve.
    kv_token: int  # Keys and values of a token.
    states: int  # Recurrent states of max_num_seqs sequences and of the padding. 0 without recurrent layers.
    state_snapshots: int  # Snapshots of recurrent states. 0 without recurrent layers.
    drafts: DraftNeeds | None = None  # None if no model drafts.


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a budget leaves beside the needs, and what fits into it."""

    kv_cache_bytes: int
    kv_cache_tokens: int
    max_model_len: int | None  # The longest sequence served; None if `refusal` is set.
    # The largest max_loras beside one sequence of `beside_tokens`; None without adapters, or if lora_memory_gib is set.
    most_loras: int | None
    beside_tokens: int
    refusal: str | None = None  # The error with which an engine would not start.


@dataclass(frozen=True, slots=True)
class MetaEngine:
    """One rank's model on the meta device, with the settings of the engine."""

    config: EngineConfig
    model: DecoderModel
    dtype: torch.dtype
    spec: AttentionSpec
    needs: Needs = field(repr=False)

    @classmethod
    def build(cls, config: EngineConfig, card: Card | None) -> MetaEngine:
        """Builds rank 0 for a GPU, or for a CPU if `card` is None. Raises as build_rank() does."""
        folder = Path(config.model)
        model_config = read_model_config(folder)
        model_config = replace(model_config, quantization=resolved(model_config.quantization, config.quantization))
        check_context(config, model_config.context_limit, model_config.rope_positions)
        check_tiers(config, model_config)
        dtype = base_dtype(config, model_config, folder)
        cached_dtype = kv_dtype(config, dtype, META)
        if card is not None and card.capability is not None:
            for option, asked in (
                ("kv_cache_dtype", config.kv_cache_dtype),
                ("lora_dtype", config.lora.lora_dtype if config.lora else "auto"),
            ):
                if asked == "fp8":
                    check_fp8(option, card.capability, card.name)
        group = TPGroup(0, config.tensor_parallel_size)
        model = DecoderModel(model_config, group, dtype, META)
        weights = weight_bytes(model)
        device = CPU if card is None else CUDA
        spec = attention_spec(model.shard.local, config.block_size, dtype, cached_dtype, device, model.sinks())
        adapter, adapters = 0, 0
        if config.lora is not None:
            cuda_name = None if card is None else card.cuda_name
            lora = with_sharding(config.lora, cuda_name, config.tensor_parallel_size, config.max_num_seqs)
            adapter, adapters = _adapter_bytes(model, dtype, lora, device)
        written = _written_bytes(model, largest_step(config, model.shard.local), dtype, card)
        activations = _activation_bytes(config, model.shard.local, spec, written)
        others = unmeasured_bytes(config, model, dtype, activations)
        shapes = model.shard.local.states
        num_snapshots, num_drafts = snapshots_for(config, model_config), draft_states_for(config, model_config)
        states = StateCache(shapes, config.max_num_seqs, dtype, META, num_snapshots, num_drafts)
        held, snapshots = states.num_bytes - states.snapshot_bytes, states.snapshot_bytes
        drafts = _draft_needs(config, model, device)
        needs = Needs(weights, adapter, adapters, activations, others, bytes_per_token(spec), held, snapshots, drafts)
        return cls(config, model, dtype, spec, needs)

    def room(self, card: Card | None) -> Room:
        """Returns what remains on the card, or on a CPU if it is None, with the errors of a start."""
        config, needs, limit = self.config, self.needs, self.model.config.context_limit
        wanted = min(config.max_model_len or limit, limit)
        if card is None:
            free, most_loras = CPU_CACHE_BYTES, None
        else:
            free = budget_bytes(config, card.total_bytes) - card.other_bytes
            free -= needs.weights + needs.activations + needs.others + needs.states + needs.state_snapshots
            token_bytes, adapters = needs.kv_token, needs.adapters
            if needs.drafts is not None:
                free -= needs.drafts.weights
                token_bytes, adapters = token_bytes + needs.drafts.kv_token, adapters + needs.drafts.adapters
            most_loras = None
            if config.lora is not None:
                blocks = -(-wanted // config.block_size)
                left = free - blocks * config.block_size * token_bytes
                left -= 0 if needs.drafts is None else needs.drafts.steps
                if config.lora.lora_memory_gib is None:
                    for_each = adapters // config.lora.max_loras
                    most_loras = max(0, min(MAX_LORAS_BOUND, left // for_each))
                free -= adapters
        tokens = config.kv_cache_tokens
        if tokens is None:
            if needs.drafts is not None:
                free -= late_draft_bytes(
                    cache_tokens(config, self.spec, free), needs.kv_token, needs.drafts.kv_token, needs.drafts.steps
                )
            tokens = cache_tokens(config, self.spec, free)
        tokens = max(0, tokens // config.block_size * config.block_size)
        try:
            longest, refusal = longest_sequence(config, limit, tokens), None
        except ConfigError as error:
            longest, refusal = None, error.message
        return Room(tokens * needs.kv_token, tokens, longest, most_loras, wanted, refusal)


def unquantized_model(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> DecoderModel:
    """Returns the whole model on the meta device, as it is without quantization."""
    return DecoderModel(replace(config, quantization=None), TPGroup(), dtype, META)


def _draft_needs(config: EngineConfig, base: DecoderModel, device: torch.device) -> DraftNeeds | None:
    draft = make_drafting_model(config, base, META, device)
    if draft is None:
        return None
    adapters = 0
    if config.lora is not None and isinstance(draft.model, DecoderModel):
        _, adapters = _adapter_bytes(draft.model, draft.spec.dtype, draft_lora_config(config.lora), device)
    return DraftNeeds(weight_bytes(draft.model), adapters, draft.step_bytes, draft.token_bytes)


def _adapter_bytes(
    model: DecoderModel, base_dtype: torch.dtype, lora: LoRAConfig, device: torch.device
) -> tuple[int, int]:
    """Returns Needs.adapter and Needs.adapters."""
    dtype = lora.serving_dtype(base_dtype)
    sharding = AdapterSharding(model.shard, model.group, lora.is_fully_sharded(device))
    linears, norms, mixtures = model.packed_linears(), model.norms(), model.mixtures()
    with _Allocations() as allocated:
        tables = LoRATables(len(linears), lora.gpu_loras, META, len(norms), len(mixtures))
        table_bytes: int = allocated.live_bytes
    layers = SlotLayers.attach(model, sharding, tables, lora.max_lora_rank, dtype)
    largest = slot_bytes(layers.linears, lora.max_lora_rank, dtype)
    return largest, lora.lora_memory_bytes(largest) + table_bytes


def _written_bytes(model: DecoderModel, num_tokens: int, dtype: torch.dtype, card: Card | None) -> int:
    """Returns the bytes of experts' values that a step of so many tokens writes at a time (kernels/moe/moe_triton.py).

    A card of an unknown capability counts as one that writes them.
    """
    if card is None or card.capability not in (None, WGMMA_CAPABILITY):
        return 0
    found = [0]
    for _, mixture in model.mixtures():
        if num_tokens * mixture.experts.per_token <= WRITTEN_PAIRS * mixture.experts.count:
            continue
        for matrix in (mixture.gate_up_EUD, mixture.down_EDI):
            _, outputs, inputs = matrix.shape
            if isinstance(matrix, ExpertCodes) and is_tileable(matrix.scheme, outputs, inputs, dtype):
                found.append(written_experts(matrix.shape) * outputs * inputs * dtype.itemsize)
    return max(found)


def _activation_bytes(config: EngineConfig, local: ModelConfig, spec: AttentionSpec, written: int) -> int:
    """Returns the peak of the largest step beyond what is allocated before it.

    The rank's part, `local`, runs as a model of its own, since the meta device has no collectives. `written` is
    _written_bytes().
    """
    local = _first_layers(local)
    model = unquantized_model(local, spec.dtype)
    for layer in model.decoder_layers():
        if isinstance(layer.mlp, SparseMLP):
            layer.mlp = _ExpertShapes(layer.mlp, written)  # type: ignore[assignment]  # It is called in the same way.
        if layer.beside is not None:
            layer.beside.mixture = _ExpertShapes(layer.beside.mixture, written)  # type: ignore[assignment]  # As above.
    num_tokens = largest_step(config, local)
    num_blocks = -(-num_tokens // config.block_size)
    spec = attention_spec(local, config.block_size, spec.dtype, spec.kv_dtype, META, model.sinks())
    caches = allocate_caches(replace(config, load_format="dummy"), local, spec, num_blocks)
    position_T = torch.arange(num_tokens, device=META)
    states = StateCache(local.states, 1, spec.dtype, META).of_padding([num_tokens]) if local.states else None
    with torch.inference_mode(), _Allocations() as allocated:
        token_T, attention = torch.zeros_like(position_T), _AttentionShapes(spec)
        hidden_TD = model(token_T, position_T, position_T + 1, position_T, caches, attention, None, states)
        model.gather_logits(model.logits(hidden_TD[: config.max_num_seqs])).float()
    peak: int = allocated.peak_bytes
    return peak


def _first_layers(config: ModelConfig) -> ModelConfig:
    """Returns the model with as many layers as have every kind of layer. A layer's activations end with it, but
    per-layer embeddings of all layers are held at once."""
    if config.per_layer is not None:
        return config
    kinds = [(layer, config.experts_of(i) is not None) for i, layer in enumerate(config.layers)]
    return replace(config, layers=config.layers[: 1 + max(map(kinds.index, set(kinds)))])


class _AttentionShapes:
    """An attention backend whose result has a shape and no values."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def plan(self, batch: AttentionBatch) -> None:  # noqa: ARG002  # as AttentionBackend
        raise AssertionError("there is nothing to plan on the meta device")

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:  # noqa: ARG002  # as AttentionBackend
        return q_THD.new_empty(*q_THD.shape[:2], self._spec.layers[layer].out_dim)


class _ExpertShapes(nn.Module):
    """A mixture whose results have shapes and no values, since a token's experts depend on values.

    Each product of experts takes `written` bytes for their values beside its result.
    """

    def __init__(self, mixture: SparseMLP, written: int) -> None:
        super().__init__()
        self.mixture = mixture
        self._written = written

    def forward(self, x_TD: Tensor, batch: LoRABatch | None, router_x_TD: Tensor | None = None) -> LinearOutput:  # noqa: ARG002  # as SparseMLP
        mixture = self.mixture
        num_pairs = len(x_TD) * mixture.experts.per_token
        up_NU = x_TD.new_empty(num_pairs, mixture.gate_up_EUD.shape[1])
        x_TD.new_empty(self._written, dtype=torch.uint8)
        inner_NI = x_TD.new_empty(num_pairs, mixture.down_EDI.shape[2])
        del up_NU
        y_ND = x_TD.new_empty(num_pairs, mixture.down_shape[1])
        x_TD.new_empty(self._written, dtype=torch.uint8)
        del inner_NI, y_ND
        if mixture.shared is not None:
            mixture.shared(x_TD, batch)
        return LinearOutput(torch.empty_like(x_TD))


class _Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are created within the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types for it.
        self.live_bytes: int = 0
        self.peak_bytes: int = 0
        self._counted: set[int] = set()  # Addresses of live storages.
        self._earlier: set[int] = set()  # Addresses of storages from before the block, which live on.

    def __torch_dispatch__(
        self, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        ]
        self._earlier.update(address for address in given if address not in self._counted)
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._counted and address not in self._earlier:
            self._counted.add(address)
            weakref.finalize(storage, self._free, address, storage.nbytes())
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, address: int, num_bytes: int) -> None:
        self._counted.discard(address)
        self.live_bytes -= num_bytes
