"""The state of the step in progress, for modules that transformers calls and that it cannot pass on, and attention
over our paged caches for transformers' modules."""

# T tokens · H query heads · G KV heads · D head size

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lorafleet.kernels.decoder.rope_store import store
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.attention.attention_backend import AttentionBackend, KVCache

PAGED = "lorafleet_paged"  # the name of paged_attention among transformers' attention functions
_LAYER = "_lorafleet_layer"  # the attribute of an attention module that leads to its PagedLayer


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step's values that attention needs."""

    slot_mapping_T: Tensor  # as in StepContext
    caches: list[KVCache]
    attention: AttentionBackend


class StepState:
    """The step that a model is computing."""

    def __init__(self) -> None:
        self.lora: LoRABatch | None = None
        self.paged: PagedStep | None = None

    @contextmanager
    def of(self, paged: PagedStep, lora: LoRABatch | None) -> Iterator[None]:
        self.paged, self.lora = paged, lora
        try:
            yield
        finally:
            self.paged = self.lora = None


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """Attends over one layer's paged cache."""

    index: int
    state: StepState

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        step = self.state.paged
        assert step is not None, "attention runs within a step"
        cache = step.caches[self.index]
        store(k_TGD, cache.k_NPGD, step.slot_mapping_T, cache.k_scale)
        store(v_TGD, cache.v_NPGD, step.slot_mapping_T, cache.v_scale)
        return step.attention.attend(self.index, q_THD)


def use_paged_attention(model: Any, attention_modules: tuple[str, ...], state: StepState) -> None:
    """Makes the modules at these paths, one per layer, attend over the caches of `state`'s step."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # an import of seconds, and only for this

    ALL_ATTENTION_FUNCTIONS.register(PAGED, paged_attention)
    for index, path in enumerate(attention_modules):
        setattr(model.get_submodule(path), _LAYER, PagedLayer(index, state))
    model.set_attn_implementation(PAGED)


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_options: Any
) -> tuple[Tensor, None]:
    """Attends as transformers' attention functions do: q [1, H, T, D], k and v [1, G, T, D], result [1, T, H, D].

    The mask and the options are those that attention_probe.py has found, and are in the backend's AttentionSpec.
    """
    assert attention_mask is None
    layer: PagedLayer = getattr(module, _LAYER)
    q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return layer.attend(q_THD, k_TGD, v_TGD).unsqueeze(0), None
