"""Packs tensors in memory into the body of a push (protocol/adapter_formats/tensor_push.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lorafleet.protocol.adapter_formats.tensor_push import write_head


def pack_tensors(tensors: Mapping[str, Any] | bytes, config: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Returns the two parts of the body: its head and its weights.

    Args:
        tensors: torch tensors on any device or numpy arrays by PEFT's names, or the content of a safetensors file.
        config: Content of adapter_config.json; sets and enums in it become lists and texts.
    """
    weights = tensors if isinstance(tensors, bytes) else _save(tensors)
    return write_head({key: _plain(value) for key, value in config.items()}, weights), weights


def _save(tensors: Mapping[str, Any]) -> bytes:
    if all(hasattr(tensor, "detach") for tensor in tensors.values()):
        from safetensors import torch as torch_format  # Clients without torch send numpy arrays.

        return torch_format.save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
    from safetensors import numpy as numpy_format

    return numpy_format.save(dict(tensors))


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value
