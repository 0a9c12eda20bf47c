"""Which mix of adapters a request's `model` and `lora_weights` mean."""

from __future__ import annotations

import openai
import pytest

from lorafleet.protocol.lora_request import LoRARequest

ASK = {"prompt": "hello", "max_tokens": 1}


@pytest.fixture(autouse=True)
def adapters(catalog):
    catalog.loras |= {name: LoRARequest(name, 1, f"/{name}", digest=name.upper()) for name in ("a", "b", "org/c@2")}


def parts(engine) -> list[tuple[str, float]]:
    """Of the request that came last."""
    return [(part.lora.lora_name, part.weight) for part in engine.requests[-1].lora.parts]


@pytest.mark.parametrize(
    ("model", "weights", "expected"),
    [
        ("a+b", None, [("a", 1.0), ("b", 1.0)]),
        ("a+b", [0.7, -1], [("a", 0.7), ("b", -1.0)]),
        ("b+org/c@2+a", [1, 2, 3], [("a", 3.0), ("b", 1.0), ("org/c@2", 2.0)]),
        ("llama:a+b", None, [("a", 1.0), ("b", 1.0)]),
    ],
)
def test_a_mix_is_named_by_its_parts(client, engine, model, weights, expected):
    extra = {} if weights is None else {"lora_weights": weights}
    answer = client.completions.create(model=model, extra_body=extra, **ASK)
    assert answer.model == model
    assert parts(engine) == expected
    client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hello"}], max_tokens=1, extra_body=extra
    )
    assert parts(engine) == expected


@pytest.mark.parametrize(
    ("model", "weights", "status", "param", "message"),
    [
        ("a+nobody", None, 404, "model", "The model `nobody` does not exist."),
        ("a+", None, 404, "model", "The model `` does not exist."),
        ("a+b", [1.0], 400, "lora_weights", "1 numbers for 2 adapters"),
        ("a+b", [1.0, 1e9], 400, "lora_weights.1", "[-10000.0, 10000.0]"),
        ("a+b", "1,2", 400, "lora_weights", "lora_weights"),
        ("a+llama", None, 400, "model", "the base model"),
        ("a+a", None, 400, "model", "the same adapter"),
        ("+".join(["a"] * 9), None, 400, "model", "at most 8"),
        ("a", [1.0], 400, "lora_weights", "'a+b'"),
        ("llama", [1.0], 400, "lora_weights", "'a+b'"),
    ],
)
def test_what_is_no_mix_is_refused(client, model, weights, status, param, message):
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(model=model, extra_body={"lora_weights": weights}, **ASK)
    assert error.value.status_code == status
    assert error.value.body["param"] == param
    assert message in error.value.body["message"]
