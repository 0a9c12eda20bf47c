from lorafleet.cluster.route import PREFIX_BYTES, read_route


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
