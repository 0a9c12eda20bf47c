"""Checks an untrusted tokenizer.json before the `tokenizers` library reads it, which trusts every number in the file.

It has allow lists, and bounds on everything that decides how much memory or work a token, a text or an answer costs.
Time is left to the limits of the process: regular expressions, and tables that are slow to build.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MAX_ADDED_TOKENS = 1 << 17
MAX_MERGES = 2_000_000  # Gemma 3 has 514,906
MAX_TOKEN_CHARS = 4096  # Tokens of well-known vocabularies have up to some hundreds.
MAX_PARTS = 64  # Parts of a post-processor's template, or of a sequence of normalizers, pre-tokenizers or decoders.
MAX_DECODER_GROWTH = 16  # Characters of text per character of a token.
MAX_PREFIX_CHARS = 64

_KEYS = frozenset(
    {
        "version",
        "truncation",
        "padding",
        "added_tokens",
        "normalizer",
        "pre_tokenizer",
        "post_processor",
        "decoder",
        "model",
    }
)
_ADDED_TOKEN_FLAGS = frozenset({"single_word", "lstrip", "rstrip", "normalized", "special"})
_MODELS = frozenset({"BPE", "WordPiece", "WordLevel", "Unigram"})
_POST_PROCESSORS = frozenset({"TemplateProcessing", "ByteLevel", "RobertaProcessing", "BertProcessing", "Sequence"})
_DECODERS = frozenset(
    {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece", "BPEDecoder", "CTC", "Sequence"}
)


class Rejected(Exception):
    """An error in the file. The message is for its author."""


def checked(document: Mapping[str, Any], max_ids: int) -> dict[str, Any]:
    """Returns the document without truncation and padding, which the server decides itself. Token ids must be below
    `max_ids`.

    Raises Rejected.
    """
    _check_keys(document)
    _check_added_tokens(document.get("added_tokens"), max_ids)
    _check_model(document.get("model"), max_ids)
    for name in ("normalizer", "pre_tokenizer"):
        _check_parts(document.get(name), name)
    _check_post_processor(document.get("post_processor"), max_ids)
    if _growth_of(document.get("decoder"), depth=0) > MAX_DECODER_GROWTH:
        raise Rejected(f"its decoder turns one character into more than {MAX_DECODER_GROWTH}")
    return {**document, "truncation": None, "padding": None}


def check_token(content: object, where: str) -> None:
    if not isinstance(content, str) or not content:
        raise Rejected(f"{where} has {_shown(content)} for a token; a token must be a string that is not empty")
    if len(content) > MAX_TOKEN_CHARS:
        raise Rejected(f"{where} has a token of {len(content)} characters; at most {MAX_TOKEN_CHARS} are read")


def _check_keys(document: Mapping[str, Any]) -> None:
    unknown = next((key for key in document if key not in _KEYS), None)
    if unknown is not None:
        raise Rejected(f"it has the unknown key {_shown(unknown)}")


def _check_added_tokens(tokens: object, max_ids: int) -> None:
    if tokens is None:
        return
    if not isinstance(tokens, list) or len(tokens) > MAX_ADDED_TOKENS:
        raise Rejected(f"added_tokens must be a list of at most {MAX_ADDED_TOKENS} tokens")
    for token in tokens:
        if not isinstance(token, dict):
            raise Rejected(f"added_tokens has the entry {_shown(token)}; it must be an object")
        flags = {key: value for key, value in token.items() if key not in ("id", "content")}
        wrong = next((k for k, v in flags.items() if k not in _ADDED_TOKEN_FLAGS or type(v) is not bool), None)
        if wrong is not None:
            raise Rejected(
                f"an added token has {_shown(wrong)}: {_shown(flags[wrong])}; it may have only "
                f"{', '.join(sorted(_ADDED_TOKEN_FLAGS))}, each true or false"
            )
        check_token(token.get("content"), "added_tokens")
        _check_id(token.get("id"), token["content"], max_ids)


def _check_model(model: object, max_ids: int) -> None:
    if not isinstance(model, dict):
        raise Rejected("it has no model")
    kind = model.get("type")
    if kind is not None and kind not in _MODELS:
        raise Rejected(f"its model has the type {_shown(kind)}; it must be one of {', '.join(sorted(_MODELS))}")
    _check_vocabulary(model.get("vocab"), max_ids)
    merges = model.get("merges", [])
    if not isinstance(merges, list) or len(merges) > MAX_MERGES:
        raise Rejected(f"its merges must be a list of at most {MAX_MERGES} entries")
    for name, value in model.items():
        if isinstance(value, str) and len(value) > MAX_PREFIX_CHARS:
            raise Rejected(
                f"its model has a {_shown(name)} of {len(value)} characters; at most {MAX_PREFIX_CHARS} are allowed"
            )


def _check_vocabulary(vocabulary: object, max_ids: int) -> None:
    """Checks a table from tokens to ids, or Unigram's list of tokens and scores. Raises Rejected."""
    if isinstance(vocabulary, dict):
        tokens: Iterable[Any] = vocabulary
        ids: Iterable[Any] = vocabulary.values()
    elif isinstance(vocabulary, list):
        if not all(isinstance(entry, list) and len(entry) == 2 for entry in vocabulary):
            raise Rejected("its vocabulary has an entry that is not a pair of a token and a number")
        tokens = [entry[0] for entry in vocabulary]
        ids = range(len(vocabulary))
    else:
        raise Rejected("its model has no vocabulary")
    if len(vocabulary) > max_ids:
        raise Rejected(f"its vocabulary has {len(vocabulary)} tokens; at most {max_ids} are allowed with this base")
    for token, token_id in zip(tokens, ids, strict=True):
        if token != "":
            check_token(token, "its vocabulary")
        _check_id(token_id, token, max_ids)


def _check_id(token_id: object, content: str, max_ids: int) -> None:
    if type(token_id) is not int or not 0 <= token_id < max_ids:
        raise Rejected(
            f"it gives the token {_shown(content)} the id {_shown(token_id)}; with this base it must be in 0 to "
            f"{max_ids - 1}"
        )


def _check_parts(part: object, name: str, depth: int = 0) -> None:
    """Bounds the length and the nesting of sequences. The limits of the process bound the cost of their members."""
    if part is None:
        return
    if not isinstance(part, dict) or depth > 4:
        raise Rejected(
            f"its {name} has the part {_shown(part)}; parts must be objects that are nested at most four deep"
        )
    for value in part.values():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if len(value) > MAX_PARTS:
                raise Rejected(f"its {name} has a sequence of {len(value)} parts; at most {MAX_PARTS} are read")
            for member in value:
                _check_parts(member, name, depth + 1)


def _check_post_processor(part: object, max_ids: int, depth: int = 0) -> None:
    if part is None:
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in _POST_PROCESSORS or depth > 4:
        raise Rejected(f"its post_processor is {_shown(kind)}; it must be one of {', '.join(sorted(_POST_PROCESSORS))}")
    if kind == "Sequence":
        for member in _few(part.get("processors"), "post_processor"):
            _check_post_processor(member, max_ids, depth + 1)
    if kind == "TemplateProcessing":
        _few(part.get("single"), "post_processor")
        _few(part.get("pair"), "post_processor")
        _check_template_tokens(part.get("special_tokens"), max_ids)
    for side in ("sep", "cls"):
        pair = part.get(side)
        if isinstance(pair, list) and len(pair) == 2:
            _check_id(pair[1], str(pair[0]), max_ids)


def _check_template_tokens(tokens: object, max_ids: int) -> None:
    if not isinstance(tokens, dict) or len(tokens) > MAX_PARTS:
        raise Rejected(f"its post_processor must have an object of at most {MAX_PARTS} special_tokens")
    for name, token in tokens.items():
        ids = _few(token.get("ids") if isinstance(token, dict) else None, "post_processor")
        for token_id in ids:
            _check_id(token_id, name, max_ids)


def _few(parts: object, name: str) -> list[Any]:
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        raise Rejected(f"its {name} must have lists of at most {MAX_PARTS} parts")
    return parts


def _growth_of(decoder: object, depth: int) -> float:
    """Returns the number of characters into which a decoder can turn one character.

    Raises Rejected for regular expressions: the decoder runs in the server's own process, for each token of an
    answer.
    """
    if decoder is None:
        return 1
    kind = decoder.get("type") if isinstance(decoder, dict) else None
    if not isinstance(decoder, dict) or kind not in _DECODERS or depth > 4:
        raise Rejected(f"its decoder is {_shown(kind)}; it must be one of {', '.join(sorted(_DECODERS))}")
    if kind == "Sequence":
        growth = 1.0
        for member in _few(decoder.get("decoders"), "decoder"):
            growth *= _growth_of(member, depth + 1)
        return growth
    if kind == "Replace":
        return _growth_of_replacing(decoder)
    return 1


def _growth_of_replacing(decoder: Mapping[str, Any]) -> float:
    pattern, content = decoder.get("pattern"), decoder.get("content")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(text, str) or not text or not isinstance(content, str):
        raise Rejected(f"its decoder replaces {_shown(pattern)}; it may replace only a string that is not empty")
    return max(1.0, len(content) / len(text))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
