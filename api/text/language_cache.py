"""A cache of the languages of recently requested adapters. It is bounded in number and in memory."""

from __future__ import annotations

from collections import Counter, OrderedDict

from lorafleet.api.text.adapter_language import Language
from lorafleet.api.text.tokenizers import AdapterTokenizer

MAX_LANGUAGES = 4096  # Nearly all of them are just the base's own.
MAX_TOKENIZERS = 32  # Tokenizers other than the base's.
# Tokenizers, templates and formats together; a tokenizer of 128 thousand tokens takes 40 MB.
MAX_LANGUAGE_BYTES = 512 << 20


class LanguageCache:
    """Languages by digest of the adapter. Evicts the least recently used language, but never the newest."""

    def __init__(
        self,
        max_languages: int = MAX_LANGUAGES,
        max_tokenizers: int = MAX_TOKENIZERS,
        max_bytes: int = MAX_LANGUAGE_BYTES,
    ) -> None:
        self.num_bytes = 0
        self._limits = max_languages, max_tokenizers, max_bytes
        self._languages: OrderedDict[str, Language] = OrderedDict()
        self._users: Counter[AdapterTokenizer] = Counter()  # languages that share a tokenizer

    def __len__(self) -> int:
        return len(self._languages)

    @property
    def num_tokenizers(self) -> int:
        return len(self._users)

    def peek(self, digest: str) -> Language | None:
        """Returns what get() does, without counting as a use."""
        return self._languages.get(digest)

    def get(self, digest: str) -> Language | None:
        found = self._languages.get(digest)
        if found is not None:
            self._languages.move_to_end(digest)
        return found

    def put(self, digest: str, language: Language) -> None:
        if digest in self._languages:
            self._forget(digest)
        self._languages[digest] = language
        self.num_bytes += language.num_bytes
        if isinstance(language.tokenizer, AdapterTokenizer):
            self.num_bytes += 0 if language.tokenizer in self._users else language.tokenizer.num_bytes
            self._users[language.tokenizer] += 1
        max_languages, max_tokenizers, max_bytes = self._limits
        while len(self._languages) > 1 and (
            len(self._languages) > max_languages or len(self._users) > max_tokenizers or self.num_bytes > max_bytes
        ):
            self._forget(next(iter(self._languages)))

    def _forget(self, digest: str) -> None:
        language = self._languages.pop(digest)
        self.num_bytes -= language.num_bytes
        if isinstance(language.tokenizer, AdapterTokenizer):
            self._users[language.tokenizer] -= 1
            if not self._users[language.tokenizer]:
                del self._users[language.tokenizer]
                self.num_bytes -= language.tokenizer.num_bytes
