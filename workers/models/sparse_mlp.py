"""A mixture of experts in place of a layer's MLP: a router chooses some experts for each token.

Under tensor parallelism each rank has a part of every expert. It has the whole router, whose choice is the same on all
ranks.
"""

# T tokens · D hidden size · I this rank's intermediate size of an expert · E experts

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.moe.expert_lora import ExpertLoRA
from lorafleet.kernels.moe.moe import experts_mlp, route
from lorafleet.workers.bases.model_families import ExpertsConfig
from lorafleet.workers.models.layers import PackedLinear, parameter


class SparseMLP(nn.Module):
    """The experts of one layer and their router.

    gate_up_E2ID has, for each expert, the rows of its gate_proj and then of its up_proj. lora is for gate_up and for
    down. It is None until adapters are enabled.
    """

    def __init__(self, hidden_size: int, experts: ExpertsConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        inner = experts.intermediate_size
        self.experts = experts
        self.gate = PackedLinear(hidden_size, (experts.count,), False, dtype, device)
        self.gate_up_E2ID = parameter(experts.count, 2 * inner, hidden_size, dtype=dtype, device=device)
        self.down_EDI = parameter(experts.count, hidden_size, inner, dtype=dtype, device=device)

        self.lora: tuple[ExpertLoRA, ExpertLoRA] | None = None

    def forward(self, x_TD: Tensor, batch: LoRABatch | None) -> LinearOutput:
        logits_TE = apply_affine(self.gate(x_TD, batch))
        routing = route(logits_TE, self.experts.per_token, self.experts.sums_to_one)
        adapters = None
        if batch is not None and batch.has_experts and self.lora is not None:
            adapters = self.lora[0].in_step(batch), self.lora[1].in_step(batch)
        return LinearOutput(experts_mlp(x_TD, routing, self.gate_up_E2ID, self.down_EDI, adapters))
