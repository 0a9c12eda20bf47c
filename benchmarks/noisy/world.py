"""Starts the server under attack in a folder of its own: the demo's model and adapters, two tenants and an operator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from local_server import LocalServer, running
from lorafleet.cluster.tenancy.key_text import digest_of, make_key
from noisy.hostile import Target
from noisy.pushing import files_in, tar_of
from noisy.quiet import Question

DEMO = Path(__file__).parents[2] / "demo"
BASE = "demo"
STYLES = ("pirate", "shout", "json")
PROMPTS = ("What colour is a lime?", "What is the capital of Spain?", "How much is six plus nine?")
IDLE_S = 30.0  # The longest wait for the remaining work of an attack.
SERVER = [
    *("--served-model-name", BASE, "--device", "cpu", "--cpu-threads", "1", "--allow-runtime-lora-updating"),
    *("--max-loras", "8", "--kv-cache-tokens", "32768"),
]


@dataclass(frozen=True, slots=True)
class World:
    server: LocalServer
    keys: dict[str, str]  # The keys of the quiet tenant, the hostile tenant and the operator.
    folder: Path

    @property
    def questions(self) -> list[Question]:
        return [(style, prompt) for prompt in PROMPTS for style in STYLES]

    def target(self) -> Target:
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        config = json.loads((DEMO / "model" / "config.json").read_text())
        return Target(
            host=host,
            port=int(port),
            pid=self.server.pid,
            key=self.keys["hostile"],
            base=BASE,
            model="pirate",
            adapter_dir=DEMO / "adapters" / "shout",
            model_dir=DEMO / "model",
            sources_dir=self.folder / "sources",
            vocab_size=config["vocab_size"],
            context_len=config["max_position_embeddings"],
        )

    def client(self, who: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {self.keys[who]}"}
        return httpx.AsyncClient(base_url=self.server.url, headers=headers, timeout=60, trust_env=False)

    async def push_adapters(self) -> None:
        """Pushes adapters for each tenant, under the same names."""
        for who in ("quiet", "hostile"):
            async with self.client(who) as http:
                for style in STYLES:
                    packed = tar_of(files_in(DEMO / "adapters" / style))
                    answer = await http.put(f"/v1/adapters/{style}/files", content=packed)
                    answer.raise_for_status()

    async def settle(self) -> None:
        """Removes the adapters that the hostile tenant has pushed, and waits until its requests have ended."""
        async with self.client("operator") as http:
            with contextlib.suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(IDLE_S):
                    await self._remove_pushed()
                    while not await _is_idle(http):  # noqa: ASYNC110  # The server has no event to wait for.
                        await asyncio.sleep(0.2)

    async def _remove_pushed(self) -> None:
        async with self.client("hostile") as hostile:
            while True:
                listed = (await hostile.get("/v1/adapters", params={"limit": 100})).json()["data"]
                names = [adapter["id"] for adapter in listed if adapter["id"] not in STYLES and not adapter["removing"]]
                if not names:
                    return
                await asyncio.gather(*(hostile.delete(f"/v1/adapters/{name}?wait_s=1") for name in names))


async def _is_idle(http: httpx.AsyncClient) -> bool:
    lines = (await http.get("/metrics")).text.splitlines()
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return not any(line.startswith(busy) and float(line.rpartition(" ")[2]) for line in lines)


@contextlib.contextmanager
def serving(folder: Path, num_replicas: int) -> Iterator[World]:
    """Starts the server and yields it when it is ready; its logs, state and uploads are below the folder."""
    (folder / "resolved").mkdir()
    (folder / "uploads").mkdir()
    shutil.copytree(DEMO / "adapters" / "shout", folder / "sources" / "good")
    keys = _write_keys(folder)
    os.environ |= {"LORAFLEET_STATE_DIR": str(folder / "state"), "TMPDIR": str(folder / "uploads")}
    arguments = ["--model", str(DEMO / "model"), "--num-replicas", str(num_replicas), *SERVER]
    arguments += ["--api-keys", str(folder / "keys.yaml"), "--lora-resolver-dir", str(folder / "resolved")]
    arguments += ["--lora-cache-dir", str(folder / "cache"), "--batch-store", str(folder / "batches")]
    arguments += ["--usage-dir", str(folder / "usage"), "--audit-dir", str(folder / "audit")]
    with running(arguments, folder / "serve.log") as server:
        yield World(server, keys, folder)


def _write_keys(folder: Path) -> dict[str, str]:
    keys = {who: make_key() for who in ("quiet", "hostile", "operator")}
    entries = [
        {"id": who, "hash": f"sha256:{digest_of(key)}", "scopes": ["infer", "admin", "metrics"]}
        | ({} if who == "operator" else {"tenant": who})
        for who, key in keys.items()
    ]
    tenants = {"hostile": {"sources": [str(folder / "sources")]}}
    (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": entries, "tenants": tenants}))
    return keys
