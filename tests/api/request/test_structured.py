"""From the fields of each API to what the engine is told."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pydantic
import pytest

from lorafleet.api.text.adapter_language import LanguageReader
from lorafleet.api.text.templates import TemplateSandbox
from lorafleet.api.text.tokenizers import Encoders
from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.structured_spec import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "hi"}]}


async def asked(http, engine, path: str, **body: object) -> StructuredOutputs | None:
    """What reached the engine. An error is an AssertionError that shows it."""
    given = {"/v1/completions": {"model": "llama", "prompt": "hi"}, "/v1/chat/completions": CHAT}
    answer = await http.post(path, json=given.get(path, {"text": "hi"}) | body)
    assert answer.status_code == 200, answer.text
    request = engine.requests[-1]
    assert (request.tokenizer is not None) == (request.params.structured_outputs is not None)
    return request.params.structured_outputs


def schema_of(found: StructuredOutputs | None) -> object:
    assert found is not None and found.kind == "json_schema"
    return json.loads(found.source)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_each_spelling_says_the_same(http, engine, path):
    wanted = {"name": "answer", "strict": True, "schema": SCHEMA}
    assert (
        schema_of(await asked(http, engine, path, response_format={"type": "json_schema", "json_schema": wanted}))
        == schema_of(await asked(http, engine, path, structured_outputs={"json": SCHEMA}))
        == schema_of(await asked(http, engine, path, guided_json=json.dumps(SCHEMA)))
        == SCHEMA
    )
    found = await asked(http, engine, path, response_format={"type": "json_object"})
    assert found is not None and found.kind == "json_object"
    assert await asked(http, engine, path, response_format={"type": "text"}) is None
    for fields in ({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}):
        assert (await asked(http, engine, path, **fields)).source == "a+"
    for fields in ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}):
        assert json.loads((await asked(http, engine, path, **fields)).source) == ["a", "b"]
    for fields in ({"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}):
        assert (await asked(http, engine, path, **fields)).kind == "grammar"


async def test_a_structural_tag_says_the_same_in_each_spelling(http, engine):
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
    text, typed = json.dumps(tag), tag | {"type": "structural_tag"}
    found = [
        await asked(http, engine, "/v1/chat/completions", response_format=typed),
        await asked(http, engine, "/v1/completions", structured_outputs={"structural_tag": text}),
        await asked(http, engine, "/generate", sampling_params={"structural_tag": json.dumps(typed)}),
    ]
    assert [one.kind for one in found if one] == ["tagged"] * 3
    assert len({one.source for one in found if one}) == 1


async def test_vllms_options_act(http, engine):
    path = "/v1/completions"
    closed = {"json": SCHEMA, "disable_additional_properties": True, "disable_any_whitespace": True}
    found = await asked(http, engine, path, structured_outputs=closed)
    assert schema_of(found) == SCHEMA | {"additionalProperties": False}
    assert not found.any_whitespace
    found = await asked(
        http, engine, path, structured_outputs={"json_object": True, "disable_any_whitespace": True, "json": None}
    )
    assert (found.kind, found.any_whitespace) == ("json_object", False)


async def test_sglangs_spelling(http, engine):
    for name, value, kind in (
        ("json_schema", json.dumps(SCHEMA), "json_schema"),
        ("regex", "a+", "regex"),
        ("ebnf", 'root ::= "a"', "grammar"),
    ):
        found = await asked(http, engine, "/generate", sampling_params={name: value})
        assert (found.kind, found.param) == (kind, f"sampling_params.{name}")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "jsonschema"}}, "response_format", "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "`name` and `schema`"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "`response_format.schema`"),
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "give only one"),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "structured_outputs", "leave them"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "`triggers`"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "`type`"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "give only one of them"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "leave it out"),
    ],
)
async def test_what_cannot_be_kept_to_is_refused_by_name(http, fields, param, message):
    answer = await http.post("/v1/chat/completions", json=CHAT | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


async def test_text_beside_another_wish_says_nothing(http, engine):
    found = await asked(
        http, engine, "/v1/completions", response_format={"type": "text"}, structured_outputs={"regex": "a"}
    )
    assert found.kind == "regex"


class Step(pydantic.BaseModel):
    explanation: str
    number: int


def test_openais_parse_sends_a_pydantic_model_and_gets_one_back(client: openai.OpenAI, engine):
    engine.answer = lambda _: '{"explanation": "because", "number": 4}'
    parsed = client.chat.completions.parse(
        model="llama", messages=[{"role": "user", "content": "hi"}], response_format=Step
    )
    assert parsed.choices[0].message.parsed == Step(explanation="because", number=4)
    assert schema_of(engine.requests[-1].params.structured_outputs)["additionalProperties"] is False


@pytest.fixture
def adapter(catalog, tmp_path: Path) -> Path:
    """One whose answers are JSON where nothing else is asked."""
    import torch
    from safetensors.torch import save_file

    save_file({"x.lora_A.weight": torch.zeros(1, 1)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    default = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}
    (tmp_path / "lorafleet.json").write_text(json.dumps(default))
    catalog.loras["bound"] = LoRARequest("bound", 5, str(tmp_path), "digest of bound")
    return tmp_path


@pytest.mark.usefixtures("adapter")
async def test_an_adapters_own_default_holds_until_a_request_says_otherwise(http, engine):
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        found = await asked(http, engine, path, model="bound")
        assert schema_of(found) == SCHEMA
    assert await asked(http, engine, "/v1/completions", model="bound", response_format={"type": "text"}) is None
    for format, kind in ((None, "json_schema"), ({"type": "text"}, None), ({"type": "json_object"}, "json_object")):
        fields = {"model": "bound", "input": "hi", "text": format and {"format": format}}
        found = await asked(http, engine, "/v1/responses", **fields)
        assert (found.kind if found else None) == kind
    assert (await asked(http, engine, "/v1/completions", model="bound", guided_regex="a")).kind == "regex"
    shown = (await http.get("/v1/models/bound")).json()
    assert shown["default_response_format"]["json_schema"]["schema"] == SCHEMA
    assert "default_response_format" not in (await http.get("/v1/models/sql")).json()


@pytest.mark.usefixtures("adapter")
async def test_an_adapters_own_default_holds_for_text_beside_tools(http, engine, front):
    front.texts.chat_template = "{{ tools | length }} <tool_call>{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "now"}}]
    found = await asked(http, engine, "/v1/chat/completions", model="bound", tools=tools)
    assert found is not None and found.kind == "tagged"
    assert json.loads(found.source)[1][-1][:2] == ["formatted", SCHEMA]
    text = {"type": "text"}
    assert await asked(http, engine, "/v1/chat/completions", model="bound", tools=tools, response_format=text) is None


@pytest.mark.parametrize("content", ['{"response_format": {"type": "xml"}}', '{"reply_format": {}}', "[]"])
def test_an_adapter_with_a_default_that_says_nothing_is_malformed(tokenizer, adapter, content):
    (adapter / "lorafleet.json").write_text(content)
    with pytest.raises(AdapterMalformed, match=r"lorafleet\.json"):
        LanguageReader(tokenizer, 320, [0], TemplateSandbox(), Encoders()).read(adapter)
