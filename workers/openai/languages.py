"""Finds what each adapter's requests are written in, once for each digest, in threads of its own."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from lorafleet.workers.adapter_language import Language, LanguageReader
from lorafleet.workers.errors import AdapterError, InvalidRequest
from lorafleet.workers.lora.files import AdapterFolder
from lorafleet.workers.lora.request import LoRARequest
from lorafleet.workers.openai.backend import EngineClient

MAX_KNOWN = 4096  # adapters; of nearly all no more than the base's own language is kept
NUM_THREADS = 8  # adapters that lie elsewhere are fetched first, and wait for their network

# An adapter's folder on this node, by URI and digest, until the end of the block.
OpenFiles = Callable[[str, str], AbstractContextManager[Path]]


def open_local(path: str, digest: str) -> AbstractContextManager[Path]:  # noqa: ARG001  a folder is what it is
    return nullcontext(Path(path))


class AdapterLanguages:
    def __init__(self, reader: LanguageReader, engine: EngineClient, open_files: OpenFiles) -> None:
        self.base = reader.base
        self._reader = reader
        self._engine = engine
        self._open_files = open_files
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="adapter-language")
        self._known: OrderedDict[str, Language] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[Language]] = {}

    async def of(self, lora: LoRARequest) -> Language:
        """Raises AdapterError where its files cannot be read, and InvalidRequest for a mix of several languages."""
        if lora.parts:
            found = [await self.of(part.lora) for part in lora.parts]
            if not all(language.does_as(found[0]) for language in found):
                raise InvalidRequest(
                    f"`model` mixes adapters with different tokenizers, chat templates or formats: {lora.lora_name}.",
                    "model",
                )
            return found[0]
        known = self._known.get(lora.digest)
        if known is not None:
            self._known.move_to_end(lora.digest)
            return known
        task = self._under_way.get(lora.digest)
        if task is None:
            task = asyncio.create_task(self._find(lora))
            if lora.digest:
                self._under_way[lora.digest] = task
                task.add_done_callback(lambda _: self._under_way.pop(lora.digest))
        return await asyncio.shield(task)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _find(self, lora: LoRARequest) -> Language:
        try:
            language = await asyncio.get_running_loop().run_in_executor(self._pool, self._read, lora)
        except AdapterError:
            # The engine may have it in memory still, and knows whether it came with a language of its own.
            info = await self._engine.load_adapter(lora)
            if info.language or info.vocab_size is not None:
                raise
            language = self.base
        if lora.digest:
            self._known[lora.digest] = language
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return language

    def _read(self, lora: LoRARequest) -> Language:
        with self._open_files(lora.lora_path, lora.digest) as folder:
            return self._reader.read(AdapterFolder.at(folder, lora.within))
