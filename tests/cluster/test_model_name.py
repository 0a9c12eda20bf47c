import json
import time

import pytest

from lorafleet.cluster.model_name import find_adapter, scan


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"model": "sql", "prompt": "x"}, "sql"),
        ({"model": "base:sql"}, "sql"),
        ({"text": "x", "lora_path": "sql"}, "sql"),
        ({"model": "a", "lora_path": "sql"}, "sql"),
        ({"messages": [{"role": "user", "content": 'say "model": "other"', "model": "other"}], "model": "sql"}, "sql"),
        ({"prompt": '{"model": "other"}', "model": 'qu"o\\te'}, 'qu"o\\te'),
        ({"model": "naïve"}, "naïve"),
        ({"metadata": {"model": "other"}}, ""),
        ({"model": 5}, ""),
        ({"stop": ["model", "other"]}, ""),
        ([{"model": "other"}], ""),
        ({}, ""),
    ],
)
def test_only_the_top_level_name_counts(body: object, name: str) -> None:
    text = json.dumps(body).encode()
    assert find_adapter(text) == name
    assert find_adapter(text + b" " * 5000) == name  # over the size up to which the body is parsed
    assert find_adapter(json.dumps(body, indent=2).encode() + b" " * 5000) == name


def test_a_name_before_the_cut_is_found() -> None:
    body = json.dumps({"model": "sql", "prompt": "x" * 100_000}).encode()
    assert find_adapter(body[:50_000]) == "sql"


def test_a_name_behind_the_cut_is_not_guessed() -> None:
    body = json.dumps({"prompt": "model" * 10_000, "model": "sql"}).encode()
    assert find_adapter(body) == "sql"
    assert find_adapter(body[:40_000]) == ""
    assert find_adapter(body[: body.rindex(b"sql") + 1]) == ""


def test_every_cut_is_survived() -> None:
    body = json.dumps({"a": [1, {"b": 'x"y'}], "model": "sql", "c": "é\\"}).encode()
    for length in range(len(body) + 1):
        assert scan(body[:length]) in ({}, {"model": "sql"})


@pytest.mark.parametrize("body", [b"", b"\x00\xff", b"}}}}", b'"model": "x"', b"{" * 10_000, b'{"model"' * 2000])
def test_rubbish_names_nothing(body: bytes) -> None:
    assert find_adapter(body) == ""


def test_a_large_body_is_scanned_quickly() -> None:
    body = json.dumps({"prompt": "word " * 1_600_000, "model": "sql"}).encode()
    started = time.perf_counter()
    assert find_adapter(body) == "sql"
    assert time.perf_counter() - started < 30.0  # a tenth of one, where others leave it a core
