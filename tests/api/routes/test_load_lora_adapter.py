from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx

from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.errors import AdapterMissing

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def test_load_and_unload_answer_in_vllms_words(http: httpx.AsyncClient) -> None:
    body = {"lora_name": "new", "lora_path": "/adapters/new"}
    loaded = await http.post(LOAD, json=body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert loaded.headers["content-type"].startswith("text/plain")
    answer = await http.post("/v1/completions", json={"model": "new", "prompt": "a"})
    assert answer.json()["choices"][0]["text"].startswith("new")
    again = await http.post(LOAD, json=body)
    assert again.status_code == 400
    assert again.json()["error"]["message"] == (
        "The lora adapter 'new' has already been loaded. If you want to load the adapter in place, "
        "set 'load_inplace' to True."
    )
    assert (await http.post(LOAD, json=body | {"load_inplace": True})).status_code == 200
    unloaded = await http.post(UNLOAD, json={"lora_name": "new"})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
    gone = await http.post(UNLOAD, json={"lora_name": "new"})
    assert (gone.status_code, gone.json()["error"]["message"]) == (404, "The lora adapter 'new' cannot be found.")
    assert (await http.post("/v1/completions", json={"model": "new", "prompt": "a"})).status_code == 404


async def test_unload_checks_the_number_where_given(http: httpx.AsyncClient) -> None:
    assert (await http.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 99})).status_code == 404
    assert (await http.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 1})).status_code == 200


async def test_missing_and_wrong_fields_are_named(http: httpx.AsyncClient) -> None:
    for path, body, param in (
        (LOAD, {"lora_path": "/x"}, "lora_name"),
        (LOAD, {"lora_name": "x"}, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "/x", "pin": True}, "pin"),
        (LOAD, {"lora_name": 3, "lora_path": "/x"}, "lora_name"),
        (UNLOAD, {}, "lora_name"),
        (UNLOAD, {"lora_name": "x", "lora_int_id": "1"}, "lora_int_id"),
    ):
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_bad_adapter_is_the_callers_error(http: httpx.AsyncClient, catalog: Any) -> None:
    catalog.failure = AdapterMissing("No adapter found for /x", "lora_path")
    response = await http.post(LOAD, json={"lora_name": "x", "lora_path": "/x"})
    assert (response.status_code, response.json()["error"]["message"]) == (404, "No adapter found for /x")


async def test_without_the_flag_both_are_forbidden(
    http: httpx.AsyncClient, holder: Any, front: AppState, tokenizer: Tokenizer
) -> None:
    config = replace(front.config, allow_runtime_lora_updating=False)
    holder.front = make_state(config, tokenizer, front.engine, front.models.catalog)
    for path in (LOAD, UNLOAD):
        response = await http.post(path, json={"lora_name": "sql", "lora_path": "/x"})
        assert response.status_code == 403
        assert "--allow-runtime-lora-updating" in response.json()["error"]["message"]
