"""Reads the special tokens from an adapter's tokenizer_config.json and special_tokens_map.json.

transformers passes everything in these files to its classes as arguments, including paths of other files. Only tokens
are accepted here: texts, or objects that describe a token. special_tokens_map.json may hold nothing else.
tokenizer_config.json has many settings of training, and nothing else in it is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lorafleet.api.text.tokenizer_document import MAX_TOKEN_CHARS
from lorafleet.api.text.tokenizers import SpecialToken
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import read_json_object, shown

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_NAME = "special_tokens_map.json"
MAX_SPECIAL_TOKENS = 16_384  # Special tokens in one file; Gemma 3 has 6,414.

# The order in which transformers assigns ids to tokens that a vocabulary lacks.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_ROLE = re.compile(r"[a-z][a-z0-9_]{0,60}_token")  # includes roles of single models, such as image_token
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    roles: Mapping[str, SpecialToken]
    others: list[SpecialToken]

    @property
    def texts(self) -> dict[str, str]:
        """The texts by role, as chat templates use them."""
        return {role: token.content for role, token in self.roles.items()}

    @property
    def all(self) -> list[SpecialToken]:
        """All tokens in the order in which they get ids if the vocabulary lacks them."""
        first = [self.roles[role] for role in _ROLES if role in self.roles]
        return [*first, *(token for role, token in self.roles.items() if role not in _ROLES), *self.others]


def read_special_tokens(files: Mapping[str, bytes]) -> SpecialTokens:
    """Reads the special tokens of an adapter's files. Raises AdapterError."""
    config = _object(files, TOKENIZER_CONFIG_NAME)
    _refuse_code(config)
    found = _tokens_in(config, TOKENIZER_CONFIG_NAME)
    # As in transformers, a config that describes the added tokens is newer than the other file.
    special = _object(files, SPECIAL_NAME)
    for key in special:
        if key not in _LISTS and not _ROLE.fullmatch(key):
            raise AdapterUnsupported(
                f"{SPECIAL_NAME} has {shown(key)}; it may name only special tokens. Remove the entry, or save the "
                "tokenizer again."
            )
    named = _tokens_in(special, SPECIAL_NAME, strict=True)
    return found if "added_tokens_decoder" in config else _merged(found, named)


def eos_text(files: Mapping[str, bytes]) -> str | None:
    """Returns the text of the eos token that the files name, or None. Raises AdapterError."""
    config = _object(files, TOKENIZER_CONFIG_NAME)
    older, newer = (TOKENIZER_CONFIG_NAME, SPECIAL_NAME)
    if "added_tokens_decoder" in config:  # as in read_special_tokens()
        older, newer = newer, older
    for name in (newer, older):
        value = (config if name == TOKENIZER_CONFIG_NAME else _object(files, name)).get("eos_token")
        if value is not None:
            return _token(value, "eos_token", name).content
    return None


def _object(files: Mapping[str, bytes], name: str) -> dict[str, object]:
    return read_json_object(files[name], name) if name in files else {}


def _refuse_code(config: Mapping[str, object]) -> None:
    if config.get("auto_map"):
        raise AdapterUnsupported(
            f"{TOKENIZER_CONFIG_NAME} has an auto_map: its tokenizer is custom code, which this server never runs. "
            "Save it as a fast tokenizer (tokenizer.json) and remove auto_map."
        )


def _tokens_in(content: Mapping[str, object], file: str, *, strict: bool = False) -> SpecialTokens:
    """Reads the tokens of one file. If `strict`, every key that looks like a role is one; else settings such as
    add_bos_token are skipped."""
    roles: dict[str, SpecialToken] = {}
    for key, value in content.items():
        is_role = key in _ROLES or (_ROLE.fullmatch(key) and (strict or isinstance(value, str | dict)))
        if is_role and value is not None and value is not False:
            roles[key] = _token(value, key, file)
    others: list[SpecialToken] = []
    for key in _LISTS:
        given = content.get(key)
        values = list(given.values()) if isinstance(given, dict) else given or []
        if not isinstance(values, list):
            raise AdapterMalformed(f"{file} has the {key} {shown(given)}; it must be a list of tokens.")
        others += [_token(value, key, file) for value in values]
    if len(roles) + len(others) > MAX_SPECIAL_TOKENS:
        raise AdapterMalformed(
            f"{file} names {len(roles) + len(others)} special tokens; at most {MAX_SPECIAL_TOKENS} are allowed."
        )
    return SpecialTokens(roles, others)


def _token(value: object, key: str, file: str) -> SpecialToken:
    given = value if isinstance(value, dict) else {"content": value}
    content = given.get("content")
    if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_CHARS:
        raise AdapterMalformed(
            f"{file} has the {key} {shown(value)}; a token must be a string of at most {MAX_TOKEN_CHARS} characters."
        )
    return SpecialToken(content, **{flag: _flag(given, flag, key, file) for flag in _FLAGS})


def _flag(given: Mapping[str, object], flag: str, key: str, file: str) -> bool:
    state = given.get(flag, False)
    if not isinstance(state, bool):
        raise AdapterMalformed(f"{file}: the {flag} of {key} is {shown(state)}; it must be true or false.")
    return state


def _merged(config: SpecialTokens, special: SpecialTokens) -> SpecialTokens:
    return SpecialTokens({**config.roles, **special.roles}, [*config.others, *special.others])
