from __future__ import annotations

import httpx
import openai
import pytest


def test_models_lists_base_names_and_adapters(client: openai.OpenAI) -> None:
    models = {m.id: m for m in client.models.list()}
    assert list(models) == ["llama", "llama-alias", "org/json", "sql"]
    base, adapter = models["llama"].model_dump(), models["org/json"].model_dump()
    assert (base["root"], base["parent"], base["max_model_len"], base["object"]) == (
        "/models/llama",
        None,
        256,
        "model",
    )
    assert (adapter["root"], adapter["parent"], adapter["owned_by"]) == ("/adapters/org/json", "llama", "lorafleet")


def test_every_listed_name_is_served(client: openai.OpenAI) -> None:
    for model in client.models.list():
        assert client.models.retrieve(model.id).id == model.id
        assert client.completions.create(model=model.id, prompt="a", max_tokens=1).model == model.id


async def test_a_model_with_a_slash_is_found_and_an_unknown_one_is_not(http: httpx.AsyncClient) -> None:
    assert (await http.get("/v1/models/org/json")).json()["root"] == "/adapters/org/json"
    response = await http.get("/v1/models/org/other")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "The model `org/other` does not exist."


async def test_parts_of_an_adapter_that_are_left_out_are_named(http: httpx.AsyncClient, catalog: object) -> None:
    loras = catalog.loras  # type: ignore[attr-defined]
    loras["whole"] = type(loras["sql"])("whole", 5, "/adapters/whole", left_out=("vision_tower",))
    assert (await http.get("/v1/models/whole")).json()["left_out"] == ["vision_tower"]
    cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
    assert cards["whole"]["left_out"] == ["vision_tower"]
    assert "left_out" not in cards["sql"]


def test_an_exact_name_wins_over_the_colon_form(client: openai.OpenAI, catalog: object) -> None:
    loras = catalog.loras  # type: ignore[attr-defined]
    loras["llama:sql"] = type(loras["sql"])("llama:sql", 5, "/adapters/exact")
    assert client.completions.create(model="llama:sql", prompt="a").choices[0].text.startswith("llama:sql")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other:sql", prompt="a")
