"""Who may make tokens of texts, or texts of tokens, at a time: beside the event loop, which has streams to serve.

Short texts of the base's tokenizer are done at once. Long ones take turns in few threads, so that the loop and the
engine keep the processors; texts of adapters' own tokenizers take turns for processes (api/text/tokenizers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.api.text.tokenizer_files import AnyTokenizer
from lorafleet.api.text.tokenizers import AdapterTokenizer
from lorafleet.sandbox.job_turns import TurnLimits

MAX_INLINE_CHARS = 8192  # shorter ones are tokenized faster than a thread is reached
MAX_INLINE_TOKEN_IDS = 8192  # the same the other way
MAX_LONG_TEXTS = 2  # of the base's tokenizer, at a time; one of a megabyte takes 100 MiB meanwhile
MAX_ADAPTER_TEXTS = 4  # of adapters' tokenizers, at a time
MAX_TEXTS_WAITING = 128  # of one tenant


class Tokenizing:
    def __init__(self) -> None:
        self._of_base = FairThreads("long-text", TurnLimits(MAX_LONG_TEXTS, MAX_TEXTS_WAITING))
        self._of_adapters = FairThreads("adapter-text", TurnLimits(MAX_ADAPTER_TEXTS, MAX_TEXTS_WAITING))

    async def encode(self, tokenizer: AnyTokenizer, text: str, *, add_special_tokens: bool, group: str) -> list[int]:
        """group: whose turn it takes. Raises InvalidRequest, and QueueFull where too many of the group wait."""
        if isinstance(tokenizer, AdapterTokenizer):
            own = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens, group=group)
            return await self._of_adapters.run(group, own)
        if len(text) <= MAX_INLINE_CHARS:
            await asyncio.sleep(0)  # a request of many prompts lets others go on between them
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self._of_base.run(group, partial(tokenizer.encode, text, add_special_tokens=add_special_tokens))

    async def decode(
        self, tokenizer: AnyTokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool, group: str
    ) -> str:
        """As encode()."""
        work = partial(tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        if len(token_ids) <= MAX_INLINE_TOKEN_IDS:
            return work()
        lane = self._of_adapters if isinstance(tokenizer, AdapterTokenizer) else self._of_base
        return await lane.run(group, work)

    def close(self) -> None:
        self._of_base.close()
        self._of_adapters.close()
