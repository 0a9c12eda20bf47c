"""Who may make tokens of texts, or texts of tokens, at a time: beside the event loop, which has streams to serve.

Short texts of the base's tokenizer are done at once. Long ones take turns in few threads, so that the loop and the
engine keep the processors; texts of adapters' own tokenizers take turns for processes (workers/sandbox/tokenizers.py).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from lorafleet.workers.errors import QueueFull
from lorafleet.workers.sandbox.confinement import NICENESS
from lorafleet.workers.sandbox.tokenizers import AdapterTokenizer
from lorafleet.workers.sandbox.turns import NoRoom, TurnLimits, Turns
from lorafleet.workers.tokenizer_files import AnyTokenizer

LONG_TEXT_CHARS = 8192  # shorter ones are tokenized faster than a thread is reached
LONG_TOKEN_IDS = 8192  # the same the other way
MAX_LONG_TEXTS = 2  # of the base's tokenizer, at a time; one of a megabyte takes 100 MiB meanwhile
MAX_ADAPTER_TEXTS = 4  # of adapters' tokenizers, at a time
MAX_TEXTS_WAITING = 128  # of one tenant

Result = TypeVar("Result")


class Tokenizing:
    def __init__(self) -> None:
        self._of_base = _Lane(MAX_LONG_TEXTS, "long-text")
        self._of_adapters = _Lane(MAX_ADAPTER_TEXTS, "adapter-text")

    async def encode(self, tokenizer: AnyTokenizer, text: str, *, add_special_tokens: bool, group: str) -> list[int]:
        """group: whose turn it takes. Raises InvalidRequest, and QueueFull where too many of the group wait."""
        if isinstance(tokenizer, AdapterTokenizer):
            own = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens, group=group)
            return await self._of_adapters.run(group, own)
        if len(text) <= LONG_TEXT_CHARS:
            await asyncio.sleep(0)  # a request of many prompts lets others go on between them
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self._of_base.run(group, partial(tokenizer.encode, text, add_special_tokens=add_special_tokens))

    async def decode(
        self, tokenizer: AnyTokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool, group: str
    ) -> str:
        """As encode()."""
        work = partial(tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        if len(token_ids) <= LONG_TOKEN_IDS:
            return work()
        lane = self._of_adapters if isinstance(tokenizer, AdapterTokenizer) else self._of_base
        return await lane.run(group, work)

    def close(self) -> None:
        self._of_base.close()
        self._of_adapters.close()


class _Lane:
    """Threads, and the turns for them. asyncio's own threads stay free for what must not wait for texts."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._turns = Turns(TurnLimits(num_threads, MAX_TEXTS_WAITING))
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=_be_nice)

    async def run(self, group: str, work: Callable[[], Result]) -> Result:
        try:
            async with self._turns.turn(group):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except NoRoom as full:
            raise QueueFull(
                f"The text cannot be tokenized now: {full}. Try again later.", retry_after_s=self._turns.retry_after_s
            ) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _be_nice() -> None:
    """On Linux each thread has a niceness of its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
