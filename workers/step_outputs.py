"""Holds what one step of the engine has for its clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from lorafleet.protocol.messages import PlainTokens, TokenOutput


@dataclass(slots=True)
class StepOutputs:
    """The outputs of one step. Those in `plain` come first if a sequence has both kinds."""

    others: list[TokenOutput] = field(default_factory=list)
    plain: PlainTokens = field(default_factory=PlainTokens)  # No object is made for each of these.

    def __len__(self) -> int:
        return len(self.plain.request_ids) + len(self.others)

    def __iter__(self) -> Iterator[TokenOutput]:
        """Yields all outputs, for clients in this process that want an object for each."""
        for request_id, token in zip(self.plain.request_ids, self.plain.token_ids, strict=True):
            yield TokenOutput(request_id=request_id, token_ids=[token])
        yield from self.others
