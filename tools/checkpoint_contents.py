"""Reads what the files of a base's checkpoint hold: tensors, values and bytes by kind and dtype. It reads the headers
of the files, and no weights."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.stored_tensors import checkpoint_files
from lorafleet.workers.bases.text_part import is_of_pictures

# Bits of a value of each dtype, by safetensors' names.
VALUE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
MTP = "layers for several tokens (MTP)"
# The first pattern that is found in a tensor's name says its kind.
_KINDS = (
    ("scales of weights", re.compile(r"\.(?:weight_scale\w*|weight\.\w.*|qzeros|scales|g_idx|\w+_zero_point)$")),
    ("embedding", re.compile(r"\bembed_tokens\b")),
    ("head", re.compile(r"\blm_head\b")),
    ("norms", re.compile(r"norm\w*\.weight$")),
    ("biases", re.compile(r"\.bias$")),
    ("experts", re.compile(r"\.experts\.")),
    ("attention", re.compile(r"\.self_attn\.")),
    ("MLP", re.compile(r"\.(?:mlp|block_sparse_moe|feed_forward)\.")),
)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The tensors of one kind and dtype."""

    kind: str
    dtype: str  # safetensors' name.
    num_tensors: int
    num_values: int
    num_bytes: int


def read_contents(folder: Path, mtp_names: tuple[str, ...] = ()) -> list[TensorGroup]:
    """Returns the groups of tensors, the largest first. Raises ConfigError for files that cannot be read.

    Args:
        mtp_names: Beginnings of the names of tensors that predict more than the next token. They are one kind, MTP.
    """
    found: dict[tuple[str, str], list[int]] = defaultdict(list)
    for path in checkpoint_files(folder):
        for name, dtype, num_values in _headed(path):
            if dtype not in VALUE_BITS:
                raise ConfigError(f"{path}: the tensor {name!r} has the dtype {dtype}, whose size is unknown.", "model")
            kind = MTP if name.startswith(mtp_names) else kind_of_tensor(name)
            found[kind, dtype].append(num_values)
    groups = [
        TensorGroup(kind, dtype, len(sizes), sum(sizes), sum(size * VALUE_BITS[dtype] // 8 for size in sizes))
        for (kind, dtype), sizes in found.items()
    ]
    return sorted(groups, key=lambda group: -group.num_bytes)


def kind_of_tensor(name: str) -> str:
    if is_of_pictures(name):
        return "pictures"
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "others")


def _headed(path: Path) -> Iterator[tuple[str, str, int]]:
    """Yields the name, dtype and number of values of each tensor of a file."""
    try:
        # For numpy, the file is mapped for reading only, so it may be larger than the memory.
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118  safe_open is no mapping
                stored = file.get_slice(name)
                yield name, stored.get_dtype(), math.prod(stored.get_shape())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", "model") from None
