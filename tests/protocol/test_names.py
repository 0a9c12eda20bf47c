from __future__ import annotations

import pytest

from lorafleet.protocol.errors import InvalidAdapterName
from lorafleet.protocol.names import check_adapter_name


@pytest.mark.parametrize("name", ["sql", "org/sql", "a/b/c", "SQL-v1.2_x@3", "_x", "0", "a" * 256])
def test_usual_names_are_allowed(name: str) -> None:
    check_adapter_name(name, base_names=["base"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "empty"),
        ("a" * 257, "257 characters"),
        ("a" * 10_000, "10000 characters"),
        ("base", "base model's own"),
        ("/etc/passwd", "absolute path"),
        ("../sql", "path part"),
        ("a/../b", "path part"),
        ("a/./b", "path part"),
        ("a//b", "path part"),
        ("a/", "path part"),
        ("..", "path part"),
        (".hidden", "hidden"),
        ("a/.hidden", "hidden"),
        ("a\\..\\b", "ASCII"),
        ("a%2e%2e", "ASCII"),
        ("a\nb", "control character"),
        ("a\0b", "control character"),
        ("a\x7f", "control character"),
        ("sql ", "ASCII"),
        ("base:sql", "ASCII"),
        ("a+b", "ASCII"),
        ("-x", "ASCII"),
        ("ѕql", "ASCII"),
        ("\ud800", "ASCII"),
    ],
)
def test_other_names_are_refused_with_the_cause(name: str, words: str) -> None:
    with pytest.raises(InvalidAdapterName) as caught:
        check_adapter_name(name, base_names=["base"])
    assert words in caught.value.message
    assert len(caught.value.message.encode()) < 400
    assert caught.value.param == "lora_name"
