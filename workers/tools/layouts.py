"""Reads an adapter as other tools and older versions lay it out, into today's PEFT layout.

Names, orientation and fields alone: what the tensors mean stays as it is, and is read by workers/lora/reader.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from lorafleet.workers.errors import AdapterMalformed
from lorafleet.workers.lora.files import BIN_NAME, CONFIG_NAME, AdapterFolder, open_weights, read_config
from lorafleet.workers.lora.peft_fields import FIELDS, is_known, is_unset
from lorafleet.workers.lora.strict_json import read_json_object, shown
from lorafleet.workers.lora.weight_files import read_weights
from lorafleet.workers.tools.mlx import is_mlx, read_mlx
from lorafleet.workers.tools.peft_files import PEFTFiles, load_tensors

REMOVED_FIELDS = ("enable_lora", "merge_weights")  # of 2023; without effect where they are unset or false

_PREFIX = re.compile(r"(?:base_model\.model\.|base_model\.|model\.|language_model\.)*+")
_ADAPTER_NAME = re.compile(r"\.default(?=\.|$)")
_LEAF_WITHOUT_WEIGHT = re.compile(r"\.(lora_embedding_[AB]|lora_magnitude_vector)\.weight$")
_OF_THE_MODEL = re.compile(r"(layers\.\d+|embed_tokens|norm)\.")


def read_layout(path: Path) -> PEFTFiles:
    """Raises an AdapterError where there is no adapter, or one in a layout that is not understood."""
    folder = AdapterFolder.at(path)
    config = read_json_object(read_config(folder), CONFIG_NAME)
    if is_mlx(folder, config):
        return read_mlx(folder, config)
    with open_weights(folder) as file:
        tensors = load_tensors(read_weights(file, hashlib.sha256()), file.name)
        changes = [f"{BIN_NAME} -> safetensors"] if file.name == BIN_NAME else []
    names = {name: saved_name(name) for name in tensors}
    _check_distinct(names)
    renamed = sum(old != new for old, new in names.items())
    if renamed:
        old, new = next((old, new) for old, new in names.items() if old != new)
        changes.append(f"{renamed} tensors renamed, such as {shown(old)} -> {shown(new)}")
    dropped = [name for name in config if _is_outdated(name, config)]
    if dropped:
        changes.append(f"adapter_config.json: dropped {', '.join(map(shown, dropped))}")
    today = {name: value for name, value in config.items() if name not in dropped}
    return PEFTFiles(today, {names[name]: tensor for name, tensor in tensors.items()}, changes)


def saved_name(name: str) -> str:
    """As PEFT 0.21 would save this tensor of a decoder. A name that is no decoder's stays."""
    match = _PREFIX.match(name)
    rest = _ADAPTER_NAME.sub("", name[match.end() if match else 0 :])
    rest = _LEAF_WITHOUT_WEIGHT.sub(r".\1", rest)
    if _OF_THE_MODEL.match(rest):
        return f"base_model.model.model.{rest}"
    return f"base_model.model.{rest}" if rest.startswith("lm_head.") else name


def _check_distinct(names: Mapping[str, str]) -> None:
    found: dict[str, str] = {}
    for old, new in names.items():
        other = found.setdefault(new, old)
        if other != old:
            raise AdapterMalformed(f"{shown(other)} and {shown(old)} are both {shown(new)}.")


def _is_outdated(name: str, config: Mapping[str, object]) -> bool:
    """A field that PEFT no longer knows and that asks for nothing; one that does is left for the reader to refuse."""
    method = config.get("peft_type")
    if method not in FIELDS or not is_unset(config[name]):
        return False
    return name in REMOVED_FIELDS or not is_known(method, name)
