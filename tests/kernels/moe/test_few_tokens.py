"""A mixture's kernels for few tokens against a loop over tokens and their experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.moe.expert_activation import ClampedSwiGLU, ExpertActivation
from lorafleet.kernels.moe.few_tokens import (
    FewTokenMixture,
    FewTokenRouter,
    SharedWeights,
    few_token_choice,
    few_token_mixture,
)
from lorafleet.kernels.moe.routing_rule import ExpertGroups, RoutingRule
from tests.kernels.harness import needs_triton, poison_free_memory, run_interpreted
from tests.kernels.machine_code import nvdisasm, reads_of_compiled

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# The rule, the shared expert's intermediate size and whether it has a gate, and the experts' activation.
KINDS: dict[str, tuple[RoutingRule, int, bool, ExpertActivation]] = {
    "qwen3": (RoutingRule(2, True), 0, False, "silu"),
    "qwen3.5": (RoutingRule(3, True), 12, True, "silu"),
    "deepseek": (RoutingRule(3, True, "sigmoid", ExpertGroups(3, 2, "top_two"), 2.5), 20, False, "gelu_tanh"),
    "clamped": (RoutingRule(1, False, "sigmoid"), 12, True, ClampedSwiGLU()),
}
LARGE = 2048, 512, 256  # hidden size, intermediate size, experts of Qwen3.5-35B-A3B


def make_case(
    kind: str,
    tokens: int,
    sizes: tuple[int, int, int] = (40, 12, 9),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    early: bool = False,
) -> tuple[Tensor, FewTokenMixture]:
    """Returns x and a mixture whose first expert is the favorite of most tokens."""
    rule, shared_inner, has_gate, activation = KINDS[kind]
    hidden, inner, experts = sizes
    generator = torch.Generator(device).manual_seed(len(kind))

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5).to(dtype)

    x = 8 * normal(tokens, hidden)
    router = normal(experts, hidden)
    router[0] += 0.2 * x.float().mean(0).to(dtype)
    shared = None
    if shared_inner:
        shared_inner *= inner // 12
        gate = normal(1, hidden) if has_gate else None
        shared = SharedWeights(normal(2 * shared_inner, hidden), normal(hidden, shared_inner), gate)
    is_deepseek = rule.groups is not None
    choice = FewTokenRouter(
        router.float() if is_deepseek else router,
        rule,
        normal(experts, dtype=torch.float32) if is_deepseek else None,
        normal(experts, dtype=torch.float32) + 1 if kind == "clamped" else None,
        early,
    )
    mixture = FewTokenMixture(
        choice,
        normal(experts, 2 * inner, hidden),
        normal(experts, hidden, inner),
        activation,
        shared,
    )
    return x, mixture


def activated(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    gate, up = gate_up.chunk(2)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    return (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7))


def scores_of(x: Tensor, router: FewTokenRouter) -> tuple[Tensor, Tensor]:
    """Returns a token's scores of all experts, and those by which they are chosen."""
    logits = (router.router_ED.double() @ x.double()).to(router.router_ED.dtype).double()
    scores = logits.softmax(0) if router.rule.scores == "softmax" else logits.sigmoid()
    choice = scores if router.correction_E is None else scores + router.correction_E.double()
    if router.rule.groups is not None:
        groups = choice.view(router.rule.groups.count, -1)
        worst = groups.topk(2).values.sum(1).argmin()  # two of three groups are kept
        choice = groups.index_fill(0, worst, -torch.inf).flatten()
    return scores, choice


def check_choice(x: Tensor, router: FewTokenRouter, expert_TK: Tensor, weight_TK: Tensor) -> None:
    for own, experts, found in zip(x, expert_TK.long(), weight_TK, strict=True):
        scores, choice = scores_of(own, router)
        rest = choice.index_fill(0, experts, -torch.inf)
        least = choice[experts].min()
        assert len(set(experts.tolist())) == router.rule.per_token and rest.max() <= least + 1e-2 * least.abs()
        weights = scores[experts]
        if router.rule.sums_to_one:
            weights = weights / weights.sum()
        weights = weights * router.rule.scaling
        if router.scale_E is not None:
            weights = weights * router.scale_E[experts]
        torch.testing.assert_close(found.double(), weights, atol=1e-2 if x.dtype == torch.bfloat16 else 1e-5, rtol=1e-5)


def check(x: Tensor, mixture: FewTokenMixture, expert_TK: Tensor, weight_TK: Tensor, out: LinearOutput) -> None:
    """expert_TK is the mixture's own choice, and weight_TK are the weights of these experts."""
    found = out.y_TO if out.sums is None else out.sums.part_KTO.sum(0).to(x.dtype)
    assert found.shape == x.shape and found.dtype == x.dtype
    shared = mixture.shared
    for own, experts, weights, y in zip(x, expert_TK.tolist(), weight_TK.double(), found, strict=True):
        expected = torch.zeros_like(own, dtype=torch.float64)
        for weight, e in zip(weights, experts, strict=True):
            inner = activated(mixture.gate_up_EUD[e].double() @ own.double(), mixture.activation)
            expected += weight * (mixture.down_EDI[e].double() @ inner)
        if shared is not None:
            inner = activated(shared.gate_up_UD.double() @ own.double(), mixture.activation)
            whole = shared.down_DI.double() @ inner
            expected += whole if shared.gate_1D is None else whole * (shared.gate_1D.double() @ own.double()).sigmoid()
        tolerance = TOLERANCE[x.dtype] * float(expected.abs().max())
        torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=0)


def run(x: Tensor, mixture: FewTokenMixture, choose=few_token_choice, compute=few_token_mixture) -> None:
    router = mixture.router
    if x.is_cuda:
        poison_free_memory()
    chosen_TK, weight_TK = choose(x, router)
    check_choice(x, router, chosen_TK, weight_TK)
    expert_TK = torch.full((len(x), router.rule.per_token), -1, dtype=torch.int32, device=x.device)
    out = compute(x, mixture, expert_TK)
    assert torch.equal(chosen_TK, expert_TK)
    check(x, mixture, expert_TK, weight_TK, out)


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin(kind: str) -> None:
    run(*make_case(kind, 5))


def test_interpreted_kernels() -> None:
    run_interpreted("""
        from lorafleet.kernels.moe import few_tokens_choice_triton as choice, few_tokens_experts_triton as experts
        from tests.kernels.moe import test_few_tokens as cases

        choice.ONE_TOKEN_BLOCKS, choice.BLOCKS = (4, 32, 1), (4, 32, 4)
        experts.ONE_TOKEN = experts.Blocks(8, 32), experts.Blocks(16, 16)
        experts.SOME_TOKENS = experts.Blocks(8, 32), experts.Blocks(16, 32)
        for kind in cases.KINDS:
            for tokens in (1, 5):
                cases.run(
                    *cases.make_case(kind, tokens),
                    lambda x, router: choice.few_token_choice_triton(x, router, None, None),
                    experts.few_token_mixture_triton,
                )
    """)


def test_a_token_that_has_an_expert_twice_writes_only_its_own_rows() -> None:
    """A router chooses so for a token of NaN."""
    run_interpreted("""
        import torch
        from lorafleet.kernels.moe import few_tokens_experts_triton as experts
        from tests.kernels.moe.test_few_tokens import make_case

        experts.SOME_TOKENS = experts.Blocks(8, 32), experts.Blocks(16, 32)
        x, mixture = make_case("qwen3.5", 5)
        weight_TJ = torch.ones(5, 4)

        def of_shared(*chosen):
            expert_TK = torch.tensor([[3, 1, 2], [0, 1, 2], [*chosen], [4, 5, 6], [3, 5, 6]], dtype=torch.int32)
            experts.few_token_choice_triton = lambda *_: (expert_TK, weight_TJ)
            return experts.few_token_mixture_triton(x, mixture, None).sums.part_KTO[3]

        assert torch.equal(of_shared(7, 8, 8), of_shared(7, 8, 6))
    """)


@needs_triton
def test_a_mixture_without_a_shared_expert_compiles(tmp_path: Path) -> None:
    if nvdisasm() is None:
        pytest.skip("Triton's package has no nvdisasm")
    compiled = reads_of_compiled(
        """
        import torch
        from lorafleet.kernels.moe.few_tokens_experts_triton import few_token_mixture_triton
        from tests.kernels.moe.test_few_tokens import make_case

        few_token_mixture_triton(*make_case("qwen3", 1, (64, 32, 4), torch.bfloat16, early=True), None)
        """,
        tmp_path,
    )
    assert [name for name, _ in compiled] == ["_logits_kernel", "_route_kernel", "_inner_kernel", "_outer_kernel"]


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_all_kinds(self, kind: str, dtype: torch.dtype) -> None:
        for tokens in (1, 2, 7, 16):
            run(*make_case(kind, tokens, (264, 60, 12), dtype, "cuda", early=True))

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_token_of_nan_disturbs_no_other(self, kind: str) -> None:
        x, mixture = make_case(kind, 7, (264, 60, 12), torch.float32, "cuda", early=True)
        wanted = few_token_mixture(x, mixture).sums
        x[2] = torch.nan
        expert_TK, _ = few_token_choice(x, mixture.router)
        found = few_token_mixture(x, mixture).sums
        assert wanted is not None and found is not None
        assert expert_TK.min() >= 0 and expert_TK.max() < len(mixture.router.router_ED)
        others = [0, 1, 3, 4, 5, 6]
        assert torch.equal(found.part_KTO[:, others], wanted.part_KTO[:, others])

    @pytest.mark.parametrize("tokens", [1, 8, 16])
    def test_a_large_mixture(self, tokens: int) -> None:
        run(*make_case("qwen3.5", tokens, LARGE, torch.bfloat16, "cuda", early=True))
