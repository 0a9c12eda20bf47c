"""A base model that runs as transformers' own module, with our attention, our linears and our tables inside it.

It serves dense decoders that we have no decoder for, more slowly: norms, rotation and activations are transformers',
one after another, and no CUDA graph is captured. Ranks divide it by the plan of transformers' class.
"""

# T tokens · D hidden size · V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.protocol.errors import UnsupportedModel
from lorafleet.workers.adapters.base_layout import EMBEDDING, HEAD, peft_name
from lorafleet.workers.attention.attention_backend import AttentionBackend, KVCache
from lorafleet.workers.device.state_cache import StepStates
from lorafleet.workers.models.generic.adapted_modules import (
    AdaptedEmbedding,
    AdaptedLinear,
    RankExchange,
    packed,
    replace_module,
)
from lorafleet.workers.models.generic.divided_module import divide_attention, divide_experts, divide_tables
from lorafleet.workers.models.generic.generic_shard import GenericShard
from lorafleet.workers.models.generic.head_table import HeadTable, LogitsFinisher
from lorafleet.workers.models.generic.module_paths import engine_path
from lorafleet.workers.models.generic.step_state import PagedStep, StepState, use_paged_attention
from lorafleet.workers.models.layers import Norm, PackedLinear
from lorafleet.workers.models.linear_weights import LinearWeights
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.models.vocab_table import VocabTable
from lorafleet.workers.tp.adapter_sharding import AdapterSharding
from lorafleet.workers.tp.group import TPGroup


class TransformersModel(nn.Module):
    """One rank's part of the model. forward() returns the decoder's output for every token, after its last norm.

    Norms and experts are transformers', and adapters do not reach them.
    """

    def __init__(
        self, model: Any, shard: GenericShard, group: TPGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Takes over `model`, a whole causal language model of transformers with its weights in `dtype`, on the CPU."""
        super().__init__()
        config = shard.whole
        self.config = config
        self.group = group
        self.rotations = None
        self.shard = shard
        self._state = StepState()
        paths = {module: path for path, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if group.size > 1:
            divide_attention(model, shard)
            divide_experts(model, shard, group)
            divide_tables(embedding, head, shard)
        self._linears = self._take_linears(model, dtype, device)
        model.to(device).eval().requires_grad_(False)
        self.embed_tokens = VocabTable(self.shard, self.group, dtype, torch.device("meta"))
        self.embed_tokens.weight = embedding.weight
        replace_module(model, paths[embedding], AdaptedEmbedding(self.embed_tokens, self._state))
        use_paged_attention(model, config.attention.modules, self._state)
        self.body = model.base_model
        finisher = LogitsFinisher(model, model.base_model_prefix, paths[head])
        self.lm_head = HeadTable(self.shard, self.group, head.weight, head.bias, finisher)

    def _take_linears(self, model: Any, dtype: torch.dtype, device: torch.device) -> dict[str, PackedLinear]:
        """Replaces the linears that adapters may target, and returns ours by engine name."""
        weights, sharding = LinearWeights(dtype, device), AdapterSharding(self.shard, self.group)
        quantization = self.config.quantization
        taken: dict[str, PackedLinear] = {}
        for path, module in list(model.named_modules()):
            name = engine_path(path)
            if name in self.config.linears:
                scheme = None if quantization is None else quantization.of([name])
                taken[name] = packed(module, name, sharding, scheme, weights, device)
                exchange = RankExchange.of(name, self.shard, self.group)
                replace_module(model, path, AdaptedLinear(taken[name], self._state, exchange))
        return taken

    def forward(
        self,
        token_T: Tensor,
        position_T: Tensor,
        rope_length_T: Tensor,  # noqa: ARG002  models whose angles depend on it are rejected
        slot_mapping_T: Tensor,
        caches: list[KVCache],
        attention: AttentionBackend,
        lora: LoRABatch | None,
        states: StepStates | None = None,
    ) -> Tensor:
        """Returns the last norm's output, [T, D]. The arguments are DecoderModel.forward's."""
        assert states is None, "modules with recurrent layers are rejected"
        if lora is not None:
            lora.begin()
        with self._state.of(PagedStep(slot_mapping_T, caches, attention), lora):
            hidden_TD: Tensor = self._run(token_T, position_T)
        return hidden_TD

    def reference(self, token_T: Tensor) -> Tensor:
        """Returns what forward() returns for one sequence without adapters, by transformers' own attention."""
        implementation = self.body.config._attn_implementation
        self.body.set_attn_implementation("eager")
        try:
            hidden_TD: Tensor = self._run(token_T, torch.arange(len(token_T), device=token_T.device))
        finally:
            self.body.set_attn_implementation(implementation)
        return hidden_TD

    def _run(self, token_T: Tensor, position_T: Tensor) -> Any:
        output = self.body(
            input_ids=token_T.unsqueeze(0), position_ids=position_T.unsqueeze(0), use_cache=False, return_dict=True
        )
        return output.last_hidden_state[0]

    def logits(self, x_TD: Tensor) -> Tensor:
        """Returns the logits [T, V], as the class computes them."""
        return self.lm_head.logits(x_TD)

    def gather_logits(self, logits_TW: Tensor) -> Tensor:
        return self.lm_head.gather(logits_TW)

    def packed_linears(self) -> list[tuple[tuple[str, ...], PackedLinear]]:
        return [((name,), linear) for name, linear in self._linears.items()]

    def mixtures(self) -> list[tuple[str, SparseMLP]]:
        return []

    def sinks(self) -> dict[int, Tensor]:
        return {}

    def norms(self) -> list[tuple[str, Norm]]:
        return []

    def held_tensors(self) -> dict[str, Callable[[], Tensor]]:
        """Returns this rank's part of the tensors that adapters may be computed from, as bases/weights.py's
        held_tensors does."""
        tables = {EMBEDDING: self.embed_tokens, HEAD: self.lm_head}
        found = {f"{peft_name(name)}.weight": _value(tables[name].weight) for name in self.config.tables}
        for name, linear in self._linears.items():
            found[f"{peft_name(name)}.weight"] = linear.weight.dequantized
            if linear.bias is not None:
                found[f"{peft_name(name)}.bias"] = _value(linear.bias)
        return found


def _value(parameter: nn.Parameter) -> Callable[[], Tensor]:
    return lambda: parameter.data


def check_answers(model: TransformersModel, steps: Callable[[TransformersModel, list[Tensor]], list[Tensor]]) -> None:
    """Raises UnsupportedModel if the model computes other values in our steps than transformers does by itself.

    That happens if its module relates the tokens of a sequence in a way that the run of attention_probe.py does not
    show, such as a convolution. `steps` computes several sequences in chunks beside each other.
    """
    device, vocabulary = model.embed_tokens.weight.device, model.config.vocab_size
    lengths = [min(length, model.config.context_limit) for length in (9, 8)]
    sequences = [(torch.arange(n, device=device) * 7919 + 13 * n) % vocabulary for n in lengths]
    tolerance = 1e-3 if model.embed_tokens.weight.dtype is torch.float32 else 0.2  # rounding alone stays far below
    for token_T, found_TD in zip(sequences, steps(model, sequences), strict=True):
        expected_TD = model.reference(token_T).float()
        error = ((found_TD.float() - expected_TD).norm() / expected_TD.norm()).item()
        if not error < tolerance:
            raise UnsupportedModel(
                f"{model.config.architecture} cannot be served by model_impl=transformers: with our attention its "
                f"hidden states differ by {error:.2g} (relative) from transformers' own, where {tolerance} is allowed."
            )
