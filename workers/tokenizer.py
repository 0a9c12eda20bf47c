"""Text to token ids and back, chat templates, and what each token looks like, for one model folder.

Owns the Hugging Face tokenizer; the rest of the code sees only this class. Turning a growing answer into text is
workers/detokenizer.py's work.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers

from lorafleet.workers.errors import ConfigError, InvalidRequest, UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
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


class Tokenizer:
    """`vocab_size` counts the ids that this tokenizer knows; the model's own vocabulary may be padded beyond it."""

    def __init__(self, hf: Any) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise UnsupportedModel(
                f"{type(hf).__name__} has no tokenizer.json; save the model's tokenizer again with a current "
                "transformers, which writes one."
            )
        backend.no_truncation()
        backend.no_padding()
        self._hf = hf
        self._backend = backend
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.eos_token_id: int | None = hf.eos_token_id
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.special_texts = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._bytes = [self._bytes_of(i) for i in range(self.vocab_size)]
        self._visible_bytes = [b"" if i in self.special_ids else b for i, b in enumerate(self._bytes)]
        self._most_characters = self._most_characters_a_token()

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads a local model folder; runs none of its code and asks no network."""
        from transformers import AutoTokenizer

        if not Path(folder).is_dir():
            raise ConfigError(f"{folder} is not a folder; give a local Hugging Face model folder.")
        try:
            return cls(AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise ConfigError(f"the tokenizer in {folder} cannot be read: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest(f"the text cannot be tokenized: {error}", "prompt") from error

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of len(encode(text)), at no cost: a text far over the context need not be tokenized."""
        return 0 if self._most_characters is None else len(text) // self._most_characters

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Ids that the tokenizer does not know decode to nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def does_as(self, other: Tokenizer) -> bool:
        """Whether both make the same tokens of every text, and the same text of every token; and where it begins and
        ends, for templates."""
        return (
            self._backend.to_str() == other._backend.to_str()
            and self.special_tokens.get("bos_token") == other.special_tokens.get("bos_token")
            and self.special_tokens.get("eos_token") == other.special_tokens.get("eos_token")
        )

    @property
    def special_tokens(self) -> dict[str, str]:
        """By name: "eos_token"."""
        return {name: str(token) for name, token in self._hf.special_tokens_map.items() if isinstance(token, str)}

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    @property
    def chat_template(self) -> str | None:
        """Its Jinja source; None where there is none, or several."""
        return self._hf.chat_template if isinstance(self._hf.chat_template, str) else None

    @property
    def tool_template(self) -> str | None:
        """The one that is used where there are tools: some tokenizers have a template of its own for them."""
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
        """The prompt text; transformers runs the template in its sandbox."""
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions, or start the server with a chat template.",
                "messages",
            )
        check_template_kwargs(template_kwargs)
        try:
            text = self._hf.apply_chat_template(
                [dict(m) for m in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template is a program: whatever it raises is about these messages
            raise InvalidRequest(f"The chat template refused these messages: {error}", "messages") from error
        assert isinstance(text, str)
        return text

    def to_json(self) -> str:
        """As tokenizer.json has it, with the tokens that were added."""
        return self._backend.to_str()

    def byte_table(self, *, skip_special_tokens: bool) -> list[bytes]:
        """The bytes of every token by id; exact for byte-level tokenizers only."""
        return self._visible_bytes if skip_special_tokens else self._bytes

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, also where it is half of a UTF-8 character."""
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """OpenAI's spelling of one token: its text, or `bytes:\\xe2\\x82` where it is no whole character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_name(self, token_id: int) -> str:
        """The vocabulary's own spelling, such as `Ġhello`."""
        return self._backend.id_to_token(token_id) or ""

    def _most_characters_a_token(self) -> int | None:
        """None where the tokenizer may drop characters, so that nothing can be said."""
        normalizer = self._backend.normalizer
        if not self.is_byte_level or not isinstance(normalizer, normalizers.NFC | None):
            return None
        longest = max(map(len, self._bytes), default=1)
        return longest if normalizer is None else 3 * longest  # NFC makes one character of three at most

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            # Any foreign character makes the library take the whole token literally; added tokens are often so.
            codes = [_BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in codes else bytes(code for code in codes if code is not None)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def check_template_kwargs(template_kwargs: Mapping[str, object] | None) -> None:
    """Raises InvalidRequest for what is the server's to say."""
    reserved = _TEMPLATE_ARGUMENTS & set(template_kwargs or ())
    if reserved:
        raise InvalidRequest(f"chat_template_kwargs may not set {sorted(reserved)}.", "chat_template_kwargs")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: every byte as a printable character. Source: openai/gpt-2, encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()
