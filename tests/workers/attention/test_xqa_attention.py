"""FlashInfer's XQA: which cases it is chosen for, its tables, and on a GPU its answers."""

from __future__ import annotations

import importlib.util
import math
import random
from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache, LayerAttention
from lorafleet.workers.attention.flashinfer_backend import FlashInferAttention
from lorafleet.workers.attention.kv_pages import BlockTables, KVPages
from lorafleet.workers.attention.torch_backend import TorchAttention
from lorafleet.workers.attention.xqa_attention import SEMAPHORE_BYTES, XQAAttention, xqa_refusal
from tests.kernels.harness import poison_free_memory
from tests.workers.attention.xqa_kernels import XQA_VARIANTS, compile_xqa

PAGE = 16
HOPPER = (9, 0)
MOST_CONTEXT = 5000
K_SCALE, V_SCALE = 0.03, 0.01
WINDOW = 300
# Largest relative errors of all heads together, and of one. In e4m3, the rounding of weights alone makes 0.024 and 0.04
# (computed in float64); rounding the queries, which the reference does too, would double that.
BOUND_OF_ALL, BOUND_OF_ONE = 0.035, 0.08
LAYER = LayerAttention(num_heads=32, num_kv_heads=8, head_dim=128, scale=1.3 * 128**-0.5)
SPEC = AttentionSpec(
    layers=(LAYER, LAYER),
    block_size=PAGE,
    dtype=torch.bfloat16,
    kv_dtype=FP8,
    device=torch.device("cuda"),
)


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, dtype=torch.float16), replace(SPEC, block_size=32)])
def test_xqa_serves_what_was_tested(spec: AttentionSpec) -> None:
    assert xqa_refusal(spec, HOPPER) is None


@pytest.mark.parametrize(
    ("spec", "capability", "reason"),
    [
        (SPEC, (8, 9), "the GPU's compute capability is 8.9, not 9.0"),
        (SPEC, (10, 0), "the GPU's compute capability is 10.0, not 9.0"),
        (
            replace(SPEC, layers=(replace(LAYER, head_dim=256),)),
            HOPPER,
            "it has not been tested with head_dim=256 and 4 query heads for each KV head",
        ),
        (
            replace(SPEC, layers=(replace(LAYER, num_kv_heads=4),)),
            HOPPER,
            "it has not been tested with head_dim=128 and 8 query heads for each KV head",
        ),
        (
            replace(SPEC, layers=(LAYER, replace(LAYER, window=1024))),
            HOPPER,
            "it has not been tested with sliding windows",
        ),
        (replace(SPEC, layers=(replace(LAYER, chunk=64),)), HOPPER, "it has not been tested with chunks or sinks"),
        (replace(SPEC, block_size=8), HOPPER, "blocks have 8 tokens, not 16, 32, 64, 128"),
        (replace(SPEC, layers=(replace(LAYER, softcap=50.0),)), HOPPER, "scores are capped"),
        (replace(SPEC, kv_dtype=torch.bfloat16), HOPPER, "it is faster for FP8 caches only"),
    ],
)
def test_xqa_is_refused_with_a_reason(spec: AttentionSpec, capability: tuple[int, int], reason: str) -> None:
    assert xqa_refusal(spec, capability) == reason


def test_tables_have_each_sequences_blocks_in_its_row() -> None:
    batch = AttentionBatch([1, 1, 1], [17, 1, 33], [array("i", [7, 8]), [5, 6], [1, 2, 3, 10**6]])
    tables = BlockTables.of(batch, PAGE, torch.device("cpu"))
    assert tables.lens_B.tolist() == [17, 1, 33]
    assert tables.blocks_BW.dtype == torch.int32
    assert [row[:count] for row, count in zip(tables.blocks_BW.tolist(), (2, 1, 3), strict=True)] == [
        [7, 8],
        [5],
        [1, 2, 3],
    ]


def test_fixed_tables_are_rewritten_where_they_lie() -> None:
    memory = torch.zeros(KVPages.size(2, 2 * 5), dtype=torch.int32)
    fixed = BlockTables.within(memory, 2, 5)
    for lens, blocks in (([70, 30], [[9, 8, 7, 6, 5], [4, 3]]), ([16, 17], [[1], [3, 2]])):
        fixed.assign(BlockTables.of(AttentionBatch([1, 1], lens, blocks), PAGE, torch.device("cpu")))
        assert fixed.lens_B.tolist() == lens
        assert [row[: len(own)] for row, own in zip(fixed.blocks_BW.tolist(), blocks, strict=True)] == blocks
    assert fixed.blocks_BW.is_contiguous()
    assert memory[:2].tolist() == [16, 17]


class Decodes:
    """Random caches on the GPU, whose unused rows hold what must not be seen, the largest number of e4m3."""

    def __init__(self, spec: AttentionSpec, context_lens: list[int], seed: int) -> None:
        layer = spec.layers[0]
        rng = random.Random(seed)
        generator = torch.Generator("cuda").manual_seed(seed)
        counts = [-(-length // PAGE) for length in context_lens]
        free = list(range(sum(counts) + 3))
        rng.shuffle(free)
        tables = [array("i", [free.pop() for _ in range(count)]) for count in counts]
        self.batch = AttentionBatch([1] * len(counts), context_lens, tables)
        used = torch.zeros(sum(counts) + 3, PAGE, dtype=torch.bool)
        for table, length in zip(tables, context_lens, strict=True):
            rows = torch.arange(len(table) * PAGE).view(-1, PAGE) < length
            used[torch.tensor(table)] = rows
        used_NP11 = used.cuda()[:, :, None, None]

        def cache(scale: float) -> Tensor:
            shape = (*used.shape, layer.num_kv_heads, layer.head_dim)
            drawn = (torch.randn(shape, generator=generator, device="cuda") / scale).clamp(-448, 448)  # e4m3's range
            return torch.where(used_NP11, drawn, 448.0).to(FP8)

        self.k_NPGD, self.v_NPGD = cache(K_SCALE), cache(V_SCALE)
        shape = (len(counts), layer.num_heads, layer.head_dim)
        self.q_THD = torch.randn(shape, generator=generator, device="cuda").to(spec.dtype)
        self.want_THD = self._attention_in_float32(spec)

    def _attention_in_float32(self, spec: AttentionSpec) -> Tensor:
        exact = replace(spec, dtype=torch.float32, kv_dtype=torch.float32)
        k_NPGD, v_NPGD = self.k_NPGD.float() * K_SCALE, self.v_NPGD.float() * V_SCALE
        backend = TorchAttention(exact, [KVCache(k_NPGD, v_NPGD)])
        backend.plan(self.batch)
        return backend.attend(0, self.q_THD.to(FP8).float())

    def check(self, spec: AttentionSpec, out_THD: Tensor) -> None:
        assert out_THD.dtype == spec.dtype
        want_THD, found_THD, lens = self.want_THD, out_THD.float(), self.batch.context_lens
        whole = ((found_THD - want_THD).norm() / want_THD.norm()).item()
        errors_TH = (found_THD - want_THD).norm(dim=-1) / want_THD.norm(dim=-1)
        errors_TH = errors_TH.nan_to_num(nan=torch.inf)
        worst = int(errors_TH.argmax())
        token, head = divmod(worst, errors_TH.shape[1])
        wrong = (errors_TH.amax(1) > 0.2).nonzero().flatten().tolist()
        about = (
            f"{len(out_THD)} sequences: relative error {whole:.4f}, at most {errors_TH.max().item():.4f} in row {token}"
            f", head {head}, of context {lens[token]}: {found_THD[token, head, :6].tolist()} instead of "
            f"{want_THD[token, head, :6].tolist()}. Contexts of the rows that are off by more than 0.2: "
            f"{[lens[row] for row in wrong[:40]]}"
        )
        print(about)
        assert whole < BOUND_OF_ALL, about
        assert errors_TH.max() < BOUND_OF_ONE, about


def ragged(num_seqs: int, seed: int) -> list[int]:
    """Returns lengths from 1 to MOST_CONTEXT, mostly short ones, and the ends of blocks and of kernels' tiles."""
    rng = random.Random(seed)
    lens = [MOST_CONTEXT, 1, 64, 65, 16, 17, 128, 2, 300, 301, 364]
    lens += [int(math.exp(rng.uniform(0, math.log(MOST_CONTEXT)))) for _ in range(num_seqs)]
    return lens[seed % 2 : seed % 2 + num_seqs]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer")
@pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
class TestOnGPU:
    """The first test compiles for about two minutes."""

    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("num_seqs", [1, 3, 8, 64, 256])
    @pytest.mark.parametrize(("head_dim", "group", "has_window"), XQA_VARIANTS, ids=str)
    def test_a_graph_answers_for_each_new_batch(
        self, head_dim: int, group: int, has_window: bool, num_seqs: int
    ) -> None:
        self.needs_hopper()
        compile_xqa()
        window = WINDOW if has_window else None
        layer = replace(LAYER, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, window=window)
        spec = replace(SPEC, layers=(layer,))
        cases = [Decodes(spec, ragged(num_seqs, seed), seed) for seed in (2, 3)]
        # A graph's padding: two rows, or the only one, with one token of the same block.
        padded = ragged(num_seqs, 4)[:-2] + [1] * min(2, num_seqs)
        cases.append(Decodes(spec, padded, 4))
        most = max(len(case.k_NPGD) for case in cases)
        buffers = [torch.zeros(most, *cases[0].k_NPGD.shape[1:], dtype=FP8, device="cuda") for _ in "kv"]
        cache = KVCache(*buffers, K_SCALE, V_SCALE)
        backend = self.make(spec, cache, num_seqs)
        q_THD = cases[0].q_THD.clone()
        backend.plan(AttentionBatch([1] * num_seqs, [1] * num_seqs, [[0]] * num_seqs))
        poison_free_memory()
        backend.attend(0, q_THD)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_THD = backend.attend(0, q_THD)
        for case in [*cases, cases[0]]:
            for buffer, own in zip(buffers, (case.k_NPGD, case.v_NPGD), strict=True):
                buffer.view(torch.uint8)[: len(own)].copy_(own.view(torch.uint8))
            q_THD.copy_(case.q_THD)
            spare = [array("i", [*table, 10**6]) for table in case.batch.block_tables]  # a block that is not filled yet
            backend.plan(AttentionBatch(case.batch.query_lens, case.batch.context_lens, spare))
            for _ in range(2):  # The second replay finds the semaphores as the first has left them.
                out_THD.fill_(torch.nan)
                graph.replay()
                case.check(spec, out_THD)

    def test_steps_without_a_graph(self) -> None:
        self.needs_hopper()
        compile_xqa()
        spec = replace(SPEC, layers=(replace(LAYER, num_heads=8, num_kv_heads=2),))
        for num_seqs in (1, 8, 70):
            case = Decodes(spec, ragged(num_seqs, 5), 5)
            backend = self.make(spec, KVCache(case.k_NPGD, case.v_NPGD, K_SCALE, V_SCALE), None)
            backend.plan(case.batch)
            case.check(spec, backend.attend(0, case.q_THD))

    def test_flashinfers_backend_chooses_it(self) -> None:
        self.needs_hopper()
        compile_xqa()
        buffers = [torch.zeros(4, PAGE, 2, 128, dtype=FP8, device="cuda") for _ in "kv"]
        spec = replace(SPEC, layers=(replace(LAYER, num_heads=8, num_kv_heads=2),))
        backend = FlashInferAttention(spec, [KVCache(*buffers)])
        assert isinstance(backend.for_graph(8, 8192), XQAAttention)
        half = FlashInferAttention(
            replace(spec, kv_dtype=torch.bfloat16), [KVCache(*(x.to(torch.bfloat16) for x in buffers))]
        )
        assert not isinstance(half.for_graph(8, 8192), XQAAttention)

    @pytest.mark.parametrize("in_graph", [False, True])
    def test_plans_do_not_wait_for_the_device(self, in_graph: bool) -> None:
        spec = replace(SPEC, layers=(replace(LAYER, num_heads=8, num_kv_heads=2),))
        case = Decodes(spec, ragged(8, 5), 5)
        backend = self.make(spec, KVCache(case.k_NPGD, case.v_NPGD), 8 if in_graph else None)
        backend.plan(case.batch)
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        done.record()
        backend.plan(case.batch)
        assert not done.query()

    @staticmethod
    def needs_hopper() -> None:
        if torch.cuda.get_device_capability() != HOPPER:
            pytest.skip("needs a GPU of compute capability 9.0")

    @staticmethod
    def make(spec: AttentionSpec, cache: KVCache, num_seqs: int | None) -> XQAAttention:
        """A backend whose tables are fixed for num_seqs sequences, or made anew for each step if that is None."""
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")
        semaphores = torch.zeros(SEMAPHORE_BYTES // 4, dtype=torch.int32, device="cuda")
        fixed = None
        if num_seqs is not None:
            width = -(-MOST_CONTEXT // PAGE) + 1
            memory = torch.zeros(KVPages.size(num_seqs, num_seqs * width), dtype=torch.int32, device="cuda")
            fixed = BlockTables.within(memory, num_seqs, width)
        return XQAAttention(spec, [cache], workspace, semaphores, fixed)
