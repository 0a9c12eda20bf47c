"""The program that reads and runs adapters' tokenizers; tokenizers.py runs it in separate processes.

- Reading: the library reads a tokenizer.json that tokenizer_document.py has checked. The answer is plain tables, with
  the file as the library writes it.
- Encoding: the process holds one such file and encodes texts.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders

from lorafleet.api.text.token_table import bytes_of, cutting_rules, most_characters
from lorafleet.api.text.tokenizer_document import Rejected, check_token, checked
from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import read_json_object
from lorafleet.sandbox.confinement import MemoryBound
from lorafleet.sandbox.program import serve, settings

MAX_ERROR_CHARS = 300


def main() -> None:
    fd = settings().get("tokenizer_fd")
    if fd is None:
        serve(read)
        return
    document = os.pread(fd, os.fstat(fd).st_size, 0)  # the server's process shares the file offset
    os.close(fd)
    serve(Encoder(document).answer)


def read(message: bytearray) -> bytes:
    """Answers a job of tokenizers.ReadJob with a tokenizers.ReadTokenizer, or with an error."""
    return answered(lambda: tables_of(msgspec.msgpack.decode(message)))


class Encoder:
    def __init__(self, document: bytes) -> None:
        self._document = document
        self._memory = MemoryBound()
        self._tokenizer: Tokenizer | None = None

    def answer(self, message: bytearray) -> bytes:
        """Answers a job, which is [text, whether to add special tokens], with the ids as uint32."""
        text, add_special_tokens = msgspec.msgpack.decode(message)
        return answered(lambda: {"ids": self._encode(text, add_special_tokens)})

    def _encode(self, text: str, add_special_tokens: bool) -> bytes:
        if self._tokenizer is None:
            self._tokenizer = self._load()
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encoding.ids).tobytes()

    def _load(self) -> Tokenizer:
        """Builds the tables with more memory than texts may take. This is safe, since the file was read before under
        these bounds."""
        limits = settings()
        self._memory.set(limits["tables_bytes"])
        tokenizer = Tokenizer.from_buffer(self._document)
        self._document = b""
        self._memory.set(limits["memory_bytes"])
        return tokenizer


def answered(work: Callable[[], Mapping[str, object]]) -> bytes:
    try:
        return msgspec.msgpack.encode(work())
    except (Rejected, AdapterMalformed) as error:
        fault = error.message if isinstance(error, AdapterMalformed) else str(error)
    except MemoryError:
        fault = "it needs more memory than a tokenizer may have"
    except BaseException as error:  # includes the library's panics, which are no Exception
        fault = str(error)
    return msgspec.msgpack.encode({"error": fault[:MAX_ERROR_CHARS]})


def tables_of(job: Mapping[str, Any]) -> dict[str, object]:
    document = checked(read_json_object(job["json"], "tokenizer.json"), job["max_ids"])
    tokenizer = Tokenizer.from_str(json.dumps(document, ensure_ascii=False))
    del document
    add_special_tokens(tokenizer, job["special_tokens"])
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > job["max_ids"]:
        raise Rejected(f"with its special tokens it has {size} tokens; at most {job['max_ids']} are allowed")
    names = [""] * size
    for name, token_id in vocabulary.items():
        names[token_id] = name
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        names[token_id] = token.content
    is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    token_bytes = [bytes_of(name, is_byte_level=is_byte_level) for name in names]
    normalizer = None if tokenizer.normalizer is None else type(tokenizer.normalizer).__name__
    written = tokenizer.to_str()
    return {
        "json": written.encode(),
        "digest": hashlib.sha256(written.encode()).hexdigest(),
        "rules": cutting_rules(tokenizer),
        "names": names,
        "token_bytes": token_bytes,
        "special_ids": sorted(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special),
        "is_byte_level": is_byte_level,
        "most_characters": most_characters(token_bytes, normalizer, is_byte_level=is_byte_level),
        "decoder": None if tokenizer.decoder is None else bytes(tokenizer.decoder.__getstate__()),
        "eos_token_id": None if job["eos_token"] is None else tokenizer.token_to_id(job["eos_token"]),
    }


def add_special_tokens(tokenizer: Tokenizer, tokens: list[dict[str, Any]]) -> None:
    """Adds the tokens as transformers does: tokens that have a role are special, even if the file does not say so."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    added = []
    for token in tokens:
        check_token(token["content"], "the special tokens")
        if token["content"] not in known:
            known.add(token["content"])
            added.append(AddedToken(**token, special=True))
    tokenizer.add_special_tokens(added)


if __name__ == "__main__":
    main()
