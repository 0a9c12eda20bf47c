"""Uploads an adapter's files, and makes requests for the adapter."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from noisy.hostile import Call, Hostile, post

Files = Mapping[str, bytes]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def good_files(hostile: Hostile) -> dict[str, bytes]:
    """Returns a valid adapter, with another digest each time."""
    files = files_in(hostile.target.adapter_dir)
    config = json.loads(files["adapter_config.json"]) | {"revision": hostile.new_name()}
    return files | {"adapter_config.json": json_file(config)}


def tar_of(files: Files) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def upload_of(name: str, packed: bytes) -> Call:
    return Call("PUT", f"/v1/adapters/{name}/files", packed, {"content-type": "application/x-tar"})


async def pushed(hostile: Hostile, files: Files) -> str:
    """Pushes the files, and returns their new name; the push may have been rejected."""
    name = hostile.new_name()
    await hostile.send(upload_of(name, tar_of(files)))
    return name


async def removed(hostile: Hostile, name: str) -> None:
    await hostile.send(Call("DELETE", f"/v1/adapters/{name}?wait_s=1"))


def requests_for(hostile: Hostile, name: str) -> list[Call]:
    """Returns one request of every kind that reads a different part of an adapter."""
    return [
        hostile.completion(model=name, max_tokens=8, min_tokens=4, ignore_eos=False),
        hostile.completion(model=name, prompt="a" * 60, max_tokens=8, stream=True, stop=["zz"]),
        hostile.chat(model=name, max_tokens=8),
        post("/tokenize", {"model": name, "prompt": "a" * 200 + "!", "return_token_strs": True}),
        post("/detokenize", {"model": name, "tokens": [5, 6, 7]}),
        post("/v1/embeddings", {"model": name, "input": "What colour is a lime?"}),
    ]


async def push_and_ask(hostile: Hostile, changes: Files, *, width: int = 4) -> None:
    """Pushes a valid adapter with these files changed, requests it in every way and removes it, over and over."""

    async def once() -> None:
        name = await pushed(hostile, good_files(hostile) | dict(changes))
        for call in requests_for(hostile, name):
            await hostile.send(call)
        await removed(hostile, name)

    await hostile.repeated(once, width)


def json_file(value: object) -> bytes:
    return json.dumps(value).encode()
