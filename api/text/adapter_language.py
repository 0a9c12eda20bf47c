"""Reads an adapter's own language: tokenizer, vocabulary, end tokens and chat template. Parts that its folder lacks
are the base's.

Trainers save the base's tokenizer beside nearly every adapter. A tokenizer that equals the base's is recognized and
costs nothing. Files are read by the rules of adapter_files.py. No code of the adapter is ever run here; its template
and its tokenizer run only in processes of sandbox/.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from lorafleet.api.text.special_tokens import (
    SPECIAL_NAME,
    TOKENIZER_CONFIG_NAME,
    SpecialTokens,
    eos_text,
    read_special_tokens,
)
from lorafleet.api.text.templates import ChatTemplate, TemplateSandbox
from lorafleet.api.text.token_table import TokenTable
from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizers import (
    AdapterTokenizer,
    Encoders,
    ReadJob,
    TokenizerLimits,
    read_tokenizer,
)
from lorafleet.protocol.adapter_formats.adapter_classifier import (
    CLASSIFIER_KEYS,
    HEAD_TASKS,
    AdapterClassifier,
    read_classifier,
)
from lorafleet.protocol.adapter_formats.adapter_files import (
    CONFIG_NAME,
    SAFETENSORS_NAME,
    AdapterFolder,
    language_digest,
    open_weights,
    read_config,
    read_language,
)
from lorafleet.protocol.adapter_formats.adapter_rope import DEFAULTS_NAME, ROPE_KEYS, read_adapter_rope
from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo, parse_header, read_header
from lorafleet.protocol.adapter_formats.torch_archive import TorchArchive
from lorafleet.protocol.errors import AdapterMalformed, InvalidRequest
from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.protocol.messages import Vocabulary
from lorafleet.protocol.strict_json import read_json_object, shown
from lorafleet.protocol.structured_spec import ADAPTERS_DEFAULT, StructuredOutputs, response_format
from lorafleet.protocol.tool_call_formats import ReasoningFormat, ToolCallFormat

MAX_TOKENIZERS_LIKE_BASE = 4096  # Cached digests of file sets that hold the base's tokenizer.
MAX_NEW_TOKENS = 65_536  # Tokens that an adapter's tokenizer may have beyond the base's vocabulary.
MAX_EOS_TOKEN_IDS = 64  # End tokens of one adapter; each request carries them.
TOKENIZER_NAME = "tokenizer.json"
TEMPLATE_NAME = "chat_template.jinja"
GENERATION_NAME = "generation_config.json"
TOKENIZER_NAMES = (TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, SPECIAL_NAME)

_TABLE_SIGNS = (b"embed_tokens", b"lm_head")
_HEAD_SIGNS = (b"score", b"classifier")
# PEFT's names of the tensors that replace the tables of the vocabulary.
_TABLE = re.compile(
    r"(?:.*\.)?(?:embed_tokens|lm_head)\.(?:(?:modules_to_save|token_adapter|base_layer|default)\.)*weight"
)


@dataclass(frozen=True, slots=True)
class Language:
    """The tokenizer, vocabulary and chat template for an adapter's requests."""

    tokenizer: Tokenizer | AdapterTokenizer
    vocabulary: Vocabulary | None = None  # None: token ids and end tokens are the base's.
    template: ChatTemplate | None = None  # The adapter's own. None: the base's.
    structured_outputs: StructuredOutputs | None = None  # Format of its answers if a request gives none.
    tool_call_parser: str | None = None  # Its format of tool calls. None: the server's.
    reasoning_parser: str | None = None  # Its format of reasoning. None: the server's.
    digest: str = ""  # language_digest of the files that it was read from.
    context_length: int | None = None  # As AdapterInfo's.
    classifier: AdapterClassifier | None = None  # The meaning of its classification head's outputs; None: it has none.

    @property
    def num_bytes(self) -> int:
        """Its memory without the tokenizer, which others may share."""
        template = 0 if self.template is None else 4 * len(self.template.source)
        classifier = 0 if self.classifier is None else 4 * self.classifier.num_chars
        return (
            template + classifier + (0 if self.structured_outputs is None else 4 * len(self.structured_outputs.source))
        )

    def does_as(self, other: Language) -> bool:
        """Returns whether both behave the same, even if they were read from different files."""
        return replace(self, digest="") == replace(other, digest="")


class LanguageReader:
    """Reads the languages of the adapters of one base. Threads may share it.

    Args:
        vocab_size: Size of the base's vocabulary, which may be padded beyond that of its tokenizer.
        eos_token_ids: Tokens that end the base's answers, EngineHello.ends().
        rope_positions: EngineHello.rope_positions.
    """

    def __init__(
        self,
        base: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        templates: TemplateSandbox,
        encoders: Encoders,
        limits: TokenizerLimits | None = None,
        rope_positions: int = 0,
    ) -> None:
        self.base = Language(base)
        self._base = base
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._templates = templates
        self._encoders = encoders
        self._limits = limits or TokenizerLimits()
        self._rope_positions = rope_positions
        self._lock = threading.Lock()
        # By their files' digest. A tokenizer lives as long as it is used.
        self._tokenizers: weakref.WeakValueDictionary[str, AdapterTokenizer] = weakref.WeakValueDictionary()
        self._like_base: LRUCache[str, None] = LRUCache(MAX_TOKENIZERS_LIKE_BASE)
        self._base_digests: frozenset[str] | None = None

    def read(self, path: str | os.PathLike[str]) -> Language:
        """Reads the language of the adapter in the folder. Blocks on the disk. Raises AdapterError."""
        folder = AdapterFolder.at(path)
        files = read_language(folder)
        vocab_size = _vocab_size_in(folder) or self._vocab_size
        tokenizer = self._tokenizer(files)
        eos = self._ends(files, tokenizer)
        _check_ends(eos, vocab_size)
        same = vocab_size == self._vocab_size and sorted(eos) == sorted(self._eos_token_ids)
        vocabulary = None if same else Vocabulary(vocab_size, eos)
        template = self._template(files, tokenizer)
        config = read_json_object(read_config(folder), CONFIG_NAME)
        defaults = _defaults_in(files)
        return Language(
            tokenizer,
            vocabulary,
            template,
            _default_format(defaults),
            _named(defaults, "tool_call_parser", get_args(ToolCallFormat)),
            _named(defaults, "reasoning_parser", get_args(ReasoningFormat)),
            language_digest(files),
            self._context_length(config, files),
            read_classifier(config, files.get(DEFAULTS_NAME), _infos(folder, _HEAD_SIGNS) if _has_head(config) else {}),
        )

    def _context_length(self, config: Mapping[str, object], files: Mapping[str, bytes]) -> int | None:
        rope = read_adapter_rope(config, files.get(DEFAULTS_NAME))
        return None if rope is None else rope.context_limit(self._rope_positions)

    def _tokenizer(self, files: Mapping[str, bytes]) -> Tokenizer | AdapterTokenizer:
        base = self._base
        if TOKENIZER_NAME not in files:
            return base
        key = language_digest({name: content for name, content in files.items() if name in TOKENIZER_NAMES})
        with self._lock:
            known = base if key in self._like_base else self._tokenizers.get(key)
        if known is not None:
            return known
        made = self._read_tokenizer(files, read_special_tokens(files))
        with self._lock:
            if made is None:
                self._like_base.put(key, None)
                return base
            return self._tokenizers.setdefault(key, made)

    def _read_tokenizer(self, files: Mapping[str, bytes], special: SpecialTokens) -> AdapterTokenizer | None:
        """Returns None if it encodes and decodes every text exactly as the base's does."""
        content, base = files[TOKENIZER_NAME], self._base.special_tokens
        same_ends = all(special.texts.get(role) == base.get(role) for role in ("bos_token", "eos_token"))
        may_be_base = same_ends or not special.roles
        if may_be_base and hashlib.sha256(content).hexdigest() in self._digests_of_base():
            return None
        eos = special.roles.get("eos_token")
        max_ids = self._vocab_size + MAX_NEW_TOKENS
        job = ReadJob(content, max_ids, special.all, None if eos is None else eos.content)
        read = read_tokenizer(job, self._limits)
        if may_be_base and read.digest in self._digests_of_base():
            return None
        spells_in_time = read.rules == self._base.rules
        return AdapterTokenizer(read, special.texts, self._encoders, spells_in_time=spells_in_time)

    def _digests_of_base(self) -> frozenset[str]:
        """Returns the digests of the base's tokenizer.json, as it is in its folder and as the library writes it."""
        if self._base_digests is None:
            found = {hashlib.sha256(self._base.to_json().encode()).hexdigest()}
            file = None if self._base.folder is None else self._base.folder / TOKENIZER_NAME
            if file is not None and file.is_file():
                found.add(hashlib.sha256(file.read_bytes()).hexdigest())
            self._base_digests = frozenset(found)
        return self._base_digests

    def _ends(self, files: Mapping[str, bytes], tokenizer: TokenTable) -> list[int]:
        """Returns the tokens that end the adapter's answers: those of generation_config.json, or without that entry
        those of the base's that have the same name in both tokenizers; and the tokenizer's eos token in any case."""
        given, own = self._configured_ends(files, tokenizer), self._eos_of(files, tokenizer)
        return given if own is None or own in given else [*given, own]

    def _configured_ends(self, files: Mapping[str, bytes], tokenizer: TokenTable) -> list[int]:
        if GENERATION_NAME in files:
            given = read_json_object(files[GENERATION_NAME], GENERATION_NAME).get("eos_token_id")
            if given is not None:
                ids = [token for token in (given if isinstance(given, list) else [given]) if type(token) is int]
                if not ids or (isinstance(given, list) and len(ids) < len(given)) or min(ids) < 0:
                    raise AdapterMalformed(
                        f"{GENERATION_NAME} has the eos_token_id {shown(given)}; it must be a token id, or a list of "
                        "token ids."
                    )
                return ids
        base = self.base.tokenizer
        if tokenizer is base:
            return self._eos_token_ids
        return [i for i in self._eos_token_ids if tokenizer.token_name(i) == base.token_name(i) != ""]

    def _eos_of(self, files: Mapping[str, bytes], tokenizer: TokenTable) -> int | None:
        """Returns the eos token of the adapter's tokenizer. Without tokenizer.json, this is the base's, of which the
        other files may name another token."""
        text = None if TOKENIZER_NAME in files else eos_text(files)
        named = None if text is None else tokenizer.id_by_name(text)  # It need not be special in the base's tokenizer.
        eos = tokenizer.eos_token_id if named is None else named
        is_of_base = tokenizer is self.base.tokenizer
        return None if is_of_base and eos is not None and eos >= self._vocab_size else eos

    def _template(self, files: Mapping[str, bytes], tokenizer: TokenTable) -> ChatTemplate | None:
        source = _template_in(files)
        base = self._base
        if source is None or (source == base.chat_template and tokenizer.special_tokens == base.special_tokens):
            return None
        return self._templates.examined(ChatTemplate(source, tokenizer.special_tokens))


def _check_ends(eos_token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises AdapterMalformed if there are too many end tokens or one is outside the vocabulary.

    Trainers cause the second fault by accident: they add a token to the tokenizer, and save it beside tables that
    were not resized.
    """
    if len(eos_token_ids) > MAX_EOS_TOKEN_IDS:
        raise AdapterMalformed(
            f"the adapter has {len(eos_token_ids)} eos_token_ids; at most {MAX_EOS_TOKEN_IDS} are allowed."
        )
    for token in eos_token_ids:
        if not 0 <= token < vocab_size:
            raise AdapterMalformed(
                f"the adapter's answers end with token {shown(token)} ({GENERATION_NAME}, or its tokenizer's "
                f"eos_token), but its vocabulary has ids 0 to {vocab_size - 1}. Save the resized embed_tokens and "
                "lm_head with the adapter, or correct the eos token."
            )


def _template_in(files: Mapping[str, bytes]) -> str | None:
    if TEMPLATE_NAME in files:
        try:
            return files[TEMPLATE_NAME].decode()
        except UnicodeDecodeError:
            raise AdapterMalformed(f"{TEMPLATE_NAME} is not UTF-8 text.") from None
    if TOKENIZER_CONFIG_NAME not in files:
        return None
    found = read_json_object(files[TOKENIZER_CONFIG_NAME], TOKENIZER_CONFIG_NAME).get("chat_template")
    if isinstance(found, list):  # several templates: transformers uses the one that is called "default"
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise AdapterMalformed(f"{TOKENIZER_CONFIG_NAME} has the chat_template {shown(found)}; it must be a string.")
    return found or None


def _defaults_in(files: Mapping[str, bytes]) -> dict[str, Any]:
    if DEFAULTS_NAME not in files:
        return {}
    given = read_json_object(files[DEFAULTS_NAME], DEFAULTS_NAME)
    known = ("response_format", "tool_call_parser", "reasoning_parser", *ROPE_KEYS, *CLASSIFIER_KEYS)
    unknown = [key for key in given if key not in known]
    if unknown:
        raise AdapterMalformed(f"{DEFAULTS_NAME} has {shown(unknown[0])}; it may have only {', '.join(known)}.")
    return given


def _named(given: Mapping[str, Any], key: str, known: Sequence[str]) -> str | None:
    """Returns the name of a parser that lorafleet.json chooses."""
    name = given.get(key)
    if name is not None and name not in known:
        raise AdapterMalformed(f"{DEFAULTS_NAME} has the {key} {shown(name)}; it must be one of {', '.join(known)}.")
    return name


def _default_format(given: Mapping[str, Any]) -> StructuredOutputs | None:
    if "response_format" not in given:
        return None
    try:
        return response_format(given["response_format"], ADAPTERS_DEFAULT)
    except InvalidRequest as error:
        raise AdapterMalformed(error.message) from None


def _vocab_size_in(folder: AdapterFolder) -> int | None:
    """Returns the number of rows of the vocabulary tables in the weights file, or None if it has none. The loader
    checks the rest."""
    infos = _infos(folder, _TABLE_SIGNS)
    sizes = {info.shape[0] for name, info in infos.items() if _TABLE.fullmatch(name) and len(info.shape) == 2}
    if len(sizes) > 1:
        raise AdapterMalformed(
            f"its vocabulary tables have {sorted(sizes)} rows; all must have the same number of rows."
        )
    return next(iter(sizes), None)


def _has_head(config: Mapping[str, object]) -> bool:
    task_type = config.get("task_type")
    return isinstance(task_type, str) and task_type in HEAD_TASKS


def _infos(folder: AdapterFolder, signs: Sequence[bytes]) -> Mapping[str, TensorInfo]:
    """Returns the tensors of the weights file; none for a safetensors file in which no name has one of the `signs`.

    Parsing a header takes milliseconds, and for most adapters nothing in it matters here.
    """
    with open_weights(folder) as file:
        if file.name != SAFETENSORS_NAME:
            return TorchArchive(file, hashlib.sha256()).infos
        header = read_header(file, hashlib.sha256())
        if not any(sign in header for sign in (*signs, b"\\")):  # an escape could hide a name
            return {}
        return parse_header(header, file.size - 8 - len(header), file.name)
