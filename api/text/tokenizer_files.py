"""Tokenizers as files for the engine's helper processes. A file is written when it is first needed, and deleted
together with its tokenizer."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
import weakref
from pathlib import Path

import msgspec

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizers import AdapterTokenizer
from lorafleet.protocol.messages import TokenizerFile

AnyTokenizer = Tokenizer | AdapterTokenizer


class TokenizerFiles:
    """The files of all tokenizers of this process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._written: weakref.WeakKeyDictionary[AnyTokenizer, TokenizerFile] = weakref.WeakKeyDictionary()

    def of(self, tokenizer: AnyTokenizer) -> TokenizerFile:
        """Returns the tokenizer's file and writes it if needed. Blocks: 128 thousand tokens take 0.1 s and 10 MB."""
        with self._lock:
            known = self._written.get(tokenizer)
            if known is not None:
                return known
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="lorafleet-tokenizers-"))
                self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            # "json" is empty if a regular expression could delay the engine: forced texts are then spelled by the
            # vocabulary alone.
            content = msgspec.msgpack.encode(
                {
                    "json": tokenizer.to_json() if tokenizer.spells_in_time else "",
                    "tokens": tokenizer.byte_table(skip_special_tokens=False),
                    "special": sorted(tokenizer.special_ids),
                }
            )
            digest = hashlib.sha256(content).hexdigest()
            path = Path(self._folder, f"{len(self._written)}-{digest}")
            path.write_bytes(content)
            weakref.finalize(tokenizer, path.unlink, missing_ok=True)
            made = self._written[tokenizer] = TokenizerFile(str(path), digest, tokenizer.vocab_size)
            return made

    def known(self, tokenizer: AnyTokenizer) -> TokenizerFile | None:
        """Returns the tokenizer's file without blocking, or None if it is not written yet."""
        return self._written.get(tokenizer)

    def close(self) -> None:
        with self._lock:
            if self._folder is not None:
                self._remove()
                self._folder = None
                self._written.clear()
