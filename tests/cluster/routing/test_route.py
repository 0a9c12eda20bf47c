from lorafleet.cluster.routing.route import NO_ROUTE, PREFIX_BYTES, Route, read_route, route_of_session


def test_a_body_tells_the_adapter_its_length_and_how_its_prompt_begins() -> None:
    long = b"x" * PREFIX_BYTES
    one = read_route(b'{"model": "sql", "prompt": "' + long + b' and one"}')
    two = read_route(b'{"model": "chat", "temperature": 1, "prompt": "' + long + b' and another"}')
    other = read_route(b'{"model": "sql", "prompt": "y' + long + b'"}')
    assert (one.name, two.name) == ("sql", "chat")
    assert one.num_tokens > PREFIX_BYTES // 5
    assert one.prefix is not None
    assert one.prefix == two.prefix != other.prefix


def test_a_short_prompt_or_none_has_no_prefix() -> None:
    assert read_route(b'{"model": "sql", "prompt": "short"}').prefix is None
    assert read_route(b"x" * 2 * PREFIX_BYTES).prefix is None


def test_a_route_survives_as_a_session_and_other_sessions_are_none() -> None:
    for route in (Route("org/a b", 17, 4_000_000_000), Route("sql", 3), NO_ROUTE):
        assert route_of_session(route.to_session()) == route
    for text in ("", "abc", "lorafleet-route", "lorafleet-route x - sql", "0b1c 4 - sql"):
        assert route_of_session(text) == NO_ROUTE
