"""Compiles grammars with llguidance, over a tokenizer's vocabulary, and says which part of a schema is at fault."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import llguidance
import msgspec
import numpy as np
import tokenizers

from lorafleet.workers.structured.grammar_settings import Settings
from lorafleet.workers.structured.mask_filler import DEAD_END, first_line

MAX_BLAMED = 500  # parts of a schema that are tried alone, to find which of them is at fault
PROBED_TOKENS = 24  # tokens of a random answer that a trial writes, since some grammars are cheap only to compile
# The number is limited, since an answer of nothing but blanks matches too, and small models get lost in it.
WHITESPACE = r"[ \n\r\t]{1,64}"
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
Spec = tuple[str, str, bool]  # kind, source, any_whitespace, as in protocol/structured_spec.py


def read_tokenizer(settings: Settings) -> Any:
    with open(settings.tokenizer, "rb") as file:
        written = msgspec.msgpack.decode(file.read())
    tokens: list[bytes] = written["tokens"]
    assert len(tokens) == settings.vocab_size
    spelling = Spelling(tokens, written["special"], settings.eos_token_ids[0], written["json"])
    # Spelling is like the library's wrapper of tokenizers, but not of its class.
    spelling.library = llguidance.LLTokenizer(spelling, eos_token=settings.eos_token_ids)  # type: ignore[arg-type]
    return spelling.library


class Spelling:
    """A vocabulary in the form that the library wants. The library's own reader of tokenizers takes each added token
    in angle brackets for a special one, which no text can spell."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos_token_id: int, text: str) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_token_id
        self.library: Any = None
        self._backend = tokenizers.Tokenizer.from_str(text) if text else None
        if self._backend is not None:
            self._backend.encode_special_tokens = True  # encode them as the text that they look like

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens that the model itself would write for the text, where a grammar allows nothing else.

        If its tokenizer could take forever, or adds blanks of its own, the longest tokens are taken first.
        """
        if self._backend is not None:
            ids = list(self._backend.encode(text, add_special_tokens=False).ids)
            if self.library is None or b"".join(self.tokens[i] for i in ids) == text.encode():
                return ids
        return [] if self.library is None else list(self.library.greedy_tokenize(text))


def trial_of(tokenizer: Any, spec: Spec) -> str:
    """Returns what is wrong with the grammar, or "" if it compiles and a random answer can be begun."""
    try:
        text = grammar_of(spec)
    except (ValueError, RecursionError) as error:
        return first_line(str(error))
    matcher = matcher_of(tokenizer, text)
    if matcher.is_error():
        fault = first_line(matcher.get_error())
        if spec[0] == "tagged":
            return blamed_part(tokenizer, spec, fault)
        return blamed(tokenizer, spec, fault) if spec[0] == "json_schema" else fault
    return probe(matcher)


def probe(matcher: Any) -> str:
    draw = random.Random(0)
    for _ in range(PROBED_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error():
            return first_line(matcher.get_error())
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            return DEAD_END
        if not matcher.consume_token(int(draw.choice(allowed))):
            return first_line(matcher.get_error())
        if matcher.is_stopped():
            return ""
    return ""


def grammar_of(spec: Spec) -> str:
    """Returns the grammar in the library's own format. Raises ValueError."""
    kind, source, any_whitespace = spec
    if kind in ("json_schema", "json_object"):
        schema = json.loads(source) if kind == "json_schema" else {"type": "object"}
        return str(llguidance.LLMatcher.grammar_from_json_schema(with_options(schema, any_whitespace)))
    if kind == "tagged":
        lark, parts = json.loads(source)
        rules = [f"{rule}: %json {json.dumps(with_options(schema, blanks))}" for rule, schema, _, blanks in parts]
        return str(llguidance.LLMatcher.grammar_from_lark("\n".join([lark, *rules])))
    if kind == "choice":
        # The library's own Lark writes strings as JSON does.
        return str(llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(source)))))
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(source))
    assert kind == "grammar"
    return str(llguidance.grammar_from("grammar", source))


def with_options(schema: Any, any_whitespace: bool) -> dict[str, Any]:
    """Returns the schema with the options for its compilation, which the library reads from a member of the schema
    itself. Raises ValueError."""
    if schema is False:
        raise ValueError("the schema `false` allows no answer")
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}  # otherwise keywords would be ignored
    options |= {"whitespace_pattern": WHITESPACE} if any_whitespace else {"whitespace_flexible": False}
    return {**({} if schema is True else schema), "x-guidance": options}


def matcher_of(tokenizer: Any, grammar: str) -> Any:
    return llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)


def blamed(tokenizer: Any, spec: Spec, error: str) -> str:
    """Returns the error with the innermost part of the schema that has it by itself."""
    schema = json.loads(spec[1])
    shared = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
    for count, (path, part) in enumerate(parts_of(schema, "")):
        if count == MAX_BLAMED:
            break
        text = json.dumps({**shared, **part})
        matcher = matcher_of(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(text))
        if path and matcher.is_error() and first_line(matcher.get_error()) == error:
            return f"at {path}: {error}"
    return error


def blamed_part(tokenizer: Any, spec: Spec, error: str) -> str:
    """Returns the error of the first of the spec's schemas that has one by itself."""
    for _, schema, where, any_whitespace in json.loads(spec[1])[1]:
        alone = ("json_schema", json.dumps(schema), any_whitespace)
        matcher = matcher_of(tokenizer, grammar_of(alone))
        if matcher.is_error():
            return f"in {where}: {blamed(tokenizer, alone, first_line(matcher.get_error()))}"
    return error


def parts_of(schema: object, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the schemas within this one, the innermost first, with their paths as JSON pointers."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
            inner = value.items() if isinstance(value, dict) else ()
            for name, part in inner:
                yield from parts_of(part, f"{path}/{key}/{name}")
        elif isinstance(value, list) and key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            for i, part in enumerate(value):
                yield from parts_of(part, f"{path}/{key}/{i}")
        elif key in ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"):
            yield from parts_of(value, f"{path}/{key}")
    yield path, schema
