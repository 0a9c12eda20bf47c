"""The dense MLP of one decoder layer, with a gate or without."""

# T tokens · D hidden size · I this rank's intermediate size · U numbers of gate and up together

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.gated_mul import activated, gated_mul
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.linear.split_linear import gated_linear
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.bases.layer_config import MLPConfig
from lorafleet.workers.models.layers import PackedLinear, parameter
from lorafleet.workers.tp.group import TPGroup


class MLP(nn.Module):
    """This rank's part of the MLP. `config` has its sizes. up_proj includes the gate, if there is one."""

    def __init__(
        self, config: MLPConfig, hidden_size: int, group: TPGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.config = config
        up, [down] = config.packed(hidden_size)
        self.up_proj = PackedLinear.of(up, dtype, device)
        # alpha_p, alpha_n, beta and eps of the activation xielu, as the checkpoint stores them
        self.numbers = parameter(4, dtype=dtype, device=device) if config.activation == "xielu" else None
        self.down_proj = PackedLinear.of([down], dtype, device, adds_bias=group.rank == 0)
        self._group = group
        # rounded to the model's dtype
        self._deviations = torch.tensor(NormalDist().inv_cdf(config.sparsity or 0.5), dtype=dtype).item()

    def forward(self, x_TD: Tensor, lora: LoRABatch | None) -> LinearOutput:
        out: LinearOutput = self.down_proj(self._inner(x_TD, lora), lora)
        if self.config.out_multiplier != 1.0:
            out = LinearOutput(apply_affine(out).mul_(self.config.out_multiplier))
        return out

    def _inner(self, x_TD: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns the input of the second GEMM, [T, I]."""
        shape = self.up_proj.shape
        if shape is not None and shape.gated and lora is None and self._is_plain_silu:
            return gated_linear(x_TD, self.up_proj.weight.dequantized(), shape)
        up = self.up_proj(x_TD, lora)
        if self.config.sparsity:
            up = LinearOutput(self._thinned(apply_affine(up)))
        if self.config.gate_multiplier != 1.0:
            up_TU = apply_affine(up)
            up_TU[:, : up_TU.shape[1] // 2] *= self.config.gate_multiplier
            up = LinearOutput(up_TU)
        if self.config.gate_name is None:
            return activated(up, self.config.activation, self.numbers)
        return gated_mul(up, self.config.activation)

    @property
    def _is_plain_silu(self) -> bool:
        """Whether nothing but SiLU(gate) * up stands between the GEMMs."""
        config = self.config
        has_bias = self.up_proj.bias is not None
        scaled = config.sparsity or config.gate_multiplier != 1.0
        return config.gate_name is not None and config.activation == "silu" and not (scaled or has_bias)

    def _thinned(self, up_TU: Tensor) -> Tensor:
        """Reduces the gate in the first half of each row by its quantile, in place. What is below that becomes zero.

        The ranks sum what mean and deviation need. A kernel of it could be joined with gated_mul on one rank.
        """
        gate_TI = up_TU[:, : up_TU.shape[1] // 2]
        size = gate_TI.shape[1] * self._group.size
        mean_T1 = self._group.all_reduce(gate_TI.float().sum(-1, keepdim=True)) / size
        squares_T1 = self._group.all_reduce((gate_TI.float() - mean_T1).square().sum(-1, keepdim=True))
        cutoff_T1 = mean_T1 + (squares_T1 / size).sqrt() * self._deviations
        gate_TI.sub_(cutoff_T1.to(gate_TI.dtype)).relu_()
        return up_TU
