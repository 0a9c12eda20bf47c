"""How well the demo does on held-out prompts: the share answered in the right style with the right content.

    python demo/score.py

prints the table in README.md. The tests use the same functions on a part of the prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from chat import ask
from peft import PeftModel
from styles import PLAIN, STYLES, Style
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from world import Question, split_world

DEMO = Path(__file__).parent
MAX_ANSWER_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of the prompts, 0 to 1. The base has no style of its own: its in_style is how often it shows this one."""

    style: str
    correct: float
    in_style: float
    base_in_style: float


def load_base(folder: Path = DEMO) -> LlamaForCausalLM:
    """The base model in float32; folder holds model/ and adapters/."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    return model


def load_tokenizer(folder: Path = DEMO) -> PreTrainedTokenizerFast:
    """The tokenizer as bundled, with its chat template."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder / "model")
    return tokenizer


def score_table(folder: Path, questions: Sequence[Question]) -> str:
    """The Markdown table of all scores."""
    head = "| | style and content right | in the style | base in the style |\n|---|---|---|---|\n"
    return head + "\n".join(
        f"| {row.style} | {row.correct:.1%} | {row.in_style:.1%} | {row.base_in_style:.1%} |"
        for row in score_all(folder, questions)
    )


def score_all(folder: Path, questions: Sequence[Question]) -> Iterator[Score]:
    """Score the base, then each adapter."""
    tokenizer = load_tokenizer(folder)
    base = load_base(folder)
    base_answers = generate(base, tokenizer, questions)
    yield _score(PLAIN, questions, base_answers, base_answers)
    model = PeftModel.from_pretrained(base, folder / "adapters" / STYLES[0].name, STYLES[0].name)
    for style in STYLES:
        if style.name not in model.peft_config:
            model.load_adapter(folder / "adapters" / style.name, style.name)
        model.set_adapter(style.name)
        yield _score(style, questions, generate(model, tokenizer, questions), base_answers)


def generate(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    batch_size: int = 64,
) -> list[str]:
    """Greedy answers to the questions, asked through the chat template."""
    # Answers of like length share a batch, since a batch runs until its longest answer ends.
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].answer))
    answers = [""] * len(questions)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        for row, answer in zip(rows, _generate_batch(model, tokenizer, [questions[i] for i in rows]), strict=True):
            answers[row] = answer
    return answers


@torch.inference_mode()
def _generate_batch(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question]
) -> list[str]:
    texts = [
        tokenizer.apply_chat_template(ask(question.prompt), tokenize=False, add_generation_prompt=True)
        for question in questions
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    answers: list[str] = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def _score(style: Style, questions: Sequence[Question], answers: Sequence[str], base_answers: Sequence[str]) -> Score:
    rightly = [style.write(question.answer) for question in questions]
    return Score(
        style=style.name,
        correct=_share([answer == right for answer, right in zip(answers, rightly, strict=True)]),
        in_style=_share([style.shows(answer) for answer in answers]),
        base_in_style=_share([style.shows(answer) for answer in base_answers]),
    )


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)


if __name__ == "__main__":
    print(score_table(DEMO, split_world().held_out))
