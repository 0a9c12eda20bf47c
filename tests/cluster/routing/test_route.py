import zlib

import pytest

from lorafleet.cluster.routing.route import (
    NO_ROUTE,
    PREFIX_BYTES,
    Route,
    prefix_tokens,
    read_route,
    route_of_session,
)

KIB = 1024


def test_prefixes_have_four_lengths_for_each_power_of_two() -> None:
    assert PREFIX_BYTES[:9] == (1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
    assert PREFIX_BYTES[-1] == 128 * KIB and list(PREFIX_BYTES) == sorted(set(PREFIX_BYTES))
    assert [prefix_tokens(count) for count in (0, 1, 5)] == [0, 256, 512]


def test_a_body_tells_the_adapter_its_length_and_how_its_prompt_begins() -> None:
    long = b"x" * 2 * KIB
    one = read_route(b'{"model": "sql", "prompt": "' + long + b' and one"}')
    two = read_route(b'{"model": "chat", "temperature": 1, "prompt": "' + long + b' and another"}')
    other = read_route(b'{"model": "sql", "prompt": "y' + long + b'"}')
    assert (one.name, two.name) == ("sql", "chat")
    assert one.num_tokens > 2 * KIB // 5
    assert len(one.prefixes) == 5 and one.prefixes == two.prefixes
    assert not set(one.prefixes) & set(other.prefixes)


def test_a_later_turn_has_the_prefixes_of_the_earlier_ones() -> None:
    first = b'{"messages": [{"role": "user", "content": "' + b"abc" * 2000 + b'"}'
    second = first + b', {"role": "assistant", "content": "' + b"def" * 2000 + b'"}'
    short, long = (read_route(body + b"]}").prefixes for body in (first, second))
    shared = sum(one == two for one, two in zip(short, long, strict=False))
    assert len(short) > shared - 1 >= 9 and len(long) > len(short)
    assert short[0] == zlib.crc32(first[len(b'{"messages":') :][:KIB])


@pytest.mark.parametrize("num_bytes", [None, 256 * KIB])
def test_of_a_body_that_was_cut_the_first_half_alone_is_the_beginning(num_bytes: int | None) -> None:
    body = (b'{"prompt": "' + b"x" * 200 * KIB)[: 128 * KIB]
    longest = PREFIX_BYTES[len(read_route(body, num_bytes).prefixes) - 1]
    assert longest == (112 if num_bytes is None else 56) * KIB


def test_a_short_prompt_or_none_has_no_prefix() -> None:
    assert read_route(b'{"model": "sql", "prompt": "short"}').prefixes == ()
    assert read_route(b"x" * 4 * KIB).prefixes == ()


def test_a_route_survives_as_a_session_and_other_sessions_are_none() -> None:
    for route in (Route("org/a b", 17, (4_000_000_000, 7)), Route("sql", 3), NO_ROUTE):
        assert route_of_session(route.to_session()) == route
    for text in (
        "",
        "abc",
        "lorafleet-route",
        "lorafleet-route x - sql",
        "0b1c 4 - sql",
        f"lorafleet-route {'9' * 5000} - sql",
    ):
        assert route_of_session(text) == NO_ROUTE
    assert route_of_session(f"lorafleet-route 3 {'9' * 5000} sql") == Route("sql", 3)
    many = Route("sql", 3, tuple(range(100)))
    assert len(route_of_session(many.to_session()).prefixes) == len(PREFIX_BYTES)
