"""Reads the tensors in the body of SGLang's /load_lora_adapter_from_tensors.

SGLang's own clients pickle them. A pickle can run any program when it is read, so it is rejected here, and the bytes of
a safetensors file or of a flat bucket take its place.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from typing import Literal

from lorafleet.protocol.adapter_formats.tensor_push import (
    PushedTensors,
    check_sums,
    read_bucket_file,
    write_config,
)
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.yield_gil import yielding_gil

TensorFormat = Literal["safetensors", "flattened_bucket"]

FIELD = "serialized_named_tensors"
_CHARS_AT_A_TIME = 1 << 16  # A multiple of 4, since 4 characters of base64 are 3 bytes.
_PICKLE_PROTOCOLS = range(2, 6)


def read_serialized(
    copies: Sequence[str],
    load_format: TensorFormat,
    config: Mapping[str, object],
    checksums: Mapping[str, object] | None,
) -> PushedTensors:
    """Decodes and checks an adapter.

    Args:
        copies: base64 texts with the whole adapter each. SGLang has one for each tensor-parallel rank.
        checksums: hex digests (SHA-256) by the names of all tensors, or None.

    Raises AdapterMalformed, and AdapterUnsupported for a pickle.
    """
    if any(copy != copies[0] for copy in copies):
        raise AdapterMalformed(f"the entries of `{FIELD}` differ; each must have the whole adapter.")
    data = memoryview(_decoded(copies[0]))
    if _is_pickle(data):
        raise AdapterUnsupported(
            f"`{FIELD}` has a pickle, which could run any program here and is never read. Send "
            "`safetensors.torch.save(tensors)` in its place, or PUT /v1/adapters/NAME/tensors.",
            FIELD,
        )
    weights = read_bucket_file(data) if load_format == "flattened_bucket" else data
    if checksums is not None:
        check_sums(weights, checksums, "expected_checksums")
    return PushedTensors(write_config(config), weights)


def _decoded(text: str) -> bytearray:
    data = bytearray()
    try:
        for start in yielding_gil(range(0, len(text), _CHARS_AT_A_TIME)):
            data += binascii.a2b_base64(text[start : start + _CHARS_AT_A_TIME], strict_mode=True)
    except ValueError as error:
        raise AdapterMalformed(f"an entry of `{FIELD}` is not base64: {error}.") from None
    return data


def _is_pickle(data: memoryview) -> bool:
    """Returns whether the bytes begin as a pickle does. The length of a head may begin with the same two bytes, but is
    followed by an object."""
    return len(data) > 1 and data[0] == 0x80 and data[1] in _PICKLE_PROTOCOLS and bytes(data[8:9]) != b"{"
