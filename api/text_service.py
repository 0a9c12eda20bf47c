"""Gives requests the tokenizers, chat templates and limits of the models that they name."""

from __future__ import annotations

import re

from lorafleet.api.access.work_threads import CHECKS, in_turn
from lorafleet.api.backend import EngineBackend
from lorafleet.api.front_config import FrontConfig
from lorafleet.api.languages import AdapterLanguages
from lorafleet.api.served_model import ServedModel
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.api.text.tokenizing import Tokenizing
from lorafleet.api.tool_calls.known import FORMATS, KnownFormat, detect
from lorafleet.api.tool_calls.thinking import TAGS, Tags, detect_tags
from lorafleet.protocol.lora_request import LoRARequest
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
        self.reasoning_parser = config.reasoning_parser
        self._engine = engine
        self._languages = languages
        self._tokenizer_files = TokenizerFiles()

    @property
    def base_max_model_len(self) -> int:
        return self._engine.hello.max_model_len

    def max_model_len(self, model: ServedModel) -> int:
        return self._engine.hello.context_limit(model.language.context_length)

    def listed_max_model_len(self, lora: LoRARequest) -> int:
        """Returns the adapter's max_model_len without reading its files: the base's, unless they were read lately."""
        return self._engine.hello.context_limit(self._languages.known_context(lora.digest))

    def context_len(self, model: ServedModel) -> int:
        """Returns the maximum number of tokens that the prompt and the answer of one request may have together."""
        return min(self.max_model_len(model), self._engine.hello.kv_cache_tokens)

    def vocab_size(self, model: ServedModel) -> int:
        own = model.language.vocabulary
        return self._engine.hello.vocab_size if own is None else own.size

    async def tokenizer_file(self, model: ServedModel) -> TokenizerFile:
        """Returns a file of the model's tokenizer for the engine's grammars, and writes it if it does not exist yet."""
        known = self._tokenizer_files.known(model.tokenizer)
        return known if known is not None else await in_turn(CHECKS, self._tokenizer_files.of, model.tokenizer)

    def tool_format(self, model: ServedModel) -> KnownFormat | None:
        """Returns the format in which the model writes tool calls, or None if it is unknown."""
        named = model.language.tool_call_parser or self.tool_call_parser
        if named != "auto":
            return FORMATS.get(named)
        return detect(self.chat_template_of(model))

    def reasoning_tags(self, model: ServedModel) -> Tags | None:
        """Returns the tags around the model's reasoning, or None if reasoning is not separated by tags.

        An adapter's own template often lacks the tags that its base goes on writing, so the base's template counts too.
        """
        named = model.language.reasoning_parser or self.reasoning_parser
        if named != "auto":
            return TAGS.get(named)
        return detect_tags(self.chat_template_of(model)) or detect_tags(self._base_template)

    def knows_argument(self, model: ServedModel, name: str) -> bool:
        """Returns whether the model's chat template reads an argument of this name."""
        return re.search(rf"\b{re.escape(name)}\b", self.chat_template_of(model)) is not None

    def shows_tools(self, model: ServedModel) -> bool:
        return "tools" in self.chat_template_of(model)

    def chat_template_of(self, model: ServedModel) -> str:
        """Returns the source of the template that renders chats with tools; empty if there is none."""
        if model.language.template is not None:
            return model.language.template.source
        return self._base_template

    @property
    def _base_template(self) -> str:
        return self.chat_template or self.tokenizer.tool_template or ""

    def close(self) -> None:
        """Stops the threads and processes that tokenize and render templates."""
        self.tokenizing.close()
        self._languages.close()
        self._tokenizer_files.close()
