"""Heads that draft, divided among ranks that are processes of their own: their drafts are those of a plain
implementation, and answers are those of one rank without drafts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from family_cases import CASES, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol import structured_spec
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.schedule.sequence import UNKNOWN
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from ranks import start_llm
from tests.workers.speculation.drafting import record, speculate
from tests.workers.speculation.eagle_reference import EagleReference, make_head
from tests.workers.speculation.mtp_reference import Drafted, MTPReference, make_mtp_checkpoint
from tiny_models import make_adapter, make_model

PARAMS = [
    SamplingParams(max_tokens=16, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=1.0, seed=3, ignore_eos=True, frequency_penalty=0.5),
    SamplingParams(max_tokens=16, temperature=0, ignore_eos=True),
]


def answers(llm: LLM, prompt: Callable[[int], list[int]], path: Path, params: list[SamplingParams]) -> list[list[int]]:
    """Returns the tokens of an answer for each of the parameters. The third is the adapter's."""
    jobs = [{"prompt_token_ids": prompt(n)} for n in (5, 80, 17, 9)[: len(params)]]
    loras = [None, None, LoRARequest("own", 1, str(path)), None][: len(params)]
    outputs = llm.generate(jobs, params, lora_request=loras)
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


def recorded(llm: LLM) -> tuple[list[Drafted], list[str]]:
    """Has the engine verify each draft of its model or head. Returns the lists to which record() adds what is
    drafted."""
    drafter, found, behind = llm._engine.scheduler.speculation.drafter, list[Drafted](), list[str]()
    assert isinstance(drafter, ModelDrafter)
    record(drafter, found, behind)
    speculate(llm._engine, drafter)
    return found, behind


def check_equal(
    base: Path,
    path: Path,
    config: dict[str, Any],
    prompt: Callable[[int], list[int]],
    params: list[SamplingParams],
    before_masks: list[int] | None = None,
) -> list[Drafted]:
    """Returns what is drafted on two ranks, whose answers must be those of one rank without drafts, before a sleep and
    behind it. Most of it must be drafted behind steps in flight, where no masks are waited for.

    Args:
        before_masks: Gets the numbers of drafts that draft_before_masks() has. None leaves it out.
    """
    with closing(start_llm(str(base), 1, enable_lora=True)) as alone:
        expected = answers(alone, prompt, path, params)
    with closing(start_llm(str(base), 2, enable_lora=True, speculative_config=config, async_scheduling=True)) as shared:
        drafted, behind = recorded(shared)
        counts = [] if before_masks is None else draft_before_masks(shared)
        assert answers(shared, prompt, path, params) == expected
        num_drafted, num_behind = len(drafted), len(behind)
        shared.sleep(2)
        shared.wake_up()
        assert answers(shared, prompt, path, params[:2]) == expected[:2]
    assert len(drafted) > num_drafted
    if before_masks is None:
        assert len(behind) > len(drafted) // 2
    else:  # How often a step waits depends on when masks arrive.
        assert len(behind) > num_behind > 4
        before_masks += counts
    return drafted


@pytest.mark.parametrize("family", ["qwen3_5", "glm4_moe", "deepseek_v3"])
def test_a_layer_for_several_tokens_is_divided(tmp_path, prompt, family) -> None:
    """Attention with heads and latent attention, a dense layer and mixtures, and a base with recurrent layers."""
    base = make_mtp_checkpoint(tmp_path / "base", family)
    path = make_case_adapter(tmp_path / "adapter", base, CASES[family])
    drafted = check_equal(base, path, {"method": "mtp"}, prompt, PARAMS)
    target, reference = AutoModelForCausalLM.from_pretrained(base), MTPReference(base, family)
    of_base = [entry for entry in drafted if entry[0] != "2-0"][::4]
    assert len(of_base) > 4
    assert not reference.wrong(target, of_base)
    of_adapter = [entry for entry in drafted if entry[0] == "2-0"][::4]
    assert of_adapter
    assert not reference.wrong(PeftModel.from_pretrained(target, path), of_adapter)


def test_a_draft_model_on_the_first_gpu_drafts_behind_steps_of_all(tmp_path, prompt) -> None:
    """The draft model has the base's weights. So drafts are right unless penalties change the tokens."""
    base = make_model(tmp_path / "base", "llama3", seed=3)
    path = make_adapter(tmp_path / "adapter", base)
    check_equal(base, path, {"method": "draft_model", "model": str(base)}, prompt, PARAMS)


def draft_before_masks(llm: LLM) -> list[int]:
    """Has the head draft for a sequence each time that the tokens in flight wait for their masks. Returns the list to
    which the number of its drafts is added."""
    engine, counts = llm._engine, list[int]()
    finish, drafter = engine._structured.finish, engine.scheduler.speculation.drafter

    def draft_and_finish() -> Any:
        for sequence in engine.scheduler.running[:1]:
            num_known = len(sequence.tokens) - (sequence.tokens[-1] == UNKNOWN)
            if sequence.num_generated:
                counts.extend(len(draft) for draft in drafter.propose([Wanted(sequence, num_known, 2)]))
        return finish()

    engine._structured.finish = draft_and_finish  # type: ignore[method-assign]
    return counts


def test_an_eagle_head_is_divided_and_drafts_while_an_answer_waits_for_its_masks(tmp_path, prompt) -> None:
    base = make_model(tmp_path / "base", "llama3", num_hidden_layers=7, seed=3)
    path, head = make_adapter(tmp_path / "adapter", base), make_head(tmp_path / "head")
    grammar = structured_spec.regex("(the |of ){6}", "x")
    masked = SamplingParams(max_tokens=30, temperature=1.0, seed=5, structured_outputs=grammar)
    config = {"method": "eagle3", "model": str(head)}
    counts: list[int] = []
    drafted = check_equal(base, path, config, prompt, [*PARAMS, masked], counts)
    assert sum(counts) > 4
    target, reference = AutoModelForCausalLM.from_pretrained(base), EagleReference(head)
    of_base = [entry for entry in drafted if entry[0] in ("0-0", "1-0")][::4]
    assert len(of_base) > 4
    for _, known, draft in of_base:
        assert draft == reference.drafts(target, known, len(draft))


def test_a_head_that_the_ranks_cannot_divide_is_refused_by_its_folder(tmp_path) -> None:
    base = make_model(tmp_path / "base", "llama3", num_hidden_layers=7)
    head = make_head(tmp_path / "head", num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(
        ConfigError, match=r"the head '.*head': tensor_parallel_size=2 does not divide the model's num_"
    ):
        start_llm(str(base), 2, speculative_config={"method": "eagle3", "model": str(head)})
