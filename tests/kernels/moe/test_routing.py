"""The routers' choices against a loop over tokens, and what the mixture's other kernels add to their sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.moe.expert_activation import ClampedSwiGLU, ExpertActivation, activate_experts
from lorafleet.kernels.moe.moe import ExpertMatrices, Routing, experts_mlp, route
from lorafleet.kernels.moe.moe_torch import SharedOutput, combine_torch
from lorafleet.kernels.moe.routing_rule import ExpertGroups, RoutingRule
from tests.kernels.harness import poison_free_memory, run_interpreted

ACTIVATIONS: tuple[ExpertActivation, ...] = ("silu", "gelu_tanh", "relu2", ClampedSwiGLU(), ClampedSwiGLU(1.5, 0.5))
TOKENS, EXPERTS = 9, 12
# The rule, and whether the choice has a correction and the weights a scale.
RULES: dict[str, tuple[RoutingRule, bool, bool]] = {
    "qwen": (RoutingRule(3, sums_to_one=False), False, False),
    "gpt-oss": (RoutingRule(3, sums_to_one=True), False, False),
    "deepseek v3": (RoutingRule(4, True, "sigmoid", ExpertGroups(4, 2, "top_two"), 2.5), True, False),
    "deepseek v2": (RoutingRule(4, False, groups=ExpertGroups(3, 2, "max"), scaling=16.0), False, False),
    "minimax": (RoutingRule(5, True, "sigmoid"), True, False),
    "llama 4": (RoutingRule(1, False, "sigmoid"), False, False),
    "ernie": (RoutingRule(3, True), True, False),
    "phimoe": (RoutingRule(2, False, "sparsemixer", nearness=0.4), False, False),
    "gemma 4": (RoutingRule(2, True), False, True),
}


def router_case(name: str, device: str = "cpu") -> tuple[Tensor, RoutingRule, Tensor | None, Tensor | None]:
    rule, has_correction, has_scale = RULES[name]
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(TOKENS, EXPERTS, generator=generator)
    logits[0] += 60  # where sigmoids are rounded to 1
    correction = torch.randn(EXPERTS, generator=generator).to(device) if has_correction else None
    scale = torch.rand(EXPERTS, generator=generator).to(device) if has_scale else None
    return logits.to(device), rule, correction, scale


def sparsemixer(row: Tensor, rule: RoutingRule) -> Tensor:
    """Returns the weights of a token's experts, the best one first."""
    values, weights = sorted(row.tolist())[::-1], []
    for i in range(rule.per_token):
        best = values[i]
        near = [x for x in values[i:] if (best - x) / max(abs(x), best) <= rule.nearness]
        weights.append(1 / sum(math.exp(x - best) for x in near))
    return torch.tensor(weights, dtype=torch.float64)


def check_router(name: str, found: Routing) -> None:
    logits, rule, correction, scale = router_case(name)
    for t, row in enumerate(logits.double()):
        scores = row.softmax(0) if rule.scores == "softmax" else row.float().sigmoid().double()
        choice = (row if rule.groups is None and correction is None else scores).clone()
        if correction is not None:
            choice = scores + correction
        if rule.groups is not None:
            values = [sorted(group.tolist())[::-1] for group in choice.chunk(rule.groups.count)]
            ranks = [sum(group[: 2 if rule.groups.ranked_by == "top_two" else 1]) for group in values]
            kept = sorted(range(len(ranks)), key=lambda g: -ranks[g])[: rule.groups.per_token]
            for g, group in enumerate(choice.chunk(rule.groups.count)):
                if g not in kept:
                    group.fill_(-torch.inf)
        expected = choice.topk(rule.per_token).indices
        weights = scores[expected] if rule.scores != "sparsemixer" else sparsemixer(row, rule)
        if rule.sums_to_one:
            weights = weights / weights.sum()
        weights = weights * rule.scaling * (1.0 if scale is None else scale[expected])
        order = found.expert_TK[t].cpu().argsort()
        assert found.expert_TK.dtype == torch.int32 and found.weight_TK.dtype == torch.float32
        assert found.expert_TK[t].cpu()[order].tolist() == sorted(expected.tolist())
        torch.testing.assert_close(
            found.weight_TK[t].cpu()[order].double(), weights[expected.argsort()], atol=1e-6, rtol=1e-5
        )


def activation_case(
    activation: ExpertActivation, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[LinearOutput, Tensor, Tensor]:
    """The linear's output with a delta, each pair's expert, and the experts' biases."""
    width = 20 if activation == "relu2" else 40
    generator = torch.Generator().manual_seed(5)
    y, delta = (6 * torch.randn(7, width, generator=generator).to(device, dtype) for _ in range(2))
    bias = torch.randn(3, width, generator=generator).to(device, dtype)
    return LinearOutput(y, delta), torch.tensor([2, 0, 0, 1, 2, 1, 1], dtype=torch.int32, device=device), bias


def check_activation(activation: ExpertActivation, out: Tensor, with_bias: bool) -> None:
    (y, delta, *_), expert, bias = activation_case(activation, dtype=out.dtype)
    assert delta is not None
    both = y.double() + delta.double() + (bias[expert.long()].double() if with_bias else 0.0)
    gate, up = both.chunk(2, dim=1)
    if activation == "relu2":
        expected = both.clamp(min=0) ** 2
    elif isinstance(activation, ClampedSwiGLU):
        gate = gate.clamp(max=activation.limit)
        expected = (up.clamp(-activation.limit, activation.limit) + 1) * gate / (1 + (-activation.alpha * gate).exp())
    elif activation == "silu":
        expected = gate / (1 + (-gate).exp()) * up
    else:
        expected = gate / 2 * (1 + ((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up
    tolerance = 1e-5 if out.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(out.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def combine_cases(
    device: str = "cpu",
) -> list[tuple[Tensor, Tensor, Tensor | None, Tensor | None, SharedOutput | None]]:
    generator = torch.Generator().manual_seed(8)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    y, bias, weight = normal(10, 24), normal(4, 24), normal(5, 2)
    expert = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [0, 3]], dtype=torch.int32, device=device)
    shared, gate = normal(5, 24), normal(5, 1)
    return [
        (y, expert, weight, bias, None),
        (y, expert, None, bias, SharedOutput(shared)),
        (y, expert, weight, None, SharedOutput(shared, gate)),
    ]


def check_combined(case: tuple[Tensor, Tensor, Tensor | None, Tensor | None, SharedOutput | None], out: Tensor) -> None:
    y, expert, weight, bias, shared = case
    for t, row in enumerate(out.double()):
        expected = torch.zeros_like(row)
        for k, e in enumerate(expert[t].tolist()):
            one = y[2 * t + k].double() + (0.0 if bias is None else bias[e].double())
            expected += one if weight is None else weight[t, k].double() * one
        if shared is not None:
            factor = 1.0 if shared.gate_T1 is None else 1 / (1 + (-shared.gate_T1[t].double()).exp())
            expected += factor * shared.y_TD[t].double()
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_a_router_on_a_cpu(name: str) -> None:
    check_router(name, route(*router_case(name)))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_an_activation_on_a_cpu(activation: ExpertActivation) -> None:
    gate_up, expert, bias = activation_case(activation)
    check_activation(activation, activate_experts(gate_up, activation, expert, bias), True)
    check_activation(activation, activate_experts(gate_up, activation), False)


def test_the_sum_on_a_cpu() -> None:
    for case in combine_cases():
        check_combined(case, combine_torch(*case))


def test_interpreted_kernels() -> None:
    run_interpreted("""
        from lorafleet.kernels.moe import expert_activation_triton, moe_combine_triton
        from lorafleet.kernels.moe.moe import Routing
        from lorafleet.kernels.moe.moe_route_triton import route_triton
        from tests.kernels.moe import test_routing as cases

        expert_activation_triton.BLOCK_I, moe_combine_triton.BLOCK_D = 16, 16
        for name in cases.RULES:
            cases.check_router(name, Routing(*route_triton(*cases.router_case(name))))
        for activation in cases.ACTIVATIONS:
            gate_up, expert, bias = cases.activation_case(activation)
            for own in (None, bias):
                out = expert_activation_triton.activate_experts_triton(gate_up, activation, expert, own)
                cases.check_activation(activation, out, own is not None)
        for case in cases.combine_cases():
            cases.check_combined(case, moe_combine_triton.combine_triton(*case))
    """)


def mixture_case(device: str, scales_input: bool) -> tuple[Tensor, Routing, ExpertMatrices, SharedOutput]:
    """Returns a mixture with what Qwen3-MoE lacks: biases, another activation, scaled inputs, a gated shared expert."""
    generator = torch.Generator().manual_seed(6)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device)

    x = 8 * normal(21, 64)
    routing = route(8 * normal(21, 6), RoutingRule(2, not scales_input, "sigmoid"))
    gate_up, down, biases = normal(6, 48, 64), normal(6, 64, 24), (normal(6, 48), normal(6, 64))
    matrices = ExpertMatrices(gate_up, down, ClampedSwiGLU(), *biases, scales_input=scales_input)
    return x, routing, matrices, SharedOutput(normal(21, 64), normal(21, 1))


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("scales_input", [False, True])
    def test_the_whole_mixture(self, scales_input: bool) -> None:
        expected = experts_mlp(*mixture_case("cpu", scales_input)[:3], None, mixture_case("cpu", scales_input)[3])
        x, routing, matrices, shared = mixture_case("cuda", scales_input)
        poison_free_memory()
        found = experts_mlp(x, routing, matrices, None, shared)
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("name", RULES)
    def test_a_router(self, name: str) -> None:
        poison_free_memory()
        check_router(name, route(*router_case(name, "cuda")))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
    def test_an_activation(self, activation: ExpertActivation, dtype: torch.dtype) -> None:
        gate_up, expert, bias = activation_case(activation, "cuda", dtype)
        poison_free_memory()
        check_activation(activation, activate_experts(gate_up, activation, expert, bias), True)
        check_activation(activation, activate_experts(gate_up, activation), False)

    def test_the_sum(self) -> None:
        from lorafleet.kernels.moe.moe_combine_triton import combine_triton

        for case in combine_cases("cuda"):
            poison_free_memory()
            check_combined(case, combine_triton(*case))
