"""Reads a Hugging Face config.json into what the engine needs, and rejects by name what the engine does not support.

workers/bases/families/ has a description of each architecture, and workers/bases/weights.py reads weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorafleet.protocol.config_json import read_config
from lorafleet.protocol.errors import ConfigError, LorafleetError, UnsupportedModel
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.bases.architecture_name import architecture_name
from lorafleet.workers.bases.families.architectures import FAMILIES
from lorafleet.workers.bases.families.config_fields import ConfigFields
from lorafleet.workers.bases.families.family import Family
from lorafleet.workers.bases.layer_config import AttentionConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.module_names import OF_BASE
from lorafleet.workers.bases.quantization import stored_quantization
from lorafleet.workers.bases.stored_tables import with_stored_tables
from lorafleet.workers.bases.stored_tensors import StoredTensors
from lorafleet.workers.bases.text_part import any_ties, text_config, text_name, wrapper_ties


def read_model_config(folder: Path) -> ModelConfig:
    """Reads the config of the checkpoint in `folder`.

    Raises ConfigError if the folder or file is missing or damaged, and UnsupportedModel naming what is not supported.
    """
    if not folder.is_dir():
        raise ConfigError(f"model {str(folder)!r} is not a folder; give a local Hugging Face checkpoint.", "model")
    raw = read_config(folder / "config.json")
    name = architecture_name(raw, frozenset(FAMILIES))
    family = None if name is None else FAMILIES.get(name)
    if family is None:
        raise UnsupportedModel(
            f"architecture {shown(raw.get('architectures'))} (model_type {shown(raw.get('model_type'))}) in "
            f"{folder / 'config.json'} is not supported; supported architectures: {', '.join(sorted(FAMILIES))}.",
            "model",
        )
    raw = raw | {"architectures": [name]}
    fields = ConfigFields(text_config(raw) if family.is_wrapper else raw, family.defaults)
    if family.is_wrapper:
        fields.raw["tie_word_embeddings"] = wrapper_ties(raw, family.defaults.get("tie_word_embeddings"))
    if fields.raw.get("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": for pictures only
        raise UnsupportedModel("use_bidirectional_attention is not supported; models that generate do not have it.")
    described = replace(_described(family, fields, folder), is_text_part=family.is_wrapper)
    model = with_stored_tables(described, folder, may_be_tied=any_ties(raw))
    if model.head_bias and model.tie_word_embeddings and model.has_head:
        raise UnsupportedModel(
            f"tie_word_embeddings=True is not supported for {model.architecture}, whose head has a bias; only False is."
        )
    return replace(
        model,
        eos_token_ids=read_ends(folder, model.vocab_size, raw.get("eos_token_id"), fields.raw.get("eos_token_id")),
        quantization=stored_quantization(
            _quantization(raw), folder, model.names, model.mtp_names, stored_names=model.stored_names
        ),
    )


def _described(family: Family, fields: ConfigFields, folder: Path) -> ModelConfig:
    """Returns the family's description. Raises ConfigError that names the field if a value is of a type or size that
    the family does not expect."""
    try:
        described = family.describe(fields)
        _check_numbers(described)
        return described
    except LorafleetError:
        raise
    except Exception as error:  # a value of another type may raise anything
        field = _unreadable_field(family, fields)
        what = "cannot be read" if field is None else f"has {field}={shown(fields.raw[field])}, which cannot be read"
        raise ConfigError(
            f"{folder / 'config.json'} {what} ({type(error).__name__}: {error}). Correct the file.", "model"
        ) from error


def _check_numbers(described: ModelConfig) -> None:
    """Raises ConfigError for a window or a cap of scores or logits that is no positive number."""
    found: list[tuple[str, object, type | tuple[type, ...]]] = [
        ("final_logit_softcapping", described.final_softcap, (int, float))
    ]
    for attention in described.attentions:
        if isinstance(attention, AttentionConfig):
            found.append(("sliding_window", attention.window, int))
            found.append(("attn_logit_softcapping", attention.softcap, (int, float)))
    for field, value, kind in found:
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind) or not value > 0):  # type: ignore[operator]  # a number by then
            raise ConfigError(f"config.json has {field}={value!r}; it must be a positive number or null.", "model")


def _unreadable_field(family: Family, fields: ConfigFields) -> str | None:
    """Returns the field without which the family can describe the model, or None if there is no such field."""
    found = []
    for key in fields.raw:
        raw = {other: value for other, value in fields.raw.items() if other != key}
        try:
            family.describe(ConfigFields(raw, family.defaults))
        except Exception:
            continue
        found.append(key)
    return min(found, key=lambda key: _is_count(fields.raw[key]), default=None)


def _is_count(value: object) -> bool:
    """Returns whether the value is one that most fields may have."""
    return type(value) is int and value > 0


def check_same_tables(folder: Path, served: ModelConfig) -> None:
    """Raises ConfigError if the checkpoint has changed so that embedding and head do not fit the running model."""
    read = read_model_config(folder)
    for what, new, old in (
        ("tie_word_embeddings by its tensors", read.tie_word_embeddings, served.tie_word_embeddings),
        ("lm_head.weight", read.has_head, served.has_head),
        ("names of tensors", read.stored_names, served.stored_names),
    ):
        if new != old:
            raise ConfigError(
                f"{folder} has other {what} than when the server started: {new} in place of {old}. Restart the server "
                "to serve this checkpoint.",
                "model",
            )


def read_mtp_config(folder: Path, target: ModelConfig) -> ModelConfig:
    """Returns the layer of `target` that predicts one token more, as a model of one layer. Its linears are quantized as
    the checkpoint in `folder` has them, or as the server's option says."""
    assert target.mtp is not None
    names = replace(target.names, part=target.mtp.names)
    quantization = target.quantization
    if quantization is None or quantization.stored is not None:
        stored = _quantization(read_config(folder / "config.json"))
        quantization = stored_quantization(
            stored, folder, names, (OF_BASE,), stored_names=target.stored_names, may_be_plain=True
        )
    return replace(
        target,
        layers=(target.mtp.layer,),
        experts=None if target.experts is None else replace(target.experts, layers=frozenset({0})),
        final_norm="norm",
        names=names,
        mtp_names=(OF_BASE,),
        quantization=quantization,
    )


def has_mtp_tensors(folder: Path, mtp_names: tuple[str, ...]) -> bool:
    """Returns whether the checkpoint has any tensor whose name begins so."""
    with StoredTensors(folder) as tensors:
        return any(text_name(name).startswith(mtp_names) for name in tensors.names())


def _quantization(raw: dict[str, Any]) -> Mapping[str, Any] | None:
    """Returns the quantization_config of the language model, or that of the whole checkpoint."""
    found: Mapping[str, Any] | None = (raw.get("text_config") or {}).get("quantization_config")
    return found or raw.get("quantization_config")


def read_ends(folder: Path, vocab_size: int, *in_config: object) -> tuple[int, ...]:
    """Returns the tokens that end answers by generation_config.json, or else by config.json.

    Args:
        in_config: eos_token_id of the whole config.json, and of its parts. The first that is not None counts, as in
            transformers.
    """
    file = folder / "generation_config.json"
    in_file = read_config(file).get("eos_token_id") if file.exists() else None
    given = next((ids for ids in (in_file, *in_config) if ids is not None), [])
    ids = given if isinstance(given, list) else [given]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigError(
                f"eos_token_id={token!r} of generation_config.json or config.json is not a token of the model; its "
                f"vocabulary has ids 0 to {vocab_size - 1}. Correct the file.",
                "model",
            )
    return tuple(ids)
