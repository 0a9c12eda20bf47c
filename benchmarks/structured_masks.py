"""Compares llguidance and xgrammar: the time to compile a schema, the time of a mask, and the support of keywords.

    python benchmarks/structured_masks.py [--libraries llguidance xgrammar] [--batch 64] [--threads 1 2] [--json FILE]

For each keyword of JSON schema it shows whether the library enforces, rejects or silently ignores it. The vocabulary is
realistic_vocabulary.py's, with 128 256 tokens. Masks are timed along a valid answer, with the rows of the batch at
different places in it; the figures are the median and the worst of all steps. xgrammar is not a dependency of lorafleet
and must be installed separately.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from realistic_vocabulary import realistic_tokenizer


class Matcher(Protocol):
    def accept(self, token: int) -> bool: ...
    def fill(self, mask_BW: Any, row: int) -> None: ...
    def fresh(self) -> Matcher: ...
    def can_end(self) -> bool: ...


class LLGuidance:
    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self._library = llguidance
        self.vocab_size = tokenizer.get_vocab_size()
        self.eos = self.vocab_size - 1
        self._tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=self.eos)

    def compile(self, schema: object) -> Matcher:
        text = self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        return _LLMatcher(matcher)

    def buffer(self, rows: int) -> Any:
        return np.zeros((rows, -(-self.vocab_size // 32)), np.int32)

    def fill_all(self, matchers: Sequence[Matcher], threads: int) -> Callable[[Any], None]:
        import llguidance.numpy

        executor = self._library.LLExecutor(num_threads=threads)
        pairs = [(matcher.inner, row) for row, matcher in enumerate(matchers)]  # type: ignore[attr-defined]  # It only gets its own matchers.
        return lambda mask_BW: llguidance.numpy.fill_next_token_bitmask_par(executor, pairs, mask_BW)


class _LLMatcher:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def accept(self, token: int) -> bool:
        return bool(self.inner.consume_token(token))

    def fill(self, mask_BW: Any, row: int) -> None:
        import llguidance.numpy

        llguidance.numpy.fill_next_token_bitmask(self.inner, mask_BW, row)

    def fresh(self) -> Matcher:
        copy = self.inner.deep_copy()
        copy.reset()
        return _LLMatcher(copy)

    def can_end(self) -> bool:
        return bool(self.inner.is_accepting())


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._library = xgrammar
        self.vocab_size = tokenizer.get_vocab_size()
        self.eos = self.vocab_size - 1
        names = [tokenizer.id_to_token(i) for i in range(self.vocab_size)]
        info = xgrammar.TokenizerInfo(names, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[self.eos])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: object) -> Matcher:
        return _XMatcher(self._library, self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False))

    def buffer(self, rows: int) -> Any:
        return self._library.allocate_token_bitmask(rows, self.vocab_size)

    def fill_all(self, matchers: Sequence[Matcher], threads: int) -> Callable[[Any], None]:
        pool = ThreadPoolExecutor(threads)

        def fill(mask_BW: Any) -> None:
            list(pool.map(lambda pair: pair[1].fill(mask_BW, pair[0]), enumerate(matchers)))

        return fill


class _XMatcher:
    def __init__(self, library: Any, compiled: Any) -> None:
        self._library, self._compiled = library, compiled
        self._inner = library.GrammarMatcher(compiled)

    def accept(self, token: int) -> bool:
        return bool(self._inner.accept_token(token))

    def fill(self, mask_BW: Any, row: int) -> None:
        self._inner.fill_next_token_bitmask(mask_BW, row)

    def fresh(self) -> Matcher:
        return _XMatcher(self._library, self._compiled)

    def can_end(self) -> bool:
        return bool(self._inner.is_completed())


def _object(properties: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


_WORDS = [f"value number {i * 7919 % 100_003}" for i in range(10_000)]
_TREE = _object({"value": {"type": "number"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}})

# Each case is a schema and a valid answer to it.
CASES: dict[str, tuple[object, object]] = {
    "person": (
        _object({"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {}}}),
        {"name": "Johanna Mustermann", "age": 41, "tags": ["likes long walks", "an engineer"]},
    ),
    "any object": ({"type": "object"}, {"some": {"nested": [1, 2.5, "text of some length", None, True]}}),
    "enum 1000": (_object({"x": {"enum": _WORDS[:1000]}}), {"x": _WORDS[777]}),
    "enum 10000": (_object({"x": {"enum": _WORDS}}), {"x": _WORDS[7777]}),
    "recursive": (
        {"$ref": "#/$defs/node", "$defs": {"node": _TREE}},
        {"value": 1.5, "children": [{"value": 2, "children": []}, {"value": -3e5, "children": []}]},
    ),
    "bounds": (
        _object(
            {
                "a": {"type": "integer", "minimum": -17, "maximum": 123_456},
                "b": {"type": "number", "exclusiveMinimum": 0, "maximum": 99.5},
                "s": {"type": "string", "minLength": 3, "maxLength": 200},
                "p": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
                "d": {"type": "array", "items": {"type": "string", "format": "date-time"}, "maxItems": 20},
            }
        ),
        {"a": 123, "b": 7.25, "s": "some text that is bounded", "p": "AB-12345", "d": ["2026-11-21T14:40:00Z"]},
    ),
    "100 optional": (
        {
            "type": "object",
            "properties": {f"property_{i}": {"type": "string"} for i in range(100)},
            "additionalProperties": False,
        },
        {f"property_{i}": "some text" for i in range(0, 100, 9)},
    ),
    "1000 optional": (
        {
            "type": "object",
            "properties": {f"property_{i}": {"type": "string"} for i in range(1000)},
            "additionalProperties": False,
        },
        {f"property_{i}": "some text" for i in range(0, 1000, 90)},
    ),
}

# Each case is a schema, a valid instance, and an instance that violates the keyword.
KEYWORDS: dict[str, tuple[object, object, object]] = {
    "required": ({"type": "object", "required": ["b"]}, {"b": 1}, {"a": 1}),
    "additionalProperties": ({"type": "object", "additionalProperties": False}, {}, {"a": 1}),
    "minProperties": ({"type": "object", "minProperties": 1}, {"a": 1}, {}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 2}),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 2}}, {"ab": 1}, {"abc": 1}),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
        {"xa": 1},
        {"xa": "text"},
    ),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 1}, {"a": 1}),
    "minimum": ({"type": "integer", "minimum": 5}, 5, 4),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 5}, 4.9, 5),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, 14, 15),
    "minLength": ({"type": "string", "minLength": 3}, "abc", "ab"),
    "maxLength of characters": ({"type": "string", "maxLength": 2}, "éß", "éßü"),
    "pattern": ({"type": "string", "pattern": "^[a-c]+$"}, "abc", "abd"),
    "pattern unanchored": ({"type": "string", "pattern": "b"}, "abc", "acd"),
    "pattern and maxLength": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aa", "aaa"),
    "format date": ({"type": "string", "format": "date"}, "2026-11-21", "21.11.2026"),
    "format uuid": ({"type": "string", "format": "uuid"}, "12345678-1234-1234-1234-123456789abc", "x"),
    "format unknown": ({"type": "string", "format": "iri-reference-of-ours"}, "x", None),
    "minItems": ({"type": "array", "minItems": 1}, [1], []),
    "maxItems": ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    "uniqueItems": ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, [1, 2], [1, 1]),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}]}, [1, "a"], ["a"]),
    "contains": ({"type": "array", "contains": {"const": 1}}, [1], [2]),
    "const": ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    "enum of objects": ({"enum": [{"a": 1}, 2, None]}, {"a": 1}, {"a": 2}),
    "enum and type": ({"type": "integer", "enum": ["a", 1]}, 1, "a"),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    "oneOf disjoint": ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, None, "a"),
    "oneOf overlapping": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, 4, 6),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, 6, 4),
    "not": ({"type": "integer", "not": {"const": 3}}, 4, 3),
    "if then": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "if": {"required": ["a"]}, "then": False},
        {},
        {"a": 1},
    ),
    "siblings of $ref": ({"$ref": "#/$defs/x", "maximum": 5, "$defs": {"x": {"type": "integer"}}}, 4, 6),
    "siblings of anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}], "maximum": 5}, 4, 6),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, {}, {"a": 1}),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, {"b": 1}, {"a": 1}),
    "misspelt keyword": ({"type": "string", "maxlength": 2}, "ab", None),
    "false": ({"type": "object", "properties": {"a": False}}, {}, {"a": 1}),
}


def verdict(library: Any, tokenizer: Tokenizer, keyword: str) -> str:
    schema, good, bad = KEYWORDS[keyword]
    try:
        matcher = library.compile(schema)
    except (ValueError, RuntimeError) as error:
        return f"refused: {str(error)[:80]}"
    if not _takes(matcher.fresh(), tokenizer, good):
        return "WRONG: a valid answer is not allowed"
    if bad is not None and _takes(matcher.fresh(), tokenizer, bad):
        return "IGNORED"
    return "enforced" if bad is not None else "IGNORED"


def _takes(matcher: Matcher, tokenizer: Tokenizer, answer: object) -> bool:
    tokens = [i for c in json.dumps(answer, ensure_ascii=False) for i in tokenizer.encode(c).ids]
    return all(matcher.accept(token) for token in tokens) and matcher.can_end()


def time_case(library: Any, tokenizer: Tokenizer, case: str, batch: int, threads: list[int]) -> dict[str, Any]:
    schema, answer = CASES[case]
    started = time.perf_counter()
    matcher = library.compile(schema)
    compiled_s = time.perf_counter() - started
    tokens = tokenizer.encode(json.dumps(answer)).ids
    mask_BW = library.buffer(batch)
    single = []
    single_matcher = matcher.fresh()
    for token in tokens:
        started = time.perf_counter()
        single_matcher.fill(mask_BW, 0)
        single.append(time.perf_counter() - started)
        if not single_matcher.accept(token):
            raise ValueError(f"{library.name} does not allow {case}'s answer")
    result = {"compile_ms": 1e3 * compiled_s, "mask_us": 1e6 * statistics.median(single), "worst_us": 1e6 * max(single)}
    for count in threads:
        rows = [matcher.fresh() for _ in range(batch)]
        for row, row_matcher in enumerate(rows):
            for token in tokens[: row % len(tokens)]:
                row_matcher.accept(token)
        fill = library.fill_all(rows, count)
        taken = []
        for step in range(len(tokens)):
            started = time.perf_counter()
            fill(mask_BW)
            taken.append(time.perf_counter() - started)
            for row, row_matcher in enumerate(rows):
                index = row % len(tokens) + step
                if index < len(tokens):
                    row_matcher.accept(tokens[index])
        result[f"batch_ms_{count}"] = 1e3 * statistics.median(taken)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", default=["llguidance"], choices=["llguidance", "xgrammar"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = realistic_tokenizer()
    found: dict[str, Any] = {}
    for make in (LLGuidance, XGrammar):
        if make.name not in args.libraries:
            continue
        started = time.perf_counter()
        library = make(tokenizer)
        print(f"\n{make.name}: vocabulary {time.perf_counter() - started:.2f} s")
        for case in CASES:
            try:
                result = time_case(library, tokenizer, case, args.batch, args.threads)
            except ValueError as error:
                print(f"  {case:16} {error}")
                continue
            print(f"  {case:16}", "  ".join(f"{name} {value:9.2f}" for name, value in result.items()), flush=True)
            found[f"{make.name} {case}"] = result
        for keyword in KEYWORDS:
            found[f"{make.name} {keyword}"] = said = verdict(library, tokenizer, keyword)
            print(f"  {keyword:28}{said}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
