"""Quantized experts of few tokens: the CUDA kernels, emulated on this CPU, against a loop over tokens and experts."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.moe import few_tokens_codes_cuda
from lorafleet.kernels.moe.expert_activation import ClampedSwiGLU, ExpertActivation
from lorafleet.kernels.moe.expert_codes import ExpertCodes
from lorafleet.kernels.moe.few_tokens import (
    MOST_TOKENS,
    FewTokenMixture,
    FewTokenRouter,
    SharedWeights,
    few_token_choice,
    few_token_mixture,
    serves_tokens,
)
from lorafleet.kernels.moe.few_tokens_codes_cuda import (
    COLUMNS,
    NAMES,
    SERVED_TOKENS,
    CodesKernels,
    CodesVariant,
    Launch,
    launch,
)
from lorafleet.kernels.moe.routing_rule import RoutingRule
from lorafleet.kernels.quant import code_operands
from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_weight import ScaledScheme, ScaledWeight
from lorafleet.kernels.quant.tiled_weight import TiledWeight
from tests.kernels.harness import poison_free_memory
from tests.kernels.moe.test_few_tokens import activated
from tests.kernels.quant.emulation import MOST_WARPS, compiled_emulation
from tests.kernels.quant.four_bit_cases import BF16, CASES, F16, random_matrix_of

SOURCE = Path(few_tokens_codes_cuda.__file__).with_name("few_tokens_codes.cu")
OPERANDS = Path(code_operands.__file__).with_suffix(".cuh")
WARPS = {
    "WARPS": MOST_WARPS,
    "ONE_INNER_TEAM": MOST_WARPS,
    "INNER_TEAM": 2,
    "ONE_OUTER_TEAM": 2,
    "OUTER_TEAM": 1,
}  # of the emulated kernels
# Each kind of codes, with the served dtype.
CODES: dict[str, tuple[Scheme, torch.dtype]] = CASES | {
    "e4m3 by rows": (ScaledScheme("fp8", FP8), BF16),
    "e4m3 by blocks": (ScaledScheme("fp8", FP8, 128), BF16),
    "e4m3 in float16": (ScaledScheme("fp8", FP8, 64), F16),
}


def matrix_of(scheme: Scheme, rows: int, inputs: int, dtype: torch.dtype, device: str) -> ScaledWeight | TiledWeight:
    """Returns a weight with random values, of which each row has a size of its own."""
    unused = Scratch(dtype, torch.device("meta"))
    if isinstance(scheme, ScaledScheme):
        weight = ScaledWeight(rows, inputs, dtype, torch.device(device), unused, scheme)
        generator = torch.Generator().manual_seed(rows)
        matrix = scheme.quantize(torch.randn(rows, inputs, generator=generator) * (1 + torch.arange(rows)[:, None] % 3))
    else:
        weight = TiledWeight(scheme, rows, inputs, dtype, torch.device(device), unused, of_experts=True)
        matrix = random_matrix_of(scheme, rows, inputs)
    weight.fill(0, matrix, (slice(0, rows), slice(0, inputs)))
    return weight


def make_mixture(
    case: str,
    sizes: tuple[int, int, int],
    per_token: int,
    activation: ExpertActivation = "silu",
    shared_inner: int = 0,
    device: str = "cpu",
    early: bool = False,
) -> FewTokenMixture:
    (hidden, inner, experts), (scheme, dtype) = sizes, CODES[case]

    def of_experts(outputs: int, inputs: int) -> ExpertCodes:
        codes = ExpertCodes(scheme, (experts, outputs, inputs), dtype, torch.device("meta"))
        codes.weight = matrix_of(scheme, experts * outputs, inputs, dtype, device)
        return codes

    generator = torch.Generator().manual_seed(7)
    router_ED = (torch.randn(experts, hidden, generator=generator) / hidden**0.5).to(device, dtype)
    shared = None
    if shared_inner:
        of_shared = [
            matrix_of(scheme, *shape, dtype, device) for shape in ((2 * shared_inner, hidden), (hidden, shared_inner))
        ]
        gate_1D = torch.randn(1, hidden, generator=generator).to(device, dtype)
        shared = SharedWeights(of_shared[0], of_shared[1], gate_1D)
    router = FewTokenRouter(router_ED, RoutingRule(per_token, True), None, None, early)
    return FewTokenMixture(router, of_experts(2 * inner, hidden), of_experts(hidden, inner), activation, shared)


def make_x(mixture: FewTokenMixture, tokens: int) -> Tensor:
    router_ED = mixture.router.router_ED
    x_TD = torch.randn(tokens, router_ED.shape[1], generator=torch.Generator().manual_seed(tokens))
    return x_TD.div(router_ED.shape[1] ** 0.5).to(router_ED.device, router_ED.dtype)


def expected(x_TD: Tensor, mixture: FewTokenMixture, expert_TK: Tensor, weight_TJ: Tensor) -> Tensor:
    """weight_TJ has the weight of the shared expert behind those of the chosen ones, if there is one."""
    out_TD = torch.zeros(x_TD.shape, dtype=torch.float64, device=x_TD.device)
    for token, x_D in enumerate(x_TD.double()):
        pairs = [(mixture.gate_up_EUD[e], mixture.down_EDI[e]) for e in expert_TK[token].tolist()]
        if mixture.shared is not None:
            assert not isinstance(mixture.shared.gate_up_UD, Tensor) and not isinstance(mixture.shared.down_DI, Tensor)
            pairs.append((mixture.shared.gate_up_UD.dequantized(), mixture.shared.down_DI.dequantized()))
        for weight, (gate_up, down) in zip(weight_TJ[token].double(), pairs, strict=True):
            inner = activated(gate_up.double() @ x_D, mixture.activation).to(x_TD.dtype).double()
            out_TD[token] += weight * (down.double() @ inner)
    return out_TD


def check(found: Tensor, wanted: Tensor) -> None:
    # The book of NF4 is rounded to the served dtype, and so is what lies between the two linears.
    assert (found.double() - wanted).norm() < 0.01 * wanted.norm()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def emulated_kernels(variant: CodesVariant, folder: Path, programs: int) -> CodesKernels:
    fewer = [f"-D{name}={warps}" for name, warps in WARPS.items()]
    options = [
        option for option in variant.options if option.startswith("-D") and option.split("=")[0][2:] not in WARPS
    ]
    loaded = compiled_emulation([*options, *fewer], {"FEW_TOKENS_SOURCE": SOURCE, "OPERANDS_SOURCE": OPERANDS}, folder)

    def kernel(index: int) -> Launch:
        return lambda programs, arguments: loaded.emulate(index, programs, ctypes.byref(arguments))

    return CodesKernels({name: kernel(index) for index, name in enumerate(NAMES)}, programs)


@pytest.mark.parametrize(
    ("case", "activation", "shared_inner"),
    [
        ("nf4", "silu", 64),
        ("int4 with zeros, groups of 32", ClampedSwiGLU(), 0),
        ("nvfp4", "gelu_tanh", 0),
        ("e4m3 by blocks", "silu", 128),
    ],
)
def test_the_source_computes_a_mixture(
    case: str, activation: ExpertActivation, shared_inner: int, folder: Path
) -> None:
    mixture = make_mixture(case, (192, 128, 5), 2, activation, shared_inner)
    weights = few_tokens_codes_cuda._weights(mixture)
    assert weights is not None
    kernels = emulated_kernels(CodesVariant.of(weights[0], activation, early=False), folder, 2)
    for tokens in (1, COLUMNS):
        x_TD = make_x(mixture, tokens)
        expert_TK, weight_TK = few_token_choice(x_TD, mixture.router)
        weight_TJ = torch.cat([weight_TK, torch.full((tokens, int(shared_inner > 0)), 0.3)], dim=1)
        out = launch(x_TD, mixture, (expert_TK, weight_TJ), kernels)
        assert out.sums is not None
        check(out.sums.part_KTO.sum(0), expected(x_TD, mixture, expert_TK, weight_TJ))


@pytest.mark.parametrize("case", ["nf4", "e4m3 by blocks"])
def test_the_twin(case: str) -> None:
    mixture = make_mixture(case, (128, 64, 5), 2, shared_inner=64)
    assert serves_tokens(mixture, MOST_TOKENS) and not serves_tokens(mixture, MOST_TOKENS + 1)
    compare(mixture, make_x(mixture, 3))


def test_a_mixture_of_another_kind_of_codes_is_not_served() -> None:
    assert few_tokens_codes_cuda._weights(make_mixture("nf4", (64, 64, 2), 1)) is not None
    mixture = make_mixture("nf4", (64, 64, 2), 1, shared_inner=64)
    assert mixture.shared is not None and isinstance(mixture.shared.gate_up_UD, TiledWeight)
    plain = replace(mixture.shared, gate_up_UD=mixture.shared.gate_up_UD.dequantized())
    assert few_tokens_codes_cuda._weights(replace(mixture, shared=plain)) is None


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("activation", ["silu", ClampedSwiGLU()], ids=["silu", "clamped"])
    @pytest.mark.parametrize("shared_inner", [0, 128])
    @pytest.mark.parametrize("case", CODES)
    def test_all_codes(self, case: str, shared_inner: int, activation: ExpertActivation) -> None:
        mixture = make_mixture(case, (512, 192, 16), 4, activation, shared_inner, "cuda", early=True)
        served = SERVED_TOKENS[8 if "e4m3" in case else 4]
        assert serves_tokens(mixture, served) and not serves_tokens(mixture, served + 1)
        for tokens in (1, 2, 7, COLUMNS):
            compare(mixture, make_x(mixture, tokens))

    @pytest.mark.parametrize("case", ["nf4", "e4m3 by blocks"])
    def test_a_token_of_nan_disturbs_no_other(self, case: str) -> None:
        mixture = make_mixture(case, (512, 192, 16), 4, device="cuda", early=True)
        x_TD = make_x(mixture, 7)
        wanted = few_token_mixture(x_TD, mixture).sums
        x_TD[2] = torch.nan
        found = few_token_mixture(x_TD, mixture).sums
        assert wanted is not None and found is not None
        others = [0, 1, 3, 4, 5, 6]
        assert torch.equal(found.part_KTO[:, others], wanted.part_KTO[:, others])

    @pytest.mark.parametrize("case", ["nf4", "e4m3 by blocks"])
    def test_a_large_mixture(self, case: str) -> None:
        mixture = make_mixture(case, (2048, 768, 24), 8, device="cuda", early=True)
        for tokens in (1, COLUMNS):
            compare(mixture, make_x(mixture, tokens))


def compare(mixture: FewTokenMixture, x_TD: Tensor) -> None:
    if x_TD.is_cuda:
        poison_free_memory()
    router = mixture.router
    expert_TK = torch.full((len(x_TD), router.rule.per_token), -1, dtype=torch.int32, device=x_TD.device)
    out = few_token_mixture(x_TD, mixture, expert_TK)
    logits_TE = (x_TD.double() @ router.router_ED.double().T).to(x_TD.dtype).double()
    weight_TJ = logits_TE.gather(1, expert_TK.long()).softmax(1)
    if mixture.shared is not None:
        assert mixture.shared.gate_1D is not None
        weight_TJ = torch.cat([weight_TJ, (x_TD.double() @ mixture.shared.gate_1D.double().T).sigmoid()], dim=1)
    found = out.y_TO if out.sums is None else out.sums.part_KTO.sum(0)
    check(found, expected(x_TD, mixture, expert_TK, weight_TJ))
