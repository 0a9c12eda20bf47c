"""Checksums of tensors that arrive in parts, and the layout of a safetensors file."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import save

from lorafleet.cluster.admin.tensor_memory import copy_tensors
from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo, parse_header
from lorafleet.protocol.adapter_formats.safetensors_layout import write_header
from lorafleet.protocol.adapter_formats.sealed_memory import map_sealed
from lorafleet.protocol.adapter_formats.tensor_push import TensorSums
from lorafleet.protocol.errors import AdapterMalformed, InvalidRequest

TENSORS = {
    "b.lora_A": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a.lora_A": torch.arange(5, dtype=torch.bfloat16),
    "Ä": torch.empty(0, 4),
    "n": torch.tensor(7, dtype=torch.int64),
    "u": torch.arange(3, dtype=torch.uint8),
}


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 4096])
def test_checksums_do_not_depend_on_the_parts(part_bytes: int) -> None:
    file = save(TENSORS)
    sums = TensorSums(len(file))
    for start in range(0, len(file), part_bytes):
        sums.advance(memoryview(file), min(start + part_bytes, len(file)))
    values = {key: tensor.contiguous().view(-1).view(torch.uint8).numpy() for key, tensor in TENSORS.items()}
    assert sums.computed() == {key: hashlib.sha256(value.tobytes()).hexdigest() for key, value in values.items()}


@pytest.mark.parametrize("file", [b"", b"1234567", b"\xff" * 16, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_without_a_header_is_rejected(file: bytes) -> None:
    with pytest.raises(AdapterMalformed):
        TensorSums(len(file)).advance(memoryview(file), len(file))


def test_tensors_are_laid_out_as_the_library_does() -> None:
    memory = copy_tensors({**TENSORS, "t": torch.arange(6.0).view(2, 3).T}, b"{}")
    content = map_sealed(memory.seal())
    assert content is not None
    expected = save({**TENSORS, "t": torch.arange(6.0).view(2, 3).T.contiguous()})
    assert bytes(content.weights) == expected
    memory.close()


def test_a_dtype_that_no_adapter_has_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"'c' is of torch.complex64"):
        copy_tensors({"c": torch.from_numpy(np.zeros(1, np.complex64))}, b"{}")


def test_the_header_of_an_adapter_on_all_experts_of_a_large_mixture_is_read() -> None:
    """48 layers of 128 experts have three projections each, beside four of attention."""
    names = [
        f"base_model.model.model.layers.{layer}.{module}.lora_{side}.weight"
        for layer in range(48)
        for module in (
            *(f"mlp.experts.{expert}.{leaf}_proj" for expert in range(128) for leaf in ("gate", "up", "down")),
            *(f"self_attn.{leaf}_proj" for leaf in "qkvo"),
        )
        for side in "AB"
    ]
    header = write_header({name: TensorInfo((1,), "U8", i, i + 1) for i, name in enumerate(names)})
    assert len(parse_header(header[8:], len(names), "the body")) == len(names) == 37_248
