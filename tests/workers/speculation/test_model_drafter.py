"""A draft model in an engine: what it drafts and what it leaves behind. Answers never depend on it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.sources import S3Config, SourcesConfig
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from s3_server import BUCKET, KEY, SECRET, RadosGateway, write_credentials
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import speculate
from tests.workers.speculation.eagle_reference import make_head
from tiny_models import make_model

LENGTH = 30


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a smaller model with the same tokens, whose drafts are hardly ever right."""
    return make_model(tmp_path_factory.mktemp("draft") / "other", "qwen2", num_hidden_layers=1, seed=7)


def made_engine(base: Path, draft: Path | None = None, **options: Any) -> SteppedEngine:
    """Returns an engine that verifies each draft of the model in the folder `draft`, or one that drafts nothing."""
    if draft is None:
        return SteppedEngine(base, **options)
    config = SpeculativeConfig("draft_model", model=str(draft))
    stepped = SteppedEngine(base, **({"speculative_config": config} | options))
    speculate(stepped.engine, drafter(stepped))
    return stepped


def drafter(stepped: SteppedEngine) -> ModelDrafter:
    speculation = stepped.engine.scheduler.speculation
    assert speculation is not None and isinstance(speculation.drafter, ModelDrafter)
    return speculation.drafter


class Counts:
    """The draft tokens of an engine's requests, and those that were right."""

    def __init__(self, stepped: SteppedEngine) -> None:
        self.drafted = self.accepted = 0
        step = stepped.engine.step

        def recorded() -> Any:
            outputs = step()
            for output in outputs:
                if output.drafts is not None:
                    self.drafted += output.drafts.num_tokens
                    self.accepted += output.drafts.num_accepted
            return outputs

        stepped.engine.step = recorded  # type: ignore[method-assign]


def answers(stepped: SteppedEngine, prompts: dict[str, list[int]], **fields: Any) -> dict[str, list[int]]:
    for name, ids in prompts.items():
        stepped.add(name, ids, **({"params": {"max_tokens": LENGTH}} | fields))
    stepped.until(lambda: prompts.keys() <= stepped.ended.keys())
    return {name: stepped.tokens[name] for name in prompts}


def assert_is_empty(stepped: SteppedEngine) -> None:
    kv = drafter(stepped).kv
    assert kv.num_free == kv.num_blocks and not drafter(stepped)._followed


@pytest.mark.parametrize("overlap", [False, True])
def test_a_draft_model_that_is_the_target_is_always_right(fleet, prompt, overlap) -> None:
    base = fleet("llama3").base
    prompts = {"a": prompt(20), "b": prompt(35), "c": prompt(7)}
    expected = answers(made_engine(base), prompts)
    stepped = made_engine(base, base, async_scheduling=overlap)
    counts = Counts(stepped)
    assert answers(stepped, prompts) == expected
    assert counts.drafted == counts.accepted > 50
    assert_is_empty(stepped)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}])
def test_a_draft_model_that_is_hardly_ever_right_changes_no_answer(fleet, prompt, other, params) -> None:
    base = fleet("llama3").base
    prompts = {"a": prompt(20), "b": prompt(35)}
    params = {"params": params | {"max_tokens": LENGTH}}
    stepped = made_engine(base, other)
    counts = Counts(stepped)
    assert answers(stepped, prompts, **params) == answers(made_engine(base), prompts, **params)
    assert counts.accepted < 0.3 * counts.drafted
    assert counts.drafted > 40
    assert_is_empty(stepped)


def test_the_tokens_that_were_accepted_are_computed_as_drafts_which_graphs_run(fleet, prompt) -> None:
    base = fleet("llama3").base
    stepped = made_engine(base, base)
    lengths: list[int] = []
    run = drafter(stepped).steps.run

    def recorded(plan: Any, **more: Any) -> Any:
        if not plan.has_decodes_only:
            lengths.append(plan.num_tokens)
        return run(plan, **more)

    drafter(stepped).steps.run = recorded  # type: ignore[method-assign]
    counts = Counts(stepped)
    prompts = {"a": prompt(20), "b": prompt(30)}
    assert answers(stepped, prompts) == answers(made_engine(base), prompts)
    assert counts.drafted == counts.accepted > 30
    assert len(lengths) <= 2 and sum(lengths) >= 50, "the prompts alone are longer"


def test_a_second_request_finds_the_draft_models_keys_and_values_of_the_first(fleet, prompt) -> None:
    base = fleet("llama3").base
    stepped = made_engine(base, base)
    answers(stepped, {"a": prompt(50)})
    computed = stepped.engine.stats().prefix_cache_hits_total
    answers(stepped, {"b": prompt(50)})
    assert stepped.engine.stats().prefix_cache_hits_total - computed == 48
    assert drafter(stepped).kv.counts.hit_tokens == 48
    answers(stepped, {"c": prompt(50)}, cache_salt="apart")
    assert drafter(stepped).kv.counts.hit_tokens == 48


@pytest.mark.parametrize("most", [32, 1024])
def test_samples_of_one_prompt_have_it_computed_once_for_all(fleet, prompt, monkeypatch, most) -> None:
    monkeypatch.setattr("lorafleet.workers.speculation.model_drafter.CAUGHT_UP_TOKENS", most)
    base = fleet("llama3").base
    stepped = made_engine(base, base)
    lengths: list[int] = []
    run = drafter(stepped).steps.run

    def recorded(plan: Any, **more: Any) -> Any:
        lengths.extend(count for count in plan.attention.query_lens if count > 5)  # More than a token and its drafts.
        return run(plan, **more)

    drafter(stepped).steps.run = recorded  # type: ignore[method-assign]
    counts = Counts(stepped)
    params = {"params": {"max_tokens": LENGTH, "temperature": 0}}
    prompts = {name: prompt(100) for name in "abcd"}
    assert answers(stepped, prompts, **params) == answers(made_engine(base), prompts, **params)
    assert counts.drafted == counts.accepted > 30
    assert sum(lengths) < 100 + 3 * 16 + 4 * 10, "all but the last block is shared"
    assert_is_empty(stepped)


def test_a_preempted_sequence_is_drafted_for_as_before(fleet, prompt) -> None:
    base = fleet("llama3").base
    options: dict[str, Any] = {"kv_cache_tokens": 96, "max_model_len": 64, "enable_prefix_caching": False}
    prompts = {"a": prompt(20), "b": prompt(21), "c": prompt(22)}
    stepped = made_engine(base, base, **options)
    counts = Counts(stepped)
    assert answers(stepped, prompts) == answers(made_engine(base, **options), prompts)
    assert stepped.engine.stats().preemptions_total > 0
    assert counts.accepted == counts.drafted > 20
    assert_is_empty(stepped)


def test_an_abort_frees_the_draft_models_blocks(fleet, prompt) -> None:
    base = fleet("llama3").base
    stepped = made_engine(base, base)
    for name in ("a", "b"):
        stepped.add(name, prompt(20), params={"max_tokens": LENGTH})
    stepped.until(lambda: len(stepped.tokens.get("a", ())) > 8)
    stepped.engine.abort("b")
    stepped.until(lambda: "a" in stepped.ended)
    assert_is_empty(stepped)


def test_a_long_prompt_is_caught_up_with_in_parts(fleet, prompt, monkeypatch) -> None:
    monkeypatch.setattr("lorafleet.workers.speculation.model_drafter.CAUGHT_UP_TOKENS", 16)
    base = fleet("llama3").base
    stepped = made_engine(base, base)
    counts = Counts(stepped)
    expected = answers(made_engine(base), {"a": prompt(100)})
    assert answers(stepped, {"a": prompt(100)}) == expected
    assert counts.accepted == counts.drafted > 10


def test_a_sequence_beyond_the_draft_models_context_gets_no_drafts(fleet, prompt, tmp_path) -> None:
    base = fleet("llama3").base
    short = make_model(tmp_path / "short", "qwen2", num_hidden_layers=1, max_position_embeddings=32)
    stepped = made_engine(base, short)
    counts = Counts(stepped)
    expected = answers(made_engine(base), {"a": prompt(25), "b": prompt(40)})
    assert answers(stepped, {"a": prompt(25), "b": prompt(40)}) == expected
    assert 0 < counts.drafted <= 32


def test_drafts_end_before_tokens_that_the_base_does_not_have(fleet, prompt, tmp_path) -> None:
    """The draft model's table has more padding than the base's, and its padding is often the likeliest token."""
    base = fleet("llama3").base
    padded = make_model(tmp_path / "padded", "llama2", num_hidden_layers=1, vocab_size=384)
    stepped = made_engine(base, padded)
    drafter(stepped).steps.model.lm_head.weight.data[320:] *= 10
    expected = answers(made_engine(base), {"a": prompt(25)})
    assert answers(stepped, {"a": prompt(25)}) == expected


@pytest.fixture(scope="module")
def adapters(fleet: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns adapters by name. "plain" has no draft LoRA. The others are their own, which is always right where the
    base is the draft model."""
    made, root = fleet("llama3"), tmp_path_factory.mktemp("drafted")
    found: dict[str, Path] = {"plain": made.adapters["rslora"]}
    for name in ("all", "qv"):
        found[name] = root / name
        shutil.copytree(made.adapters[name], found[name])
        shutil.copytree(made.adapters[name], found[name] / "draft")
    return found


def test_adapters_in_one_batch_are_drafted_for_by_their_own_draft_loras(fleet, prompt, adapters) -> None:
    base = fleet("llama3").base
    with_drafts, without = made_engine(base, base), made_engine(base)
    counts = Counts(with_drafts)
    for stepped in (with_drafts, without):
        for i, name in enumerate(("all", "qv")):
            stepped.add(name, prompt(20 + i), stepped.load(name, adapters[name]), params={"max_tokens": LENGTH})
        stepped.add("base", prompt(9), params={"max_tokens": LENGTH})
        stepped.until(lambda stepped=stepped: len(stepped.ended) == 3)
    assert with_drafts.tokens == without.tokens
    assert counts.drafted == counts.accepted > 50


def test_a_draft_lora_comes_from_s3_with_its_adapter(
    fleet, prompt, adapters, gateway: RadosGateway, tmp_path, monkeypatch
) -> None:
    base, prefix = fleet("llama3").base, "drafted/all"
    for file in adapters["all"].rglob("*.*"):
        gateway.put(f"{prefix}/{file.relative_to(adapters['all']).as_posix()}", file.read_bytes())
    credentials = tmp_path / "credentials"
    write_credentials(credentials, KEY, SECRET)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    s3 = S3Config(endpoint_url=gateway.endpoint, region="us-east-1")
    stepped = made_engine(base, base, sources=SourcesConfig(s3=s3, cache_dir=str(tmp_path / "cache")))
    counts = Counts(stepped)
    uri = f"s3://{BUCKET}/{prefix}"
    loading = stepped.engine.load_adapter(LoRARequest("all", 1, uri))
    stepped.until(loading.done)
    digest = folder_digest(adapters["all"])
    assert loading.result().digest == digest
    answers(stepped, {"a": prompt(20)}, lora=LoRARequest("all", 1, uri, digest))
    assert counts.drafted == counts.accepted > 10
    stepped.engine.close()


def test_an_adapter_without_a_draft_lora_is_drafted_for_by_the_draft_model_alone(fleet, prompt, adapters) -> None:
    base = fleet("llama3").base
    with_drafts, without = made_engine(base, base), made_engine(base)
    counts = Counts(with_drafts)
    for stepped in (with_drafts, without):
        stepped.add("a", prompt(20), stepped.load("plain", adapters["plain"]), params={"max_tokens": LENGTH})
        stepped.until(lambda stepped=stepped: "a" in stepped.ended)
    assert with_drafts.tokens == without.tokens
    assert counts.accepted < 0.5 * counts.drafted


def test_a_draft_lora_leaves_its_slot_with_its_adapter(fleet, prompt, adapters) -> None:
    """With one slot, each adapter takes the other's."""
    base = fleet("llama3").base
    lora = LoRAConfig(max_loras=1, max_gpu_loras=1, max_cpu_loras=2)
    stepped, without = made_engine(base, base, lora=lora), made_engine(base, lora=lora)
    counts = Counts(stepped)
    for turn, name in enumerate(("all", "qv", "plain", "all")):
        for engine in (stepped, without):
            engine.add(f"{turn}", prompt(20), engine.load(name, adapters[name]), params={"max_tokens": 12})
            engine.until(lambda engine=engine, turn=turn: f"{turn}" in engine.ended)
        if name != "plain":
            assert counts.drafted == counts.accepted > 0
        else:
            assert counts.drafted > counts.accepted
            counts.drafted = counts.accepted = 0
    assert stepped.tokens == without.tokens


def test_a_draft_lora_that_does_not_fit_the_draft_model_is_left_out(fleet, prompt, adapters, other, caplog) -> None:
    base = fleet("llama3").base
    with_drafts, without = made_engine(base, other), made_engine(base)
    for stepped in (with_drafts, without):
        stepped.add("a", prompt(20), stepped.load("all", adapters["all"]), params={"max_tokens": 12})
        stepped.until(lambda stepped=stepped: "a" in stepped.ended)
    assert with_drafts.tokens == without.tokens
    assert "is served without its draft LoRA" in caplog.text


def test_sequences_of_an_adapter_find_keys_and_values_of_their_own_draft_lora_alone(fleet, prompt, adapters) -> None:
    base = fleet("llama3").base
    stepped = made_engine(base, base)
    counts = Counts(stepped)
    for name in ("all", "qv", "all"):
        request = f"{name}{len(stepped.ended)}"
        stepped.add(request, prompt(50), stepped.load(name, adapters[name]), params={"max_tokens": 12})
        stepped.until(lambda request=request: request in stepped.ended)
    assert drafter(stepped).kv.counts.hit_tokens == 48
    assert counts.drafted == counts.accepted


def test_a_model_with_other_tokens_is_refused(fleet, tmp_path) -> None:
    base = fleet("llama3").base
    other = make_model(tmp_path / "other", "qwen2", num_hidden_layers=1)
    content = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(content.replace('"Ġthe"', '"Ġthee"'))
    with pytest.raises(ConfigError, match="another vocabulary than the base"):
        made_engine(base, other)
    (other / "tokenizer.json").unlink()
    larger = make_model(tmp_path / "larger", "qwen2", num_hidden_layers=1, vocab_size=321)
    (larger / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has 321 tokens and the base has 320"):
        made_engine(base, larger)


def test_models_that_cannot_draft_are_refused(fleet, tmp_path) -> None:
    base = fleet("llama3").base
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = make_model(tmp_path / "dynamic", "llama3", rope_parameters=scaling)
    with pytest.raises(ConfigError, match=r"draft model .* rotates all keys anew .* Give another one"):
        made_engine(base, dynamic)
    with pytest.raises(ConfigError, match=r"is an EAGLE-3 head, not a model\. Give method='eagle3'"):
        made_engine(base, make_head(tmp_path / "head"))
    with pytest.raises(ConfigError, match=r"is an EAGLE-3 head, not a model\. Give method='eagle3'"):
        made_engine(base, make_head(tmp_path / "named", architectures=["LlamaForCausalLMEagle3"]))
    with pytest.raises(ConfigError, match=r"speculative_config: model '.*nowhere' is not a folder"):
        made_engine(base, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not served with share_lora_memory"):
        made_engine(base, base, lora=LoRAConfig(share_lora_memory=True))
