"""Attacks with what the server stores for a tenant: responses, background runs, files, batches, drafts, tensors."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator

import httpx

from noisy.hostile import Attack, Call, Hostile, post
from noisy.pushing import files_in, good_files, pushed, removed

MIB = 1 << 20
_BOUNDARY = "lime"


async def background_runs(hostile: Hostile) -> None:
    """Starts responses in the background whose events have twenty log-probabilities a token, as many as are allowed."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            yield _response(hostile, background=True, stream=number % 2 == 0, metadata={"a": "b" * 400})

    await hostile.flood_with(calls(), width=64)


async def one_request_id(hostile: Hostile) -> None:
    """Gives one id to ever new responses, in the background and not."""
    calls = [_response(hostile, request_id="mine", background=background) for background in (True, False)]
    await hostile.flood(*calls, width=16)


async def unknown_responses(hostile: Hostile) -> None:
    """Reads, cancels and deletes responses that do not exist, which every replica is asked for."""
    paths = [("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/input_items")]
    calls = (
        Call(method, f"/v1/responses/resp_{number}{end}", headers={"content-type": "application/json"})
        for number in itertools.count()
        for method, end in paths
    )
    await hostile.flood_with(calls, width=32)


async def stored_conversations(hostile: Hostile) -> None:
    """Stores responses to inputs of megabytes, and continues each several times."""

    async def once() -> None:
        answer = await hostile.send(_response(hostile, input="lime " * (MIB // 2), max_output_tokens=1, include=[]))
        known = _field(answer, "id")
        for _ in range(3):
            await hostile.send(_response(hostile, previous_response_id=known, max_output_tokens=1))

    await hostile.repeated(once, 8)


async def files(hostile: Hostile) -> None:
    """Uploads files of 16 MiB, lists, reads and deletes them."""
    upload = _upload(b'{"a": "' + b"x" * (16 * MIB) + b'"}\n')

    async def once() -> None:
        file = _field(await hostile.send(upload), "id")
        for method, end in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            await hostile.send(Call(method, f"/v1/files/{file}{end}"))
        await hostile.send(Call("GET", "/v1/files"))

    await hostile.repeated(once, 8)


async def batches_of_long_lines(hostile: Hostile) -> None:
    """Runs batches whose lines are millions of empty lists, 900,000 keys, or the longest prompt."""
    empty = b'"prompt": [' + b"[]," * (5 * MIB) + b"[]]"
    keys = b'"prompt": "a", ' + b",".join(b'"k%d": 1' % i for i in range(900_000))
    prompt = b'"prompt": "' + b"lime " * (2 * MIB) + b'"'
    model = hostile.model.encode()
    lines = [
        b'{"custom_id": "c%d", "method": "POST", "url": "/v1/completions", "body": {"model": "%s", %s}}\n'
        % (number, model, body)
        for number, body in enumerate((empty, keys, prompt))
    ]
    await _run_batches(hostile, [_upload(line) for line in (*lines, b"".join(lines))])


async def batches_of_many_lines(hostile: Hostile) -> None:
    """Runs batches of ten thousand short lines, with answers of many log-probabilities."""
    body = {"model": hostile.model, "prompt": "a", "max_tokens": 60, "logprobs": 20, "n": 8, "temperature": 1}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    content = b"".join(json.dumps(line | {"custom_id": f"c{i}"}).encode() + b"\n" for i in range(10_000))
    await _run_batches(hostile, [_upload(content)])


async def large_drafts(hostile: Hostile) -> None:
    """Pushes adapters with a draft of 100 MiB of zeros, valid ones and ones that are rejected for their rank."""
    draft = {"draft/adapter_config.json": b"{}", "draft/adapter_model.safetensors": bytes(100 * MIB)}

    async def once() -> None:
        for wrong in (False, True):
            files = good_files(hostile) | draft
            if wrong:
                config = json.loads(files["adapter_config.json"]) | {"r": 100_000}
                files = files | {"adapter_config.json": json.dumps(config).encode()}
            await removed(hostile, await pushed(hostile, files))

    await hostile.repeated(once, 3)


async def tensors_over_http(hostile: Hostile) -> None:
    """Pushes tensors in bodies that are valid, wrongly summed, cut off, or announce far more than they have."""
    source = files_in(hostile.target.adapter_dir)
    weights, config = source["adapter_model.safetensors"], json.loads(source["adapter_config.json"])
    size = struct.unpack("<Q", weights[:8])[0]
    header = {name: at for name, at in json.loads(weights[8 : 8 + size]).items() if name != "__metadata__"}
    begin = 8 + size
    sums = {
        name: hashlib.sha256(weights[begin + at["data_offsets"][0] : begin + at["data_offsets"][1]]).hexdigest()
        for name, at in header.items()
    }

    def body(sums: dict[str, str], content: bytes) -> bytes:
        head = json.dumps({"config": config | {"revision": hostile.new_name()}, "sha256": sums}).encode()
        return struct.pack("<Q", len(head)) + head + content

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            path = f"/v1/adapters/{hostile.new_name()}/tensors"
            large = struct.pack("<Q", 1 << 62) + weights[8:]
            content = (weights, weights[: len(weights) // 2], large, bytes(64 * MIB))[number % 4]
            given = sums if number % 3 else dict.fromkeys(sums, "0" * 64)
            yield Call("PUT", path, body(given, content), {"content-type": "application/octet-stream"})
            names = [f"t{i}" for i in range(20_000)]
            yield post("/load_lora_adapter_from_tensors", {"lora_name": "x", "serialized_named_tensors": names})

    await hostile.flood_with(calls(), width=6)


async def uploaded_file(hostile: Hostile, content: bytes) -> str:
    """Uploads a file, and returns its id, or a name that does not exist if it was rejected."""
    return _field(await hostile.send(_upload(content)), "id")


async def _run_batches(hostile: Hostile, uploads: list[Call]) -> None:
    """Uploads each input, starts a batch of it, and cancels the batch a while later, over and over."""
    inputs = itertools.cycle(uploads)

    async def once() -> None:
        file = _field(await hostile.send(next(inputs)), "id")
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = _field(await hostile.send(post("/v1/batches", body)), "id")
        for _ in range(10):
            await hostile.send(Call("GET", f"/v1/batches/{batch}"))
        await hostile.send(post(f"/v1/batches/{batch}/cancel", {}))
        await hostile.send(Call("DELETE", f"/v1/files/{file}"))

    await hostile.repeated(once, 3)


def _response(hostile: Hostile, **fields: object) -> Call:
    body = {"model": hostile.model, "input": "What colour is a lime?", "max_output_tokens": 400, "top_logprobs": 20}
    body |= {"include": ["message.output_text.logprobs"], "temperature": 1.0} | fields
    if not body["include"]:
        del body["include"], body["top_logprobs"]
    return post("/v1/responses", body)


def _upload(content: bytes) -> Call:
    parts = [
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode(),
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'.encode(),
        content,
        f"\r\n--{_BOUNDARY}--\r\n".encode(),
    ]
    return Call("POST", "/v1/files", b"".join(parts), {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"})


def _field(answer: httpx.Response | None, name: str) -> str:
    """Returns a text field of an answer, or a name that does not exist."""
    return str(answer.json().get(name, "none")) if answer is not None and answer.status_code == 200 else "none"


ATTACKS: tuple[Attack, ...] = (
    *(background_runs, one_request_id, unknown_responses, stored_conversations, files),
    *(batches_of_long_lines, batches_of_many_lines, large_drafts, tensors_over_http),
)
