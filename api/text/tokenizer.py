"""The base model's tokenizer and chat template, from a folder whose files the operator trusts.

It owns the Hugging Face tokenizer; the rest of the code sees only this class. api/text/detokenizer.py turns a growing
answer into text, and api/text/tokenizers.py handles the tokenizers of adapters.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from lorafleet.api.text.content_forms import TEXTS, ContentForms
from lorafleet.api.text.content_probe import Message, find_forms
from lorafleet.api.text.token_table import TokenFacts, TokenTable, bytes_of, cutting_rules, most_characters
from lorafleet.api.text.tokenizer_conversion import convert_folder, has_general_class, processor_template
from lorafleet.protocol.errors import ConfigError, InvalidRequest, UnsupportedModel

# Longer texts are encoded without offsets, which are not used: they would hold the GIL for one second per megabyte.
# For short texts the plain call is faster.
MAX_CHARS_WITH_OFFSETS = 4096
# The library's thread pool is as wide as the machine and would compete with the engine, so each text uses one thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_TEMPLATE_ARGUMENTS = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "processor_kwargs",
    }
)


class Tokenizer(TokenTable):
    """The base model's tokenizer. Threads may share it."""

    spells_in_time = True  # the operator trusts its regular expressions

    def __init__(self, hf: Any, folder: Path | None = None) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise UnsupportedModel(
                f"{type(hf).__name__} has no tokenizer.json; save the model's tokenizer again with a recent version "
                "of transformers, which writes one."
            )
        backend.no_truncation()
        backend.no_padding()
        self._hf = hf
        self._backend = backend
        self.folder = folder  # folder that it was read from
        self._forms_of: dict[str, ContentForms] = {}  # By template.
        super().__init__(_facts_of(hf, backend))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads a local model folder. It runs none of the folder's code and uses no network."""
        from transformers import PreTrainedTokenizerFast

        if not Path(folder).is_dir():
            raise ConfigError(f"{folder} is not a folder; give a local Hugging Face model folder.")
        try:
            with tempfile.TemporaryDirectory(prefix="lorafleet-tokenizer-") as made:
                if convert_folder(Path(folder), Path(made)):
                    hf = PreTrainedTokenizerFast.from_pretrained(made, local_files_only=True)
                elif has_general_class(Path(folder)):
                    hf = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
                else:
                    from transformers import AutoTokenizer  # It imports torch.

                    # Without mistral_format=False, an installed mistral-common takes the place of tokenizer.json.
                    hf = AutoTokenizer.from_pretrained(
                        str(folder), local_files_only=True, trust_remote_code=False, mistral_format=False
                    )
            hf.chat_template = hf.chat_template or processor_template(Path(folder))
            return cls(hf, Path(folder))
        except (ConfigError, UnsupportedModel) as error:
            raise type(error)(f"the tokenizer in {folder} cannot be read: {error.message}", "model") from None
        except Exception as error:  # the libraries raise errors of many types, some for config.json
            raise ConfigError(
                f"the tokenizer in {folder} cannot be read: {error} ({type(error).__name__} from "
                "tokenizer_config.json, tokenizer.json or config.json)."
            ) from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            if len(text) <= MAX_CHARS_WITH_OFFSETS:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest(f"the text cannot be tokenized: {error}", "prompt") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes the ids; skips those that the tokenizer does not know."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the template, or None if there is no template or there are several."""
        return self._hf.chat_template if isinstance(self._hf.chat_template, str) else None

    @property
    def tool_template(self) -> str | None:
        """The template for requests with tools: some tokenizers have a separate one."""
        template = self._hf.chat_template
        if isinstance(template, dict):
            return template.get("tool_use", template.get("default"))
        return template or None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """Returns the prompt text; transformers runs the template in its sandbox."""
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions, or start the server with a --chat-template.",
                "messages",
            )
        check_template_kwargs(template_kwargs)
        shaped = self._forms(chat_template, has_tools=tools is not None).shaped(messages)
        try:
            text = self._hf.apply_chat_template(
                shaped,
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template is a program; any error is about these messages
            raise InvalidRequest(f"The chat template rejected these messages: {error}", "messages") from error
        assert isinstance(text, str)
        return text

    def _forms(self, chat_template: str | None, *, has_tools: bool) -> ContentForms:
        """Returns how a template, by default the tokenizer's own, takes the contents of messages."""
        source = chat_template or (self.tool_template if has_tools else self._plain_template)
        if source is None:
            return TEXTS
        if source not in self._forms_of:

            def render(messages: list[Message], tools: list[Message] | None) -> str:
                text: str = self._hf.apply_chat_template(
                    messages, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
                )
                return text

            self._forms_of[source] = ContentForms(find_forms(render))
        return self._forms_of[source]

    @property
    def _plain_template(self) -> str | None:
        """The template for requests without tools."""
        template = self._hf.chat_template
        return template.get("default") if isinstance(template, dict) else template or None

    @property
    def rules(self) -> str:
        return cutting_rules(self._backend)

    def to_json(self) -> str:
        """Returns the content of tokenizer.json, including tokens that were added."""
        return self._backend.to_str()


def _facts_of(hf: Any, backend: tokenizers.Tokenizer) -> TokenFacts:
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    names = [backend.id_to_token(i) or "" for i in range(size)]
    is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
    token_bytes = [bytes_of(name, is_byte_level=is_byte_level) for name in names]
    normalizer = None if backend.normalizer is None else type(backend.normalizer).__name__
    return TokenFacts(
        names=names,
        token_bytes=token_bytes,
        special_ids=frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special),
        is_byte_level=is_byte_level,
        most_characters=most_characters(token_bytes, normalizer, is_byte_level=is_byte_level),
        special_tokens={name: str(token) for name, token in hf.special_tokens_map.items() if isinstance(token, str)},
        eos_token_id=hf.eos_token_id,
    )


def check_template_kwargs(template_kwargs: Mapping[str, object] | None) -> None:
    """Raises InvalidRequest for arguments that only the server may set."""
    reserved = _TEMPLATE_ARGUMENTS & set(template_kwargs or ())
    if reserved:
        raise InvalidRequest(f"chat_template_kwargs may not set {sorted(reserved)}.", "chat_template_kwargs")
