"""Adapters on several ranks add what they add on one, in both layouts, from the files to every linear's output."""

# T tokens · O out

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.tp.adapter_sharding import AdapterSharding
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard
from ranks import on_ranks
from tiny_models import ALL_TARGETS, make_adapter, make_model

CPU = torch.device("cpu")
# A hidden size that four ranks do not divide, with KV heads that they share; one where all is divided evenly; and one
# whose q, k and v are one linear, and gate and up.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "odd": ("qwen3", {"hidden_size": 66, "head_dim": 16, "num_key_value_heads": 2}),
    "even": ("qwen3", {"hidden_size": 64, "head_dim": 16, "num_key_value_heads": 4}),
    "fused": ("phi3", {"hidden_size": 64, "num_key_value_heads": 2}),
}
# Ranks that no number of ranks divides, and slices that an adapter leaves alone.
ADAPTERS: list[dict[str, Any]] = [
    {"r": 8, "target_modules": ALL_TARGETS},
    {"r": 1, "target_modules": ALL_TARGETS},
    {"r": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"r": 5, "target_modules": ["k_proj", "o_proj", "up_proj"], "rank_pattern": {"k_proj": 16}},
]
CASES = [(name, fully, torch.float32) for name in MODELS for fully in (False, True)]
CASES.append(("even", True, torch.bfloat16))
CASES += [("odd", True, FP8), ("even", False, FP8), ("fused", True, FP8)]  # of the adapters; the base is float32
NUM_TOKENS = 29, 1200  # the second is enough for the CPU's other form of the sum
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, FP8: 1e-4}

Folders = dict[str, tuple[Path, list[Path]]]


def test_adapters_are_fully_sharded_on_gpus_and_not_on_cpus_unless_said_otherwise() -> None:
    devices = [torch.device(name) for name in ("cuda", "cpu")]
    assert [LoRAConfig().is_fully_sharded(device) for device in devices] == [True, False]
    for said in (True, False):
        config = LoRAConfig(fully_sharded_loras=said)
        assert [config.is_fully_sharded(device) for device in devices] == [said, said]


@dataclass(frozen=True)
class Result:
    """outputs: of every packed linear, with its projections' paths, for each number of tokens. matrix_bytes: of each
    adapter's A and B here."""

    outputs: list[tuple[tuple[str, ...], list[Tensor]]]
    infos: list[AdapterInfo]
    matrix_bytes: list[int]


def slots_of(num_tokens: int) -> list[int]:
    return [(t * 7) % (len(ADAPTERS) + 1) + BASE_SLOT for t in range(num_tokens)]


@torch.inference_mode()
def run(group: TPGroup, model_folder: Path, adapters: list[Path], fully_sharded: bool, lora_dtype: torch.dtype) -> Any:
    """Result's fields: a class of this module could not be unpickled."""
    dtype = torch.float32 if lora_dtype == FP8 else lora_dtype
    config = read_model_config(model_folder)
    model = DecoderModel(config, group, dtype, CPU)
    load_weights(model, model_folder)
    lora_config = LoRAConfig(
        max_loras=len(adapters), max_gpu_loras=len(adapters), max_lora_rank=16, fully_sharded_loras=fully_sharded
    )
    manager = LoRAModelManager(model, lora_config, lora_dtype, CPU)
    loader = AdapterLoader(
        Base(BaseLayout.of(config)), lora_config, manager, lora_dtype, CPU, AdapterStore(SourcesConfig())
    )
    packed = [loader.submit(LoRARequest(f"a{i}", i + 1, str(path))).result() for i, path in enumerate(adapters)]
    loader.stop()
    for adapter, slot in zip(packed, manager.slots, strict=True):
        manager.activate(adapter, slot)
    outputs = []
    for i, (names, linear) in enumerate(model.packed_linears()):
        ys = []
        for num_tokens in NUM_TOKENS:
            random = torch.Generator().manual_seed(i)
            x_TD = torch.randn(num_tokens, config.projections()[names[0]].shape[0], generator=random).to(dtype)
            batch = LoRABatch.build(slots_of(num_tokens), manager.tables)
            own_TD = x_TD[:, model.shard.input(names[0])].contiguous()
            y_TO = linear(own_TD, batch).y_TO
            is_sum = model.shard.is_row_parallel(names[0])
            ys.append(group.all_reduce(y_TO) if is_sum else y_TO)
        outputs.append((names, ys))
    loras = [linear.lora for _, linear in model.packed_linears()]
    weights = [[lora.slots[slot] for lora in loras if lora is not None] for slot in range(len(adapters))]
    matrix_bytes = [
        sum(m.nbytes for w in of_slot if w is not None for m in (w.a_RD, *w.b, w.row_scale_R) if m is not None)
        for of_slot in weights
    ]
    return outputs, [adapter.info for adapter in packed], matrix_bytes


def run_all(group: TPGroup, folders: Folders) -> list[Any]:
    return [run(group, *folders[name], fully, dtype) for name, fully, dtype in CASES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("tp_lora")
    made: Folders = {}
    for name, (family, options) in MODELS.items():
        model = make_model(root / name, family, num_hidden_layers=1, **options)
        made[name] = (
            model,
            [make_adapter(root / f"{name}-{i}", model, seed=i, **kw) for i, kw in enumerate(ADAPTERS)],
        )
    return made


@pytest.fixture(scope="module")
def alone(folders: Folders) -> list[Result]:
    return [Result(*fields) for fields in run_all(TPGroup(), folders)]


@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"{size} ranks")
def ranks(request: pytest.FixtureRequest, folders: Folders) -> list[list[Result]]:
    return [[Result(*fields) for fields in results] for results in on_ranks(request.param, run_all, folders)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{n}-{f}-{d}" for n, f, d in CASES])
def test_every_linear_gives_what_it_gives_on_one_rank(
    ranks: list[list[Result]], alone: list[Result], folders: Folders, case: int
) -> None:
    config = read_model_config(folders[CASES[case][0]][0])
    tolerance = TOLERANCE[CASES[case][2]]
    for rank, results in enumerate(ranks):
        shard = Shard.of(config, rank, len(ranks))
        for (names, ys), (_, whole_ys) in zip(results[case].outputs, alone[case].outputs, strict=True):
            for y_TO, whole_TO in zip(ys, whole_ys, strict=True):
                whole_sizes = [config.projections()[name].shape[1] for name in names]
                slices = zip(names, whole_TO.split(whole_sizes, dim=1), strict=True)
                want_TO = torch.cat([columns[:, rows] for n, columns in slices for rows in shard.outputs(n)], dim=1)
                torch.testing.assert_close(y_TO, want_TO, atol=tolerance, rtol=tolerance)


def test_adapters_count_in_the_comparison(alone: list[Result], folders: Folders) -> None:
    model = DecoderModel(config := read_model_config(folders["even"][0]), TPGroup(), torch.float32, CPU)
    load_weights(model, folders["even"][0])
    adapters_used = torch.tensor(slots_of(NUM_TOKENS[0])) != BASE_SLOT
    for i, (names, linear) in enumerate(model.packed_linears()):
        x_TD = torch.randn(
            NUM_TOKENS[0], config.projections()[names[0]].shape[0], generator=torch.Generator().manual_seed(i)
        )
        changed = (alone[2].outputs[i][1][0] - linear(x_TD, None)[0]).abs().amax(dim=1) > 1e-2
        assert not changed[~adapters_used].any() and changed[adapters_used].float().mean() > 0.4


def test_all_ranks_say_the_same_of_an_adapter(ranks: list[list[Result]], alone: list[Result]) -> None:
    for results in ranks:
        for result, whole in zip(results, alone, strict=True):
            assert result.infos == whole.infos
            assert [info.num_bytes for info in result.infos] == whole.matrix_bytes


def test_fully_sharded_a_rank_holds_exactly_its_share_of_an_adapter(
    ranks: list[list[Result]], alone: list[Result]
) -> None:
    """Of rank 8 on an even model. A layout that divides only one of A and B holds more."""
    for fully_sharded in (False, True):
        case = CASES.index(("even", fully_sharded, torch.float32))
        share = alone[case].matrix_bytes[0] // len(ranks)
        for results in ranks:
            assert (results[case].matrix_bytes[0] == share) is fully_sharded
            assert results[case].matrix_bytes[0] >= share


def test_ranks_that_do_not_divide_cost_no_more_than_rounding_up(
    ranks: list[list[Result]], alone: list[Result], folders: Folders
) -> None:
    config = read_model_config(folders["odd"][0])
    case = CASES.index(("odd", True, torch.float32))
    total = sum(results[case].matrix_bytes[2] for results in ranks)
    attention = config.layers[0].attention
    shared_kv = max(0, len(ranks) - attention.num_kv_heads) * attention.head_dim * 3 * 4
    assert total == alone[case].matrix_bytes[2] + shared_kv, "nothing is held twice but the KV heads' B"


def test_a_part_is_cut_out_of_the_file_s_tensors_without_a_copy(folders: Folders) -> None:
    shard = Shard.of(read_model_config(folders["odd"][0]), 3, 4)
    a_RD, b_OR = torch.randn(5, 66), torch.randn(96, 5)
    own_a, own_b = AdapterSharding(shard, TPGroup(3, 4), True).part_of("layers.0.mlp.up_proj", a_RD, b_OR)
    assert own_a.untyped_storage().data_ptr() == a_RD.untyped_storage().data_ptr()
    assert own_b.untyped_storage().data_ptr() == b_OR.untyped_storage().data_ptr()
    assert own_a.shape == (0, 66) and torch.equal(own_b, b_OR[72:])


def test_of_a_fused_projection_a_rank_has_its_rows_of_each_part(folders: Folders) -> None:
    shard = Shard.of(read_model_config(folders["fused"][0]), 1, 2)
    sizes = (64, 32, 32)  # q, k and v
    b_OR = torch.arange(sum(sizes)).unsqueeze(1)
    _, own_b = AdapterSharding(shard, TPGroup(1, 2)).part_of("layers.0.self_attn.qkv_proj", torch.randn(1, 64), b_OR)
    assert own_b.flatten().tolist() == [*range(32, 64), *range(80, 96), *range(112, 128)]


def test_fully_sharded_changes_nothing_on_one_rank(alone: list[Result]) -> None:
    plain, fully = (alone[CASES.index(("odd", f, torch.float32))] for f in (False, True))
    assert plain.matrix_bytes == fully.matrix_bytes
    for (_, ys), (_, others) in zip(plain.outputs, fully.outputs, strict=True):
        assert all(torch.equal(y, other) for y, other in zip(ys, others, strict=True))
