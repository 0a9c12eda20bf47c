"""An EAGLE-3 head in an engine: its drafts are those of a plain implementation, and answers never depend on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.engine_control import SleepEngine, WakeEngine
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import Drafted, record, speculate
from tests.workers.speculation.eagle_reference import EagleReference, make_head
from tiny_models import make_adapter, make_model

LENGTH = 24


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("eagle") / "base", "llama3", num_hidden_layers=7, seed=3)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_head(tmp_path_factory.mktemp("eagle") / "head")


def made_engine(base: Path, head: Path | None = None, **options: Any) -> tuple[SteppedEngine, list[Drafted]]:
    """Returns an engine that verifies each draft of the head, and what is drafted from now on."""
    drafted: list[Drafted] = []
    if head is None:
        return SteppedEngine(base, **options), drafted
    stepped = SteppedEngine(base, speculative_config=SpeculativeConfig("eagle3", model=str(head)), **options)
    drafter = stepped.engine.scheduler.speculation.drafter
    assert isinstance(drafter, ModelDrafter)
    record(drafter, drafted)
    speculate(stepped.engine, drafter)
    return stepped, drafted


def answer(stepped: SteppedEngine, prompts: dict[str, list[int]], **fields: Any) -> dict[str, list[int]]:
    for name, ids in prompts.items():
        stepped.add(name, ids, **({"params": {"max_tokens": LENGTH}} | fields))
    stepped.until(lambda: prompts.keys() <= stepped.ended.keys())
    return {name: stepped.tokens[name] for name in prompts}


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_are_those_of_a_plain_implementation_and_answers_are_unchanged(prompt, base, head, overlap) -> None:
    """Prompts of several chunks, and one that is longer than the head's config says."""
    prompts = {"a": prompt(20), "b": prompt(70), "c": prompt(2)}
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    plain, _ = made_engine(base, **options)
    stepped, drafted = made_engine(base, head, async_scheduling=overlap, **options)
    assert answer(stepped, prompts) == answer(plain, prompts)
    target, reference = AutoModelForCausalLM.from_pretrained(base), EagleReference(head)
    assert len(drafted) > 30
    for _, known, draft in drafted[::3]:
        assert draft == reference.drafts(target, known, len(draft))
    assert sum(len(draft) for _, _, draft in drafted) > 60


def test_a_cached_prefix_has_its_features(prompt, base, head) -> None:
    stepped, drafted = made_engine(base, head)
    drafter = stepped.engine.scheduler.speculation.drafter
    answer(stepped, {"a": prompt(50)})
    before = len(drafted)
    answer(stepped, {"b": prompt(50)})
    assert stepped.engine.stats().prefix_cache_hits_total == 48
    assert drafter.kv.counts.hit_tokens == 48
    target, reference = AutoModelForCausalLM.from_pretrained(base), EagleReference(head)
    for _, known, draft in drafted[before:][:3]:
        assert draft and draft == reference.drafts(target, known, len(draft))
    answer(stepped, {"c": [prompt(50)[0] + 1, *prompt(50)[1:]]})
    assert drafter.kv.counts.hit_tokens == 48, "the first token differs, which only the features know"


def test_drafts_of_an_adapter_follow_its_own_hidden_states(prompt, base, head, tmp_path) -> None:
    path = make_adapter(tmp_path / "adapter", base)
    found = []
    for given in (None, head):
        stepped, drafted = made_engine(base, given)
        stepped.add("own", prompt(20), stepped.load("own", path), params={"max_tokens": LENGTH})
        stepped.add("base", prompt(20), params={"max_tokens": LENGTH})
        stepped.until(lambda stepped=stepped: len(stepped.ended) == 2)
        found.append(stepped.tokens)
    assert found[0] == found[1]
    reference, target = EagleReference(head), AutoModelForCausalLM.from_pretrained(base)
    of_base = [one for one in drafted if one[0] == "base"][::4]
    for _, known, draft in of_base:
        assert draft == reference.drafts(target, known, len(draft))
    adapted = PeftModel.from_pretrained(target, path)
    of_adapter = [one for one in drafted if one[0] == "own"][::4]
    for _, known, draft in of_adapter:
        assert draft == reference.drafts(adapted, known, len(draft))
    assert of_base and of_adapter


def test_a_head_may_add_to_the_norm_of_the_feature(prompt, base, tmp_path) -> None:
    head = make_head(tmp_path / "head", norm_before_residual=True)
    stepped, drafted = made_engine(base, head)
    answer(stepped, {"a": prompt(20)})
    target, reference = AutoModelForCausalLM.from_pretrained(base), EagleReference(head, norms_residual=True)
    for _, known, draft in drafted[:4]:
        assert draft == reference.drafts(target, known, len(draft))


def test_preempted_sequences_are_drafted_for_as_before(prompt, base, head) -> None:
    options: dict[str, Any] = {"kv_cache_tokens": 96, "max_model_len": 64, "enable_prefix_caching": False}
    prompts = {"a": prompt(20), "b": prompt(21), "c": prompt(22)}
    stepped, drafted = made_engine(base, head, **options)
    plain, _ = made_engine(base, **options)
    assert answer(stepped, prompts) == answer(plain, prompts)
    assert stepped.engine.stats().preemptions_total > 0
    target, reference = AutoModelForCausalLM.from_pretrained(base), EagleReference(head)
    for _, known, draft in drafted[-4:]:
        assert draft == reference.drafts(target, known, len(draft))
    kv = stepped.engine.scheduler.speculation.drafter.kv
    assert kv.num_free == kv.num_blocks


class Captured:
    """Stands in for the CUDA graphs of decode steps, and records where the embedding lies when they are captured."""

    def __init__(self, stepped: SteppedEngine) -> None:
        self._weight = stepped.engine.runner.steps.model.embed_tokens.weight
        self.capture_first()

    @property
    def is_valid(self) -> bool:
        return self.address == self._weight.data_ptr()

    def restart(self) -> None:
        self.address = 0

    def capture_first(self) -> None:
        self.address = self._weight.data_ptr()

    def find(self, *_: Any, may_shorten: bool) -> None:
        """Finds no graph, so that steps are computed without one."""


def test_graphs_of_a_head_are_captured_again_after_a_sleep_since_the_embedding_may_move(prompt, base, head) -> None:
    stepped, drafted = made_engine(base, head)
    expected = answer(stepped, {"a": prompt(20)})
    graphs = Captured(stepped)
    stepped.engine.scheduler.speculation.drafter.steps.decode_graphs = graphs
    stepped.order(SleepEngine())
    assert graphs.address == 0
    stepped.order(WakeEngine())
    assert graphs.is_valid
    drafted.clear()
    stepped.tokens.clear()
    stepped.ended.clear()
    assert answer(stepped, {"a": prompt(20)}) == expected
    assert drafted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "has 2 layers; only heads of one layer are served"),
        ({"vocab_size": 400}, "is for a target of hidden size 64 and 400 tokens; this one has 64 and 320"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, r"reads the layers \[1, 2, 3\]; only \[2,"),
        ({"eagle_config": "layers"}, r"reads the layers .layers.; only \[2,"),
        ({"eagle_aux_hidden_state_layer_ids": 7}, r"reads the layers 7; only \[2,"),
        ({"draft_vocab_size": 100}, r"has lm_head\.weight of shape \[200, 64\] in place of \[100, 64\]"),
    ],
    ids=str,
)
def test_a_head_of_another_kind_or_target_is_refused(base, tmp_path, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        made_engine(base, make_head(tmp_path / "head", **changes))


def test_a_damaged_head_is_refused(base, tmp_path) -> None:
    folder = make_head(tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    for name, changed, message in (
        ("norm.weight", None, r"lacks norm\.weight"),
        ("d2t", None, "lacks d2t"),
        ("other.weight", tensors["norm.weight"].clone(), r"has other\.weight"),
        ("d2t", tensors["d2t"] + 200, "leads to tokens which the target does not have"),
    ):
        damaged = {key: value for key, value in tensors.items() if key != name}
        save_file(damaged if changed is None else damaged | {name: changed}, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            made_engine(base, folder)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="needs a target of 7 layers or more; this one has 6"):
        made_engine(make_model(tmp_path / "six", "llama3", num_hidden_layers=6), folder)
    with pytest.raises(ConfigError, match=r"speculative_config: the model '.*nowhere' is not a local folder"):
        made_engine(base, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has no draft_vocab_size"):
        made_engine(base, base)
    with pytest.raises(ConfigError, match="not served with share_lora_memory"):
        made_engine(base, folder, lora=LoRAConfig(share_lora_memory=True))
