"""Gives requests the tokenizers, chat templates and limits of the models that they name."""

from __future__ import annotations

import asyncio

from lorafleet.api.backend import EngineBackend
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.languages import AdapterLanguages
from lorafleet.api.served_model import ServedModel
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.api.text.tokenizing import Tokenizing
from lorafleet.api.tool_calls.known import FORMATS, KnownFormat, detect
from lorafleet.protocol.messages import TokenizerFile


class TextService:
    """Turns the texts of requests into tokens that their models can read, and back.

    Args:
        tokenizer: The base model's own.
        languages: The adapters' tokenizers and templates. They are closed with this service.
    """

    def __init__(
        self, config: FrontConfig, tokenizer: Tokenizer, engine: EngineBackend, languages: AdapterLanguages
    ) -> None:
        self.tokenizer = tokenizer
        self.tokenizing = Tokenizing()
        self.templates = languages.templates
        self.chat_template = config.chat_template
        self.tool_call_parser = config.tool_call_parser
        self._engine = engine
        self._languages = languages
        self._tokenizer_files = TokenizerFiles()

    @property
    def max_model_len(self) -> int:
        return self._engine.hello.max_model_len

    @property
    def context_len(self) -> int:
        """The maximum number of tokens that the prompt and the answer of one request may have together."""
        return min(self._engine.hello.max_model_len, self._engine.hello.kv_cache_tokens)

    def vocab_size(self, model: ServedModel) -> int:
        own = model.language.vocabulary
        return self._engine.hello.vocab_size if own is None else own.size

    async def tokenizer_file(self, model: ServedModel) -> TokenizerFile:
        """Returns a file of the model's tokenizer for the engine's grammars, and writes it if it does not exist yet."""
        known = self._tokenizer_files.known(model.tokenizer)
        return known if known is not None else await asyncio.to_thread(self._tokenizer_files.of, model.tokenizer)

    def tool_format(self, model: ServedModel) -> KnownFormat | None:
        """Returns the format in which the model writes tool calls, or None if it is unknown."""
        if self.tool_call_parser != "auto":
            return FORMATS.get(self.tool_call_parser)
        return detect(self._tool_template(model))

    def shows_tools(self, model: ServedModel) -> bool:
        return "tools" in self._tool_template(model)

    def _tool_template(self, model: ServedModel) -> str:
        if model.language.template is not None:
            return model.language.template.source
        return self.chat_template or self.tokenizer.tool_template or ""

    def close(self) -> None:
        """Stops the threads and processes that tokenize and render templates."""
        self.tokenizing.close()
        self._languages.close()
        self._tokenizer_files.close()
