"""The cache of adapters' languages is bounded in number, in tokenizers and in bytes."""

from __future__ import annotations

from typing import Any

from lorafleet.api.text.adapter_language import Language
from lorafleet.api.text.language_cache import LanguageCache
from lorafleet.api.text.templates import ChatTemplate
from lorafleet.api.text.tokenizers import AdapterTokenizer, Encoders, ReadTokenizer


def tokenizer_of(num_bytes: int) -> AdapterTokenizer:
    read = ReadTokenizer(b"x" * (num_bytes // 4), "", "", ["a"], [b"a"], [], True, 1, None, None)
    return AdapterTokenizer(read, {}, Encoders(), spells_in_time=False)


def test_the_tokenizer_that_was_asked_for_longest_ago_goes_first() -> None:
    cache = LanguageCache(max_tokenizers=2)
    languages = {name: Language(tokenizer_of(400)) for name in "abc"}
    cache.put("a", languages["a"])
    cache.put("b", languages["b"])
    cache.put("b of other weights", languages["b"])
    assert cache.num_tokenizers == 2 and cache.num_bytes == 800, "adapters may share a tokenizer"
    assert cache.get("a") is languages["a"]
    cache.put("c", languages["c"])
    assert cache.get("b") is None and cache.get("b of other weights") is None
    assert cache.get("a") is languages["a"] and cache.get("c") is languages["c"]
    assert cache.num_tokenizers == 2 and cache.num_bytes == 800


def test_tokenizers_and_templates_have_bounded_bytes_together(tokenizer: Any) -> None:
    cache = LanguageCache(max_bytes=10_000)
    for i in range(8):
        cache.put(f"template {i}", Language(tokenizer, template=ChatTemplate("x" * 500, {})))
    assert len(cache) == 5 and cache.num_bytes == 10_000
    cache.put("tokenizer", Language(tokenizer_of(9_000)))
    assert len(cache) == 1 and cache.num_bytes == 9_000
    cache.put("large", Language(tokenizer_of(90_000)))
    assert len(cache) == 1, "the newest stays, as it is being used"


def test_languages_are_bounded_in_number(tokenizer: Any) -> None:
    cache = LanguageCache(max_languages=2)
    for name in ("a", "b", "a", "c"):
        cache.put(name, Language(tokenizer))
    assert [name for name in "abc" if cache.get(name)] == ["a", "c"]
