"""Converts the tokenizer of a base model's folder that has no tokenizer.json.

It converts SentencePiece models, tekken.json and tiktoken.model, once at the start of the server. The result is a
temporary folder from which transformers reads the tokenizer as any other. Folders with vocab.json and merges.txt need
no conversion: transformers reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from lorafleet.api.text import sentencepiece_file, tekken_file, tiktoken_file
from lorafleet.api.text.mistral_template import mistral_template
from lorafleet.api.text.special_tokens import SPECIAL_NAME, TOKENIZER_CONFIG_NAME
from lorafleet.protocol.config_json import read_json
from lorafleet.protocol.errors import ConfigError

ADDED_NAME, TEMPLATE_NAME, TEMPLATE_FOLDER = "added_tokens.json", "chat_template.jinja", "additional_chat_templates"
PROCESSOR_TEMPLATE_NAME = "chat_template.json"
# Files that transformers reads without conversion.
_READABLE = ("tokenizer.json", "vocab.json", "vocab.txt")
# Settings that only the class which read the original file understands.
_OF_ORIGINAL = ("auto_map", "vocab_file", "tokenizer_file", "sp_model_kwargs", "legacy", "add_prefix_space", "backend")
# Names of transformers' class for all models, as transformers 5 and earlier releases write them.
_GENERAL_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Types of models for which AutoTokenizer takes its own class, which splits texts in its own way, whatever the folder
# names (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS). To read that table would import torch.
_WITH_OWN_CLASS = {
    "hyperclovax_vision_v2",
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen4_exp",
    "siglip2",
}
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class _Converted:
    tokenizer: Tokenizer
    roles: Mapping[str, str]  # Special tokens by role, where tokenizer_config.json does not name them.
    template: str | None = None  # Chat template, where the folder has none.


@dataclass(frozen=True, slots=True)
class _Original:
    """The settings in a folder that a conversion needs in addition to the file itself."""

    config: Mapping[str, Any]  # tokenizer_config.json.
    added: Mapping[int, AddedToken] = field(default_factory=dict)  # Tokens that the config names by id.

    @property
    def names(self) -> dict[int, str]:
        return {i: token.content for i, token in self.added.items()}


def has_general_class(folder: Path) -> bool:
    """Returns whether transformers reads the folder's tokenizer with its class for all models.

    AutoTokenizer reads the configuration of the model as well, which imports torch: that takes seconds of CPU time.
    """
    config = _json(folder / TOKENIZER_CONFIG_NAME)
    named = config.get("tokenizer_class") in _GENERAL_CLASSES and "auto_map" not in config
    if not named or not (folder / "tokenizer.json").exists():
        return False
    return _json(folder / "config.json").get("model_type") not in _WITH_OWN_CLASS


def convert_folder(folder: Path, target: Path) -> bool:
    """Writes a tokenizer that transformers can read to `target`, and returns whether that was needed.

    Raises ConfigError for files that are damaged or contradict each other, and UnsupportedModel for unknown forms.
    """
    if any((folder / name).exists() for name in _READABLE):
        return False
    found = _file_in(folder)
    if found is None:
        return False
    config = _json(folder / TOKENIZER_CONFIG_NAME)
    path, convert = found
    original = _Original(config, _added_tokens(folder, config))
    converted = convert(path.read_bytes(), original)
    _add_tokens(converted.tokenizer, original.added)
    converted.tokenizer.save(str(target / "tokenizer.json"))
    settings = {key: value for key, value in config.items() if key not in _OF_ORIGINAL}
    roles = {role: name for role, name in converted.roles.items() if config.get(role) is None}
    settings |= roles | {"tokenizer_class": "PreTrainedTokenizerFast"}
    _copy_templates(folder, target)
    has_template = config.get("chat_template") or processor_template(folder) or any(target.glob("**/*.jinja"))
    if converted.template is not None and not has_template:
        settings["chat_template"] = converted.template
    (target / TOKENIZER_CONFIG_NAME).write_text(json.dumps(settings))
    if (folder / SPECIAL_NAME).exists():
        shutil.copy(folder / SPECIAL_NAME, target / SPECIAL_NAME)
    return True


def processor_template(folder: Path) -> str | None:
    """Returns the chat template that the folder has for a processor of images and text, or None if there is none."""
    template = _json(folder / PROCESSOR_TEMPLATE_NAME).get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{PROCESSOR_TEMPLATE_NAME} has a chat_template that is not a string; correct the file.")
    return template


def _file_in(folder: Path) -> tuple[Path, Callable[[bytes, _Original], _Converted]] | None:
    for name, convert in (("tekken.json", _tekken), ("tiktoken.model", _tiktoken), ("tokenizer.model", _sentencepiece)):
        if (folder / name).exists():
            return folder / name, convert
    versions = sorted(folder.glob("tokenizer.model.v*"))  # Mistral's names, such as tokenizer.model.v3.
    return (versions[-1], _sentencepiece) if versions else None


def _sentencepiece(raw: bytes, original: _Original) -> _Converted:
    model = sentencepiece_file.read_sentencepiece(raw)
    config = original.config
    tokenizer = sentencepiece_file.build_tokenizer(
        model,
        names={i: name for i, name in original.names.items() if i < len(model.pieces)},
        legacy=bool(config.get("legacy", False)),
        # The classes of transformers that read such files add the first token unless they are told otherwise.
        add_bos=bool(config.get("add_bos_token", True)),
        add_eos=bool(config.get("add_eos_token", False)),
    )
    ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
    return _Converted(
        tokenizer, {role: name for role, i in ids.items() if i >= 0 and (name := tokenizer.id_to_token(i))}
    )


def _tekken(raw: bytes, _: _Original) -> _Converted:
    read = tekken_file.read_tekken(raw)
    names = (tekken_file.BOS, tekken_file.EOS, tekken_file.UNK, tekken_file.PAD)
    roles = {
        role: name for role, name in zip(_ROLES, names, strict=True) if read.tokenizer.token_to_id(name) is not None
    }
    return _Converted(read.tokenizer, roles, mistral_template(read.version))


def _tiktoken(raw: bytes, original: _Original) -> _Converted:
    auto_map = original.config.get("auto_map")
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    class_name = named[0] if isinstance(named, list) and named else named
    if not isinstance(class_name, str):
        class_name = None
    return _Converted(tiktoken_file.read_tiktoken(raw, class_name, original.names), {})


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Reads the tokens that the folder names by id, from the newer of two forms if there are both."""
    described = config.get("added_tokens_decoder")
    try:
        if described is not None:
            return {int(i): _added_token(token) for i, token in described.items()}
        special = json.dumps(_json(folder / SPECIAL_NAME), ensure_ascii=False)
        listed = _json(folder / ADDED_NAME)
        return {
            i: AddedToken(name, normalized=False, special=json.dumps(name, ensure_ascii=False) in special)
            for name, i in listed.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"the added tokens of {folder} cannot be read: {error}") from None


def _added_token(token: Mapping[str, Any]) -> AddedToken:
    flags = {
        name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
    }
    return AddedToken(token["content"], **flags)


def _add_tokens(tokenizer: Tokenizer, added: Mapping[int, AddedToken]) -> None:
    for i in sorted(added):
        tokenizer.add_tokens([added[i]])
        if tokenizer.id_to_token(i) != added[i].content:
            raise ConfigError(
                f"{TOKENIZER_CONFIG_NAME} or {ADDED_NAME} gives {added[i].content!r} the id {i}, but the vocabulary "
                f"has {tokenizer.id_to_token(i)!r} there. Save the tokenizer again as tokenizer.json."
            )


def _copy_templates(folder: Path, target: Path) -> None:
    if (folder / TEMPLATE_NAME).exists():
        shutil.copy(folder / TEMPLATE_NAME, target / TEMPLATE_NAME)
    if (folder / TEMPLATE_FOLDER).is_dir():
        shutil.copytree(folder / TEMPLATE_FOLDER, target / TEMPLATE_FOLDER)


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
