from __future__ import annotations

import ctypes
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from lorafleet.kernels.lora import gemm_sms
from lorafleet.kernels.lora.apply_lora import linear_with_lora
from lorafleet.kernels.lora.gemm_sms import gemms_limited_to
from lorafleet.kernels.lora.lora_batch import LoRABatch, static_tile_counts
from lorafleet.kernels.lora.lora_tuning import CLASSES, FOLDER
from lorafleet.kernels.lora.sm_split import (
    TOKEN_BOUNDS,
    UNSPLIT,
    GEMMs,
    SMSplit,
    StepClass,
    choose,
    read_splits,
    split_for,
    split_path,
    write_splits,
)
from lorafleet.kernels.nvrtc import matrix_map
from lorafleet.kernels.quant.base_weight import PlainWeight
from lorafleet.kernels.quant.four_bit_cuda import FourBitKernels, KernelShape
from tests.kernels.harness import poison_free_memory
from tests.kernels.lora_cases import RANKS_OF_SLOTS, make_inputs, make_packed, reference, slots_of_tokens

GEMM_FIRST, LORA_FIRST = SMSplit(88, "gemm"), SMSplit(100, "lora")


@pytest.mark.parametrize(
    ("num_tokens", "num_tiles", "max_rank", "name"),
    [
        (1, 1, 16, "4 tokens, few tiles, narrow ranks"),
        (17, 16, 8, "64 tokens, few tiles, narrow ranks"),
        (64, 17, 64, "64 tokens, some tiles, wide ranks"),
        (65, 33, 17, "128 tokens, many tiles, wide ranks"),
        (256, 81, 16, "256 tokens, many tiles, narrow ranks"),
    ],
)
def test_a_step_belongs_to_the_class_of_its_tokens_tiles_and_ranks(
    num_tokens: int, num_tiles: int, max_rank: int, name: str
) -> None:
    step = StepClass.of(num_tokens, num_tiles, max_rank)
    assert step is not None
    assert step.name == name


def test_a_class_uses_its_own_split_before_that_of_other_ranks() -> None:
    wide, narrow = StepClass(64, "some", wide=True), StepClass(64, "some", wide=False)
    assert choose({wide.name: GEMM_FIRST, narrow.name: LORA_FIRST}, wide) == GEMM_FIRST
    assert choose({wide.name: GEMM_FIRST}, narrow) == GEMM_FIRST
    assert choose({wide.name: GEMM_FIRST, narrow.name: UNSPLIT}, narrow) == UNSPLIT


def test_gemms_of_another_kind_have_splits_of_their_own() -> None:
    plain, coded = StepClass(64, "some", wide=False), StepClass(64, "some", wide=False, gemms="four bits")
    assert coded.name == f"{plain.name}, four bits"
    assert choose({plain.name: GEMM_FIRST}, coded) == UNSPLIT
    assert choose({plain.name: GEMM_FIRST, coded.name: LORA_FIRST}, coded) == LORA_FIRST
    assert choose({coded.name: LORA_FIRST}, StepClass(64, "some", wide=True, gemms="four bits")) == LORA_FIRST


def test_a_class_without_data_is_not_split() -> None:
    splits = {StepClass(64, "some", wide=False).name: GEMM_FIRST}
    for step in (StepClass(64, "many", wide=False), StepClass(128, "some", wide=False)):
        assert choose(splits, step) == UNSPLIT
    assert StepClass.of(TOKEN_BOUNDS[-1] + 1, 8, 16) is None
    assert choose(splits, None) == UNSPLIT


def test_a_cpu_and_an_unknown_gpu_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_for(torch.device("cpu"), 64, 64, 16) == UNSPLIT
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU that nobody has measured")
    assert split_for(torch.device("cuda"), 64, 64, 16) == UNSPLIT


def test_the_kernels_that_come_first_have_the_stream_of_higher_priority() -> None:
    assert (GEMM_FIRST.gemm_priority, GEMM_FIRST.lora_priority) == (-1, 0)
    assert (LORA_FIRST.gemm_priority, LORA_FIRST.lora_priority) == (0, -1)
    assert (UNSPLIT.gemm_priority, UNSPLIT.lora_priority) == (0, 0)


def test_splits_are_read_as_they_were_written(tmp_path: Path) -> None:
    splits = {"a": GEMM_FIRST, "b": LORA_FIRST, "c": UNSPLIT}
    path = tmp_path / "folder" / "GPU.sm_split.json"
    assert read_splits(path) == {}
    write_splits(path, splits)
    assert read_splits(path) == splits


@pytest.mark.parametrize("fields", [{"gemm_sms": 4}, {"first": "neither"}])
def test_a_split_that_makes_no_sense_is_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    path = tmp_path / "GPU.sm_split.json"
    path.write_text(json.dumps({"64 tokens, few tiles, narrow ranks": fields}))
    with pytest.raises(ValueError, match="Use"):
        read_splits(path)


def test_data_files_name_classes_that_exist() -> None:
    kinds = [(c, w, g) for c in CLASSES for w in (False, True) for g in get_args(GEMMs) if c != "prefill"]
    names = {StepClass(t, *kind).name for t in TOKEN_BOUNDS for kind in kinds}
    for path in FOLDER.glob("*.sm_split.json"):
        assert read_splits(path).keys() <= names
    assert split_path("NVIDIA H200").parent == FOLDER


def test_own_kernels_leave_sms_within_the_block_alone_and_in_its_thread() -> None:
    kernels = FourBitKernels((), {}, lambda *_: None, matrix_map, 132, {"few_8": 2})
    shape = KernelShape("few_8", 8, 8, 64, 8, 0)
    assert kernels.programs_for(shape, 10_000) == 264
    with gemms_limited_to(112):
        assert kernels.programs_for(shape, 10_000) == 224
        with gemms_limited_to(16):
            assert kernels.programs_for(shape, 10_000) == 32
        assert kernels.programs_for(shape, 80) == 10, "fewer programs than the limit need no limit"
        with ThreadPoolExecutor(1) as other:
            assert other.submit(kernels.programs_for, shape, 10_000).result() == 264
        with gemms_limited_to(None):
            assert kernels.programs_for(shape, 10_000) == 224
    with pytest.raises(KeyError), gemms_limited_to(96):
        raise KeyError
    assert kernels.programs_for(shape, 10_000) == 264


def test_a_block_inside_another_gives_cublas_the_outer_limit_back(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[int] = []
    monkeypatch.setattr(gemm_sms, "_cublas", lambda: ctypes.CDLL(None))
    monkeypatch.setattr(gemm_sms, "_set_target", lambda _, num_sms: targets.append(num_sms))
    with gemms_limited_to(112):
        with gemms_limited_to(16), gemms_limited_to(None):
            pass
        with pytest.raises(KeyError), gemms_limited_to(96):
            raise KeyError
    assert targets == [112, 16, 112, 96, 112, gemm_sms.ALL_SMS]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has a cuBLAS to limit")
def test_without_cublas_gemms_run_unlimited_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    gemm_sms._cublas.cache_clear()
    with caplog.at_level(logging.WARNING), gemms_limited_to(88), gemms_limited_to(96):
        pass
    assert len(caplog.records) == 1


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("split", [UNSPLIT, GEMM_FIRST, LORA_FIRST, SMSplit(None, "gemm")], ids=str)
    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize(("in_features", "out_features"), [(4096, (4096, 1024, 1024)), (14336, (4096,))], ids=str)
    @pytest.mark.parametrize("num_tokens", [8, 64, 256])
    def test_a_graph_of_any_split_equals_the_loop(
        self, num_tokens: int, in_features: int, out_features: tuple[int, ...], with_bias: bool, split: SMSplit
    ) -> None:
        packed = make_packed(in_features, out_features, dtype=torch.bfloat16, device="cuda")
        rank_of_slot = [max(ranks or (0,)) for ranks in RANKS_OF_SLOTS]
        x, y = make_inputs(packed, num_tokens)
        weight = torch.randn(sum(out_features), in_features, device="cuda").div(in_features**0.5).bfloat16()
        bias = y[0].clone() if with_bias else None
        base = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        unlimited = F.linear(x, weight)
        tiles = static_tile_counts(num_tokens, len(RANKS_OF_SLOTS))[-1]
        batch = LoRABatch.static(num_tokens, tiles, max(rank_of_slot), packed.tables)
        batch.run_beside(split, torch.cuda.Stream(priority=split.lora_priority))

        def work() -> torch.Tensor:
            batch.begin()
            out, delta, *_ = linear_with_lora(x, PlainWeight(weight), bias, packed, batch)
            assert delta is not None
            return out.float() + delta.float()

        stream = torch.cuda.Stream(priority=split.gemm_priority)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = work()
        for mix in ("all_different", "some_base"):
            slots = slots_of_tokens(mix, num_tokens, len(RANKS_OF_SLOTS))
            batch.fill(slots, rank_of_slot)
            poison_free_memory()
            want = reference(x, base, packed, slots)
            results = []
            for _ in range(3):
                out.fill_(torch.nan)
                graph.replay()
                results.append(out.clone())
            torch.testing.assert_close(results[0].double(), want, atol=5e-2, rtol=3e-2)
            assert all(torch.equal(results[0], result) for result in results)
        assert torch.equal(F.linear(x, weight), unlimited), "a GEMM without adapters is limited too"

    def test_cublas_is_limited_within_the_block_alone(self) -> None:
        torch.zeros(1, device="cuda")  # cuBLAS needs a context
        assert _target() == 0
        with gemms_limited_to(88):
            assert _target() == 88
        assert _target() == 0
        with gemms_limited_to(96), gemms_limited_to(64):
            assert _target() == 64
        with gemms_limited_to(96):
            with gemms_limited_to(64):
                pass
            assert _target() == 96
        with pytest.raises(KeyError), gemms_limited_to(96):
            raise KeyError
        assert _target() == 0

    def test_a_number_of_sms_that_cublas_does_not_take_is_an_error(self) -> None:
        torch.zeros(1, device="cuda")  # cuBLAS needs a context
        with pytest.raises(RuntimeError, match="tune_sm_split"), gemms_limited_to(-1):
            pass


def _target() -> int:
    """The number of SMs for which cuBLAS plans now; 0 stands for all."""
    library, found = gemm_sms._cublas(), ctypes.c_int(-1)
    assert library is not None
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    assert library.cublasGetSmCountTarget(handle, ctypes.byref(found)) == 0
    return found.value
