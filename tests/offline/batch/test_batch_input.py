"""A batch's input: which lines are sent, which have a fault, and what is refused as a whole."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest

from lorafleet.offline.batch import batch_input
from lorafleet.offline.batch.batch_input import parse_line, read_input, scan_input
from lorafleet.protocol.errors import InvalidRequest

LINE: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}


def raw(**fields: Any) -> bytes:
    return json.dumps(LINE | fields).encode()


@pytest.mark.parametrize(
    ("line", "custom_id", "words"),
    [
        (b"{", None, "not valid JSON"),
        (b"\xff", None, "not valid JSON"),
        (b"[" * 100_000, None, "not a JSON object"),
        (b'{"custom_id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, "not valid JSON"),
        (b'{"custom_id": NaN}', None, "not valid JSON"),
        (b"[]", None, "not a JSON object"),
        (raw(custom_id=7), None, "custom_id"),
        (raw(custom_id=""), None, "custom_id"),
        (raw(custom_id="x" * 1025), None, "1024"),
        (raw(method="GET"), "a", "POST"),
        (raw(url="/v1/files"), "a", "/v1/responses"),
        (raw(url=[1]), "a", "/v1/responses"),
        (raw(body="hi"), "a", "object"),
        (raw(body={"stream": True}), "a", "stream"),
        (raw(priority=1), "a", "'priority'"),
        (raw(body=None), "a", "object"),
        (raw(body={"stream": {"a": 1}}), "a", "stream"),
        (raw(**{f"field {i}": 1 for i in range(300)}), None, "304 fields"),
        (raw(body={str(i): 1 for i in range(900_000)}), None, "131072 colons"),
        (b'{"body": [' + b"[]," * 5_500_000 + b"[]]}", None, "131072 opening brackets"),
        (b'{"body": [' + b"0," * 8_000_000 + b"0]}", None, "1048576 commas"),
    ],
)
def test_a_line_that_cannot_be_sent_has_a_fault_with_its_number(line: bytes, custom_id: str | None, words: str):
    found = parse_line(7, line)
    assert found.custom_id == custom_id
    assert found.fault is not None
    assert "line 7" in found.fault and words in found.fault


def test_a_body_is_sent_as_it_was_given():
    body = b'{ "prompt": "\\u00e9",  "n": 1' + b"0" * 30 + b', "temperature": 0.10, "stream": false }'
    line = parse_line(1, raw(body=0).replace(b'"body": 0', b'"body":' + body))
    assert (line.url, line.body, line.fault) == ("/v1/completions", body, None)


def test_the_values_of_a_line_are_not_made_before_they_are_counted():
    """Parsed, this line takes 450 MB."""
    line = b'{"custom_id": "a", "body": [' + b"[]," * 5_500_000 + b"[]]}"
    tracemalloc.start()
    try:
        parse_line(1, line)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_lines_are_numbered_with_blank_ones_and_a_long_one_does_not_hide_the_next(monkeypatch):
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 200)
    lines = [raw(), b"", raw(custom_id="b", body={"x": "y" * 900}), raw(custom_id="c"), b"z" * 402]
    file = io.BytesIO(b"\n".join(lines))
    assert scan_input(file).numbers == {1, 3, 4, 5}
    found = [(line.number, line.custom_id, line.fault is None) for line in read_input(file)]
    assert found == [(1, "a", True), (3, None, False), (4, "c", True), (5, None, False)]


@pytest.mark.parametrize("extra", [0, 1, 199, 200, 201, 402])
def test_a_long_last_line_without_an_end_is_one_line(monkeypatch, extra: int):
    monkeypatch.setattr(batch_input, "MAX_LINE_BYTES", 200)
    numbers = scan_input(io.BytesIO(b"z" * (201 + extra))).numbers
    assert numbers == {1}


def test_ids_that_occur_twice_are_refused_with_their_lines():
    lines = [raw(), raw(custom_id="b"), b"", raw(), raw(custom_id="b", method="GET")]
    with pytest.raises(InvalidRequest, match="'a' in lines 1 and 4; 'b' in lines 2 and 5") as refused:
        scan_input(io.BytesIO(b"\n".join(lines)))
    assert "more" not in refused.value.message
    with pytest.raises(InvalidRequest, match="and 3 more"):
        scan_input(io.BytesIO(b"\n".join([raw()] * 14)))


def test_an_input_without_lines_or_with_too_many_is_refused():
    with pytest.raises(InvalidRequest, match="no lines"):
        scan_input(io.BytesIO(b"\n\n"))
    with pytest.raises(InvalidRequest, match="more than 2"):
        scan_input(io.BytesIO(b"\n".join([b"x"] * 3)), max_lines=2)
