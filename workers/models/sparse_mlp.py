"""A mixture of experts in place of a layer's MLP: a router chooses some experts for each token. A shared expert, which
every token passes, may stand beside them. Experts may read and write latent vectors (ExpertsConfig.latent_size).

Under tensor parallelism each rank has a part of every expert. It has the whole router, whose choice is the same on all
ranks. The outputs are summed over the ranks, so only one rank adds the biases of down.
"""

# T tokens · D hidden size · I this rank's intermediate size of an expert · E experts
# U rows of gate_up: 2I, or I without a gate · L size of a latent vector

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.moe.expert_activation import ExpertActivation, activate_experts
from lorafleet.kernels.moe.expert_codes import ExpertCodes, ExpertMatrix
from lorafleet.kernels.moe.expert_lora import ExpertLoRA
from lorafleet.kernels.moe.few_tokens import (
    FewTokenMixture,
    FewTokenRouter,
    SharedMatrix,
    SharedWeights,
    few_token_choice,
    few_token_mixture,
    serves_tokens,
)
from lorafleet.kernels.moe.moe import ExpertMatrices, Routing, experts_mlp, route
from lorafleet.kernels.moe.moe_torch import SharedOutput
from lorafleet.kernels.quant.base_weight import PlainWeight, Scheme
from lorafleet.kernels.quant.scaled_weight import ScaledWeight
from lorafleet.kernels.quant.tiled_weight import TiledWeight
from lorafleet.workers.bases.experts_config import ExpertsConfig
from lorafleet.workers.bases.projection import Projection
from lorafleet.workers.models.layers import PackedLinear, parameter


class SharedExpert(nn.Module):
    """The MLP that every token passes, and the gate that weights it, if it has one.

    `linears` are the last ones of ExpertsConfig.packed.
    """

    def __init__(
        self,
        linears: Sequence[tuple[Projection, ...]],
        activation: ExpertActivation,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj, self.down_proj, *gates = (PackedLinear.of(linear, dtype, device) for linear in linears)
        self.weight_gate = gates[0] if gates else None

    def forward(self, x_TD: Tensor, batch: LoRABatch | None) -> SharedOutput:
        inner_TI = activate_experts(self.gate_up_proj(x_TD, batch), self.activation)
        y_TD = apply_affine(self.down_proj(inner_TI, batch))
        return SharedOutput(y_TD, None if self.weight_gate is None else apply_affine(self.weight_gate(x_TD, batch)))

    @property
    def weights(self) -> SharedWeights | None:
        """The weights for the kernels of few tokens, or None if there are other kinds than those read."""
        gate = None if self.weight_gate is None else _matrix_of(self.weight_gate)
        gate_up_UD, down_DI = _matrix_of(self.gate_up_proj), _matrix_of(self.down_proj)
        is_other = self.weight_gate is not None and not isinstance(gate, Tensor)
        if is_other or gate_up_UD is None or down_DI is None:
            return None
        return SharedWeights(gate_up_UD, down_DI, gate if isinstance(gate, Tensor) else None)

    def packed_linears(self) -> list[PackedLinear]:
        return [linear for linear in (self.gate_up_proj, self.down_proj, self.weight_gate) if linear is not None]


class SparseMLP(nn.Module):
    """The experts of one layer, their router and the shared expert.

    gate_up_EUD has, for each expert, the rows of its gate_proj and then of its up_proj. It and down_EDI are set by
    hold(), since they may be quantized. lora is for gate_up and for down. It is None until adapters are enabled.
    adds_bias is True on the one rank that adds the biases of down. recorded_TK receives the router's choices, if they
    are recorded (workers/device/routed_experts.py). few_tokens is set while workers/step/few_token_kernels.py captures
    a step in which the kernels for few tokens compute the mixture, or its router alone.
    """

    gate_up_EUD: ExpertMatrix
    down_EDI: ExpertMatrix

    def __init__(
        self,
        hidden_size: int,
        experts: ExpertsConfig,
        dtype: torch.dtype,
        device: torch.device,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        count, inner = experts.count, experts.intermediate_size
        rows = 2 * inner if experts.is_gated else inner
        self.experts = experts
        router_dtype = torch.float32 if experts.router_float32 else dtype
        router, *of_shared = experts.packed(hidden_size)
        self.gate = PackedLinear.of(router, router_dtype, device)
        self.latent: nn.ModuleList | None = None  # the linears before the experts and behind them
        if experts.latent_size is not None:
            into, out, *of_shared = of_shared
            self.latent = nn.ModuleList(PackedLinear.of(linear, dtype, device) for linear in (into, out))
        self.gate_up_bias_EU: nn.Parameter | None = None
        self.down_bias_ED: nn.Parameter | None = None
        if experts.biases:
            self.gate_up_bias_EU = parameter(count, rows, dtype=dtype, device=device)
            self.down_bias_ED = parameter(count, hidden_size, dtype=dtype, device=device)
        self.correction_E = self._vector(experts.correction_name, device)
        self.scale_E = self._vector(experts.expert_scale_name, device)
        self.shared = SharedExpert(of_shared, experts.activation, dtype, device) if of_shared else None
        self._adds_bias = adds_bias
        self._matrices: ExpertMatrices | None = None
        self.lora: tuple[ExpertLoRA, ExpertLoRA] | None = None
        self.recorded_TK: Tensor | None = None
        self.few_tokens: FewTokenMixture | FewTokenRouter | None = None

    @property
    def gate_up_shape(self) -> tuple[int, int, int]:
        count, width, inner = self.down_shape
        return count, 2 * inner if self.experts.is_gated else inner, width

    @property
    def down_shape(self) -> tuple[int, int, int]:
        return self.experts.count, self.experts.latent_size or self.gate.in_features, self.experts.intermediate_size

    def hold(self, gate_up_EUD: ExpertMatrix, down_EDI: ExpertMatrix) -> None:
        """Sets the experts' weights, which are filled later."""
        self.gate_up_EUD, self.down_EDI = gate_up_EUD, down_EDI
        self._matrices = ExpertMatrices(
            gate_up_EUD,
            down_EDI,
            self.experts.activation,
            self.gate_up_bias_EU,
            self.down_bias_ED if self._adds_bias else None,
            self.experts.scales_input,
        )

    def forward(self, x_TD: Tensor, batch: LoRABatch | None, router_x_TD: Tensor | None = None) -> LinearOutput:
        """Returns the mixture's output on this rank. router_x is the router's input, if that is not x."""
        assert self._matrices is not None
        recorded_TK = None if self.recorded_TK is None else self.recorded_TK[: len(x_TD)]
        if isinstance(self.few_tokens, FewTokenMixture):
            return few_token_mixture(x_TD, self.few_tokens, recorded_TK)
        routing = self._routing(x_TD if router_x_TD is None else router_x_TD, batch, recorded_TK)
        adapters = None
        if batch is not None and batch.has_experts and self.lora is not None:
            adapters = self.lora[0].in_step(batch), self.lora[1].in_step(batch)
        shared = None if self.shared is None else self.shared(x_TD, batch)
        if self.latent is None:
            return LinearOutput(experts_mlp(x_TD, routing, self._matrices, adapters, shared))
        into, out = self.latent
        latent_TL = apply_affine(into(x_TD, batch))
        y_TD = apply_affine(out(experts_mlp(latent_TL, routing, self._matrices, adapters, None), batch))
        return LinearOutput(y_TD if shared is None else y_TD.add_(shared.y_TD))

    @property
    def are_tiled(self) -> bool:
        """Whether the experts have codes of four bits that the CUDA kernels read."""
        assert self._matrices is not None
        return self._matrices.are_tiled

    def _routing(self, x_TD: Tensor, batch: LoRABatch | None, out_TK: Tensor | None) -> Routing:
        """Returns the router's choice, which is written to out_TK if there is that memory."""
        if isinstance(self.few_tokens, FewTokenRouter):
            return Routing(*few_token_choice(x_TD, self.few_tokens, out_TK))
        logits_TE = apply_affine(self.gate(x_TD.float() if self.experts.router_float32 else x_TD, batch))
        return route(logits_TE, self.experts.rule, self.correction_E, self.scale_E, out_TK)

    def for_few_tokens(self, num_tokens: int, early: bool) -> FewTokenMixture | FewTokenRouter | None:
        """Returns what the kernels for few tokens read: those of the whole mixture, or of its router, or None.

        num_tokens: At most MOST_TOKENS.
        """
        experts, gate_up_EUD, down_EDI = self.experts, self.gate_up_EUD, self.down_EDI
        if experts.router_bias or type(self.gate.weight) is not PlainWeight:  # A FixedWeight's bits must not change.
            return None
        weight_ED = self.gate.weight.dequantized()
        router = FewTokenRouter(weight_ED, experts.rule, self.correction_E, self.scale_E, early)
        is_other = experts.biases or experts.scales_input or not experts.is_gated or self.latent is not None
        if is_other or experts.beside is not None:
            return router
        shared = None if self.shared is None else self.shared.weights
        if self.shared is not None and shared is None:
            return router
        mixture = FewTokenMixture(router, _plain(gate_up_EUD), _plain(down_EDI), experts.activation, shared)
        return mixture if serves_tokens(mixture, num_tokens) else router

    def schemes(self) -> list[Scheme | None]:
        """Returns the schemes of gate_up and down. None means that they are plain."""
        weights = self.gate_up_EUD, self.down_EDI
        return [weight.scheme if isinstance(weight, ExpertCodes) else None for weight in weights]

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears beside the experts, in the order of ExpertsConfig.packed."""
        of_shared = [] if self.shared is None else self.shared.packed_linears()
        of_latent = [] if self.latent is None else [cast(PackedLinear, linear) for linear in self.latent]
        return [self.gate, *of_latent, *of_shared]

    def _vector(self, name: str | None, device: torch.device) -> nn.Parameter | None:
        return None if name is None else parameter(self.experts.count, dtype=torch.float32, device=device)


def _plain(matrix: ExpertMatrix) -> ExpertMatrix:
    """Returns the tensor of a plain parameter."""
    return matrix if isinstance(matrix, ExpertCodes) else matrix.data


def _matrix_of(linear: PackedLinear) -> SharedMatrix | None:
    """Returns a linear's weight as the kernels for few tokens take it, or None if they do not."""
    weight = linear.weight
    if isinstance(weight, (ScaledWeight, TiledWeight)):
        return weight
    return weight.dequantized() if type(weight) is PlainWeight else None
