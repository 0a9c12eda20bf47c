"""Infers a base from an adapter's own tensors, so that the adapter can be read without one. This checks everything
except whether the adapter fits a real base."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NoReturn

from lorafleet.protocol.adapter_formats.adapter_classifier import find_head
from lorafleet.protocol.adapter_formats.adapter_files import (
    CONFIG_NAME,
    AdapterFolder,
    open_weights,
    read_config,
    read_language,
)
from lorafleet.protocol.adapter_formats.adapter_rope import DEFAULTS_NAME, read_adapter_rope
from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo
from lorafleet.protocol.errors import AdapterTooLarge, ConfigError
from lorafleet.protocol.strict_json import read_json_object
from lorafleet.workers.adapters.base_layout import EMBEDDING, HEAD, TABLES, BaseLayout
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.kinds.trained_tokens import ROWS, trained_tokens
from lorafleet.workers.adapters.peft_helper import PEFTHelper
from lorafleet.workers.adapters.peft_names import engine_name, left_out_part
from lorafleet.workers.adapters.spellings import table_names, without_wrappers
from lorafleet.workers.adapters.weight_files import read_weights

Shape = tuple[int, ...]
Leaves = Mapping[str, Shape]

MAX_TOKENS = 1 << 20  # Several times the largest vocabulary in use.

_TENSOR = re.compile(
    r"(?P<module>.+?)\.(?P<leaf>(?:lora|hada|lokr|gralora|delora|vera|ia3|hra|miss|vblora"
    r"|token_adapter|trainable|base_layer)[_.].*"
    r"|weight|bias)"
)
_ADAPTER_NAME = re.compile(r"\.default(?=\.|$)")

_ALL_EXPERTS = re.compile(r".+\.experts(\.(base_layer|w[123]|(gate|up|down)_proj))?")


class NoWeights:
    """Replaces a base's weights. Raises ConfigError if an adapter needs them."""

    def weight(self, module: str) -> NoReturn:
        raise ConfigError(f"{module} of this adapter is computed from the base's weights; name the base with --model.")

    def bias(self, module: str) -> NoReturn:
        raise ConfigError(f"{module} of this adapter is computed from the base's bias; name the base with --model.")

    def beside_the_steps(self) -> AbstractContextManager[None]:
        return nullcontext()


def tensor_infos(folder: Path) -> Mapping[str, TensorInfo]:
    """Returns the dtype and shape of each tensor, by its name in the file."""
    with open_weights(AdapterFolder.at(folder)) as file:
        return read_weights(file, hashlib.sha256()).infos


def inferred_base(folder: Path) -> Base:
    """Returns a base that fits the adapter in the folder. Raises ConfigError if the tensors do not determine the
    base's shapes, or if the adapter has a meaning only with a base."""
    opened = AdapterFolder.at(folder)
    config = read_json_object(read_config(opened), CONFIG_NAME)
    if read_adapter_rope(config, read_language(opened).get(DEFAULTS_NAME)) is not None:
        raise ConfigError("this adapter's rope scaling replaces the base's; name the base with --model.")
    return base_of(config, tensor_infos(folder))


def base_of(config: Mapping[str, object], infos: Mapping[str, TensorInfo]) -> Base:
    """Returns the same as inferred_base, for a config and tensors that are not in files yet."""
    if config.get("use_bdlora"):
        raise ConfigError(
            "the blocks of a BD-LoRA do not determine the shapes of the base's modules; name the base with --model."
        )
    leaves: dict[str, dict[str, Shape]] = {}
    for name, info in infos.items():
        match = None if left_out_part(name) else _TENSOR.fullmatch(without_wrappers(name))
        if match is not None:
            leaf = _ADAPTER_NAME.sub("", match["leaf"]).removesuffix(".weight")
            leaves.setdefault(engine_name(match["module"].removesuffix(".weight")), {})[leaf] = info.shape
    stacked = next((module for module in leaves if _ALL_EXPERTS.fullmatch(module)), None)
    if stacked is not None:
        raise ConfigError(
            f"{stacked} of this adapter changes all experts of a layer at once; name the base with --model."
        )
    norms = {m: found["weight"][0] for m, found in leaves.items() if m.endswith("norm") and _has(found, "weight", 1)}
    linears = {
        module: _shape_of(module, found)
        for module, found in leaves.items()
        if module not in (EMBEDDING, HEAD, *norms) and module.startswith("layers.")
    }
    vocab_size, hidden_size = _vocabulary(leaves)
    classifier = find_head(config, infos)
    if classifier is not None:
        hidden_size = classifier.hidden_size
    if vocab_size > MAX_TOKENS:  # Checked before such a table is read.
        raise AdapterTooLarge(
            f"the adapter's tables have {vocab_size} tokens; without a base, at most {MAX_TOKENS} are accepted. "
            "Name the base with --model."
        )
    # An adapter that trains biases has saved all of them. Otherwise any linear may have one, and reading it raises
    # NoWeights' error, which says to name the base.
    saved = frozenset(m for m in linears if _has(leaves[m], "base_layer.bias", 1) or _has(leaves[m], "bias", 1))
    biased = frozenset(linears) if config.get("bias", "none") == "none" else saved
    layout = BaseLayout(
        linears,
        vocab_size or MAX_TOKENS,
        hidden_size or _hidden_size(linears),
        (1, 1),
        tied=_is_tied(PEFTHelper.from_dict(config), leaves),
        biased=biased,
        norms=norms,
    )
    return Base(layout, NoWeights())


def _is_tied(helper: PEFTHelper, leaves: Mapping[str, Leaves]) -> bool:
    """Returns whether the embedding or the head has a change that adapter_config.json requests only for the other
    one. PEFT ties changes if the base ties the tables."""
    tokens = trained_tokens(helper, tied=False)
    for table in TABLES:
        own = leaves.get(table, {})
        if any(leaf.endswith(ROWS) for leaf in own) and table not in tokens:
            return True
        is_targeted = any(helper.targets(name, is_linear=False) for name in table_names(table))
        if any(leaf.startswith("lora_") for leaf in own) and not is_targeted:
            return helper.flag("ensure_weight_tying")
    return False


def _shape_of(module: str, leaves: Leaves) -> tuple[int, int]:
    """Returns (inputs, outputs) of a linear module."""
    for a, b in (("lora_A", "lora_B"), ("delora_A", "delora_B"), ("hada_w1_b", "hada_w1_a")):
        if _has(leaves, a, 2) and _has(leaves, b, 2):
            return leaves[a][1], leaves[b][0]
        if (a in leaves) != (b in leaves):
            return 1, 1  # The reader reports what is missing.
    if _has(leaves, "gralora_A", 3) and _has(leaves, "gralora_B", 3):
        return leaves["gralora_A"][0] * leaves["gralora_A"][1], leaves["gralora_B"][0] * leaves["gralora_B"][2]
    factors = [_factor_shape(leaves, name) for name in ("lokr_w1", "lokr_w2")]
    if factors[0] is not None and factors[1] is not None:
        return factors[0][1] * factors[1][1], factors[0][0] * factors[1][0]
    raise ConfigError(f"{module} of this adapter does not determine the base's shape; name the base with --model.")


def _factor_shape(leaves: Leaves, name: str) -> Shape | None:
    """Returns the shape of one factor of LoKr, which is stored whole or as a product of two matrices. None if it is
    missing."""
    if _has(leaves, name, 2):
        return leaves[name]
    if _has(leaves, f"{name}_a", 2) and _has(leaves, f"{name}_b", 2):
        return leaves[f"{name}_a"][0], leaves[f"{name}_b"][1]
    return None


def _vocabulary(leaves: Mapping[str, Leaves]) -> tuple[int, int]:
    """Returns (rows, hidden size) from the tensors of the embedding and the head. A number that they do not tell is
    zero."""
    embedding, head = leaves.get(EMBEDDING, {}), leaves.get(HEAD, {})
    if _has(embedding, "lora_embedding_A", 2) and _has(embedding, "lora_embedding_B", 2):
        return embedding["lora_embedding_A"][1], embedding["lora_embedding_B"][0]
    if _has(head, "lora_A", 2) and _has(head, "lora_B", 2):
        return head["lora_B"][0], head["lora_A"][1]
    for table in (embedding, head):
        for leaf in ("weight", "base_layer", "token_adapter.base_layer"):
            if _has(table, leaf, 2):
                return table[leaf][0], table[leaf][1]
    for table in (embedding, head):
        for leaf in ("trainable_tokens_delta", "token_adapter.trainable_tokens_delta"):
            if _has(table, leaf, 2):
                return 0, table[leaf][1]
    return 0, 0


def _hidden_size(linears: Mapping[str, tuple[int, int]]) -> int:
    inputs = (shape[0] for module, shape in linears.items() if module.endswith(("q_proj", "gate_proj", "up_proj")))
    return next(inputs, 0)


def _has(leaves: Leaves, leaf: str, dims: int) -> bool:
    """Returns whether there is a tensor with so many dimensions, none of them empty. The reader reports all other
    faults."""
    shape = leaves.get(leaf)
    return shape is not None and len(shape) == dims and 0 not in shape
