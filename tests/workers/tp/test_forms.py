"""Every form of linears on two ranks gives what it gives on one, in both layouts of A and B."""

# T tokens · O out

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapter_forms import make_forms
from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.adapters.content_digest import ContentDigest
from lorafleet.workers.adapters.forms import AdapterForms
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.packed_adapter import pack
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard
from ranks import on_ranks
from tiny_models import make_model

CPU = torch.device("cpu")
# Biases everywhere; fused projections; norms of q and k, and sizes that leave the Kronecker factors cut within.
FAMILIES = ["llama_bias", "phi3", "qwen3"]
NUM_TOKENS = 29
Outputs = list[tuple[tuple[str, ...], Tensor]]


def _pageable(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


@torch.inference_mode()
def run(
    group: TPGroup, folder: Path, forms: dict[str, AdapterForms], fully_sharded: bool
) -> tuple[Outputs, list[int], list[tuple[str, Tensor]]]:
    """What every packed linear gives for random inputs, summed over the ranks where it is a sum; the bytes of each
    adapter, as all ranks tell them; and what every norm gives."""
    config = read_model_config(folder)
    model = DecoderModel(config, group, torch.float32, CPU)
    load_weights(model, folder)
    lora_config = LoRAConfig(
        max_loras=len(forms), max_gpu_loras=len(forms), max_lora_rank=16, fully_sharded_loras=fully_sharded
    )
    manager = LoRAModelManager(model, lora_config, torch.float32, CPU)
    infos = []
    for (kind, form), slot in zip(forms.items(), manager.slots, strict=True):
        part = LoRAModel.of(form, ContentDigest.known(kind), torch.float32, kind, manager.sharding)
        adapter = pack(part, manager.base_parts, torch.float32, _pageable)
        manager.activate(adapter, slot)
        infos.append(adapter.info.num_bytes)
    slots = [(t * 3) % (len(forms) + 1) + BASE_SLOT for t in range(NUM_TOKENS)]
    batch = LoRABatch.build(slots, manager.tables)
    outputs: Outputs = []
    for i, (names, linear) in enumerate(model.packed_linears()):
        random = torch.Generator().manual_seed(i)
        x_TD = torch.randn(NUM_TOKENS, config.projections()[names[0]].shape[0], generator=random)
        y_TO = linear(x_TD[:, model.shard.input(names[0])].contiguous(), batch).y_TO
        is_sum = model.shard.is_row_parallel(names[0])
        outputs.append((names, group.all_reduce(y_TO) if is_sum else y_TO))
    norms = [(name, norm.for_step(batch).weight) for name, norm in model.norms()]
    return outputs, infos, norms


def run_all(group: TPGroup, folders: list[Path]) -> list[Any]:
    made = [(folder, make_forms(folder)) for folder in folders]
    return [run(group, folder, forms, fully) for folder, forms in made for fully in (False, True)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("tp_forms")
    return [make_model(root / family, family, num_hidden_layers=2) for family in FAMILIES]


def test_every_linear_and_norm_gives_what_it_gives_on_one_rank(folders: list[Path]) -> None:
    alone = run_all(TPGroup(), folders)
    ranks = on_ranks(2, run_all, folders)
    for case, (whole, infos, whole_norms) in enumerate(alone):
        config = read_model_config(folders[case // 2])
        for rank, results in enumerate(ranks):
            outputs, own_infos, norms = results[case]
            shard = Shard.of(config, rank, 2)
            assert own_infos == infos, "all ranks say the same of an adapter"
            for (names, y_TO), (_, whole_TO) in zip(outputs, whole, strict=True):
                sizes = [config.projections()[name].shape[1] for name in names]
                slices = zip(names, whole_TO.split(sizes, dim=1), strict=True)
                want_TO = torch.cat([s[:, own] for name, s in slices for own in shard.outputs(name)], dim=1)
                torch.testing.assert_close(y_TO, want_TO, atol=1e-4, rtol=1e-4)
            for (_, weight), (_, whole_weight) in zip(norms, whole_norms, strict=True):
                assert torch.equal(weight, whole_weight)
