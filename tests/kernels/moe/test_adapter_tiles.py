"""Adapters on experts in Triton: the tiles, how many kernels a step launches, and mixtures with more than silu."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.moe.expert_activation import ClampedSwiGLU, ExpertActivation, is_gated
from lorafleet.kernels.moe.expert_lora import ExpertWeights, StepExperts
from lorafleet.kernels.moe.moe import ExpertMatrices, Routing, experts_mlp
from lorafleet.kernels.moe.moe_torch import SharedOutput
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.moe.test_moe import with_record

EXPERTS, PER_TOKEN, HIDDEN, INNER = 6, 3, 24, 16
ACTIVATIONS: dict[str, ExpertActivation] = {
    "silu": "silu",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
    "clamped": ClampedSwiGLU(),
}
# Each token's slot. Slot 2 has nothing on experts, slot 3 has ranks 24 on gate_up and 40 on down.
MIXES = {
    "everybody else's": [0, 1, 3] * 5,
    "one prompt": [1] * 17,
    "prompts and the base": [-1] * 4 + [3] * 9 + [-1] + [0] * 6,
    "nothing on experts": [2, -1, 2, 2],
    "one token": [0],
}


def step_of(mix: list[int], gated: bool, device: str = "cpu") -> tuple[tuple[StepExperts, StepExperts], list[Tensor]]:
    """The adapters on gate_up and on down, and what their records lie in."""
    generator = torch.Generator().manual_seed(3)
    slot_T = torch.tensor(mix, dtype=torch.int32)
    order_T = slot_T.argsort(stable=True).to(device, torch.int32)

    def weights(rank: int, groups: int, inputs: int, outputs: int) -> ExpertWeights:
        a = torch.randn(EXPERTS, rank * groups, inputs, generator=generator) / inputs**0.5
        b = torch.randn(EXPERTS, outputs, rank, generator=generator) / rank**0.5
        scale = torch.rand(EXPERTS, groups, generator=generator)
        return ExpertWeights(a.to(device), b.to(device), scale.to(device))

    outputs = INNER * (1 + gated)
    ranks = ([(8, 1 + gated), (16, 1), None, (24, 1)], [(8, 1), None, None, (40, 1)])
    steps, blocks = [], []
    for kinds, sizes in zip(ranks, ((HIDDEN, outputs), (INNER, HIDDEN)), strict=True):
        slots = [None if kind is None else weights(*kind, *sizes) for kind in kinds]
        own = [None if one is None else with_record(one) for one in slots]
        records = [0 if block is None else block.data_ptr() for block in own]
        record_S = torch.tensor(records, dtype=torch.int64, device=device)
        steps.append(StepExperts(slot_T.to(device), order_T, slots, record_S, 40, torch.float32))
        blocks += [block for block in own if block is not None]
    return (steps[0], steps[1]), blocks


def mixture(
    num_tokens: int, activation: ExpertActivation, scales_input: bool, device: str = "cpu"
) -> tuple[Tensor, Routing, ExpertMatrices, SharedOutput]:
    """A mixture with biases and a gated shared expert. Nobody chooses the last expert."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device)

    outputs = INNER * (1 + is_gated(activation))
    chosen = torch.rand(num_tokens, EXPERTS - 1, generator=generator).argsort()[:, :PER_TOKEN]
    weights = torch.rand(num_tokens, PER_TOKEN, generator=generator)
    routing = Routing(chosen.to(device, torch.int32).contiguous(), weights.to(device))
    matrices = ExpertMatrices(
        normal(EXPERTS, outputs, HIDDEN),
        normal(EXPERTS, HIDDEN, INNER),
        activation,
        normal(EXPERTS, outputs),
        normal(EXPERTS, HIDDEN),
        scales_input,
    )
    return (
        4 * normal(num_tokens, HIDDEN),
        routing,
        matrices,
        SharedOutput(normal(num_tokens, HIDDEN), normal(num_tokens, 1)),
    )


def check_tiles(mix: list[int], tile_pairs: int, adapter_pairs: int) -> None:
    from lorafleet.kernels.moe.moe_tiles_triton import make_adapter_tiles

    (to_gate_up, _), _ = step_of(mix, True)
    expert_TK = mixture(len(mix), "silu", False)[1].expert_TK
    gemm, own = make_adapter_tiles(expert_TK, EXPERTS, tile_pairs, to_gate_up, adapter_pairs)
    in_tiles = [
        (expert, pair)
        for expert, row in zip(gemm.expert_M.tolist(), gemm.pair_MB.tolist(), strict=True)
        if expert >= 0
        for pair in row
        if pair >= 0
    ]
    assert sorted(in_tiles, key=lambda found: found[1]) == [(e, p) for p, e in enumerate(expert_TK.flatten().tolist())]
    experts, starts, sorted_pairs = own.expert_L.tolist(), own.start_L.tolist(), gemm.pair_MB.flatten().tolist()
    used = experts.index(-1) if -1 in experts else len(experts)
    assert set(experts[used:]) <= {-1}
    seen: list[int] = []
    keys: list[tuple[int, int]] = []
    for i in range(used):
        pairs = [pair for pair in sorted_pairs[starts[i] : starts[i + 1]] if pair >= 0]
        key = experts[i], int(own.slot_L[i])
        assert 1 <= len(pairs) <= adapter_pairs
        assert all((int(expert_TK.flatten()[pair]), mix[pair // PER_TOKEN]) == key for pair in pairs)
        seen += pairs
        keys.append(key)
    assert sorted(seen) == list(range(expert_TK.numel()))
    counts = Counter((expert, mix[pair // PER_TOKEN]) for pair, expert in enumerate(expert_TK.flatten().tolist()))
    assert Counter(keys) == {key: -(-count // adapter_pairs) for key, count in counts.items()}


def test_interpreted_tiles_hold_each_pair_once_and_share_expert_and_slot() -> None:
    run_interpreted("""
        from lorafleet.kernels.moe import moe_tiles_triton
        from tests.kernels.moe.test_adapter_tiles import MIXES, check_tiles

        moe_tiles_triton.FEW = 16, 1  # several turns of each loop
        for mix in MIXES.values():
            for tile_pairs, adapter_pairs in ((16, 2), (2, 16)):
                check_tiles(mix, tile_pairs, adapter_pairs)
    """)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_interpreted_mixtures_equal_the_twin(activation: str) -> None:
    run_interpreted(f"""
        import torch
        from lorafleet.kernels.moe import moe, moe_tiles_triton, moe_triton
        from lorafleet.kernels.moe.expert_activation import is_gated
        from lorafleet.kernels.moe.moe_torch import PairsByExpert
        from tests.kernels.moe.test_adapter_tiles import ACTIVATIONS, MIXES, mixture, step_of

        moe_tiles_triton.FEW = 64, 1
        moe_triton._SHAPES = ((float("inf"), moe_triton._Shape(16, moe_triton._Gemm(16, 8, 1, 1), adapter_pairs=16)),)
        activation = ACTIVATIONS[{activation!r}]
        for name in MIXES if {activation!r} == "silu" else ["prompts and the base"]:
            mix = MIXES[name]
            adapters, blocks = step_of(mix, is_gated(activation))
            for scales_input in (False, True):
                x, routing, matrices, shared = mixture(len(mix), activation, scales_input)
                moe._grouped = lambda expert_TK, *_: PairsByExpert.of(expert_TK)
                expected = moe.experts_mlp(x, routing, matrices, adapters, shared)
                moe._grouped = moe_triton.PairTiles.of
                moe_triton.MOST_FOLDED_PAIRS = 1024 * scales_input
                found = moe.experts_mlp(x, routing, matrices, adapters, shared)
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, msg=name)
    """)


def test_interpreted_launches_of_a_step() -> None:
    run_interpreted("""
        from collections import Counter
        from triton.runtime.interpreter import InterpretedFunction
        from lorafleet.kernels.moe import moe, moe_tiles_triton, moe_triton
        from tests.kernels.moe.test_adapter_tiles import MIXES, mixture, step_of

        launched = Counter()
        launch = InterpretedFunction.run

        def counting(kernel, *arguments, **constants):
            launched[kernel.fn.__name__] += 1
            return launch(kernel, *arguments, **constants)

        InterpretedFunction.run = counting
        moe_tiles_triton.FEW = 64, 1
        moe._grouped = moe_triton.PairTiles.of
        mix = MIXES["prompts and the base"]
        adapters, blocks = step_of(mix, True)
        case = mixture(len(mix), "silu", False)
        base = {"_place_kernel": 1, "_linear_kernel": 2}
        moe.experts_mlp(*case[:3], None, case[3])
        assert launched == base | {"_combine_kernel": 1}, launched  # A CPU's activation is torch's.
        base |= {"_count_kernel": 1, "_shrink_kernel": 2, "_adapted_activation_kernel": 1}
        for folded, last in ((1024, ["_adapted_combine_kernel"]), (0, ["_expand_kernel", "_combine_kernel"])):
            launched.clear()
            moe_triton.MOST_FOLDED_PAIRS = folded
            moe.experts_mlp(*case[:3], adapters, case[3])
            assert launched == base | dict.fromkeys(last, 1), launched
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
    @pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
    def test_a_mixture_equals_the_twin(self, mix: list[int], activation: ExpertActivation) -> None:
        for scales_input in (False, True):
            of_cpu, _ = step_of(mix, is_gated(activation))
            x, routing, matrices, shared = mixture(len(mix), activation, scales_input)
            expected = experts_mlp(x, routing, matrices, of_cpu, shared)
            adapters, _blocks = step_of(mix, is_gated(activation), "cuda")
            x, routing, matrices, shared = mixture(len(mix), activation, scales_input, "cuda")
            poison_free_memory()
            found = experts_mlp(x, routing, matrices, adapters, shared)
            torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)
