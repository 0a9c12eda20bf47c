"""Computes the logits of one step of a model on the CPU, whatever part of it a rank holds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.attention.torch_backend import TorchAttention
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.device.state_cache import StateCache
from lorafleet.workers.kv_cache_sizing import allocate_caches
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager

CPU = torch.device("cpu")
LENGTHS = 13, 6  # tokens of a prompt for the adapter, and of one for the base
BLOCK = 16


@torch.inference_mode()
def step_logits(model: EngineModel, base: Path, described: Base, adapter: Path, fully_sharded: bool = False) -> Tensor:
    """Returns the logits [T, V] of one step with both prompts. `described` is the base as the adapter is checked
    against it."""
    lora = LoRAConfig(max_loras=1, max_lora_rank=16, fully_sharded_loras=fully_sharded)
    slots = LoRAModelManager(model, lora, torch.float32, CPU)
    loader = AdapterLoader(described, lora, slots, torch.float32, CPU, AdapterStore(SourcesConfig()))
    slots.activate(loader.submit(LoRARequest("a", 1, str(adapter))).result(), slots.slots[0])
    loader.stop()
    spec = attention_spec(model.shard.local, BLOCK, torch.float32, torch.float32, CPU, model.sinks())
    caches = allocate_caches(EngineConfig(str(base), block_size=BLOCK), model.config, spec, len(LENGTHS))
    backend = TorchAttention(spec, caches)
    backend.plan(AttentionBatch(list(LENGTHS), list(LENGTHS), [[0], [1]]))
    position_T = torch.cat([torch.arange(length) for length in LENGTHS])
    length_T = torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS))
    slot_T = torch.tensor([0, BLOCK]).repeat_interleave(torch.tensor(LENGTHS)) + position_T
    vocab_size, generator = model.config.vocab_size, torch.Generator().manual_seed(0)
    token_T = torch.randint(vocab_size, (sum(LENGTHS),), generator=generator)
    batch = LoRABatch.build([0] * LENGTHS[0] + [BASE_SLOT] * LENGTHS[1], slots.tables)
    states = None
    if model.config.states:
        states = StateCache(model.shard.local.states, len(LENGTHS), torch.float32, CPU).of_padding(LENGTHS)
    hidden_TD = model(token_T, position_T, length_T, slot_T, caches, backend, batch, states)
    return model.gather_logits(model.logits(hidden_TD))
