"""Fills a DecoderModel from a checkpoint's safetensors files, one or sharded, and checks that nothing is missing.

Tensors are copied one at a time into the packed parameters, so that the host never holds the whole model twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lorafleet.workers.errors import ConfigError
from lorafleet.workers.models.decoder import DecoderModel

# Where checkpoints keep what an fp8 KV cache's numbers are multiplied by. kv_scale is both; output_scale its old name.
KV_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(kv|k|v)_scale|attn\.([kv])_scale|([kv])_proj\.(?:\4_scale|output_scale))"
)
ANY_NAME = re.compile(".*")

Progress = Callable[[int, int], None]  # tensors done, tensors in all


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights, in name order."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ConfigError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json. "
            "Convert the checkpoint with save_pretrained(..., safe_serialization=True).",
            "model",
        )
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise ConfigError(f"{index} cannot be read: {e!r}", "model") from None
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"{index} names files that are not in the folder: {', '.join(missing)}.", "model")
    return [folder / name for name in names]


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the first weight, for checkpoints whose config.json does not say."""
    with safe_open(checkpoint_files(folder)[0], framework="pt") as f:
        dtype: torch.dtype = f.get_tensor(next(iter(f.keys()))).dtype
        return dtype


def load_weights(model: DecoderModel, folder: Path, progress: Progress | None = None) -> None:
    """Raises ConfigError naming the tensor for a missing, unknown or misshapen one."""
    targets = _targets(model)
    seen: set[str] = set()
    for path in checkpoint_files(folder):
        for name, tensor in _tensors(path):
            target = targets.get(name)
            if target is None:
                if not _ignorable(name, model.config.tie_word_embeddings) and not KV_SCALE.fullmatch(name):
                    raise ConfigError(f"{path} has tensor {name!r}, which {model.config.architecture} does not.")
                continue
            if tensor.shape != target.shape:
                raise ConfigError(
                    f"{path}: {name} has shape {list(tensor.shape)}; config.json asks for {list(target.shape)}."
                )
            target.copy_(tensor)
            seen.add(name)
            if progress is not None:
                progress(len(seen), len(targets))
    missing = sorted(set(targets) - seen)
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]!r}.", "model")


def read_kv_scales(folder: Path, num_layers: int) -> list[tuple[float, float]] | None:
    """(k_scale, v_scale) of each layer, None where the checkpoint has none. Raises ConfigError for half of them."""
    scales: dict[tuple[int, str], float] = {}
    for path in checkpoint_files(folder):
        for name, tensor in _tensors(path, KV_SCALE):
            found = KV_SCALE.fullmatch(name)
            assert found is not None
            scale = tensor.item() if tensor.numel() == 1 else math.nan
            if not 0 < scale < math.inf:
                raise ConfigError(f"{path}: {name} is not one positive number, as the scale of a KV cache must be.")
            layer, kinds = int(found[1]), found[2] or found[3] or found[4]
            scales |= {(layer, kind): scale for kind in kinds}
    wanted = [(layer, kind) for layer in range(num_layers) for kind in "kv"]
    if not scales:
        return None
    if sorted(scales) != wanted:
        layer, kind = min(set(wanted) ^ set(scales))
        raise ConfigError(
            f"{folder} has KV cache scales for some layers only: layer {layer}'s {kind}_scale is the first without a "
            "counterpart. Export the checkpoint again.",
            "model",
        )
    return [(scales[layer, "k"], scales[layer, "v"]) for layer in range(num_layers)]


def fill_randomly(model: DecoderModel) -> None:
    """Weights that mean nothing and keep activations in range: speed does not depend on them, but for zeros."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02)


def _tensors(path: Path, names: re.Pattern[str] = ANY_NAME) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118  safe_open is no mapping
                if names.fullmatch(name):
                    yield name, f.get_tensor(name)
    except (SafetensorError, OSError) as e:
        raise ConfigError(f"{path} cannot be read: {e}", "model") from None


def _ignorable(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _targets(model: DecoderModel) -> dict[str, Tensor]:
    """Where each checkpoint tensor goes: a whole parameter, or its rows of a packed one."""
    targets = {"model.embed_tokens.weight": model.embed_tokens.data, "model.norm.weight": model.norm.weight.data}
    if not model.config.tie_word_embeddings:
        targets["lm_head.weight"] = model.lm_head.data
    for i, layer in enumerate(model.decoder_layers()):
        prefix = f"model.layers.{i}"
        norms = {
            "input_layernorm": layer.input_layernorm,
            "post_attention_layernorm": layer.post_attention_layernorm,
            "self_attn.q_norm": layer.self_attn.q_norm,
            "self_attn.k_norm": layer.self_attn.k_norm,
        }
        targets |= {f"{prefix}.{name}.weight": norm.weight.data for name, norm in norms.items() if norm is not None}
    for names, linear in model.packed_linears():
        rows = linear.weight.data.split(linear.out_features)
        biases = linear.bias.data.split(linear.out_features) if linear.bias is not None else ()
        targets |= {f"model.{name}.weight": part for name, part in zip(names, rows, strict=True)}
        targets |= {f"model.{name}.bias": part for name, part in zip(names, biases, strict=bool(biases))}
    return targets
