"""Reads adapters in the layouts of other tools and older versions, and converts them to today's PEFT layout.

Only names, orientation and config fields change. The tensors keep their meaning, which workers/adapters/reader.py
reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lorafleet.protocol.adapter_formats.adapter_files import (
    BIN_NAME,
    CONFIG_NAME,
    AdapterFolder,
    open_weights,
    read_config,
)
from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo
from lorafleet.protocol.errors import AdapterMalformed, ConfigError
from lorafleet.protocol.lora_config import MAX_RANK_BOUND
from lorafleet.protocol.strict_json import read_json_object, shown
from lorafleet.tools.inferred_base import base_of
from lorafleet.tools.mlx import is_mlx, read_mlx
from lorafleet.tools.peft_files import PEFTFiles, load_tensors
from lorafleet.workers.adapters.adapter_parts import AdapterParts
from lorafleet.workers.adapters.patterns import Budget, Pattern
from lorafleet.workers.adapters.peft_fields import FIELDS, is_known, is_unset
from lorafleet.workers.adapters.peft_helper import PEFTHelper
from lorafleet.workers.adapters.spellings import known_name, without_wrappers
from lorafleet.workers.adapters.weight_files import read_weights

REMOVED_FIELDS = ("enable_lora", "merge_weights")  # Fields of 2023, without effect if unset or false.

_PREFIX = re.compile(r"(?:base_model\.model\.|base_model\.|model\.|language_model\.)*+")
# Matches the adapter's name after the leaf. PEFT removes it when it saves; a state dict that a user saves still has it.
_NAMED_LEAF = re.compile(
    r"\.(?P<leaf>lora_(?:[ABE]|embedding_[AB]|magnitude_vector)"
    r"|hada_w[12]_[ab]|lokr_w[12](?:_[ab])?|ia3_l|vera_lambda_[bd])"
    r"\.(?!weight$|bias$)(?P<adapter>[\w-]+)(?=\.weight$|\.bias$|$)"
)
_TARGET = re.compile(r"base_model\.model\.(?P<module>.+)\.(?:lora|hada|lokr|ia3|vera_lambda)_\w+(?:\.weight|\.bias)?")
_SAVED_MODULE = re.compile(r"\.modules_to_save\.[\w-]+\.(?=weight$|bias$)")
_MULTIMODAL = "language_model."
_NAMES_OF_MODULES = ("target_modules", "exclude_modules", "modules_to_save", "rank_pattern", "alpha_pattern")
_LEAF_WITHOUT_WEIGHT = re.compile(r"\.(lora_embedding_[AB]|lora_magnitude_vector)\.weight$")
_OF_THE_MODEL = re.compile(r"(layers\.\d+|embed_tokens|norm)\.")


def read_layout(path: Path) -> PEFTFiles:
    """Reads the adapter in a folder. Raises an AdapterError if there is none, or if its layout is unknown."""
    folder = AdapterFolder.at(path)
    config = read_json_object(read_config(folder), CONFIG_NAME)
    if is_mlx(folder, config):
        return read_mlx(folder, config)
    with open_weights(folder) as file:
        weights = read_weights(file, hashlib.sha256())
        changes = [f"{BIN_NAME} -> safetensors"] if file.name == BIN_NAME else []
        _check_one_adapter(weights.infos)
        names = {name: saved_name(name) for name in weights.infos}
        _check_distinct(names)
        dropped = [name for name in config if _is_outdated(name, config)]
        today = {name: value for name, value in config.items() if name not in dropped}
        if any(_MULTIMODAL in name for name in names):
            today = _of_the_decoder(today, names)
        _check_header(today, {names[name]: info for name, info in weights.infos.items()})
        tensors = load_tensors(weights, file.name)
    renamed = [(old, new) for old, new in names.items() if old != new]
    if renamed:
        old, new = renamed[0]
        changes.append(f"{len(renamed)} tensors renamed, such as {shown(old)} -> {shown(new)}")
    if dropped:
        changes.append(f"adapter_config.json: dropped {', '.join(map(shown, dropped))}")
    return PEFTFiles(today, {names[name]: tensor for name, tensor in tensors.items()}, changes)


def _check_header(config: Mapping[str, object], infos: Mapping[str, TensorInfo]) -> None:
    """Checks the shapes before gigabytes of unusable tensors are read. If only the base could tell, the reader checks
    later."""
    helper = PEFTHelper.from_dict(config)
    with contextlib.suppress(ConfigError):
        AdapterParts.of(helper, infos, base_of(config, infos), MAX_RANK_BOUND)


def saved_name(name: str) -> str:
    """Returns the name under which PEFT 0.21 would save this tensor of a decoder. A name that is not a decoder's does
    not change."""
    name = without_wrappers(name)
    match = _PREFIX.match(name)
    rest = _NAMED_LEAF.sub(r".\g<leaf>", name[match.end() if match else 0 :])
    rest = _SAVED_MODULE.sub(".", rest)
    rest = _LEAF_WITHOUT_WEIGHT.sub(r".\1", rest)
    if _OF_THE_MODEL.match(rest):
        return f"base_model.model.model.{rest}"
    return f"base_model.model.{rest}" if rest.startswith(("lm_head.", "score.", "classifier.")) else name


def _check_one_adapter(names: Iterable[str]) -> None:
    found = {match["adapter"] for match in map(_NAMED_LEAF.search, names) if match is not None}
    if len(found) > 1:
        raise AdapterMalformed(f"the weights file has tensors of several adapters: {', '.join(sorted(found))}.")


def _of_the_decoder(config: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Returns a multimodal model's config for its decoder alone. A regular expression that looks for "language" would
    find nothing in a decoder, so the modules are listed instead.

    Args:
        names: today's names of the tensors, by those in the file.
    """
    today = dict(config)
    modules = _target_modules(names)
    for key in _NAMES_OF_MODULES:
        value = today.get(key)
        if isinstance(value, list):
            today[key] = [name.replace(_MULTIMODAL, "") if isinstance(name, str) else name for name in value]
        elif isinstance(value, dict):
            today[key] = _listed(key, value, modules)
    written = [config.get("target_modules"), config.get("exclude_modules")]
    if any(isinstance(value, str) and value != "all-linear" for value in written):
        today["target_modules"] = sorted(set(modules.values()))
        today["exclude_modules"] = None
    return today


def _target_modules(names: Mapping[str, str]) -> dict[str, str]:
    """Returns today's names of the targeted modules, by those that the file has without PEFT's prefix."""
    found = {}
    for old, new in names.items():
        match = _TARGET.fullmatch(new)
        if match is not None:
            leaf = new[match.end("module") :]
            own = _NAMED_LEAF.sub(r".\g<leaf>", known_name(without_wrappers(old)))
            found[own.removesuffix(leaf)] = match["module"]
    return found


def _listed(key: str, table: Mapping[str, object], modules: Mapping[str, str]) -> dict[str, object]:
    """Returns rank_pattern or alpha_pattern with each module's own name. An entry that names none of them stays."""
    budget, patterns = Budget(), [(Pattern(text, key), value) for text, value in table.items()]
    used = set()
    listed: dict[str, object] = {}
    for old, new in modules.items():
        for pattern, value in patterns:
            if pattern.matches_ending(old, budget):
                listed[new] = value
                used.add(pattern.text)
                break
    return listed | {text.replace(_MULTIMODAL, ""): value for text, value in table.items() if text not in used}


def _check_distinct(names: Mapping[str, str]) -> None:
    found: dict[str, str] = {}
    for old, new in names.items():
        other = found.setdefault(new, old)
        if other != old:
            raise AdapterMalformed(f"{shown(other)} and {shown(old)} both mean {shown(new)}.")


def _is_outdated(name: str, config: Mapping[str, object]) -> bool:
    """Returns whether PEFT no longer knows this field and its value has no effect. A field that has an effect is left
    for the reader to reject."""
    method = config.get("peft_type")
    if not isinstance(method, str) or method not in FIELDS or not is_unset(config[name]):
        return False
    return name in REMOVED_FIELDS or not is_known(method, name)
