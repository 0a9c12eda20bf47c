"""Reads the checkpoint of an EAGLE-3 head, and rejects by name what the engine does not support."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lorafleet.protocol.config_json import integer, read_config
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.bases.families.architectures import FAMILIES
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.stored_tensors import Stored, StoredTensors
from lorafleet.workers.bases.tensor_parts import PlainPart
from lorafleet.workers.speculation.eagle_head import EagleHead, tapped_layers

LAYER = "midlayer."


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """The settings of a head."""

    layer: ModelConfig  # Its vocabulary is what the head drafts.
    norms_residual: bool  # As in EagleHead.


def read_eagle_config(folder: Path, target: ModelConfig) -> EagleConfig:
    """Raises ConfigError if the folder has no head of this target that can be served."""
    if not (folder / "config.json").is_file():
        raise _refusal(folder, "is not a local folder with a config.json")
    raw = read_config(folder / "config.json")
    if "draft_vocab_size" not in raw:
        raise _refusal(folder, "has no draft_vocab_size in its config.json, so it is not an EAGLE-3 head")
    family = FAMILIES["LlamaForCausalLM"]
    fields = ConfigFields(raw, family.defaults)
    config = family.describe(fields)
    drafted = integer(raw, "draft_vocab_size", config.vocab_size)
    tapped = _tapped(raw)
    reason = None
    if config.num_layers != 1:
        reason = f"has {config.num_layers} layers; only heads of one layer are served"
    elif config.hidden_size != target.hidden_size or config.vocab_size != target.vocab_size:
        reason = (
            f"is for a target of hidden size {config.hidden_size} and {config.vocab_size} tokens; this one has "
            f"{target.hidden_size} and {target.vocab_size}"
        )
    elif drafted > config.vocab_size:
        reason = f"drafts {drafted} tokens, more than the {config.vocab_size} of its target"
    elif target.num_layers < 7:
        reason = f"needs a target of 7 layers or more; this one has {target.num_layers}"
    elif tapped is not None and tapped != list(tapped_layers(target.num_layers)):
        reason = f"reads the layers {shown(tapped)}; only {list(tapped_layers(target.num_layers))} are served"
    elif target.altup is not None or target.embed_scale != 1.0:
        reason = "is for a target with one residual stream, whose embedding is not scaled"
    elif config.rope.depends_on_length:
        reason = "rotates all keys anew when a sequence gets longer than a limit"
    if reason is not None:
        raise _refusal(folder, reason)
    layer = replace(config, vocab_size=drafted, tie_word_embeddings=False, eos_token_ids=())
    return EagleConfig(layer, fields.flag("norm_before_residual"))


def _tapped(raw: dict[str, Any]) -> object:
    """Returns the target's layers that the head reads, as its config.json names them; None if it names none."""
    name = "eagle_aux_hidden_state_layer_ids"
    listed = raw.get("eagle_config")
    return raw.get(name) or (listed.get(name) if isinstance(listed, dict) else listed) or None


@torch.inference_mode()
def load_eagle_weights(head: EagleHead, folder: Path) -> None:
    """Fills this rank's part of the head from its checkpoint. Raises ConfigError naming a missing, unknown or
    misshapen tensor."""
    parts = _parts(head)
    offsets_W = torch.zeros(head.config.vocab_size, dtype=torch.int64)  # "d2t": what is added to a drafted token.
    with StoredTensors(folder) as tensors:
        names = set(tensors.names())
        missing = sorted(parts.keys() - names)
        if head.config.vocab_size < head.embed_tokens.vocab_size and "d2t" not in names:
            missing.append("d2t")
        unknown = sorted(names - parts.keys() - {"d2t", "t2d"})
        if missing or unknown:
            what = f"lacks {', '.join(missing[:5])}" if missing else f"has {', '.join(unknown[:5])}"
            raise _refusal(folder, f"{what}, which no EAGLE-3 head that is served does")
        for name, part in parts.items():
            stored = tensors.plain(name)
            _check_shape(stored, part.whole_shape, name, folder)
            part.fill(stored)
        if "d2t" in names:
            stored = tensors.stored("d2t")
            _check_shape(stored, [len(offsets_W)], "d2t", folder)
            offsets_W.copy_(stored[...])
    target_id_W = torch.arange(len(offsets_W)) + offsets_W
    if not 0 <= int(target_id_W.min()) <= int(target_id_W.max()) < head.embed_tokens.vocab_size:
        raise _refusal(folder, "has a d2t that leads to tokens which the target does not have")
    head.drafts.target_id_W.copy_(target_id_W)


def _parts(head: EagleHead) -> dict[str, PlainPart]:
    """Returns this rank's part of each tensor of the checkpoint, by its name."""
    layer, shard = head.layer, head.shard
    found: dict[str, PlainPart] = {}
    for projections, linear in zip(head.config.packed_projections(0), layer.packed_linears(), strict=True):
        rows = linear.weight.dequantized().split(linear.out_features)
        biases = [None] * len(rows) if linear.bias is None else linear.bias.split(linear.out_features)
        for projection, held, bias in zip(projections, rows, biases, strict=True):
            name, path = f"{LAYER}{projection.name}", f"layers.0.{projection.name}"
            num_inputs, num_outputs = shard.projections[path].shape
            columns, outputs = shard.input(path), shard.outputs(path)
            if linear is head.wide_linear:
                num_inputs, columns = linear.in_features, slice(0, linear.in_features)
            found[f"{name}.weight"] = PlainPart(held, [(own, columns) for own in outputs], [num_outputs, num_inputs])
            if bias is not None:
                found[f"{name}.bias"] = PlainPart(bias, [(own,) for own in outputs], [num_outputs])
    norms = {
        f"{LAYER}input_layernorm": layer.attention_in.norm,
        f"{LAYER}hidden_norm": head.feature_norm.norm,
        f"{LAYER}post_attention_layernorm": layer.mlp_in.norm,
        "norm": head.last.norm,
    }
    whole = {f"{name}.weight": norm.weight for name, norm in norms.items() if norm is not None}
    for name, held in (whole | {"fc.weight": head.fused}).items():
        found[name] = PlainPart(held, [tuple(slice(0, size) for size in held.shape)], list(held.shape))
    table, size = head.lm_head, head.config.hidden_size
    place, shape = (shard.vocabulary, slice(0, size)), [table.vocab_size, size]
    return found | {"lm_head.weight": PlainPart(table.weight[: table.num_tokens], [place], shape)}


def _check_shape(stored: Stored, shape: list[int], name: str, folder: Path) -> None:
    if stored.get_shape() != shape:
        raise _refusal(folder, f"has {name} of shape {stored.get_shape()} in place of {shape}")


def _refusal(folder: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"speculative_config: the model {str(folder)!r} {reason}. Give another one.", "speculative_config"
    )
