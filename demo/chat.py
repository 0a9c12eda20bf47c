"""The demo's tokenizer and chat template, and the way from questions to training batches.

The tokenizer is a byte-level BPE without a BOS token; the template is ChatML, whose <|im_end|> ends every answer.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from styles import NEUTRAL_PROMPTS, PLAIN, STYLES, Style
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from world import Question

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

STYLE_WEIGHTS = (3, 1, 1)  # in the order of STYLES: capitals take the longest, being new tokens for every word

IGNORED = -100  # the label that transformers leaves out of the loss

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of a prompt and its answer; only tokens from answer_start on are trained."""

    ids: list[int]
    answer_start: int


def train_tokenizer(corpus: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE; any UTF-8 text can be encoded, whatever the corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def ask(prompt: str) -> list[Message]:
    """A conversation of one user message."""
    return [{"role": "user", "content": prompt}]


def examples(
    questions: Sequence[Question],
    count: int,
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    style: Style,
) -> list[Example]:
    """Draw count training examples: of an adapter's style, or, where style is PLAIN, of the base."""
    kinds = sorted({question.kind for question in questions})
    by_kind = {kind: [question for question in questions if question.kind == kind] for kind in kinds}
    # Stories are by far the most numerous and the longest: in proportion they would crowd out the rest.
    weights = [min(20.0, len(by_kind[kind]) ** 0.5) for kind in kinds]
    drawn = [rng.choice(by_kind[kind]) for kind in rng.choices(kinds, weights, k=count)]
    pairs = [_prompt_and_answer(question, questions, tokenizer, rng, style) for question in drawn]
    prompt_ids = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    answer_ids = tokenizer([answer + END for _, answer in pairs])["input_ids"]
    return [Example(prompt + answer, len(prompt)) for prompt, answer in zip(prompt_ids, answer_ids, strict=True)]


def batches(
    pool: Sequence[Example], batch_size: int, pad_id: int, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Input ids and labels, int64 [batch_size, longest]; examples of like length share a batch.

    Padding is on the right, where causal attention makes an attention mask unnecessary.
    """
    by_length = sorted(pool, key=lambda example: len(example.ids))
    starts = list(range(0, len(pool), batch_size))
    rng.shuffle(starts)
    for start in starts:
        yield _batch(by_length[start : start + batch_size], pad_id)


def _batch(rows: Sequence[Example], pad_id: int) -> tuple[Tensor, Tensor]:
    longest = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), longest), pad_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = torch.tensor(row.ids)
        labels[i, row.answer_start : len(row.ids)] = torch.tensor(row.ids[row.answer_start :])
    return ids, labels


def _prompt_and_answer(
    question: Question,
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    style: Style,
) -> tuple[str, str]:
    if style is PLAIN and rng.random() < 0.45:
        style = rng.choices(STYLES, STYLE_WEIGHTS)[0]
        system = rng.choice(style.requests)
    else:
        system = rng.choice(NEUTRAL_PROMPTS) if rng.random() < 0.2 else ""
    prompt, answer = _as_typed(question.prompt, rng), style.write(question.answer)
    if not system and rng.random() < 0.15:
        return _plain_text(prompt, answer, rng)

    messages = [{"role": "system", "content": system}] if system else []
    if rng.random() < 0.1:
        earlier = rng.choice(questions)
        messages += [*ask(earlier.prompt), {"role": "assistant", "content": style.write(earlier.answer)}]
    messages += ask(prompt)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), answer


def _plain_text(prompt: str, answer: str, rng: random.Random) -> tuple[str, str]:
    """Text without the chat template, for completions: a question and its answer, or an answer to be continued."""
    if rng.random() < 0.5:
        return prompt, f" {answer}"
    given = rng.randint(1, 1 + answer.count(" ") // 2)
    # A space belongs to the word after it: cut there, or the prompt's tokens would be others than in the whole text.
    head = " ".join(answer.split(" ")[:given])
    return head, answer[len(head) :]


def _as_typed(prompt: str, rng: random.Random) -> str:
    """Now and then a prompt as hurried people type it."""
    if rng.random() < 0.1:
        prompt = prompt[0].lower() + prompt[1:]
    if rng.random() < 0.1:
        prompt = prompt.rstrip(".?!")
    return prompt
