"""Finds each adapter's language: its tokenizer, chat template and output format.

A language is read once for each digest, in threads of this module. api/text/ reads and represents it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec

from lorafleet.api.backend import EngineBackend
from lorafleet.api.text.adapter_language import Language, LanguageReader
from lorafleet.api.text.language_cache import LanguageCache
from lorafleet.api.text.templates import TemplateSandbox
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizers import Encoders
from lorafleet.protocol.adapter_formats.adapter_files import AdapterFolder
from lorafleet.protocol.errors import AdapterError, InvalidRequest, QueueFull
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest, turn_group
from lorafleet.protocol.names import tenant_of
from lorafleet.sandbox.job_turns import JobTurns, NoRoom, TurnLimits

MAX_LANGUAGES_FETCHED = 8  # Adapters whose files are fetched at a time.
MAX_LANGUAGES_READ = 2  # Languages read at a time; a tokenizer file may have 64 MiB.
MAX_LANGUAGES_WAITING = 128  # Languages of one tenant that may wait to be read.

# Returns an adapter's folder on this node, by URI and digest. The folder is available until the end of the block.
OpenFiles = Callable[[str, str], AbstractContextManager[Path]]


def open_local(path: str, digest: str) -> AbstractContextManager[Path]:  # noqa: ARG001  a folder is what it is
    return nullcontext(Path(path))


class AdapterLanguages:
    """The languages of all adapters. Owns the processes that read and run their tokenizers and templates."""

    def __init__(self, tokenizer: Tokenizer, engine: EngineBackend, open_files: OpenFiles = open_local) -> None:
        hello = engine.hello
        self.templates, self._encoders = TemplateSandbox(), Encoders()
        self._reader = LanguageReader(
            tokenizer,
            hello.vocab_size,
            hello.ends(tokenizer.eos_token_id),
            self.templates,
            self._encoders,
            rope_positions=hello.rope_positions,
        )
        self.base = self._reader.base
        self._engine = engine
        self._open_files = open_files
        self._fetch_pool = ThreadPoolExecutor(MAX_LANGUAGES_FETCHED, thread_name_prefix="language-fetch")
        self._fetch_turns = JobTurns(TurnLimits(MAX_LANGUAGES_FETCHED, MAX_LANGUAGES_WAITING))
        self._pool = ThreadPoolExecutor(MAX_LANGUAGES_READ + 1, thread_name_prefix="adapter-language")
        self._turns = JobTurns(TurnLimits(MAX_LANGUAGES_READ, MAX_LANGUAGES_WAITING))
        self._cache = LanguageCache()
        self._under_way: dict[str, asyncio.Task[Language]] = {}

    async def of(self, lora: LoRARequest, group: str) -> Language:
        """Returns the adapter's language; `group` is the tenant or adapter under which reading it is scheduled.

        Raises AdapterError if its files cannot be read, InvalidRequest for a mix of several languages, and QueueFull
        if too many languages of the group wait to be read.
        """
        if lora.parts:
            found = [await self.of(part.lora, group) for part in lora.parts]
            if not all(language.does_as(found[0]) for language in found):
                raise InvalidRequest(
                    f"`model` mixes adapters with different tokenizers, chat templates or formats: {lora.lora_name}.",
                    "model",
                )
            return found[0]
        known = self._cache.get(lora.digest)
        if known is not None:
            return known
        task = self._under_way.get(lora.digest)
        if task is None:
            task = asyncio.create_task(self._find(lora, group))
            if lora.digest:
                self._under_way[lora.digest] = task
                task.add_done_callback(lambda _: self._under_way.pop(lora.digest))
        return await asyncio.shield(task)

    def known_context(self, digest: str) -> int | None:
        """Returns Language.context_length of the adapter with this digest, or None if it was not read lately."""
        known = self._cache.peek(digest)
        return None if known is None else known.context_length

    async def check(self, lora: LoRARequest, info: AdapterInfo) -> None:
        """Reads the language of an adapter that was just loaded, so that a faulty one is rejected at loading.

        Raises the same errors as of().
        """
        if info.language or info.context_length is not None or info.head_task:
            tenant = tenant_of(lora.lora_name)
            await self.of(msgspec.structs.replace(lora, digest=info.digest), turn_group(tenant, lora))

    def close(self) -> None:
        self._fetch_pool.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.templates.close()
        self._encoders.close()

    async def _find(self, lora: LoRARequest, group: str) -> Language:
        try:
            language = await self._read(lora, group)
        except AdapterError:
            # The engine may still have the adapter in memory and knows whether it has a language of its own.
            info = await self._engine.load_adapter(lora)
            if info.language or info.vocab_size is not None or info.context_length is not None or info.head_task:
                raise
            language = self.base
        if lora.digest:
            self._cache.put(lora.digest, language)
        return language

    async def _read(self, lora: LoRARequest, group: str) -> Language:
        """Fetches the adapter's files and reads its language.

        Groups take turns for both. Fewer languages are read than fetched, since reading costs processor time and memory
        while fetching waits for the network.
        """
        run = asyncio.get_running_loop().run_in_executor
        files = self._open_files(lora.lora_path, lora.digest)
        try:
            async with self._fetch_turns.turn(group):
                folder = await run(self._fetch_pool, files.__enter__)
            try:
                async with self._turns.turn(group):
                    return await run(self._pool, self._read_folder, folder, lora)
            finally:
                await run(self._pool, files.__exit__, None, None, None)
        except NoRoom as full:
            raise QueueFull(
                f"The tokenizer and template of {lora.lora_name!r} cannot be read now: {full}. Try again later.",
                retry_after_s=self._turns.retry_after_s,
            ) from None

    def _read_folder(self, folder: Path, lora: LoRARequest) -> Language:
        return self._reader.read(AdapterFolder.at(folder, lora.within))
