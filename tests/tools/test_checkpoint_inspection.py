"""The command `inspect` reports of a base the sizes and choices that an engine has for it."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from family_cases import CASES, FamilyCase, make_case
from float_checkpoints import float_checkpoint
from lorafleet.cluster.cli.cli_inspect_base import BaseOptions, inspect_base
from lorafleet.protocol.engine_config import EngineConfig, SpeculativeConfig
from lorafleet.protocol.errors import LorafleetError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.tools.checkpoint_contents import read_contents
from lorafleet.tools.checkpoint_inspection import CARDS, inspect_checkpoint
from lorafleet.workers import kv_cache_sizing, memory_estimate
from lorafleet.workers.memory_estimate import Card, MetaEngine
from lorafleet.workers.rank_startup import build_rank
from lorafleet.workers.speculation.draft_model import STEP_BYTES
from tests.workers.speculation.eagle_reference import make_head
from tests.workers.speculation.mtp_reference import make_mtp_checkpoint
from tiny_models import make_model

CACHE_BYTES = 3 << 20


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama2", {}),
        ("llama2", {"kv_cache_dtype": "fp8", "quantization": "nf4", "block_size": 32}),
        ("llama2", {"dtype": "bfloat16", "quantization": "fp8", "max_model_len": 300}),
        ("gemma3", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"quantization": "nf4"}),
        ("gemma3n", {}),
        ("gemma4_experts", {}),
    ],
)
def test_an_engine_on_a_cpu_has_the_cache_and_the_weights_that_inspect_states(
    family: str, options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small, so that the memory and not the limit of tokens decides.
    for module in (kv_cache_sizing, memory_estimate):
        monkeypatch.setattr(module, "CPU_CACHE_BYTES", CACHE_BYTES)
    folder = tmp_path / "base"
    is_case = family in CASES
    base = make_case(folder, CASES[family]) if is_case else make_model(folder, family, num_hidden_layers=2)
    config = EngineConfig(str(base), device="cpu", lora=LoRAConfig(max_loras=2, max_lora_rank=8), **options)  # type: ignore[arg-type]  # One dict for all cases.
    found, has_experts = inspect_checkpoint(config, None, (1,)), family in ("qwen3_moe", "gemma4_experts")
    [share] = found.shares
    assert found.experts.keys() == ({"nf4" if options else "plain"} if has_experts else set())
    assert share.needs is not None
    assert share.room is not None
    rank = build_rank(config)
    assert share.room.kv_cache_tokens == rank.num_blocks * config.block_size < kv_cache_sizing.CPU_CACHE_TOKENS
    assert share.room.max_model_len == rank.max_model_len
    assert share.needs.weights == sum(p.numel() * p.itemsize for p in rank.steps.model.parameters())
    [first, *_] = rank.steps.caches
    cache_bytes = sum(c.k_NPGD.nbytes + c.v_NPGD.nbytes for c in set(rank.steps.caches))
    assert share.needs.kv_token == cache_bytes // (len(first.k_NPGD) * config.block_size)


def draft_of(method: str, folder: Path) -> tuple[Path, SpeculativeConfig]:
    """Returns a base, and the options with which a model drafts for it."""
    if method == "mtp":
        return make_mtp_checkpoint(folder / "base", "glm4_moe"), SpeculativeConfig("mtp")
    base = make_model(folder / "base", "llama3", num_hidden_layers=7)
    draft = make_head(folder / "head") if method == "eagle3" else make_model(folder / "draft", "llama3")
    return base, SpeculativeConfig(method, model=str(draft))  # type: ignore[arg-type]  # One of the methods.


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_what_drafts_is_counted_as_an_engine_has_it(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kv_cache_sizing, memory_estimate):
        monkeypatch.setattr(module, "CPU_CACHE_BYTES", CACHE_BYTES)
    base, drafts = draft_of(method, tmp_path)
    lora = LoRAConfig(max_loras=2, max_lora_rank=8)
    config = EngineConfig(str(base), device="cpu", lora=lora, speculative_config=drafts)
    [share] = inspect_checkpoint(config, None, (1,)).shares
    assert share.needs is not None and share.needs.drafts is not None and share.room is not None
    rank, needs = build_rank(config), share.needs.drafts
    assert rank.drafter is not None and rank.draft_steps is not None
    assert share.room.kv_cache_tokens == rank.num_blocks * config.block_size < kv_cache_sizing.CPU_CACHE_TOKENS
    runner, rows = rank.draft_steps.runner, rank.draft_steps.rows
    assert needs.weights == sum(p.numel() * p.itemsize for p in runner.model.parameters())
    cache_bytes = sum(c.k_NPGD.nbytes + c.v_NPGD.nbytes for c in runner.caches)
    token_bytes = 0 if rows is None else rows.token_bytes
    assert needs.kv_token == cache_bytes // (len(runner.caches[0].k_NPGD) * config.block_size) + token_bytes
    assert (needs.adapters > 0) == (method == "draft_model")
    taken = share.room.kv_cache_bytes + needs.kv_token * share.room.kv_cache_tokens
    assert 0.95 * CACHE_BYTES < taken <= CACHE_BYTES


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp"])
def test_on_a_gpu_what_drafts_leaves_less_for_the_kv_cache(method: str, tmp_path: Path) -> None:
    base, drafts = draft_of(method, tmp_path)
    card = Card("tiny", 2 << 30, (9, 0), other_bytes=64 << 20)
    plain = EngineConfig(str(base), max_model_len=256, lora=LoRAConfig(max_loras=2, max_lora_rank=8))
    config = replace(plain, speculative_config=drafts)
    without = MetaEngine.build(replace(plain, speculative_config=SpeculativeConfig("ngram")), card).room(card)
    built = MetaEngine.build(config, card)
    room, needs = built.room(card), built.needs.drafts
    assert needs is not None and without.most_loras is not None and room.most_loras is not None
    assert needs.steps >= STEP_BYTES
    taken = needs.weights + needs.adapters + needs.steps + needs.kv_token * room.kv_cache_tokens
    assert 0 <= without.kv_cache_bytes - room.kv_cache_bytes - taken < 1 << 16
    assert room.most_loras <= without.most_loras
    divided = MetaEngine.build(replace(config, tensor_parallel_size=2), card).needs.drafts
    assert divided is not None
    assert (divided.weights == needs.weights) == (method == "draft_model")


def test_the_command_takes_the_options_of_drafts_and_names_mistakes(tmp_path: Path) -> None:
    base, drafts = draft_of("eagle3", tmp_path)

    def inspected(text: str) -> str:
        options = BaseOptions(None, 4.0, None, None, None, None, None, None, text)
        shown, _ = inspect_base(str(base), LoRAConfig(max_lora_rank=8), options, 1, as_json=False)
        return shown

    shown = inspected(json.dumps({"method": "eagle3", "model": drafts.model}))
    assert "for the model that drafts, 0.00 MiB for draft LoRAs in slots" in shown
    assert re.search(r"for a token, 51\d\.\d\d MiB for its steps and graphs", shown)
    for text, message in (
        ("eagle3", "--speculative-config must be a JSON object: 'eagle3' is not valid JSON"),
        ("[1]", r"'\[1\]' is no JSON object"),
        ('{"method": "medusa"}', "method='medusa' is not served"),
    ):
        with pytest.raises(LorafleetError, match=message):
            inspected(text)
    assert "is for a target of hidden size" in inspected(
        json.dumps({"method": "eagle3", "model": str(make_head(tmp_path / "other", vocab_size=400))})
    )


def test_what_would_fit_starts_and_one_more_does_not(base: Path) -> None:
    config = EngineConfig(str(base), max_model_len=256, lora=LoRAConfig(max_loras=1, max_lora_rank=16))
    card = Card("tiny", 1 << 30, (9, 0), other_bytes=64 << 20)
    [one, two] = inspect_checkpoint(config, card, (1, 2)).shares
    assert one.needs is not None
    assert two.needs is not None
    assert one.room is not None
    assert one.room.refusal is None
    # On two GPUs each has half of an adapter, and rows of the tables as before.
    assert one.needs.adapter // 2 <= two.needs.adapter < one.needs.adapter < one.needs.adapters
    assert one.needs.adapters // 2 <= two.needs.adapters < one.needs.adapters
    assert two.needs.kv_token == one.needs.kv_token // 2
    taken = one.needs.weights + one.needs.adapters + one.needs.activations + one.needs.others + one.room.kv_cache_bytes
    budget = int(card.total_bytes * 0.9) - card.other_bytes
    assert 0 <= budget - taken < config.block_size * one.needs.kv_token
    tight = replace(card, total_bytes=int((card.total_bytes * 0.9 - one.room.kv_cache_bytes + (4 << 20)) / 0.9))
    most = MetaEngine.build(config, tight).room(tight).most_loras
    assert most is not None
    assert most > 1
    for max_loras, starts in ((most, True), (most + 1, False)):
        wanted = replace(config, lora=LoRAConfig(max_loras=max_loras, max_lora_rank=16))
        found = inspect_checkpoint(wanted, tight, (1,))
        assert found.is_refused != starts
        [share] = found.shares
        assert share.room is not None
        assert ("less than max_model_len=256" in (share.room.refusal or "")) != starts


def test_values_of_experts_that_long_prompts_write_are_counted(tmp_path: Path) -> None:
    """512 tokens with two of three experts each are 341 pairs for each expert, and 256 tokens 171."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 3, "num_experts_per_tok": 2}
    base = make_model(tmp_path / "base", "qwen3_moe", num_hidden_layers=1, dtype="bfloat16", **sizes)
    written = 3 * 1024 * 256 * 2  # bytes of gate_up's values, beside its result instead of the result of the activation

    def activations(tokens: int, capability: tuple[int, int], quantization: str | None) -> int:
        card = Card("tiny", 4 << 30, capability)
        config = EngineConfig(str(base), max_num_batched_tokens=tokens, quantization=quantization, lora=None)  # type: ignore[arg-type]  # One of the methods.
        return MetaEngine.build(config, card).needs.activations

    plain = activations(512, (9, 0), None)
    assert activations(512, (9, 0), "nf4") == plain + written - 512 * 2 * 512 * 2
    assert activations(512, (8, 9), "nf4") == activations(512, (9, 0), "fp8") == plain
    assert activations(256, (9, 0), "nf4") == activations(256, (9, 0), None)


def test_memory_for_adapters_that_is_given_in_gib_is_left_out_of_the_kv_cache(base: Path) -> None:
    card = Card("tiny", 1 << 30, (9, 0), other_bytes=64 << 20)
    rooms = []
    for gib in (0.125, 0.25):
        config = EngineConfig(str(base), max_model_len=256, lora=LoRAConfig(lora_memory_gib=gib))
        built = MetaEngine.build(config, card)
        assert 0 <= built.needs.adapters - int(gib * 2**30) < 1 << 20
        rooms.append(built.room(card))
    assert (1 << 27) - rooms[0].kv_cache_bytes + rooms[1].kv_cache_bytes < 1 << 20
    assert [room.most_loras for room in rooms] == [None, None]


def test_slots_have_the_layout_that_the_cards_data_choose(base: Path) -> None:
    def slot_bytes(max_num_seqs: int, fully_sharded: bool | None) -> int:
        lora = LoRAConfig(max_loras=1, max_lora_rank=16, fully_sharded_loras=fully_sharded)
        config = EngineConfig(str(base), max_model_len=256, max_num_seqs=max_num_seqs, lora=lora)
        [two] = inspect_checkpoint(config, CARDS["h200-141"], (2,)).shares
        assert two.needs is not None
        return two.needs.adapters

    assert slot_bytes(8, None) == slot_bytes(8, False) > slot_bytes(8, True)
    assert slot_bytes(256, None) == slot_bytes(256, True)


def test_a_refusal_is_the_servers_own(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((base / "config.json").read_text().replace("LlamaForCausalLM", "OtherLM"))
    (tmp_path / "model.safetensors").symlink_to(base / "model.safetensors")
    for config in (
        EngineConfig(str(tmp_path), device="cpu"),
        EngineConfig(str(base), device="cpu", max_model_len=4096),
    ):
        with pytest.raises(LorafleetError) as caught:
            build_rank(config)
        found = inspect_checkpoint(config, None, (1,))
        assert (found.refusal, found.error) == (caught.value.message, type(caught.value).__name__)
        assert found.is_refused
        assert found.tensors  # The contents of the files are reported nevertheless.
    old = inspect_checkpoint(EngineConfig(str(base), kv_cache_dtype="fp8"), CARDS["a100-80"], (1,))
    assert "A100 80 GB is older" in (old.refusal or "")
    [share] = inspect_checkpoint(EngineConfig(str(base)), None, (3,)).shares
    assert "does not divide" in (share.refusal or "")


def test_only_the_headers_of_the_files_are_read(base: Path, tmp_path: Path) -> None:
    """The file has a hole of 100 GB in place of its weights."""
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    sizes = {"model.embed_tokens.weight": 30 << 30, "model.layers.0.mlp.up_proj.weight": 20 << 30}
    header, end = {}, 0
    for name, values in sizes.items():
        header[name] = {"dtype": "BF16", "shape": [1024, values >> 10], "data_offsets": [end, end + 2 * values]}
        end += 2 * values
    raw = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    groups = read_contents(tmp_path)
    assert [(g.kind, g.dtype, g.num_bytes >> 30) for g in groups] == [("embedding", "BF16", 60), ("MLP", "BF16", 40)]


def test_kinds_of_tensors_add_up_to_the_files(base: Path) -> None:
    groups = read_contents(base)
    assert {g.kind for g in groups} == {"embedding", "head", "attention", "MLP", "norms"}
    found = inspect_checkpoint(EngineConfig(str(base)), None, (1,))
    assert sum(g.num_values for g in groups) == found.num_parameters
    assert found.linears == {"plain": 8}
    assert found.dtype == str(torch.float32).removeprefix("torch.")


def test_quantized_linears_are_named_by_their_format(tmp_path: Path, base: Path) -> None:
    folder, _ = float_checkpoint(base, tmp_path / "quantized", "compressed-tensors, mixed")
    found = inspect_checkpoint(EngineConfig(str(folder)), None, (1,))
    assert found.linears == {"fp8": 3, "nvfp4": 4, "plain": 1}
    found = inspect_checkpoint(EngineConfig(str(base), quantization="nf4"), None, (1,))
    assert found.linears == {"nf4": 8}


def test_a_layer_for_several_tokens_is_named(tmp_path: Path) -> None:
    base = make_mtp_checkpoint(tmp_path / "base", "glm4_moe")
    found = inspect_checkpoint(EngineConfig(str(base)), None, (1,))
    kinds = [group.kind for group in found.tensors]
    assert kinds.count("layers for several tokens (MTP)") == 1
    assert found.drafts_itself
    text, _ = inspect_base(str(base), LoRAConfig(), BaseOptions(*[None] * 9), 1, as_json=False)
    assert "with its own layer for several tokens (MTP) and --speculative-config" in text
    without = make_case(tmp_path / "without", CASES["glm4_moe"])
    assert not inspect_checkpoint(EngineConfig(str(without)), None, (1,)).drafts_itself


def test_a_module_of_transformers_is_named_as_such(tmp_path: Path) -> None:
    folder = make_case(tmp_path / "neox", FamilyCase("GPTNeoX"))
    found = inspect_checkpoint(EngineConfig(str(folder)), None, (1,))
    assert (found.architecture, found.is_generic, found.is_refused) == ("GPTNeoXForCausalLM", True, False)
    assert found.context_limit == 512 and found.linears == {"plain": 2 * 4} and not found.shares
