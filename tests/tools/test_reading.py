"""Adapters by URI, and bases that an adapter's own tensors tell."""

from __future__ import annotations

import json

import pytest
import torch

from file_server import FileServer
from lorafleet.protocol.errors import AdapterMalformed, AdapterMissing, ConfigError
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.inferred_base import inferred_base
from lorafleet.tools.reading import adapter_folder, read_forms
from tests.tools.conftest import rewrite


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = FileServer()
    yield made
    made.close()


def test_a_uri_is_fetched_and_no_other_place_is_asked(server, make_adapter):
    folder = make_adapter()
    url = server.put("/a/sql", {path.name: path.read_bytes() for path in folder.iterdir()})
    with adapter_folder(url) as here:
        assert read_forms(here, None, "sql").digest == read_forms(folder, None, "sql").digest
    assert all(path.startswith("/a/sql/") for path, _ in server.requests)
    with pytest.raises(AdapterMissing), adapter_folder(server.url + "/a/other"):
        pass


def test_an_adapter_is_the_same_with_and_without_its_base(base, make_adapter):
    folder = make_adapter(rank_pattern={"q_proj": 2}, target_modules=["q_proj", "down_proj", "lm_head", "embed_tokens"])
    with BaseModel.opened(base) as opened:
        whole = read_forms(folder, opened, "sql").forms
        layout = opened.for_reader(torch.float32).layout
    inferred = inferred_base(folder).layout
    assert all(layout.linears[module] == shape for module, shape in inferred.linears.items())
    assert (inferred.vocab_size, inferred.hidden_size) == (layout.vocab_size, layout.hidden_size)
    assert inferred.linears.keys() == whole.linears.keys()


def test_tensors_that_tell_no_shape_ask_for_the_base(make_adapter):
    folder = make_adapter(target_modules=["q_proj"])
    rewrite(
        folder,
        lambda n, t: (n.replace("lora_A.weight", "vera_lambda_d").replace("lora_B.weight", "vera_lambda_b"), t[0]),
    )
    with pytest.raises(ConfigError, match="--model"):
        inferred_base(folder)


def test_damage_is_named_without_a_base_too(make_adapter):
    folder = make_adapter(target_modules=["q_proj"])
    rewrite(folder, lambda n, t: (n, t[:, :2] if "lora_B" in n else t))
    with pytest.raises(AdapterMalformed, match="rank"):
        read_forms(folder, None, "sql")
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(AdapterMalformed, match="must hold an object"):
        read_forms(folder, None, "sql")
