from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.moe import Routing, experts_mlp, route
from tests.kernels.harness import needs_gpu, poison_free_memory, run_interpreted

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
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def make_case(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Routing, Tensor, Tensor]:
    """The first expert is everybody's favourite and the last one nobody's."""
    num_tokens, experts, per_token, hidden, inner = sizes
    x = normal(num_tokens, hidden, dtype=dtype, device=device, seed=1)
    logits = normal(num_tokens, experts, dtype=torch.float32, device=device, seed=2)
    logits[:, 0] += 3
    logits[:, -1] = -50
    gate_up = normal(experts, 2 * inner, hidden, dtype=dtype, device=device, seed=3) / hidden**0.5
    down = normal(experts, hidden, inner, dtype=dtype, device=device, seed=4) / inner**0.5
    return x, route(logits, per_token, sums_to_one=True), gate_up, down


def reference(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for t, (experts, weights) in enumerate(zip(routing.expert_TK.tolist(), routing.weight_TK.tolist(), strict=True)):
        for e, weight in zip(experts, weights, strict=True):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            out[t] += weight * (down[e].double() @ (F.silu(gate) * up))
    return out


def check(case: tuple[Tensor, Routing, Tensor, Tensor], out: Tensor) -> None:
    assert out.dtype == case[0].dtype
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), reference(*case), atol=tolerance, rtol=tolerance)


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
    check(case, experts_mlp(*case))


@pytest.mark.parametrize("sums_to_one", [True, False])
def test_the_router_on_a_cpu(sums_to_one: bool) -> None:
    logits = normal(7, 6, dtype=torch.float32, device="cpu", seed=1)
    check_route(logits, 3, sums_to_one, route(logits, 3, sums_to_one))


def test_interpreted_kernels() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels import moe_triton
        from lorafleet.kernels.gated_mul import gated_mul
        from lorafleet.kernels.moe import Routing
        from lorafleet.kernels.moe_route_triton import combine_triton, route_triton
        from tests.kernels.test_moe import SMALL, check, check_route, make_case, normal

        moe_triton.BLOCK_N = 16  # several turns of each loop
        moe_triton._SHAPES = ((float("inf"), moe_triton._Shape(16, 16, 8, 1, 1)),)
        for sums_to_one in (True, False):
            logits = normal(7, 6, dtype=torch.float32, device="cpu", seed=1)
            check_route(logits, 3, sums_to_one, Routing(*route_triton(logits, 3, sums_to_one)))
        for sizes in SMALL.values():
            case = x, routing, gate_up, down = make_case(sizes, torch.float32)
            tiles = moe_triton.ExpertTiles.of(routing.expert_TK, len(down))
            check(case, combine_triton(
                tiles.linear(gated_mul(tiles.linear(x, gate_up), None), down), routing.weight_TK
            ))
    """)


class TestOnGPU:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("sizes", LARGE.values(), ids=LARGE)
    def test_equals_a_loop_over_tokens(self, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        case = make_case(sizes, dtype, "cuda")
        poison_free_memory()
        out = experts_mlp(*case)
        few = torch.linspace(0, len(out) - 1, min(len(out), 12)).long().tolist()
        x, routing, gate_up, down = case
        some = x[few], Routing(routing.expert_TK[few], routing.weight_TK[few]), gate_up, down
        check(some, out[few])

    @pytest.mark.parametrize("experts", [4, 60, 128])
    def test_the_router(self, experts: int) -> None:
        logits = normal(333, experts, dtype=torch.float32, device="cuda", seed=1)
        for sums_to_one in (True, False):
            check_route(logits, 4, sums_to_one, route(logits, 4, sums_to_one))

    def test_a_captured_graph_serves_any_choice(self) -> None:
        sizes = LARGE["decode"]
        x, routing, gate_up, down = make_case(sizes, torch.bfloat16, "cuda")
        static = Routing(routing.expert_TK.clone(), routing.weight_TK.clone())
        experts_mlp(x, static, gate_up, down)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = experts_mlp(x, static, gate_up, down)
        for shift in (0, 17, 99):
            static.expert_TK.copy_((routing.expert_TK + shift) % sizes[1])
            graph.replay()
            assert torch.equal(out, experts_mlp(x, static, gate_up, down))
