"""Sends probes to the models on the same path as any request, but with the lowest priority, and one at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from lorafleet.api.access.caller import Caller
from lorafleet.api.answer.generation import Sample, SampleGroup, Task, collect
from lorafleet.api.app_state import AppState
from lorafleet.api.request.prompts import Prompt, checked_ids, encode, fit_max_tokens
from lorafleet.api.request.request_deadline import RequestDeadline
from lorafleet.api.served_model import ServedModel
from lorafleet.api.text.output import Delta
from lorafleet.cluster.quality.probes import Probe
from lorafleet.cluster.quality.quality_records import Observed
from lorafleet.protocol.errors import AdapterError
from lorafleet.protocol.limits import INT32, MAX_LOGPROBS
from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.tools.measures import Score, score

# It has no tenant, so that it uses nobody's quota. Usage logs show it as the key.
CALLER = Caller(None, "quality", frozenset(("infer", "admin")), key_mark="quality")

_numbers = itertools.count()


class Prober:
    """Runs probes on the served models. Its methods raise LorafleetErrors, as requests do."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    async def model(self, name: str) -> ServedModel:
        """Returns the model's version for a whole run, even if several versions share the name."""
        model = await self._state.models.find(CALLER, name, key=CALLER.key_id)
        _check_own(model, model.fallback_reason)
        return model

    async def observe(self, model: ServedModel, probe: Probe, max_tokens: int, along: Sequence[int] | None) -> Observed:
        """Runs one probe on a model. `along` is the baseline's answer, or None if the model's own answer becomes it."""
        state = self._state
        prompt = await encode(state.texts, model, probe.prompt, add_special_tokens=True, must_fit="prompt")
        # One more token is for the request that scores the answer.
        room = fit_max_tokens(state.texts, model, len(prompt) + 1, None, max_tokens, "prompt")
        answer = (await self._run(model, prompt, SamplingParams(temperature=0, max_tokens=room))).token_ids
        places = await self._score(model, prompt, answer if along is None else along, MAX_LOGPROBS)
        return Observed(answer, places, await self._completion(model, prompt, probe))

    async def _completion(self, model: ServedModel, prompt: list[int], probe: Probe) -> Score | None:
        if probe.completion is None:
            return None
        text = await encode(self._state.texts, model, probe.completion, add_special_tokens=False, must_fit="completion")
        return score(await self._score(model, prompt, text, 0))

    async def _score(
        self, model: ServedModel, prompt: list[int], text: Sequence[int], top_k: int
    ) -> list[TokenLogprobs]:
        """Returns the model's logprobs for each token of the text after the prompt."""
        sequence = checked_ids(self._state.texts, model, [*prompt, *text], "prompt")
        fit_max_tokens(self._state.texts, model, len(sequence), 1, None, "prompt")
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=top_k)
        places = (await self._run(model, sequence, params, scoring=True)).prompt_logprobs or []
        return [place for place in places[len(prompt) :] if place is not None]

    async def _run(
        self, model: ServedModel, token_ids: list[int], params: SamplingParams, *, scoring: bool = False
    ) -> Delta:
        group = f"{CALLER.key_id}-{next(_numbers)}"
        # Its own salt avoids cached prefixes, which would hide that the model now computes something else.
        salt = f"{group}-{time.time_ns()}"
        task = Task(Prompt(token_ids, None), model, params, scoring=scoring, cache_salt=salt, priority=INT32)
        deadline = RequestDeadline(None, time.monotonic())
        alone = SampleGroup(group, 1, len(token_ids), deadline)
        sample = Sample(self._state, alone, 0, task, params, None, counts_prompt=True)
        [whole] = await collect([sample])
        _check_own(model, sample.fallback_reason)
        return whole


def _check_own(model: ServedModel, fallback_reason: str | None) -> None:
    """Raises AdapterError if the base answered instead, since its answers tell nothing about an adapter."""
    if fallback_reason is not None:
        raise AdapterError(f"the base answered instead of {model.name!r}: {fallback_reason}")
