"""A mixture of experts for the few tokens of a captured decode step without adapters, in four launches.

With few tokens a mixture takes as long as its launches, not its bytes. So the first launch computes the router's
logits and the shared expert's gate, and the second one chooses. The third computes gate and up of the chosen experts
and of the shared expert, with the activation. The fourth computes their down, times the weights; the reader adds the
experts' outputs. Mixtures whose experts other kernels compute may use the first two alone.
On CUDA these are kernels/moe/few_tokens_choice_triton.py, and few_tokens_experts_triton.py or, for quantized experts,
few_tokens_codes_cuda.py.
"""

# T tokens · E experts · K experts a token · J = K, or K + 1 with a shared expert · D hidden size
# I intermediate size · U = 2 I rows of gate_up

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.moe.expert_activation import ExpertActivation
from lorafleet.kernels.moe.expert_codes import ExpertCodes, ExpertMatrix
from lorafleet.kernels.moe.moe_torch import PairsByExpert, SharedOutput, route_torch
from lorafleet.kernels.moe.routing_rule import RoutingRule
from lorafleet.kernels.quant.scaled_weight import ScaledWeight
from lorafleet.kernels.quant.tiled_weight import TiledWeight

MOST_TOKENS = 16  # Every program has rows for so many tokens.
SharedMatrix = Tensor | ScaledWeight | TiledWeight


@dataclass(frozen=True, slots=True)
class FewTokenRouter:
    """The weights of a router, and how it chooses."""

    router_ED: Tensor
    rule: RoutingRule
    correction_E: Tensor | None  # float32, as in route(), like the next one
    scale_E: Tensor | None
    early: bool = False  # Launches start before the kernel ahead has ended (programmatic dependent launch).


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The weights of the shared expert."""

    gate_up_UD: SharedMatrix
    down_DI: SharedMatrix
    gate_1D: Tensor | None  # The linear whose sigmoid multiplies the output; None: the output counts once.


@dataclass(frozen=True, slots=True)
class FewTokenMixture:
    """The weights of a mixture, all contiguous. They have one dtype, but for a router in float32.

    The experts and the shared expert are plain or quantized.
    """

    router: FewTokenRouter
    gate_up_EUD: ExpertMatrix
    down_EDI: ExpertMatrix
    activation: ExpertActivation  # one with a gate
    shared: SharedWeights | None

    @property
    def num_summands(self) -> int:
        """The number of experts whose outputs are added for a token, J."""
        return self.router.rule.per_token + (self.shared is not None)


def few_token_choice(x_TD: Tensor, router: FewTokenRouter, out_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the experts that the router chooses for at most MOST_TOKENS tokens, int32 [T, K], and their weights,
    float32 [T, K].

    x may have a shorter dtype than the router. out_TK is the int32 memory for the choice; None makes new memory.
    """
    assert 0 < len(x_TD) <= MOST_TOKENS
    if x_TD.is_cuda:
        from lorafleet.kernels.moe.few_tokens_choice_triton import few_token_choice_triton  # optional on a CPU

        return few_token_choice_triton(x_TD, router, None, out_TK)
    return _choice_torch(x_TD, router, out_TK)


def few_token_mixture(x_TD: Tensor, mixture: FewTokenMixture, out_TK: Tensor | None = None) -> LinearOutput:
    """Returns the mixture's output for as many tokens as serves_tokens() allows. On CUDA it is in float32 sums, one for
    each expert.

    out_TK is the int32 memory for the router's choice; None makes new memory.
    """
    assert 0 < len(x_TD) <= MOST_TOKENS
    if x_TD.is_cuda and isinstance(mixture.gate_up_EUD, ExpertCodes):
        from lorafleet.kernels.moe.few_tokens_codes_cuda import few_token_codes_cuda  # optional on a CPU

        return few_token_codes_cuda(x_TD, mixture, out_TK)
    if x_TD.is_cuda:
        from lorafleet.kernels.moe.few_tokens_experts_triton import few_token_mixture_triton  # optional on a CPU

        return few_token_mixture_triton(x_TD, mixture, out_TK)
    return few_token_mixture_torch(x_TD, mixture, out_TK)


def serves_tokens(mixture: FewTokenMixture, num_tokens: int) -> bool:
    """Returns whether few_token_mixture() computes the mixture for so many tokens.

    On a CPU it computes every mixture for MOST_TOKENS. With quantized experts it computes fewer on a GPU.
    """
    shared = () if mixture.shared is None else (mixture.shared.gate_up_UD, mixture.shared.down_DI)
    experts = (mixture.gate_up_EUD, mixture.down_EDI)
    if all(isinstance(matrix, Tensor) for matrix in (*experts, *shared)) or not mixture.router.router_ED.is_cuda:
        return num_tokens <= MOST_TOKENS
    from lorafleet.kernels.moe.few_tokens_codes_cuda import serves  # optional on a CPU

    return serves(mixture, num_tokens)


def few_token_mixture_torch(x_TD: Tensor, mixture: FewTokenMixture, out_TK: Tensor | None = None) -> LinearOutput:
    expert_TK, weight_TK = _choice_torch(x_TD, mixture.router, out_TK)
    shared, output = mixture.shared, None
    if shared is not None:
        always_T1 = torch.zeros(len(x_TD), 1, dtype=torch.int32)
        whole = PairsByExpert.of(always_T1)
        gate_up = whole.linear(x_TD, _values(shared.gate_up_UD)[None])
        inner_TI = whole.activate(gate_up, mixture.activation, None)
        gate_T1 = None if shared.gate_1D is None else F.linear(x_TD, shared.gate_1D)
        output = SharedOutput(whole.linear(inner_TI, _values(shared.down_DI)[None]).y_NO, gate_T1)
    pairs = PairsByExpert.of(expert_TK)
    inner_NI = pairs.activate(pairs.linear(x_TD, mixture.gate_up_EUD), mixture.activation, None)
    return LinearOutput(pairs.combine(pairs.linear(inner_NI, mixture.down_EDI), weight_TK, None, output))


def _choice_torch(x_TD: Tensor, router: FewTokenRouter, out_TK: Tensor | None) -> tuple[Tensor, Tensor]:
    logits_TE = F.linear(x_TD.to(router.router_ED.dtype), router.router_ED)
    expert_TK, weight_TK = route_torch(logits_TE, router.rule, router.correction_E, router.scale_E)
    return expert_TK if out_TK is None else out_TK.copy_(expert_TK), weight_TK


def _values(matrix: SharedMatrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.dequantized()
