"""Manages the processes that hold grammars, one for each vocabulary, and records who uses them.

The base's vocabulary has a place of its own. The others share MAX_VOCABULARIES places, of which one tenant can use all
but one. If no place is free, the least recently used process that nobody uses is ended.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from lorafleet.protocol.errors import Overloaded
from lorafleet.protocol.messages import TokenizerFile
from lorafleet.workers.structured.grammar_process import GrammarProcess

# Adapters' vocabularies at a time, beside the base's. Each process takes some 200 MB for 128 thousand tokens.
MAX_VOCABULARIES = 4
MAX_VOCABULARIES_OF_ONE = MAX_VOCABULARIES - 1  # vocabularies that one tenant may use at a time

Key = tuple[str, tuple[int, ...]]  # digest of the tokenizer, ids that end an answer
Make = Callable[[TokenizerFile, tuple[int, ...]], GrammarProcess]


class Vocabularies:
    def __init__(self, make: Make) -> None:
        self._make = make
        self._processes: OrderedDict[Key, GrammarProcess] = OrderedDict()  # least recently used first
        self._base_key: Key | None = None
        # by group; includes processes that no request may join any more
        self._users: dict[GrammarProcess, Counter[str]] = {}
        self._ending: list[GrammarProcess] = []

    @property
    def processes(self) -> list[GrammarProcess]:
        """All processes that are in use, or that a request may join."""
        return list(self._users)

    def join(
        self, tokenizer: TokenizerFile, eos_token_ids: tuple[int, ...], group: str, *, base: bool
    ) -> GrammarProcess:
        """Returns the process of the vocabulary, which the group uses until leave(). Raises Overloaded.

        Args:
            group: "" if nobody else could need a place.
            base: The vocabulary is the base model's.
        """
        key = tokenizer.digest, eos_token_ids
        if base:
            self._base_key = key
        process = self._processes.get(key)
        if process is not None and process.dead and not process.failure:
            self._forget(key)
            process = None
        if process is None or not self._users[process]:
            self._check_share(key, group)
        if process is None:
            self._make_room(key)
            process = self._processes[key] = self._make(tokenizer, eos_token_ids)
            self._users[process] = Counter()
        self._processes.move_to_end(key)
        self._users[process][group] += 1
        return process

    def leave(self, process: GrammarProcess, group: str) -> None:
        users = self._users[process]
        users[group] -= 1
        if not users[group]:
            del users[group]
        if not users and process not in self._processes.values():
            del self._users[process]

    def close(self) -> None:
        """Ends all processes, and waits until they have ended."""
        for key in list(self._processes):
            self._forget(key)
        for process in self._ending:
            process.join()

    def _others(self) -> list[tuple[Key, GrammarProcess]]:
        return [(key, process) for key, process in self._processes.items() if key != self._base_key]

    def _check_share(self, key: Key, group: str) -> None:
        used = sum(group in self._users[process] for _, process in self._others())
        if group and key != self._base_key and used >= MAX_VOCABULARIES_OF_ONE:
            raise Overloaded(
                f"your requests use structured output with {used} tokenizers at once, and at most "
                f"{MAX_VOCABULARIES_OF_ONE} are allowed; try again when they have been answered."
            )

    def _make_room(self, key: Key) -> None:
        others = self._others()
        if key == self._base_key or len(others) < MAX_VOCABULARIES:
            return
        idle = next((key for key, process in others if not self._users[process]), None)
        if idle is None:
            raise Overloaded(
                f"structured output runs with at most {MAX_VOCABULARIES} tokenizers of adapters at once, and all are "
                "in use; try again when their requests have been answered."
            )
        self._forget(idle)

    def _forget(self, key: Key) -> None:
        """Ends a process, which no request joins any more. Requests that use it learn that it has ended."""
        process = self._processes.pop(key)
        process.end()
        self._ending = [ending for ending in self._ending if not ending.has_ended] + [process]
        if not self._users[process]:
            del self._users[process]
