"""Reads tekken.json, the form of Mistral's newer tokenizers.

It holds ranked tokens, special tokens with the first ids, and the version of the chat format.

Source: mistral_common/tokens/tokenizers/tekken.py of mistralai/mistral-common.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated

import msgspec
from tokenizers import Tokenizer

from lorafleet.api.text.ranked_tokens import build_ranked
from lorafleet.api.text.sentencepiece_file import bracketing
from lorafleet.protocol.errors import ConfigError

BOS, EOS, UNK, PAD = "<s>", "</s>", "<unk>", "<pad>"
# Special tokens by rank in files that do not list any, which are of version 7 or older.
_UNLISTED = (
    *(UNK, BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", PAD, "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_LAST_UNLISTED_VERSION = 7

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: _Count
    default_num_special_tokens: _Count
    version: Annotated[str, msgspec.Meta(pattern="^v[0-9]{1,4}$")]


class _Token(msgspec.Struct):
    rank: _Count
    token_bytes: str


class _SpecialToken(msgspec.Struct):
    rank: _Count
    token_str: str


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_SpecialToken] | None = None


@dataclass(frozen=True, slots=True)
class TekkenTokenizer:
    tokenizer: Tokenizer
    version: int  # The version of Mistral's chat format, such as 3 or 13.


def read_tekken(raw: bytes) -> TekkenTokenizer:
    """Raises ConfigError if the bytes are no tekken.json."""
    try:
        file = msgspec.json.decode(raw, type=_File)
        tokens = [base64.b64decode(token.token_bytes, validate=True) for token in file.vocab]
    except (msgspec.MsgspecError, binascii.Error) as error:
        raise ConfigError(f"the file is no tekken.json: {error}") from None
    config, version = file.config, int(file.config.version[1:])
    num_special = config.default_num_special_tokens
    # The file may hold more tokens than the model has.
    num_ranked = config.default_vocab_size - num_special
    if not 0 <= num_ranked <= len(tokens):
        raise ConfigError(
            f"tekken.json has {len(tokens)} tokens, but default_vocab_size={config.default_vocab_size} with "
            f"{num_special} special tokens demands {num_ranked}."
        )
    if [token.rank for token in file.vocab[:num_ranked]] != list(range(num_ranked)):
        raise ConfigError("the ranks of tekken.json's tokens must be 0, 1, 2 and so on.")
    special = _special_tokens(file.special_tokens, num_special, version)
    ranks = {token: rank for rank, token in enumerate(tokens[:num_ranked])}
    tokenizer = build_ranked(ranks, config.pattern, special, first_rank_id=num_special)
    tokenizer.post_processor = bracketing([BOS], [], tokenizer)
    return TekkenTokenizer(tokenizer, version)


def _special_tokens(listed: list[_SpecialToken] | None, count: int, version: int) -> dict[str, int]:
    if listed is None:
        if version > _LAST_UNLISTED_VERSION:
            raise ConfigError(f"tekken.json of version v{version} lists no special_tokens; it must list them.")
        names = dict(enumerate(_UNLISTED))
    else:
        names = {token.rank: token.token_str for token in listed}
    if sorted(names) != list(range(len(names))) or len(names) != len(listed or names) or len(names) > count:
        raise ConfigError(
            f"tekken.json's special_tokens must have the ranks 0, 1, 2 and so on, each once, and at most {count} of "
            "them."
        )
    names |= {rank: f"<SPECIAL_{rank}>" for rank in range(len(names), count)}
    special = {name: rank for rank, name in names.items()}
    if len(special) != count or BOS not in special or EOS not in special:
        raise ConfigError(f"tekken.json's special_tokens must be {count} different ones, with {BOS} and {EOS}.")
    return special
