from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.moe.expert_lora import ExpertWeights, StepExperts
from lorafleet.kernels.moe.moe import ExpertMatrices, Routing, experts_mlp, route
from lorafleet.kernels.moe.routing_rule import RoutingRule
from tests.kernels.harness import needs_triton, poison_free_memory, run_interpreted

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# tokens, experts, experts a token, hidden size, intermediate size
SMALL = {"odd": (9, 5, 3, 24, 10), "one token": (1, 4, 2, 16, 8), "many a tile": (40, 3, 2, 16, 8)}
LARGE = {
    "one token of 30B-A3B": (1, 128, 8, 2048, 768),
    "decode": (64, 128, 8, 2048, 768),
    "uneven": (300, 60, 4, 264, 88),
    "mixtral prefill": (1100, 8, 2, 512, 1792),
    "prefill": (2049, 64, 8, 256, 96),
}


def normal(*shape: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def make_case(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Routing, Tensor, Tensor]:
    """The first expert is everybody's favorite and the last one nobody's."""
    num_tokens, experts, per_token, hidden, inner = sizes
    x = normal(num_tokens, hidden, dtype=dtype, device=device, seed=1)
    logits = normal(num_tokens, experts, dtype=torch.float32, device=device, seed=2)
    logits[:, 0] += 3
    logits[:, -1] = -50
    gate_up = normal(experts, 2 * inner, hidden, dtype=dtype, device=device, seed=3) / hidden**0.5
    down = normal(experts, hidden, inner, dtype=dtype, device=device, seed=4) / inner**0.5
    return x, route(logits, RoutingRule(per_token, sums_to_one=True)), gate_up, down


def make_adapters(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[tuple[StepExperts, StepExperts], list[Tensor]]:
    """Of four slots: rank 8 with an A for gate and one for up, rank 40 with one for both and nothing on down, nothing
    on gate and up, nothing at all; some tokens of each and some of the base. And what the records lie in."""
    num_tokens, experts, _, hidden, inner = sizes
    generator = torch.Generator(device).manual_seed(7)
    slot_T = torch.randint(-1, 4, (num_tokens,), generator=generator, dtype=torch.int32, device=device)
    slot_T[: num_tokens // 2] = 1  # as of one prompt
    order_T = slot_T.argsort(stable=True).to(torch.int32)

    def weights(rank: int, groups: int, inputs: int, outputs: int) -> ExpertWeights:
        a = torch.randn(experts, rank * groups, inputs, generator=generator, device=device) / inputs**0.5
        b = torch.randn(experts, outputs, rank, generator=generator, device=device) / rank**0.5
        scale = torch.rand(experts, groups, generator=generator, device=device)
        return ExpertWeights(a.to(dtype), b.to(dtype), scale)

    to_gate_up = [weights(8, 2, hidden, 2 * inner), weights(40, 1, hidden, 2 * inner), None, None]
    to_down = [weights(8, 1, inner, hidden), None, weights(16, 1, inner, hidden), None]
    side = torch.cuda.Stream() if device == "cuda" else None
    blocks: list[Tensor] = []
    made = []
    for slots, max_rank in ((to_gate_up, 40), (to_down, 16)):
        blocks += [torch.zeros(0, dtype=torch.uint8) if one is None else with_record(one) for one in slots]
        records = [0 if one is None else block.data_ptr() for one, block in zip(slots, blocks[-4:], strict=True)]
        record_S = torch.tensor(records, dtype=torch.int64, device=device)
        made.append(StepExperts(slot_T, order_T, slots, record_S, max_rank, dtype, side))
    return (made[0], made[1]), blocks


def with_record(weights: ExpertWeights) -> Tensor:
    """A record, with A, B and scales behind it, one with a gap before the next."""
    parts = [weights.a_ECD, weights.b_EOR, weights.scale_EG]
    raw = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    starts, end = [], 256
    for part in raw:
        starts.append(end)
        end += -(-len(part) // 256) * 256 + 256
    block = torch.full((end,), 255, dtype=torch.uint8, device=raw[0].device)  # NaN
    record = torch.tensor([*starts, weights.rank, weights.groups, 0, 0, 0], dtype=torch.int64)
    block[: record.nbytes] = record.view(torch.uint8).to(block.device)
    for start, part in zip(starts, raw, strict=True):
        block[start : start + len(part)] = part
    return block


def adapted(w: Tensor, expert: int, adapters: StepExperts | None, token: int) -> Tensor:
    """The expert's matrix with what the token's adapter adds."""
    slot = -1 if adapters is None else int(adapters.slot_T[token])
    own = adapters.slots[slot] if adapters is not None and slot >= 0 else None
    if own is None:
        return w[expert].double()
    a = own.a_ECD[expert].double().chunk(own.groups)
    b = own.b_EOR[expert].double().chunk(own.groups)
    scales = own.scale_EG[expert].tolist()
    deltas = [scale * (b_OR @ a_RD) for a_RD, b_OR, scale in zip(a, b, scales, strict=True)]
    return w[expert].double() + torch.cat(deltas)


def run(
    case: tuple[Tensor, Routing, Tensor, Tensor], adapters: tuple[StepExperts, StepExperts] | None = None
) -> Tensor:
    x, routing, gate_up, down = case
    return experts_mlp(x, routing, ExpertMatrices(gate_up, down), adapters)


def reference(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    adapters: tuple[StepExperts, StepExperts] | None = None,
) -> Tensor:
    to_gate_up, to_down = (None, None) if adapters is None else adapters
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, (experts, weights) in enumerate(zip(routing.expert_TK.tolist(), routing.weight_TK.tolist(), strict=True)):
        for e, weight in zip(experts, weights, strict=True):
            gate, up = (adapted(gate_up, e, to_gate_up, t) @ x[t].double()).chunk(2)
            out[t] += weight * (adapted(down, e, to_down, t) @ (F.silu(gate) * up))
    return out


def check(
    case: tuple[Tensor, Routing, Tensor, Tensor],
    out: Tensor,
    adapters: tuple[StepExperts, StepExperts] | None = None,
) -> None:
    assert out.dtype == case[0].dtype
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), reference(*case, adapters), atol=tolerance, rtol=tolerance)


def check_route(logits: Tensor, per_token: int, sums_to_one: bool, found: Routing) -> None:
    probabilities = logits.double().softmax(-1)
    chosen = found.expert_TK.long()
    assert found.expert_TK.dtype == torch.int32
    assert all(len(set(row)) == per_token for row in chosen.tolist())
    weight = probabilities.gather(1, chosen)
    torch.testing.assert_close(weight, probabilities.topk(per_token).values, atol=1e-9, rtol=1e-6)
    if sums_to_one:
        weight = weight / weight.sum(-1, keepdim=True)
    torch.testing.assert_close(found.weight_TK.double(), weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("sizes", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_on_a_cpu(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    case = make_case(sizes, dtype)
    check(case, run(case))


@pytest.mark.parametrize("sizes", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adapters_on_a_cpu(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    case, (adapters, _) = make_case(sizes, dtype), make_adapters(sizes, dtype)
    check(case, run(case, adapters), adapters)


@pytest.mark.parametrize("sums_to_one", [True, False])
def test_the_router_on_a_cpu(sums_to_one: bool) -> None:
    logits = normal(7, 6, dtype=torch.float32, device="cpu", seed=1)
    check_route(logits, 3, sums_to_one, route(logits, RoutingRule(3, sums_to_one)))


@needs_triton
def test_no_thread_of_a_float32_gemm_has_so_many_products_that_compiling_takes_long() -> None:
    from lorafleet.kernels.moe.moe_triton import _SHAPES

    for _, shape in _SHAPES:
        gemm = shape.gemm
        assert gemm is not None and gemm.blocks(torch.bfloat16) == (gemm.block_o, gemm.block_d, gemm.stages)
        block_o, block_d, _ = gemm.blocks(torch.float32)
        assert shape.tile_pairs * block_o * block_d <= 1024 * 32 * gemm.warps


def test_interpreted_kernels() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.moe import adapted_activation_triton, adapted_combine_triton, expert_lora_triton
        from lorafleet.kernels.moe import moe, moe_tiles_triton, moe_triton
        from lorafleet.kernels.moe.moe import Routing
        from lorafleet.kernels.moe.moe_route_triton import route_triton
        from lorafleet.kernels.moe.routing_rule import RoutingRule
        from tests.kernels.moe.test_moe import SMALL, check, check_route, make_adapters, make_case, normal, run

        moe._grouped = moe_triton.PairTiles.of
        # Several turns of each loop.
        moe_tiles_triton.FEW = 16, 1
        expert_lora_triton.SPLIT_FEATURES, expert_lora_triton.SHRINK_D, expert_lora_triton.EXPAND_O = 16, 4, 16
        adapted_activation_triton.MOST_PROGRAMS = expert_lora_triton.MOST_PROGRAMS = 3
        adapted_activation_triton.BLOCK_I, adapted_combine_triton.BLOCK_NUMBERS = 4, 16
        moe_triton._SHAPES = ((float("inf"), moe_triton._Shape(16, moe_triton._Gemm(16, 8, 1, 1), adapter_pairs=2)),)
        for sums_to_one in (True, False):
            logits = normal(7, 6, dtype=torch.float32, device="cpu", seed=1)
            check_route(logits, 3, sums_to_one, Routing(*route_triton(logits, RoutingRule(3, sums_to_one))))
        for sizes in SMALL.values():
            case = make_case(sizes, torch.float32)
            own, blocks = make_adapters(sizes, torch.float32)
            for adapters, folded in ((None, 0), (own, 0), (own, 1024)):
                moe_triton.MOST_FOLDED_PAIRS = folded
                check(case, run(case, adapters), adapters)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("sizes", LARGE.values(), ids=LARGE)
    def test_equals_a_loop_over_tokens(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        case = make_case(sizes, dtype, "cuda")
        poison_free_memory()
        out = run(case)
        few = torch.linspace(0, len(out) - 1, min(len(out), 12)).long().tolist()
        x, routing, gate_up, down = case
        some = x[few], Routing(routing.expert_TK[few], routing.weight_TK[few]), gate_up, down
        check(some, out[few])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("sizes", LARGE.values(), ids=LARGE)
    def test_adapters_equal_a_loop_over_tokens(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        case, (adapters, _blocks) = make_case(sizes, dtype, "cuda"), make_adapters(sizes, dtype, "cuda")
        poison_free_memory()
        out = run(case, adapters)
        few = torch.linspace(0, len(out) - 1, min(len(out), 12)).long().tolist()
        x, routing, gate_up, down = case
        some = x[few], Routing(routing.expert_TK[few], routing.weight_TK[few]), gate_up, down
        to_gate_up, to_down = (replace(one, slot_T=one.slot_T[few]) for one in adapters)
        check(some, out[few], (to_gate_up, to_down))
        assert torch.equal(out, run(case, adapters))

    @pytest.mark.parametrize("experts", [4, 60, 128])
    def test_the_router(self, experts: int) -> None:
        logits = normal(333, experts, dtype=torch.float32, device="cuda", seed=1)
        for sums_to_one in (True, False):
            check_route(logits, 4, sums_to_one, route(logits, RoutingRule(4, sums_to_one)))

    def test_a_captured_graph_serves_any_choice(self) -> None:
        sizes = LARGE["decode"]
        x, routing, gate_up, down = make_case(sizes, torch.bfloat16, "cuda")
        static = Routing(routing.expert_TK.clone(), routing.weight_TK.clone())
        run((x, static, gate_up, down))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run((x, static, gate_up, down))
        for shift in (0, 17, 99):
            static.expert_TK.copy_((routing.expert_TK + shift) % sizes[1])
            graph.replay()
            assert torch.equal(out, run((x, static, gate_up, down)))
