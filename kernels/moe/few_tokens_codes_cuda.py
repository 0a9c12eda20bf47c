"""Compiles and launches few_tokens_codes.cu: quantized experts of a decode step in two launches after the router's two.
kernels/moe/few_tokens.py has the twin.

Codes of eight bits are e4m3 in a ScaledWeight, and those of four bits lie in a TiledWeight. A shared expert has to have
the same kind of codes as the others.
"""

# T tokens · K experts a token · J = K, or K + 1 with a shared expert · D hidden size · I intermediate size

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput, SplitSums
from lorafleet.kernels.moe.expert_activation import ExpertActivation, is_gated
from lorafleet.kernels.moe.expert_activation_triton import formula_of
from lorafleet.kernels.moe.expert_codes import ExpertCodes
from lorafleet.kernels.moe.few_tokens import FewTokenMixture
from lorafleet.kernels.moe.few_tokens_choice_triton import few_token_choice_triton
from lorafleet.kernels.nvrtc import CudaCode, CudaCodeError, machine_code
from lorafleet.kernels.quant.code_operands import MatrixArguments, operands_source
from lorafleet.kernels.quant.code_tiles import TILE
from lorafleet.kernels.quant.four_bit_cuda import DTYPE_INDEX, TABLE_BYTES
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_weight import ScaledWeight
from lorafleet.kernels.quant.tiled_weight import TiledWeight

log = logging.getLogger(__name__)

WARPS = 16
COLUMNS = 8  # tokens that the kernels can compute
SERVED_TOKENS = {8: 8, 4: 1}  # tokens for which they are faster, by bits of a code: benchmarks/NOTES.md
MOST_PAIRS = 256
# Bytes of shared memory for blocks in flight, sums and the choice, by bits of a code. Four bits have a table, too.
ROOM = {8: 0x38000, 4: 0x28000}
LEAST_CAPABILITY = (9, 0)
FORMULAS = ("silu", "gelu_tanh", "clamped_swiglu")
TEAMS = {"ONE_INNER": 16, "INNER": 4, "ONE_OUTER": 2, "OUTER": 4}  # warps of a team
MOST_DEPTH = 3  # blocks of a warp that have room, the one that is multiplied and those in flight
NAMES = "inner_one", "inner", "outer_one", "outer"
Codes = ScaledWeight | TiledWeight


class FewTokenArguments(ctypes.Structure):
    """The arguments of all kernels: struct FewTokens in few_tokens_codes.cu."""

    _fields_ = (
        ("routed", MatrixArguments),
        ("shared", MatrixArguments),
        *((name, ctypes.c_void_p) for name in ("pairs", "x", "shared_x", "experts")),
        *((name, ctypes.c_void_p) for name in ("weights", "inner", "shared_inner", "sums")),
        *((name, ctypes.c_int) for name in ("tokens", "per_token", "outputs", "shared_outputs")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    )


Launch = Callable[[int, FewTokenArguments], None]  # Takes the number of programs.


@dataclass(frozen=True, slots=True)
class CodesVariant:
    """The weights and numbers that one compilation of few_tokens_codes.cu serves."""

    dtype: torch.dtype  # of x: bfloat16 or float16
    bits: int
    scale_dtype: torch.dtype
    groups_a_block: int  # as in FourBitVariant
    has_zeros: bool
    formula: str
    early: bool

    @property
    def warps(self) -> int:
        """Returns the warps of a program. The scales and zeros of small groups leave shared memory for fewer."""
        return WARPS if self.groups_a_block * (1 + self.has_zeros) <= 2 else WARPS // 2

    @property
    def shared_bytes(self) -> int:
        """Returns the bytes of a program's shared memory."""
        return ROOM[self.bits] + (TABLE_BYTES if self.bits == 4 else 0)

    @property
    def options(self) -> list[str]:
        return [
            "--std=c++17",
            f"-DIS_HALF={int(self.dtype == torch.float16)}",
            f"-DBITS={self.bits}",
            f"-DSCALE={DTYPE_INDEX[self.scale_dtype]}",
            f"-DSUB={self.groups_a_block}",
            f"-DZEROS={int(self.has_zeros)}",
            f"-DFORMULA={FORMULAS.index(self.formula)}",
            f"-DWARPS={self.warps}",
            f"-DROOM={ROOM[self.bits]}",
            *(f"-D{name}_TEAM={min(warps, self.warps)}" for name, warps in TEAMS.items()),
            f"-DMOST_DEPTH={MOST_DEPTH}",
        ]

    @classmethod
    def of(cls, weight: Codes, activation: ExpertActivation, early: bool) -> CodesVariant:
        formula = str(formula_of(activation)["formula"])
        if isinstance(weight, ScaledWeight):
            return cls(weight.dtype, 8, torch.float32, 1, False, formula, early)
        own = weight.variant
        return cls(own.dtype, 4, own.scale_dtype, own.groups_a_block, own.has_zeros, formula, early)


@dataclass(frozen=True, slots=True)
class CodesKernels:
    """The compiled kernels of a variant on one GPU."""

    by_name: dict[str, Launch]
    num_sms: int


def source() -> str:
    return operands_source() + Path(__file__).with_name("few_tokens_codes.cu").read_text()


def serves(mixture: FewTokenMixture, num_tokens: int) -> bool:
    """Returns whether the kernels can compute the mixture's experts, which are on a GPU, for so many tokens."""
    weights = _weights(mixture)
    if weights is None or not is_gated(mixture.activation) or mixture.router.rule.per_token * COLUMNS > MOST_PAIRS:
        return False
    variants = {CodesVariant.of(weight, mixture.activation, mixture.router.early) for weight in weights}
    if len(variants) > 1 or weights[0].dtype not in (torch.bfloat16, torch.float16):
        return False
    variant = variants.pop()
    if num_tokens > SERVED_TOKENS[variant.bits]:
        return False
    if not all(
        _is_e4m3(weight) if isinstance(weight, ScaledWeight) else _has_book(weight, weights) for weight in weights
    ):
        return False
    return codes_kernels(variant, _device(weights[0])) is not None


def codes_kernels(variant: CodesVariant, device: torch.device) -> CodesKernels | None:
    """Returns the kernels, or None if this machine cannot compile or run them. The cause is logged once."""
    return _kernels(variant, torch.cuda.current_device() if device.index is None else device.index)


@cache
def _kernels(variant: CodesVariant, index: int) -> CodesKernels | None:
    device = torch.device("cuda", index)
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return None
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # makes the device's context current in this thread
            code = CudaCode(machine_code(source(), variant.options, device))
            by_name: dict[str, Launch] = {
                name: code.kernel(name, variant.warps * 32, variant.shared_bytes, early=variant.early) for name in NAMES
            }
            return CodesKernels(by_name, torch.cuda.get_device_properties(device).multi_processor_count)
    except CudaCodeError as error:
        log.warning("quantized experts of few tokens are served by slower kernels: %s", error)
        return None


def few_token_codes_cuda(x_TD: Tensor, mixture: FewTokenMixture, out_TK: Tensor | None) -> LinearOutput:
    """Returns few_token_mixture() of a mixture for which serves() holds."""
    weights = _weights(mixture)
    assert weights is not None
    variant = CodesVariant.of(weights[0], mixture.activation, mixture.router.early)
    kernels = codes_kernels(variant, x_TD.device)
    assert kernels is not None  # or serves() would have returned False
    choice = few_token_choice_triton(x_TD, mixture.router, mixture.shared, out_TK)
    return launch(x_TD, mixture, choice, kernels)


def launch(
    x_TD: Tensor,
    mixture: FewTokenMixture,
    choice: tuple[Tensor, Tensor],
    kernels: CodesKernels,
) -> LinearOutput:
    """Returns the mixture's output for at most COLUMNS tokens, with the experts int32 [T, K] and the weights float32
    [T, J] of a choice."""
    weights, (expert_TK, weight_TJ) = _weights(mixture), choice
    assert weights is not None and isinstance(mixture.down_EDI, ExpertCodes)
    gate_up, down, *of_shared = weights
    (num_tokens, size), per_token, inner = x_TD.shape, expert_TK.shape[1], mixture.down_EDI.shape[2]
    shared_inner = of_shared[0].num_outputs // 2 if of_shared else 0
    assert x_TD.is_contiguous() and x_TD.dtype == gate_up.dtype and x_TD.data_ptr() % 16 == 0
    assert expert_TK.is_contiguous() and weight_TJ.is_contiguous() and weight_TJ.shape[1] == mixture.num_summands
    assert num_tokens <= COLUMNS
    assert mixture.down_EDI.shape[1] == size
    inner_NI = x_TD.new_empty(per_token * num_tokens, inner)
    shared_TI = x_TD.new_empty(num_tokens, shared_inner)
    part_JTD = torch.empty(mixture.num_summands, num_tokens, size, dtype=torch.float32, device=x_TD.device)
    formula = formula_of(mixture.activation)
    arguments = FewTokenArguments(
        routed=_matrix(gate_up),
        x=x_TD.data_ptr(),
        shared_x=x_TD.data_ptr(),
        experts=expert_TK.data_ptr(),
        weights=weight_TJ.data_ptr(),
        inner=inner_NI.data_ptr(),
        shared_inner=shared_TI.data_ptr(),
        sums=part_JTD.data_ptr(),
        tokens=num_tokens,
        per_token=per_token,
        outputs=inner,
        shared_outputs=shared_inner,
        alpha=float(formula["alpha"]),
        limit=float(formula["limit"]),
    )
    if isinstance(gate_up, TiledWeight):
        arguments.pairs = gate_up.pairs.data_ptr()
    if of_shared:
        arguments.shared = _matrix(of_shared[0])
    kind = "_one" if num_tokens == 1 else ""
    kernels.by_name[f"inner{kind}"](kernels.num_sms, arguments)
    arguments.routed, arguments.x, arguments.outputs = _matrix(down), inner_NI.data_ptr(), size
    if of_shared:
        arguments.shared, arguments.shared_x, arguments.shared_outputs = (
            _matrix(of_shared[1]),
            shared_TI.data_ptr(),
            size,
        )
    kernels.by_name[f"outer{kind}"](kernels.num_sms, arguments)
    return LinearOutput(torch.empty_like(x_TD), sums=SplitSums(part_JTD, mixture.router.early))


def _weights(mixture: FewTokenMixture) -> list[Codes] | None:
    """Returns the weights of gate_up and down, then those of the shared expert; None if one has other codes."""
    found: list[object] = [
        matrix.weight if isinstance(matrix, ExpertCodes) else None for matrix in (mixture.gate_up_EUD, mixture.down_EDI)
    ]
    if mixture.shared is not None:
        found += [mixture.shared.gate_up_UD, mixture.shared.down_DI]
    weights = [weight for weight in found if isinstance(weight, (ScaledWeight, TiledWeight))]
    return weights if len(weights) == len(found) else None


def _is_e4m3(weight: ScaledWeight) -> bool:
    """Returns whether the kernels read the codes."""
    return weight.code_OD.dtype == FP8 and weight.group % TILE == weight.code_OD.shape[1] % TILE == 0


def _has_book(weight: TiledWeight, weights: list[Codes]) -> bool:
    """Returns whether all weights have the same values for codes, since a launch has one table."""
    return all(isinstance(other, TiledWeight) and torch.equal(weight.pairs, other.pairs) for other in weights)


def _matrix(weight: Codes) -> MatrixArguments:
    if isinstance(weight, ScaledWeight):
        return MatrixArguments.of(weight.code_OD, weight.scale_OG, None, weight.code_OD.shape[1], weight.group)
    return MatrixArguments.of(weight.codes, weight.scales, weight.zeros, weight.num_inputs, weight.group)


def _device(weight: Codes) -> torch.device:
    return weight.code_OD.device if isinstance(weight, ScaledWeight) else weight.codes.device
