"""Answers that have a grammar, with drafts: their tokens are those without, and forced tokens come several a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.protocol import structured_spec
from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from lorafleet.workers.structured.grammar_process import GrammarLimits, GrammarProcess
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import Guesses, record, speculate
from tiny_models import make_model

SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 3}, "state": {"enum": ["delivered", "pending"]}},
    "required": ["first_name", "state"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": structured_spec.json_schema(SCHEMA, "x", any_whitespace=False),
    "regex": structured_spec.regex("(the |of ){5}", "x"),
    "choice": structured_spec.choice(["left and right", "left or right", "up"], "x"),
    "free": None,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3, "logprobs": 1, "frequency_penalty": 0.5},
    {"temperature": 1.5, "seed": 4, "logprobs": 1, "logprobs_mode": "processed_logprobs"},
]


FORCED = "only what is forced"  # In place of a drafter.


class Grammars:
    """An engine whose answers have grammars. One engine for all tests, since its grammars have a process of their
    own."""

    def __init__(self, base: Path, prompt: Callable[[int], list[int]], **options: Any) -> None:
        self._tokenizer = Tokenizer.from_folder(base)
        self._files = TokenizerFiles()
        self._prompt = prompt
        self.stepped = SteppedEngine(base, **({"speculative_config": SpeculativeConfig("ngram")} | options))
        speculation = self.stepped.engine.scheduler.speculation
        self.drafter = None if speculation is None else speculation.drafter  # That of the options.
        self.stepped.engine._structured._limits = GrammarLimits(step_wait_s=120)  # so that no mask is late
        self.plain = self.answers(None)

    def answers(self, drafter: Any, *, overlap: bool = False) -> dict[str, list[int]]:
        """Returns the tokens of an answer for each grammar and kind of request, which share the steps."""
        self.draft(drafter, overlap=overlap)
        names = [f"{name} {i}" for i in range(len(KINDS)) for name in GRAMMARS]
        for name in names:
            self.add(name)
        self.stepped.until(lambda: len(self.stepped.ended) == len(names))
        return self.stepped.tokens

    def draft(self, drafter: Any, *, overlap: bool) -> None:
        """Has the next requests get drafts of this drafter, or those alone that are forced, or none."""
        self.stepped.tokens, self.stepped.ended = {}, {}
        self.stepped.engine._overlap = overlap
        self.stepped.engine.scheduler.speculation = None
        if drafter is not None:
            speculate(self.stepped.engine, None if drafter is FORCED else drafter)

    def add(self, name: str) -> None:
        grammar, i = name.split()
        given = GRAMMARS[grammar]
        params = KINDS[int(i)] | {"max_tokens": 60, "ignore_eos": given is None, "structured_outputs": given}
        self.stepped.add(name, self._prompt(10 + int(i)), params=params, tokenizer=self._files.of(self._tokenizer))

    def close(self) -> None:
        self.stepped.engine.close()
        self._files.close()


@pytest.fixture(scope="module")
def grammars(fleet: Any, prompt: Callable[[int], list[int]]) -> Iterator[Grammars]:
    made = Grammars(fleet("llama3").base, prompt)
    yield made
    made.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_without_drafts(grammars: Grammars, overlap: bool) -> None:
    for drafter in (Guesses(grammars.plain), FORCED):
        assert grammars.answers(drafter, overlap=overlap) == grammars.plain


def test_others_have_drafts_behind_steps_in_flight_beside_answers_that_have_grammars(fleet, prompt) -> None:
    base, behind, beside = fleet("llama3").base, list[str](), list[bool]()
    made = Grammars(base, prompt, speculative_config=SpeculativeConfig("draft_model", model=str(base)))
    assert isinstance(made.drafter, ModelDrafter)
    record(made.drafter, [], behind)
    propose, running = made.drafter.propose_behind, made.stepped.engine.scheduler.running

    def recorded(*args: Any) -> Any:
        beside.append(any(sequence.grammar is not None for sequence in running))
        return propose(*args)

    made.drafter.propose_behind = recorded  # type: ignore[method-assign]
    assert made.answers(made.drafter, overlap=True) == made.plain
    assert {name.split()[0] for name in behind} == {"free"}
    assert sum(beside) > 4
    made.close()


class Counted:
    """The requests for masks, and the tokens of each output, of one answer."""

    def __init__(self, grammars: Grammars, drafter: Any, monkeypatch: pytest.MonkeyPatch, *, overlap: bool) -> None:
        grammars.draft(drafter, overlap=overlap)
        stepped = grammars.stepped
        self.num_requests = 0
        self.lengths: list[int] = []
        start, step = GrammarProcess.start, stepped.engine.step

        def counted(process: GrammarProcess, rows: Many[Any]) -> None:
            self.num_requests += 1
            start(process, rows)

        def recorded() -> Any:
            outputs = step()
            self.lengths += [len(output.token_ids) for output in outputs if output.token_ids]
            return outputs

        monkeypatch.setattr(GrammarProcess, "start", counted)
        monkeypatch.setattr(stepped.engine, "step", recorded)
        grammars.add("schema 0")
        stepped.until(lambda: bool(stepped.ended))
        self.tokens = stepped.tokens["schema 0"]


@pytest.mark.parametrize("overlap", [False, True])
def test_forced_tokens_are_drafts_and_each_step_asks_for_masks_once(grammars, monkeypatch, overlap) -> None:
    counted = Counted(grammars, FORCED, monkeypatch, overlap=overlap)
    assert counted.tokens == grammars.plain["schema 0"]
    assert len(counted.lengths) < len(counted.tokens)
    assert counted.num_requests <= len(counted.lengths) + 1, "one for each step, and one in flight at the end"


def test_a_draft_that_the_grammar_forbids_is_no_token(grammars, monkeypatch) -> None:
    class Same(Guesses):
        """Drafts one token for all places."""

        def __init__(self) -> None:
            super().__init__({})

        def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
            return [[5] * entry.most for entry in wanted]

    counted = Counted(grammars, Same(), monkeypatch, overlap=False)
    assert counted.tokens == grammars.plain["schema 0"]


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_whose_step_has_no_mask_in_time_say_nothing_about_others(grammars, monkeypatch, overlap) -> None:
    """A sequence leaves such a step without a token, so that none of its drafts was verified."""
    grammars.draft(Guesses(grammars.plain, mistakes=0.0), overlap=overlap)
    speculation, late, verified = grammars.stepped.engine.scheduler.speculation, [0], []
    choose, verify, finish = speculation.choose, speculation.verified, GrammarProcess.finish
    drafted: list[int] = []

    def chosen(*args: Any, **named: Any) -> Any:
        found = choose(*args, **named)
        drafted[:] = [len(drafts) for drafts in found.values()]
        return found

    def finished(process: GrammarProcess, wait_s: float) -> Any:
        if wait_s > 0 and drafted and late[0] < 2:
            late[0] += 1
            process.clock.miss_masks()
            return None
        return finish(process, wait_s)

    def recorded(sequence: Any, num_drafted: int, num_accepted: int) -> None:
        verified.append((num_drafted, num_accepted))
        verify(sequence, num_drafted, num_accepted)

    monkeypatch.setattr(speculation, "choose", chosen)
    monkeypatch.setattr(speculation, "verified", recorded)
    monkeypatch.setattr(GrammarProcess, "finish", finished)
    grammars.add("regex 0")
    grammars.stepped.until(lambda: bool(grammars.stepped.ended))
    assert grammars.stepped.tokens["regex 0"] == grammars.plain["regex 0"]
    assert late == [2]
    assert verified
    assert all(0 <= num_accepted <= num_drafted for num_drafted, num_accepted in verified)


@pytest.mark.gpu
def test_on_a_gpu_tokens_in_float32_are_those_without_drafts(tmp_path, prompt) -> None:
    options = {"device": "cuda", "dtype": "float32", "attention_backend": "triton", "lora": None}
    grammars = Grammars(make_model(tmp_path / "base", "llama3"), prompt, **options)
    for drafter in (Guesses(grammars.plain), FORCED):
        assert grammars.answers(drafter, overlap=True) == grammars.plain
    grammars.close()
