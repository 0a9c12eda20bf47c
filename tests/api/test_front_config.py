from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.front_config import read_generation_defaults
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.errors import ConfigError


def test_generation_config_gives_the_defaults(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {}
    content = {"temperature": 0.6, "top_p": None, "top_k": 20, "eos_token_id": [1], "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert read_generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    "content",
    [
        "[",
        "[]",
        '{"temperature": "hot"}',
        '{"top_k": 1.5}',
        '{"top_k": 20.0}',
        '{"top_k": 1e30}',
        '{"top_k": -2}',
        '{"temperature": NaN}',
        '{"temperature": -1}',
        '{"top_p": 0}',
        '{"min_p": 2}',
        '{"repetition_penalty": 0}',
    ],
)
def test_a_broken_generation_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match="generation_config"):
        read_generation_defaults(tmp_path)


def test_the_models_defaults_hold_unless_the_request_says_otherwise(
    client: openai.OpenAI, engine: Any, front: AppState, holder: Any, tokenizer: Tokenizer
) -> None:
    config = replace(front.config, generation_defaults={"temperature": 0.6, "top_k": 20})
    holder.front = make_state(config, tokenizer, engine, front.models.catalog)
    client.completions.create(model="llama", prompt="a", temperature=0)
    client.chat.completions.create(model="llama", messages=[{"role": "user", "content": "a"}])
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.top_k) == (0, 20)
    assert (second.temperature, second.top_k) == (0.6, 20)
