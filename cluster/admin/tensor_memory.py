"""Copies a trainer's tensors into memory that the node's processes can map, once and without a file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lorafleet.protocol.adapter_formats.safetensors_layout import lay_out, write_header
from lorafleet.protocol.adapter_formats.sealed_memory import AdapterMemory
from lorafleet.protocol.errors import InvalidRequest

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}


def copy_tensors(tensors: Mapping[str, Tensor], config: bytes) -> AdapterMemory:
    """Returns memory with the tensors as a safetensors file, and with the config. It is not sealed yet.

    Raises InvalidRequest for a dtype that no adapter may have, and OSError if there is no memory.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise InvalidRequest(
                f"the tensor {name!r} is of {tensor.dtype}; use one of {', '.join(map(str, DTYPE_NAMES))}."
            )
    infos = lay_out({name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()})
    head = write_header(infos)
    num_bytes = len(head) + max((info.end for info in infos.values()), default=0)
    memory = AdapterMemory(config, num_bytes)
    try:
        memory.write(head, 0)
        for name, info in infos.items():
            values = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
            memory.write(values.numpy().data, len(head) + info.start)
    except BaseException:
        memory.close()
        raise
    return memory
