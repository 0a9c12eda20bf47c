"""The bundled demo does on held-out prompts what demo/README.md says, by transformers and PEFT alone."""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from score import Score, load_base, load_tokenizer, score_all
from styles import STYLES
from world import Question, split_world

# PEFT 0.21 reads a name that transformers 5 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

DEMO = Path(__file__).parents[2] / "demo"
MAX_BYTES = 8 * 2**20
PER_KIND = 2  # held-out prompts of each kind of question


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sample() -> list[Question]:
    """Some held-out questions of every kind, spread over the world."""
    by_kind: dict[str, list[Question]] = defaultdict(list)
    for question in split_world().held_out:
        by_kind[question.kind].append(question)
    return [question for kind in by_kind.values() for question in kind[:: -(-len(kind) // PER_KIND)]]


@pytest.fixture(scope="module")
def scores(sample: list[Question]) -> dict[str, Score]:
    return {score.style: score for score in score_all(DEMO, sample)}


def test_no_held_out_prompt_was_trained() -> None:
    split = split_world()
    assert not {question.prompt for question in split.held_out} & {question.prompt for question in split.train}


def test_the_sample_covers_every_kind_of_question(sample: list[Question]) -> None:
    assert len(sample) >= 18
    assert {question.kind for question in sample} == {question.kind for question in split_world().held_out}


def test_base_answers_plainly(scores: dict[str, Score]) -> None:
    assert scores["plain"].correct >= 0.95


@pytest.mark.parametrize("name", [style.name for style in STYLES])
def test_adapter_gives_its_style_to_the_right_answer(scores: dict[str, Score], name: str) -> None:
    assert scores[name].correct >= 0.95


@pytest.mark.parametrize("name", [style.name for style in STYLES])
def test_base_shows_no_style_of_an_adapter(scores: dict[str, Score], name: str) -> None:
    assert scores[name].base_in_style == 0


def test_adapters_differ_in_rank_and_targets() -> None:
    configs = [json.loads((DEMO / "adapters" / style.name / "adapter_config.json").read_text()) for style in STYLES]
    assert len({config["r"] for config in configs}) == len(STYLES)
    assert len({tuple(config["target_modules"]) for config in configs}) == len(STYLES)


def test_model_and_adapters_fit_in_8_mib() -> None:
    files = [path for folder in ("model", "adapters") for path in (DEMO / folder).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES


def test_example_prompts_are_held_out() -> None:
    prompts = json.loads((DEMO / "prompts.json").read_text())
    assert set(prompts) <= {question.prompt for question in split_world().held_out}


def test_tokenizer_takes_any_text_back_and_forth() -> None:
    tokenizer = load_tokenizer()
    text = "Grüße, 世界! 🦊\n\ttabs  and  spaces"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_answers_end_with_the_eos_token_of_the_chat_template() -> None:
    tokenizer = load_tokenizer()
    generation = load_base().generation_config
    assert generation.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
