"""Runs prompts through a base and its adapters, and compares each of these models with one of them, the baseline.

Answers are greedy. The models' logprobs are compared along the baseline's answers, so that all models predict the
same tokens: after a first difference, two free answers are unrelated. A Runner runs the models, and
comparison_report.py shows the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lorafleet.protocol.limits import MAX_LOGPROBS
from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.tools.comparison_runner import BASE, Runner
from lorafleet.tools.examples import Example
from lorafleet.tools.measures import (
    Score,
    TokenPlace,
    compare_places,
    equal_share,
    mean,
    perplexity,
    score,
)


@dataclass(frozen=True, slots=True)
class ComparedAnswer:
    """One model's answer to one prompt."""

    text: str
    num_tokens: int
    equal_share: float  # Share of tokens that equal the baseline's, up to the first difference.
    places: list[TokenPlace]  # One for each token of the baseline's answer.


@dataclass(frozen=True, slots=True)
class ModelResult:
    """All results of one model."""

    name: str
    answers: list[ComparedAnswer]  # One for each prompt.
    references: list[Score]  # Scores of the answers that were given with the prompts.
    retention: list[Score]  # Scores of the retention texts.
    weight_change: float | None = None  # Relative to the baseline adapter, see drift.py.

    @property
    def places(self) -> list[TokenPlace]:
        return [place for answer in self.answers for place in answer.places]

    def numbers(self) -> dict[str, float | None]:
        """Returns the measures by their names in the JSON output. A measure is None if nothing was given to measure
        it on."""
        places = self.places
        return {
            "identical_answers": mean([float(answer.equal_share == 1) for answer in self.answers]),
            "equal_tokens": mean([answer.equal_share for answer in self.answers]),
            "top1_agreement": mean([float(place.same_choice) for place in places]),
            "mean_kl": mean([place.kl for place in places]),
            "mean_logprob_change": mean([abs(place.logprob_change) for place in places]),
            "answer_perplexity": perplexity(self.references),
            "retention_perplexity": perplexity(self.retention),
            "weight_change": self.weight_change,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    baseline: str
    prompts: list[str]
    models: list[ModelResult]
    max_tokens: int
    top_k: int = MAX_LOGPROBS

    def to_json(self) -> dict[str, object]:
        return {
            "baseline": self.baseline,
            "num_prompts": len(self.prompts),
            "max_tokens": self.max_tokens,
            "top_k": self.top_k,
            "models": {model.name: model.numbers() for model in self.models},
            "prompts": [
                {
                    "prompt": prompt,
                    "answers": {model.name: model.answers[i].text for model in self.models},
                    "equal_tokens": {model.name: model.answers[i].equal_share for model in self.models},
                    "mean_kl": {model.name: mean([p.kl for p in model.answers[i].places]) for model in self.models},
                }
                for i, prompt in enumerate(self.prompts)
            ],
        }


@dataclass(frozen=True, slots=True)
class Questions:
    """The prompts and texts of a comparison."""

    prompts: Sequence[Example]  # Prompts to answer. If one comes with an answer, that is scored too.
    retention: Sequence[Example] = field(default_factory=tuple)  # Texts on which models should not get worse.


def compare(
    runner: Runner,
    adapters: Sequence[str],
    questions: Questions,
    *,
    baseline: str = BASE,
    max_tokens: int = 64,
    weight_changes: Mapping[str, float] | None = None,
) -> Comparison:
    """Compares the base and its adapters with the baseline.

    Args:
        adapters: Names that the runner knows.
        baseline: BASE, or one of the adapters.
        weight_changes: The adapters' weight changes from the baseline, which this function only copies.
    """
    names = [BASE, *adapters]
    assert baseline in names, baseline
    asked = [example for example in questions.prompts if example.prompt or example.messages]
    prompts = [runner.encode(example) for example in asked]
    tokens = {name: runner.generate(name, prompts, max_tokens) for name in names}
    places = {name: _along(runner, name, prompts, tokens[baseline]) for name in names}
    models = [
        ModelResult(
            name,
            [
                ComparedAnswer(
                    runner.decode(tokens[name][i]),
                    len(tokens[name][i]),
                    equal_share(tokens[baseline][i], tokens[name][i]),
                    compare_places(places[baseline][i], places[name][i]),
                )
                for i in range(len(prompts))
            ],
            _scores(runner, name, [example for example in questions.prompts if example.answer]),
            _scores(runner, name, questions.retention),
            (weight_changes or {}).get(name),
        )
        for name in names
    ]
    return Comparison(baseline, [example.label for example in asked], models, max_tokens)


def _along(
    runner: Runner, name: str, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> list[list[TokenLogprobs]]:
    """Returns the model's logprobs for each token of these answers."""
    sequences = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    scored = runner.score(name, sequences, MAX_LOGPROBS)
    return [
        [place for place in places[len(prompt) :] if place is not None]
        for places, prompt in zip(scored, prompts, strict=True)
    ]


def _scores(runner: Runner, name: str, examples: Sequence[Example]) -> list[Score]:
    """Scores the examples' answers, each after its prompt."""
    if not examples:
        return []
    prompts = [runner.encode(example) for example in examples]
    answers = [runner.encode_answer(example.answer or "") for example in examples]
    sequences = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    scored = runner.score(name, sequences, 0)
    return [score(places[len(prompt) :]) for places, prompt in zip(scored, prompts, strict=True)]
