"""A comparison on the engine says what transformers and PEFT say, and on a server what it says in this process."""

from __future__ import annotations

import math
from html.parser import HTMLParser

import pytest
import torch

from lorafleet.tools.compare import ComparedAnswer, Comparison, ModelResult, Questions, compare
from lorafleet.tools.comparison_report import text_table, to_html
from lorafleet.tools.engine_runner import EngineRunner
from lorafleet.tools.examples import Example
from lorafleet.tools.measures import TokenPlace, equal_share
from tiny_models import Reference, tokenizer

PROMPTS = ["the fleet of", "harbour, the answer", "adapters"]
ANSWER, TEXT = " is there", "the answer is the harbour"
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def adapters(fleet):
    made = fleet("llama3").adapters
    return {"large": made["large"], "qv": made["qv"]}


@pytest.fixture(scope="module")
def runner(fleet, adapters):
    runner = EngineRunner(fleet("llama3").base, adapters, max_lora_rank=64, device="cpu", max_model_len=256)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def questions():
    chat = Example(messages=({"role": "user", "content": "the fleet"},))
    return Questions([*(Example(p, answer=ANSWER) for p in PROMPTS), chat], [Example(answer=TEXT)])


@pytest.fixture(scope="module")
def compared(runner, questions):
    return compare(runner, ["large", "qv"], questions, max_tokens=MAX_TOKENS)


def test_numbers_are_those_of_transformers_and_peft(fleet, adapters, compared):
    reference, encode = fleet("llama3").reference, tokenizer().encode
    prompts = [*map(encode, PROMPTS), encode("<|user|>the fleet<|end|><|assistant|>")]
    base = [until_end(reference.greedy(p, MAX_TOKENS).tokens) for p in prompts]
    for result in compared.models[1:]:
        folder = adapters[result.name]
        answers = [until_end(reference.greedy(p, MAX_TOKENS, folder).tokens) for p in prompts]
        shares = [equal_share(one, other) for one, other in zip(base, answers, strict=True)]
        numbers = result.numbers()
        assert numbers["equal_tokens"] == pytest.approx(sum(shares) / len(shares))
        p, q = (
            torch.cat([along(reference, f, *pair) for pair in zip(prompts, base, strict=True)]) for f in (None, folder)
        )
        chosen = (p.argmax(-1) == q.argmax(-1)).double().mean().item()
        assert numbers["top1_agreement"] == pytest.approx(chosen)
        kl = (p.exp() * (p - q)).sum(-1).mean().item()
        assert 0 < numbers["mean_kl"] <= kl * 1.001  # a random model has more than 20 likely tokens
        tokens = torch.tensor([token for answer in base for token in answer])[:, None]
        change = (q.gather(1, tokens) - p.gather(1, tokens)).abs().mean().item()
        assert numbers["mean_logprob_change"] == pytest.approx(change, abs=1e-3)


def test_perplexities_are_those_of_the_given_texts(fleet, adapters, compared):
    reference, encode = fleet("llama3").reference, tokenizer().encode
    for result in compared.models:
        folder = adapters.get(result.name)
        answer = [
            x for p in PROMPTS for x in reference.logprobs(encode(p) + encode(ANSWER), folder)[len(encode(p)) - 1 :]
        ]
        assert result.numbers()["answer_perplexity"] == pytest.approx(math.exp(-sum(answer) / len(answer)), rel=1e-3)
        text = reference.logprobs(encode(TEXT), folder)
        assert result.numbers()["retention_perplexity"] == pytest.approx(math.exp(-sum(text) / len(text)), rel=1e-3)


def test_a_baseline_agrees_with_itself_and_may_be_an_adapter(runner, questions):
    done = compare(runner, ["large", "qv"], questions, baseline="qv", max_tokens=4, weight_changes={"large": 0.5})
    numbers = {model.name: model.numbers() for model in done.models}
    itself = numbers["qv"]
    assert (itself["identical_answers"], itself["top1_agreement"], itself["mean_kl"]) == (1, 1, 0)
    assert numbers["base"]["mean_kl"] > 0
    assert [numbers[name]["weight_change"] for name in ("base", "large", "qv")] == [None, 0.5, None]


def along(reference: Reference, folder, prompt, answer) -> torch.Tensor:
    """Log-probabilities at each token of the answer."""
    with torch.inference_mode():
        logits = reference.model(folder)(input_ids=torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def until_end(tokens: list[int]) -> list[int]:
    end = tokenizer().eos_token_id
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


class Page(HTMLParser):
    """Well-formed as far as tags go, with what it loads and says."""

    VOID = ("meta", "br", "line")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, _):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_report_is_one_well_formed_page_that_loads_nothing(compared):
    html = to_html(compared, "tiny")
    page = Page(html)
    assert not page.open
    assert not page.links
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html
    assert page.tags.count("svg") == 5
    assert page.tags.count("circle") == 2 * 4  # adapters x prompts
    assert page.tags.count("polyline") == 2
    for model in compared.models:
        assert model.name in page.text
        assert all(answer.text.strip() in page.text for answer in model.answers)


def test_what_a_model_says_stays_text_in_the_report():
    hostile = "</dd><script>alert(1)</script>&"
    model = ModelResult("<b>a", [ComparedAnswer(hostile, 3, 0.5, [TokenPlace(True, 0.1, 0.0)])], [], [])
    page = Page(to_html(Comparison("<b>a", [hostile], [model, model], 3), hostile))
    assert "script" not in page.tags
    assert hostile in page.text


def test_the_table_has_a_column_for_each_thing_measured(compared):
    lines = text_table(compared).splitlines()
    assert len(lines) == 4
    assert "retention perplexity" in lines[0]
    assert "weight change" not in lines[0]
