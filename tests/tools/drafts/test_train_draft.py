"""Drafts of a tiny base and its adapter: what is written, what is reported, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, T5Config

from lorafleet.protocol.errors import ConfigError, InvalidRequest
from lorafleet.tools.comparison_runner import BASE
from lorafleet.tools.drafts.distillation import TrainingPlan, distil
from lorafleet.tools.drafts.draft_acceptance import measure_acceptance
from lorafleet.tools.drafts.draft_adapter import trained_lora
from lorafleet.tools.drafts.draft_checkpoint import DraftModelShape, new_draft, read_draft
from lorafleet.tools.drafts.draft_job import AnswerOptions, DraftJob
from lorafleet.tools.drafts.draft_lessons import collect_lessons
from lorafleet.tools.drafts.draft_target import TargetAnswer
from lorafleet.tools.drafts.draft_traffic import TrafficLine
from lorafleet.tools.drafts.train_draft import train_draft
from lorafleet.tools.new_folder import new_folder
from tests.tools.conftest import MakeAdapter, load_peft
from tiny_models import load_base

WORDS = ["river", "stone", "cloud", "harbour", "lamp", "meadow", "winter", "bridge", "copper", "garden"]
LINES = [TrafficLine(f"line {i}", None, f"the {word} of the {WORDS[-i]}") for i, word in enumerate(WORDS)]
PLAN = TrainingPlan(epochs=2, learning_rate=1e-2, tokens_per_batch=100)


def job(base: Path, tmp_path: Path, adapters: dict[str, Path], **options: object) -> DraftJob:
    made = DraftJob(
        base,
        adapters,
        tmp_path / "drafter",
        True,
        LINES,
        rank=2,
        answers=AnswerOptions(max_tokens=8),
        plan=PLAN,
        lora_plan=PLAN,
        device="cpu",
    )
    return replace(made, **options)


def greedy(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> TargetAnswer:
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return TargetAnswer(prompt, text[len(prompt) :])


def answers_of(model: torch.nn.Module) -> list[TargetAnswer]:
    return [greedy(model, [5 + i, 7 * i + 9, 30 - i], 6) for i in range(6)]


def test_a_draft_and_the_lora_of_an_adapter_are_written_and_are_as_good_as_reported(
    base: Path, tmp_path: Path, make_adapter: MakeAdapter
):
    adapter = make_adapter()
    said: list[str] = []
    task = job(base, tmp_path, {"mine": adapter})
    of_base, of_mine = train_draft(task, said.append)
    assert [of_base.name, of_mine.name] == [BASE, "mine"]
    assert (of_mine.num_answers, of_mine.num_held_out, of_mine.num_left_out) == (9, 1, 0)
    assert {"mine: the target answers 9 prompts, and 1 to measure on", "draft LoRA of mine"} <= set(said)

    lessons = collect_lessons(task, 320, said.append)
    draft = AutoModelForCausalLM.from_pretrained(task.draft)
    assert len(draft.model.layers) == 1
    assert (task.draft / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert measure_acceptance(draft, lessons[BASE].held_out, 4, 100) == of_base.after
    assert measure_acceptance(draft, lessons["mine"].held_out, 4, 100) == of_mine.before
    with_lora = load_peft(task.draft, adapter / "draft")
    assert measure_acceptance(with_lora, lessons["mine"].held_out, 4, 100) == of_mine.after
    config = json.loads((adapter / "draft" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (2, str(task.draft))
    files = {path.name: path.stat().st_mode & 0o777 for path in (adapter / "draft").iterdir()}
    assert files == {"adapter_config.json": 0o644, "adapter_model.safetensors": 0o644}


def test_the_answers_are_those_of_the_target_with_its_adapter(base: Path, tmp_path: Path, make_adapter: MakeAdapter):
    adapter = make_adapter()
    lessons = collect_lessons(job(base, tmp_path, {"mine": adapter}), 320, lambda _: None)
    for name, model in ((BASE, load_base(base)), ("mine", load_peft(base, adapter))):
        for answer in (*lessons[name].train[:2], *lessons[name].held_out):
            assert list(answer.answer) == list(greedy(model, list(answer.prompt), len(answer.answer)).answer)
    assert lessons[BASE].train != lessons["mine"].train


def test_training_teaches_the_answers_and_leaves_the_table_of_the_target(base: Path):
    answers = answers_of(load_base(base))
    draft = new_draft(base, DraftModelShape())
    table = draft.get_input_embeddings().weight.clone()
    before = measure_acceptance(draft, answers, 4, 100)
    distil(draft, answers, TrainingPlan(40, 2e-2, 100), lambda _: None)
    assert before.share < 0.5 < 0.9 < measure_acceptance(draft, answers, 4, 100).share
    assert torch.equal(draft.get_input_embeddings().weight, table)


def test_a_lora_teaches_another_model_and_the_draft_stays_as_it_was(base: Path, make_adapter: MakeAdapter):
    answers = answers_of(load_peft(base, make_adapter(std=0.3)))
    draft = new_draft(base, DraftModelShape())
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    share = measure_acceptance(draft, answers, 4, 100).share
    with trained_lora(draft, answers, 8, TrainingPlan(40, 2e-2, 100), lambda _: None) as model:
        assert share < 0.5 < 0.9 < measure_acceptance(model, answers, 4, 100).share
    after = draft.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert any(weight.requires_grad for weight in draft.parameters())


def test_a_lora_is_trained_for_a_draft_that_exists(base: Path, tmp_path: Path, make_adapter: MakeAdapter):
    adapter = make_adapter()
    with new_folder(tmp_path / "drafter") as folder:
        new_draft(base, DraftModelShape(1, "random", 64)).save_pretrained(folder)
    size = (tmp_path / "drafter" / "model.safetensors").stat().st_size
    recorded = [replace(line, answer_ids=(7, 8, 9)) for line in LINES]
    [result] = train_draft(job(base, tmp_path, {"mine": adapter}, is_new=False, lines=recorded), lambda _: None)
    assert result.name == "mine"
    assert result.before.num_tokens > 3  # Acceptance is that of the target's answers, not of the recorded ones.
    assert (tmp_path / "drafter" / "model.safetensors").stat().st_size == size
    assert load_file(adapter / "draft" / "adapter_model.safetensors")


def test_an_adapter_with_its_own_template_takes_prompts_as_tokens_only(
    base: Path, tmp_path: Path, make_adapter: MakeAdapter
):
    adapter = make_adapter()
    (adapter / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    task = job(base, tmp_path, {"mine": adapter}, is_new=False)
    with pytest.raises(InvalidRequest, match=r"line \d+: adapter 'mine' has its own tokenizer or chat template"):
        collect_lessons(task, 320, lambda _: None)
    as_tokens = [TrafficLine(line.place, None, prompt_ids=(5, 6, 7 + i)) for i, line in enumerate(LINES)]
    assert collect_lessons(replace(task, lines=as_tokens), 320, lambda _: None)["mine"].held_out


def test_several_samples_differ_and_long_ones_are_counted(base: Path, tmp_path: Path):
    options = AnswerOptions(max_tokens=6, max_length=18, num_samples=3, temperature=1.5)
    long = TrafficLine("long", None, " ".join(WORDS)), TrafficLine("given", None, "the", answer="river" * 20)
    lines = [LINES[0], *long, *LINES[1:]]  # The first and the eleventh are held out.
    lessons = collect_lessons(job(base, tmp_path, {}, answers=options, lines=lines), 320, lambda _: None)
    train = lessons[BASE].train
    assert all(answer.num_tokens <= 18 for answer in train)
    by_prompt: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for answer in train:
        by_prompt.setdefault(tuple(answer.prompt), set()).add(tuple(answer.answer))
    assert max(map(len, by_prompt.values())) == 3
    assert lessons[BASE].num_left_out >= 3 + 1
    assert lessons[BASE].num_left_out + len(train) + len(lessons[BASE].held_out) == 3 * 8 + 3 + 1 + 2


def test_what_cannot_be_written_is_refused_before_any_work(
    base: Path, tmp_path: Path, make_adapter: MakeAdapter, monkeypatch
):
    adapter = make_adapter()
    said: list[str] = []
    (adapter / "draft").mkdir()
    (adapter / "draft" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="already exists; name a folder that does not exist, or remove it"):
        train_draft(job(base, tmp_path, {"mine": adapter}), said.append)
    with pytest.raises(ConfigError, match="not a folder"):
        train_draft(job(base, tmp_path, {"mine": tmp_path / "none"}), said.append)
    other = make_adapter("other")
    with pytest.raises(ConfigError, match="two adapters have the folder"):
        train_draft(job(base, tmp_path, {"a": other, "b": adapter / ".." / "other"}), said.append)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a folder that can be written to"):
        train_draft(job(base, tmp_path, {}, draft=tmp_path / "file" / "drafter"), said.append)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'lorafleet\[train\]'"):
        train_draft(job(base, tmp_path, {"mine": adapter}), said.append)
    assert said == []
    assert not (tmp_path / "drafter").exists()


def test_drafts_that_do_not_fit_are_refused(base: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="2 layers; a draft with 2 would not be faster"):
        new_draft(base, DraftModelShape(2))
    with pytest.raises(ConfigError, match="hidden-size"):
        DraftModelShape(1, "random")
    with pytest.raises(ConfigError, match="multiple of 64"):
        DraftModelShape(1, "random", 100)
    with pytest.raises(ConfigError, match="at most"):
        new_draft(base, DraftModelShape(64, "random", 8192))
    T5Config(vocab_size=320, num_layers=2).save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match="cannot make a causal language model of 't5'"):
        new_draft(tmp_path / "t5", DraftModelShape())
    with pytest.raises(ConfigError, match="nothing to train"):
        job(base, tmp_path, {}, is_new=False)
    with pytest.raises(ConfigError, match="--temperature over 0"):
        AnswerOptions(num_samples=2)


def test_drafts_that_the_server_would_refuse_are_not_trained(base: Path, tmp_path: Path):
    config = Qwen3_5TextConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "recurrent")
    with pytest.raises(ConfigError, match=r"first layers of .*recurrent: .*layer_types.*--init random"):
        new_draft(tmp_path / "recurrent", DraftModelShape())
    with pytest.raises(ConfigError, match=r"\(Qwen3_5ForCausalLM\) has recurrent layers"):
        read_draft(tmp_path / "recurrent", base)
    new_draft(tmp_path / "recurrent", DraftModelShape(1, "random", 64))


def test_tokens_that_the_draft_does_not_have_are_refused(base: Path, tmp_path: Path):
    lines = [LINES[0], TrafficLine("line 2", None, prompt_ids=(5, 6), answer_ids=(7, 320))]
    with pytest.raises(InvalidRequest, match="uses the token 320; the draft has 320 tokens"):
        collect_lessons(job(base, tmp_path, {}, lines=lines), 320, lambda _: None)
