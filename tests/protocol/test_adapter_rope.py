"""Tests which ropes an adapter's files may state, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lorafleet.protocol.adapter_formats.adapter_rope import AdapterRope, read_adapter_rope
from lorafleet.protocol.errors import AdapterError

LINEAR = {"rope_type": "linear", "factor": 4.0}


def read(config: dict[str, Any], defaults: dict[str, Any] | None = None) -> AdapterRope | None:
    return read_adapter_rope(config, None if defaults is None else json.dumps(defaults).encode())


def test_an_adapter_that_says_nothing_has_the_bases_rope() -> None:
    assert read({"r": 8, "context_length": None}, {"response_format": {"type": "text"}}) is None


@pytest.mark.parametrize(
    ("config", "defaults", "scaling", "limit"),
    [
        ({"context_length": 16384}, None, {"rope_type": "linear", "factor": 4.0}, 16384),
        ({"context_length": 10000}, None, {"rope_type": "linear", "factor": 3.0}, 10000),
        ({"context_length": 1024}, None, None, 1024),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope_parameters": LINEAR}, LINEAR, 16384),
        ({}, {"rope_scaling": LINEAR, "context_length": 9000}, LINEAR, 9000),
        ({"rope_scaling": {"rope_type": "default"}}, None, {"rope_type": "default"}, 4096),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}},
            None,
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048.0},
            16384,
        ),
    ],
)
def test_scaling_and_context_follow_from_each_other(config: Any, defaults: Any, scaling: Any, limit: int) -> None:
    rope = read(config, defaults)
    assert rope is not None
    assert (rope.scaling_for(4096), rope.context_limit(4096)) == (scaling, limit)


@pytest.mark.parametrize(
    ("config", "defaults", "cause"),
    [
        ({"context_length": -1}, None, "context_length is -1; it must be an integer from 1 to"),
        ({"context_length": "32k"}, None, "context_length is '32k'"),
        ({"context_length": 8192}, {"context_length": 4096}, "contradict each other"),
        ({"rope_scaling": LINEAR}, {"rope_scaling": LINEAR | {"factor": 2.0}}, "contradict each other"),
        ({"rope_scaling": "linear"}, None, "must be an object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, None, "rope_type 'dynamic'.*one of default, linear"),
        ({"rope_parameters": {"full_attention": LINEAR}}, None, "the same for all layers"),
        ({"rope_scaling": LINEAR | {"beta_fast": 32.0}}, None, "'beta_fast', which rope_type 'linear' does not have"),
        ({"rope_scaling": {"type": "linear"}}, None, "linear needs a factor of at least 1"),
        ({"rope_scaling": LINEAR | {"factor": 0.5}}, None, "factor=0.5"),
        ({"rope_scaling": LINEAR | {"factor": True}}, None, "factor=True"),
        ({"rope_scaling": LINEAR | {"rope_theta": float("inf")}}, None, "rope_theta=inf"),
    ],
)
def test_what_has_no_clear_meaning_is_refused_with_its_place(config: Any, defaults: Any, cause: str) -> None:
    with pytest.raises(AdapterError, match=cause):
        read(config, defaults)
