"""Traffic that drafts are trained on: what is read, and what is refused by its line."""

from __future__ import annotations

import json

import pytest

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.tools.drafts import draft_traffic
from lorafleet.tools.drafts.draft_traffic import TrafficLine, parse_line, read_traffic

ASKED = [{"role": "user", "content": "hi"}]


def parsed(**fields: object) -> TrafficLine:
    return parse_line(json.dumps(fields), "here")


def chat(message: dict[str, object], finish_reason: str = "stop", **fields: object) -> dict[str, object]:
    return {"choices": [{"message": message, "finish_reason": finish_reason, **fields}]}


def test_prompts_and_messages_may_name_their_model_and_answer():
    assert parsed(prompt="a") == TrafficLine("here", None, "a")
    assert parsed(messages=ASKED, model="m", answer="b") == TrafficLine("here", "m", messages=(*ASKED,), answer="b")


def test_a_recorded_request_has_its_answer_whatever_was_sampled():
    request = {"model": "m", "messages": ASKED, "temperature": 0.7, "stream": False}
    line = parsed(request=request, response=chat({"role": "assistant", "content": "b"}))
    assert line == TrafficLine("here", "m", messages=(*ASKED,), answer="b")
    completion = {"choices": [{"text": "b", "finish_reason": "stop"}]}
    assert parsed(request={"model": "m", "prompt": "a"}, response=completion).answer == "b"


@pytest.mark.parametrize(
    "response",
    [
        chat({"content": "b"}, "length"),
        chat({"content": "b", "tool_calls": [{}]}),
        chat({"content": "b", "reasoning_content": "c"}),
        chat({"content": "b", "reasoning": "c"}),
        chat({"content": "b"}, stop_reason="END"),
        chat({"content": "b"}, stop_reason=7),
        chat({"content": None}),
        {},
    ],
)
def test_an_answer_whose_tokens_are_not_known_is_left_to_the_target(response):
    assert not parsed(request={"messages": ASKED}, response=response).is_answered


def test_an_echoed_prompt_is_no_part_of_the_answer():
    completion = {"choices": [{"text": "ab", "finish_reason": "stop"}]}
    assert not parsed(request={"prompt": "a", "echo": True}, response=completion).is_answered
    assert parsed(request={"prompt": "a", "echo": False}, response=completion).answer == "ab"


def test_tokens_of_a_response_count_before_its_texts():
    request = {"messages": ASKED, "tools": [{}]}
    response = chat({"content": "b"}, "length", token_ids=[3, 4]) | {"prompt_token_ids": [1, 2]}
    assert parsed(request=request, response=response) == TrafficLine("here", None, prompt_ids=(1, 2), answer_ids=(3, 4))


def test_a_line_of_a_batch_is_a_prompt():
    body = {"model": "m", "messages": ASKED}
    line = parsed(custom_id="1", method="POST", url="/v1/chat/completions", body=body)
    assert line == TrafficLine("here", "m", messages=(*ASKED,))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "valid JSON"),
        ("[]", "give"),
        ('{"text": "a"}', "give"),
        ('{"prompt": "a", "anwser": "b"}', "give"),
        ('{"prompt": ["a"]}', "one string"),
        ('{"messages": []}', "neither may be empty"),
        ('{"request": {"prompt": "a", "messages": []}, "response": {}}', "either"),
        ('{"prompt": "a", "answer": ""}', "not empty"),
        ('{"prompt": "a", "model": 3}', "must be a name"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "a text as content"),
        ('{"request": {"messages": [], "tools": [{}]}, "response": {}}', "'tools'"),
        ('{"request": {"prompt": "a"}, "response": {"error": {}}}', "no choice"),
        ('{"request": {"prompt": "a"}, "response": {"choices": []}}', "no choice"),
        ('{"request": {"prompt": "a"}, "response": {"choices": [{"token_ids": [-1]}]}}', "0 or more"),
        ('{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {}}', "embeddings"),
    ],
)
def test_a_wrong_line_is_named_with_the_reason(tmp_path, line, why):
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(InvalidRequest, match=f"line 2.*{why}"):
        read_traffic(path)


def test_files_have_bounds(tmp_path, monkeypatch):
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "bb"}\n')
    assert [line.prompt for line in read_traffic(path)] == ["a", "bb"]
    for name, bound, why in (
        ("MAX_LINE_BYTES", 16, "line 3 has more than 16 bytes"),
        ("MAX_LINES", 2, "more than 2 lines"),
        ("MAX_FILE_BYTES", 20, "more than 20 bytes"),
    ):
        monkeypatch.setattr(draft_traffic, name, bound)
        with pytest.raises(InvalidRequest, match=why):
            read_traffic(path)
        monkeypatch.undo()


def test_an_empty_or_unreadable_file_is_refused(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    for name, why in (("empty", "no prompts"), ("bytes", "cannot be read"), ("missing", "cannot be read")):
        with pytest.raises(InvalidRequest, match=why):
            read_traffic(tmp_path / name)
