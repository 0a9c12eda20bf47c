"""Packs tensors in memory into the body of a push (protocol/adapter_formats/tensor_push.py)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from lorafleet.protocol.adapter_formats.safetensors_layout import lay_out
from lorafleet.protocol.adapter_formats.tensor_bucket import DTYPES
from lorafleet.protocol.adapter_formats.tensor_push import write_config_head, write_head

# Tensors that the server gets from elsewhere while it is entered, and what the push's head says about them.
SharedTensors = AbstractContextManager[dict[str, object]]


def pack_tensors(tensors: Mapping[str, Any] | bytes, config: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Returns the two parts of the body: its head and its weights.

    Args:
        tensors: torch tensors on any device or numpy arrays by PEFT's names, or the content of a safetensors file.
        config: Content of adapter_config.json; sets and enums in it become lists and texts.
    """
    weights = tensors if isinstance(tensors, bytes) else _save(tensors)
    return write_head({key: _plain(value) for key, value in config.items()}, weights), weights


def pack_shared(fields: Mapping[str, object], config: Mapping[str, Any]) -> bytes:
    """Returns the whole body of a push whose tensors are not in it (adapter_formats/announced_tensors.py)."""
    return write_config_head({key: _plain(value) for key, value in config.items()}, fields)


def in_file_order(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns torch tensors in the order in which a safetensors file has them. Raises ValueError for other dtypes."""
    for name, tensor in tensors.items():
        if _dtype(tensor) not in DTYPES:
            raise ValueError(f"the tensor {name!r} is of {tensor.dtype}; use one of {', '.join(DTYPES)}.")
    places = lay_out({name: (DTYPES[_dtype(tensor)], tuple(tensor.shape)) for name, tensor in tensors.items()})
    return {name: tensors[name] for name in places}


def entries_of(tensors: Mapping[str, Any]) -> list[dict[str, object]]:
    """Returns what the head of a push says about torch tensors that are not in its body."""
    return [{"name": name, "dtype": _dtype(tensor), "shape": list(tensor.shape)} for name, tensor in tensors.items()]


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
