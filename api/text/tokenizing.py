"""Limits how many texts are encoded or decoded at a time beside the event loop, which has streams to serve.

Short texts of the base's tokenizer are done at once. Long ones take turns in a few threads, so that the loop and the
engine keep the processors. Texts of adapters' own tokenizers take turns for processes (api/text/tokenizers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from lorafleet.api.access.fair_threads import FairThreads
from lorafleet.api.text.tokenizer_files import AnyTokenizer
from lorafleet.api.text.tokenizers import AdapterTokenizer
from lorafleet.sandbox.job_turns import TurnLimits

MAX_INLINE_CHARS = 8192  # Shorter texts are tokenized faster than a thread is reached.
MAX_INLINE_TOKEN_IDS = 8192  # The same for decoding.
MAX_LONG_TEXTS = 2  # Long texts at a time for the base's tokenizer; a text of one megabyte takes 100 MiB meanwhile.
MAX_ADAPTER_TEXTS = 4  # Texts at a time for adapters' tokenizers.
MAX_TEXTS_WAITING = 128  # Queued texts of one tenant.


class Tokenizing:
    def __init__(self) -> None:
        self._of_base = FairThreads("long-text", TurnLimits(MAX_LONG_TEXTS, MAX_TEXTS_WAITING))
        self._of_adapters = FairThreads("adapter-text", TurnLimits(MAX_ADAPTER_TEXTS, MAX_TEXTS_WAITING))

    async def encode(self, tokenizer: AnyTokenizer, text: str, *, add_special_tokens: bool, group: str) -> list[int]:
        """Encodes the text when it is the turn of its group. Raises InvalidRequest, or QueueFull if too many texts of
        the group are queued."""
        if isinstance(tokenizer, AdapterTokenizer):
            own = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens, group=group)
            return await self._of_adapters.run(group, own)
        if len(text) <= MAX_INLINE_CHARS:
            await asyncio.sleep(0)  # lets other requests continue between many prompts of one request
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self._of_base.run(group, partial(tokenizer.encode, text, add_special_tokens=add_special_tokens))

    async def decode(
        self, tokenizer: AnyTokenizer, token_ids: Sequence[int], *, skip_special_tokens: bool, group: str
    ) -> str:
        """Decodes the ids, in turns like encode()."""
        work = partial(tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        if len(token_ids) <= MAX_INLINE_TOKEN_IDS:
            return work()
        lane = self._of_adapters if isinstance(tokenizer, AdapterTokenizer) else self._of_base
        return await lane.run(group, work)

    def close(self) -> None:
        self._of_base.close()
        self._of_adapters.close()
