"""Describes the model that a request named, as its caller may use it."""

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.api.access.caller import Caller
from lorafleet.api.text.adapter_language import Language
from lorafleet.api.text.tokenizer_files import AnyTokenizer
from lorafleet.protocol.lora_request import LoRARequest, turn_group


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of one request, for the caller that named it."""

    name: str  # The name in the client's request, which the answer must repeat.
    lora: LoRARequest | None  # None: the base model.
    language: Language  # Its tokenizer, chat template and output format.
    caller: Caller
    fetched: bool = False  # Its adapter was copied to this node while the request waited.
    fallback_reason: str | None = None  # Why the base model answers in place of an adapter that cannot be read.

    @property
    def tokenizer(self) -> AnyTokenizer:
        return self.language.tokenizer

    @property
    def turn_group(self) -> str:
        """The tenant or adapter under which its work in shared threads and processes is scheduled."""
        return turn_group(self.caller.tenant, self.lora)
