"""Tokenizers that came with an adapter. They are read, checked and run in processes that bound their cost.

The server's own process holds plain tables of each tokenizer (token_table.py) and a decoder without regular
expressions, so decoding needs no process. Encoding needs one, because the author of the tokenizer determines its
cost.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec
from tokenizers import Tokenizer as Backend

from lorafleet.api.text.token_table import TokenFacts, TokenTable
from lorafleet.protocol.errors import AdapterMalformed, InvalidRequest
from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.sandbox.process import SandboxEnded, SandboxLimits, SandboxProcess, command_of
from lorafleet.sandbox.shunned import Shunned

PROGRAM = "lorafleet.api.text.tokenizer_program"
MAX_ENCODERS = 8  # Processes at a time; each takes about 30 MB, or 80 MB with a vocabulary of 128 thousand tokens.
MAX_TOKENS_READ = 1 << 24  # Tokens of one text.

logger = logging.getLogger("lorafleet.http")


@dataclass(frozen=True, slots=True)
class TokenizerLimits:
    # The largest well-known tokenizer, of 262 thousand tokens, takes 4 s and 450 MiB to read.
    read: SandboxLimits = field(default=SandboxLimits(30.0, 120.0, 768 << 20, 256 << 20))
    # A text of one megabyte takes one second and 60 MiB. The first text waits until the tables are built.
    encode: SandboxLimits = field(default=SandboxLimits(10.0, 60.0, 160 << 20, 4 * MAX_TOKENS_READ + 1024))
    tables_bytes: int = 512 << 20  # Memory for the tables; encode.memory_bytes are for texts.


class SpecialToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token to which a file gives a role, such as "eos_token"."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class ReadJob(msgspec.Struct, frozen=True):
    json: bytes  # Content of tokenizer.json.
    max_ids: int  # Token ids must be below this.
    special_tokens: list[SpecialToken]
    eos_token: str | None


class ReadTokenizer(msgspec.Struct, frozen=True):
    json: bytes  # The same tokenizer as the library writes it.
    digest: str  # sha256 of json.
    rules: str  # Result of token_table.cutting_rules().
    names: list[str]
    token_bytes: list[bytes]
    special_ids: list[int]
    is_byte_level: bool
    most_characters: int | None
    decoder: bytes | None
    eos_token_id: int | None


def read_tokenizer(job: ReadJob, limits: TokenizerLimits) -> ReadTokenizer:
    """Reads a tokenizer in a new process and blocks meanwhile. Raises AdapterMalformed."""
    process = SandboxProcess(command_of(PROGRAM), limits.read)
    try:
        answer = process.ask(msgspec.msgpack.encode(job))
    except SandboxEnded as ended:
        logger.warning("reading an adapter's tokenizer failed: %s", ended)
        raise _malformed(str(ended)) from None
    finally:
        process.end()
    found: ReadTokenizer = _decoded(answer, ReadTokenizer, _malformed)
    return found


def _malformed(why: str) -> AdapterMalformed:
    return AdapterMalformed(f"the adapter's tokenizer cannot be read: {why}.")


class AdapterTokenizer(TokenTable):
    """A tokenizer of an adapter. Threads may share it. Its file on the disk is deleted with it.

    If `spells_in_time` is true, it splits texts by regular expressions that the operator trusts, so the engine's
    grammars may use it without a time limit.
    """

    def __init__(
        self, read: ReadTokenizer, special_tokens: dict[str, str], encoders: Encoders, *, spells_in_time: bool
    ) -> None:
        super().__init__(
            TokenFacts(
                names=read.names,
                token_bytes=read.token_bytes,
                special_ids=frozenset(read.special_ids),
                is_byte_level=read.is_byte_level,
                most_characters=read.most_characters,
                special_tokens=special_tokens,
                eos_token_id=read.eos_token_id,
            )
        )
        self.spells_in_time = spells_in_time
        # Python's tables take several times the size of the file.
        self.num_bytes = 4 * len(read.json)
        self._digest = read.digest
        self._decoder = None if read.decoder is None else _decoder_of(read.decoder)
        self._encoders = encoders
        self._file = tempfile.TemporaryFile(prefix="lorafleet-tokenizer-")  # noqa: SIM115  nameless; it goes with this
        weakref.finalize(self, self._file.close)
        self._file.write(read.json)
        self._file.flush()

    def encode(self, text: str, *, add_special_tokens: bool = True, group: str = "") -> list[int]:
        """Encodes the text and blocks meanwhile. `group` is the group that sent the text. Raises InvalidRequest."""
        return self._encoders.encode(self._digest, self._file, text, add_special_tokens, group)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        size, special = self.vocab_size, self.special_ids if skip_special_tokens else frozenset()
        names = [self._names[i] for i in token_ids if 0 <= i < size and i not in special and self._names[i]]
        return " ".join(names) if self._decoder is None else str(self._decoder.decode(names))

    def to_json(self) -> str:
        """Returns tokenizer.json as the library writes it."""
        self._file.seek(0)
        return self._file.read().decode()


@dataclass(slots=True)
class _Encoder:
    lock: threading.Lock = field(default_factory=threading.Lock)
    process: SandboxProcess | None = None
    num_users: int = 0

    def end(self) -> None:
        if self.process is not None:
            self.process.end()


class Encoders:
    """Processes that encode texts, one for each recently used tokenizer."""

    def __init__(self, limits: TokenizerLimits | None = None, max_processes: int = MAX_ENCODERS) -> None:
        self._limits = limits or TokenizerLimits()
        self._lock = threading.Lock()
        self._encoders: LRUCache[str, _Encoder] = LRUCache(max_processes, lambda _, encoder: not encoder.num_users)
        self._shunned = Shunned()

    def encode(self, digest: str, file: IO[bytes], text: str, add_special_tokens: bool, group: str) -> list[int]:
        """Encodes the text in the tokenizer's process and blocks meanwhile. Raises InvalidRequest."""
        if (why := self._shunned.why(group, digest)) is not None:
            raise _refusal(why)
        job = _message(text, add_special_tokens)
        encoder = self._enter(digest)
        try:
            with encoder.lock:
                return _ids(self._ask(encoder, file, job))
        except SandboxEnded as ended:
            logger.warning("the process of an adapter's tokenizer was ended: %s", ended)
            self._shunned.add(group, digest, str(ended))
            raise _refusal(str(ended)) from None
        finally:
            self._leave(encoder)

    def close(self) -> None:
        """Ends the processes; a text that is being encoded fails."""
        with self._lock:
            encoders = [encoder for _, encoder in self._encoders.items()]
            self._encoders.clear()
        for encoder in encoders:
            encoder.end()

    def _ask(self, encoder: _Encoder, file: IO[bytes], job: bytes) -> bytearray:
        process = encoder.process
        if process is None or process.has_ended:
            settings, fd = {"tokenizer_fd": file.fileno(), "tables_bytes": self._limits.tables_bytes}, file.fileno()
            process = encoder.process = SandboxProcess(command_of(PROGRAM), self._limits.encode, settings, (fd,))
        return process.ask(job)

    def _enter(self, digest: str) -> _Encoder:
        with self._lock:
            encoder = self._encoders.get(digest) or _Encoder()
            encoder.num_users += 1
            evicted = self._encoders.put(digest, encoder)
        for idle in evicted:
            idle.end()
        return encoder

    def _leave(self, encoder: _Encoder) -> None:
        with self._lock:
            encoder.num_users -= 1


def _message(text: str, add_special_tokens: bool) -> bytes:
    try:
        return msgspec.msgpack.encode((text, add_special_tokens))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text cannot be tokenized: {error}", "prompt") from None


class _Ids(msgspec.Struct):
    ids: bytes


def _ids(answer: bytearray) -> list[int]:
    return array("I", _decoded(answer, _Ids, _refusal).ids).tolist()


def _refusal(why: str) -> InvalidRequest:
    return InvalidRequest(f"The adapter's tokenizer cannot tokenize this text: {why}.", "prompt")


def _decoded(answer: bytearray, kind: type[Any], refusal: Callable[[str], Exception]) -> Any:
    try:
        return msgspec.msgpack.decode(answer, type=kind)
    except msgspec.MsgspecError:
        pass
    try:
        why = msgspec.msgpack.decode(answer, type=dict[str, str])["error"]
    except (msgspec.MsgspecError, KeyError):
        why = "it returned something other than tokens"
    raise refusal(why)


def _decoder_of(written: bytes) -> Any:
    """Returns the library's decoder. It has no constructor for its serialized form, so a whole tokenizer is built
    around it."""
    empty = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": json.loads(written),
        "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
    }
    return Backend.from_str(json.dumps(empty)).decoder
