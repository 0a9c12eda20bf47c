"""The processes that hold grammars, over a vocabulary of single bytes and a few more; the engine's part is played."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import LorafleetError
from lorafleet.protocol.messages import TokenizerFile
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.structured.decoding import StructuredDecoding
from lorafleet.workers.structured.grammar_process import GrammarLimits

LIMITS = GrammarLimits(trial_cpu_s=1.0, trial_memory_bytes=256 << 20, step_wait_s=120, mask_s=120)
ROWS = 8


def schema(given: object) -> structured_spec.StructuredOutputs:
    return structured_spec.json_schema(given, "response_format", any_whitespace=False)


HOSTILE = {
    "processor time": schema({"type": "integer", "multipleOf": 99_999_989}),
    "nested too deeply": structured_spec.grammar(
        "start: A0\n" + "\n".join(f'A{i}: A{i + 1} "y"' for i in range(20_000)) + '\nA20000: "x"', "g"
    ),
    "": structured_spec.regex("((a|b)*c" * 300 + ")*" * 300 + "(x{1,1000}){1,1000}", "r"),
}


def vocabularies(file: TokenizerFile, count: int) -> list[TokenizerFile]:
    return [TokenizerFile(file.path, f"digest {i}", file.vocab_size) for i in range(count)]


class Played:
    """What the engine does with a StructuredDecoding, one answer at a time."""

    def __init__(self, file: TokenizerFile, tokenizer: Tokenizer, limits: GrammarLimits = LIMITS) -> None:
        self.woken = threading.Event()
        self.file = file
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_token_id or 0
        self.decoding = StructuredDecoding(ROWS, self.woken.set, limits)

    def open(
        self,
        given: structured_spec.StructuredOutputs,
        file: TokenizerFile | None = None,
        group: str = "",
        *,
        base: bool = False,
    ) -> Sequence:
        params = SamplingParams(structured_outputs=given)
        sequence = Sequence("x", [5, 6], 2, params, seed=0, max_tokens=1000)
        self.decoding.open(sequence, file or self.file, [self.end], group, base=base)
        return sequence

    def wait(self, *sequences: Sequence) -> list[LorafleetError | None]:
        """What poll() says of each."""
        found: dict[int, LorafleetError | None] = {}
        while any(id(sequence) not in found for sequence in sequences):
            assert self.woken.wait(120)
            self.woken.clear()
            found |= {id(sequence): error for sequence, error in self.decoding.poll()}
        return [found[id(sequence)] for sequence in sequences]

    def begin(self, given: structured_spec.StructuredOutputs) -> Sequence:
        sequence = self.open(given)
        [error] = self.wait(sequence)
        if error is not None:
            self.decoding.leave(sequence)
            raise error
        return sequence

    def allowed(self, sequence: Sequence) -> np.ndarray[Any, Any]:
        self.decoding.start([sequence])
        masked = self.decoding.finish()
        if masked.faults:
            raise masked.faults[0][1]
        assert masked.masks is not None and masked.masks.rows == [0]
        return np.flatnonzero(np.unpackbits(masked.masks.bits_NW[0].view(np.uint8), bitorder="little"))

    def write(self, given: structured_spec.StructuredOutputs, rng: random.Random, most: int = 400) -> str | None:
        """A random answer; None where it does not end."""
        sequence = self.begin(given)
        for _ in range(most):
            allowed = self.allowed(sequence)
            token = self.end if self.end in allowed and rng.random() < 0.5 else int(rng.choice(allowed))
            sequence.tokens.append(token)
            if token == self.end:
                break
        self.decoding.leave(sequence)
        text = b"".join(self.tokenizer.token_bytes(i) for i in sequence.tokens[2:-1])
        return text.decode() if sequence.tokens[-1] == self.end else None


@pytest.fixture(scope="module")
def file(tokenizer: Tokenizer) -> Iterator[TokenizerFile]:
    files = TokenizerFiles()
    yield files.of(tokenizer)
    files.close()


@pytest.fixture(scope="module")
def played(file: TokenizerFile, tokenizer: Tokenizer) -> Iterator[Played]:
    played = Played(file, tokenizer)
    yield played
    played.decoding.close()
