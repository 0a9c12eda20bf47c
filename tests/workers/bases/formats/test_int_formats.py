"""Checkpoints with integer codes, against transformers + PEFT in float32 over the plain base with the same values."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from int_checkpoints import Case, auto_round, awq, compressed, gptq, save, set_config, written
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.formats.awq_format import ORDERS
from lorafleet.workers.bases.formats.packed_ints import unpacked
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.stored_tensors import StoredTensors
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.base_weights import FileWeights, ModelWeights
from lorafleet.workers.tp.group import TPGroup
from ranks import start_llm
from tiny_models import Reference, make_adapter, make_model

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
ADAPTERS = {"plain": {"r": 4}, "dora": {"r": 4, "use_dora": True}}
ORDERED = {"symmetric": False, "ordered": True}
FLOAT_BITS = {"targets": ["Linear"], "weights": {"num_bits": 4.0, "strategy": "group", "group_size": 32}}
DYNAMIC = {r"-:.*layers\.1\..*down": {}, r"+:.*q_proj": {"bits": 8}, r".*up": {"group_size": 16}}
DYNAMICALLY: dict[str, Any] = {
    "plain": r"layers\.1\..*down",
    "other": {r"q_proj": {"bits": 8}, r"up": {"group": 16}},
}
EXTRA = {
    "model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "float"},
    "model.layers.0.mlp.down_proj": {},
    ".*down.*": {},
    ".*q_proj.*": {"bits": 8},
    r"mlp\.up_proj$": {"group_size": 16},
}
# Linears of 64 and 128 inputs, so two ranks have half a group of 64 each.
CASES: dict[str, Case] = {
    "gptq-v1-symmetric": gptq(symmetric=True),
    "gptq-v1": gptq(group=64),
    "gptq-v2": gptq(is_v1=False, group=-1),
    "gptq-8": gptq(bits=8, group=16),
    "gptq-desc-act": gptq(**ORDERED),
    "gptq-8-v2-desc-act": gptq(is_v1=False, bits=8, group=64, **ORDERED),
    "gptq-dynamic": gptq(config={"dynamic": DYNAMIC}, **DYNAMICALLY),
    "awq": awq(),
    "awq-rows": awq(group=-1, plain="layers.1."),
    "awq-8": awq(bits=8),
    "awq-dynamic": awq(config={"dynamic": DYNAMIC}, **DYNAMICALLY),
    "auto-round": auto_round(extra=EXTRA, symmetric=True, **DYNAMICALLY),
    "auto-round-v2": auto_round("auto_round", group=64),
    "auto-round-awq": auto_round("auto_round:auto_awq", extra={".*down.*": {"bits": 16}}, plain="down"),
    "compressed": compressed(group=64, symmetric=True),
    "compressed-asymmetric": compressed(plain="o_proj"),
    "compressed-8-channel": compressed(bits=8, group=-1),
    "compressed-actorder": compressed(**ORDERED),
    "compressed-mixed": compressed(other={"down": {"bits": 8, "group": -1}}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    return make_model(folder, "qwen3", num_hidden_layers=2, intermediate_size=128)


def whole(folder: Path) -> DecoderModel:
    return rank_of(folder, 0, 1)


def rank_of(folder: Path, rank: int, size: int) -> DecoderModel:
    """Returns one rank's part, alone."""
    model = DecoderModel(read_model_config(folder), TPGroup(rank, size), torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        load_weights(model, folder)
    return model


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_rank_holds_the_files_values(tmp_path, model, case) -> None:
    folder, values = written(model, tmp_path / "quantized", case)
    tensors = load_file(values / "model.safetensors")
    engine = whole(folder)
    held = ModelWeights(engine, held_tensors(engine))
    files = FileWeights(folder, torch.float32, False, engine.config.quantization)
    modules = [module for names, _ in engine.packed_linears() for module in names]
    for module in modules:
        want = tensors[f"model.{module}.weight"]
        assert torch.equal(held.weight(module), want), module
        assert torch.equal(files.weight(module), want), module
    kinds = {type(linear.weight).__name__ for _, linear in engine.packed_linears()}
    assert "IntWeight" in kinds
    for rank in range(2):
        part = rank_of(folder, rank, 2)
        for names, linear in part.packed_linears():
            wanted = [
                tensors[f"model.{name}.weight"][rows, part.shard.input(name)]
                for name in names
                for rows in part.shard.outputs(name)
            ]
            assert torch.equal(linear.weight.dequantized(), torch.cat(wanted)), names


@pytest.mark.parametrize("name", ["gptq-dynamic", "awq-dynamic", "auto-round"])
def test_linears_of_several_schemes_share_a_weight_that_holds_both(tmp_path, model, name) -> None:
    engine = whole(written(model, tmp_path / "quantized", CASES[name])[0])
    (qkv, o, gate_up, _), (_, _, _, plain) = engine.packed_linears()[:4], engine.packed_linears()[4:]
    bits = [(linear.weight.bits, linear.weight.group) for _, linear in (qkv, o, gate_up)]
    assert bits == [(8, 32), (4, 32), (4, 16)]
    assert type(plain[1].weight).__name__ == "PlainWeight"


def assert_answers_as(llm: LLM, values: Path, prompt) -> None:
    """Base and adapters in one batch."""
    adapters = {n: make_adapter(values.parent / f"{values.name}-{n}", values, **o) for n, o in ADAPTERS.items()}
    names = [None, *adapters]
    loras = [name and LoRARequest(name, names.index(name), str(adapters[name])) for name in names]
    outputs = llm.generate([{"prompt_token_ids": prompt(9)} for _ in names], GREEDY, lora_request=loras)
    reference = Reference(values)
    for name, output in zip(names, outputs, strict=True):
        expected = reference.greedy(prompt(9), GREEDY.max_tokens, adapters.get(name))
        [answer] = output.outputs
        assert answer.token_ids == expected.tokens
        assert [p.logprob for p in answer.logprobs] == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.parametrize("name", ["gptq-dynamic", "awq", "awq-dynamic", "auto-round", "compressed-actorder"])
def test_answers_are_those_of_the_values(tmp_path, model, prompt, name) -> None:
    folder, values = written(model, tmp_path / "quantized", CASES[name])
    llm = LLM(str(folder), enable_lora=True, kv_cache_tokens=1024)
    assert_answers_as(llm, values, prompt)


@pytest.mark.parametrize("name", ["gptq-desc-act", "awq-dynamic", "auto-round"])
def test_two_ranks_answer_as_one(tmp_path, model, prompt, name) -> None:
    folder, values = written(model, tmp_path / "quantized", CASES[name])
    llm = start_llm(str(folder), 2, enable_lora=True)
    try:
        assert_answers_as(llm, values, prompt)
    finally:
        llm.close()


def test_a_biased_and_fused_model_is_read(tmp_path) -> None:
    for family, case in (("llama_bias", gptq()), ("phi3", awq()), ("phi3", gptq(**ORDERED))):
        own = tmp_path / f"{family}-{case.config['quant_method']}"
        plain = make_model(own / "plain", family, num_hidden_layers=2, intermediate_size=128)
        folder, values = written(plain, own / "quantized", case)
        tensors = load_file(values / "model.safetensors")
        engine = whole(folder)
        held = ModelWeights(engine, held_tensors(engine))
        for name in tensors:
            module, _, leaf = name.removeprefix("model.").rpartition(".")
            if module.endswith("_proj"):
                found = held.weight(module) if leaf == "weight" else held.bias(module)
                assert torch.equal(found, tensors[name]), name


@pytest.mark.parametrize("name", ["gptq-v1", "awq", "compressed-asymmetric"])
def test_a_rank_reads_only_its_slices(tmp_path, model, monkeypatch, name) -> None:
    folder, _ = written(model, tmp_path / "quantized", CASES[name])
    read: dict[str, int] = {}
    stored = StoredTensors.stored

    class Counted:
        def __init__(self, tensor: Any, name: str) -> None:
            self.tensor, self.name = tensor, name

        def get_shape(self) -> list[int]:
            return self.tensor.get_shape()

        def __getitem__(self, place: Any) -> torch.Tensor:
            found = self.tensor[place]
            read[self.name] = read.get(self.name, 0) + found.numel()
            return found

    monkeypatch.setattr(StoredTensors, "stored", lambda self, name: Counted(stored(self, name), name))
    rank_of(folder, 1, 2)
    codes = {n: count for n, count in read.items() if n.endswith(("qweight", "weight_packed"))}
    tensors = load_file(folder / "model.safetensors")
    assert codes
    assert all(count == tensors[n].numel() // 2 for n, count in codes.items())


@pytest.mark.parametrize("family", ["llama_bias", "qwen3"])
def test_plain_checkpoints_are_quantized_to_int4(tmp_path, family) -> None:
    folder = make_model(tmp_path / "model", family, num_hidden_layers=1)
    config = replace(read_model_config(folder), quantization=resolved(None, "int4"))
    tensors = load_file(folder / "model.safetensors")
    groups = TPGroup(0, 1), TPGroup(1, 2)
    engines = [DecoderModel(config, group, torch.float32, torch.device("cpu")) for group in groups]
    files = FileWeights(folder, torch.float32, False, config.quantization)
    for engine in engines:
        with torch.inference_mode():
            load_weights(engine, folder)
        for names, linear in engine.packed_linears():
            wanted = []
            for name in names:
                weight = tensors[f"model.{name}.weight"]
                size = math.gcd(weight.shape[1], 128)
                by_group = weight.unflatten(1, (-1, size))
                scale = by_group.abs().amax(dim=2, keepdim=True) * (1 / 7.5)  # as torch divides by a number on a GPU
                rounded = ((by_group / scale).round().clamp(-8, 7) * scale).flatten(1)
                torch.testing.assert_close(files.weight(name), rounded)
                wanted += [rounded[rows, engine.shard.input(name)] for rows in engine.shard.outputs(name)]
            torch.testing.assert_close(linear.weight.dequantized(), torch.cat(wanted))


def numbers(bits: int) -> torch.Tensor:
    index = torch.arange(16 * 8)
    return ((index * index * 7 + index * 5 + 11) % (1 << bits)).view(16, 8)


# compressed-tensors 0.20 packed the first. The packing loops of AutoAWQ 0.2.9 and GPTQModel 7.7, typed again, packed
# the others.
BY_COMPRESSED_TENSORS = [[1430229371], [-575202829]] * 8
BY_AWQ = [[1402429211], [-618670189]] * 8
ROW_BY_GPTQ = [993737531, -134744073, -1852730991, 421075225, 2139062143, -1280068685, -707406379, -707406379]
ROW_BY_GPTQ_8 = [1130099467, -1622708457, 155318577, -2125885095, 123680655, -1685853229, 1035316517, -302678651]


@pytest.mark.parametrize(
    ("packed", "bits", "axis", "order", "rows"),
    [
        (BY_COMPRESSED_TENSORS, 4, 1, None, 16),
        (BY_AWQ, 4, 1, ORDERS[4], 16),
        ([ROW_BY_GPTQ] * 2, 4, 0, None, 16),
        ([ROW_BY_GPTQ_8], 8, 0, None, 4),
    ],
    ids=["compressed-tensors", "awq", "gptq", "gptq-8"],
)
def test_numbers_that_the_libraries_packed_are_unpacked(packed, bits, axis, order, rows) -> None:
    found = unpacked(torch.tensor(packed, dtype=torch.int32), bits, axis, order)
    assert torch.equal(found.long(), numbers(bits)[:rows])


def named(value: object) -> str:
    """Names a parameter by what is equal in every process."""
    return value.config["quant_method"] if isinstance(value, Case) else getattr(value, "__name__", str(value))


class TestRefusals:
    @pytest.mark.parametrize(
        ("case", "changes", "cause"),
        [
            (gptq(), {"bits": 3}, "bits=3"),
            (gptq(), {"checkpoint_format": "marlin"}, "marlin"),
            (gptq(), {"group_size": 20}, "group_size=20"),
            (gptq(), {"bits": 8}, "bits is wrong"),
            (gptq(), {"group_size": 64}, "group_size=64"),
            (gptq(), {"sym": True}, "sym"),
            (gptq(symmetric=True), {"checkpoint_format": "gptq_v2"}, "checkpoint_format"),
            (gptq(), {"dynamic": {r"-:.*down": {}}}, "dynamic"),
            (gptq(), {"dynamic": {"+:(": {}}}, "dynamic"),
            (gptq(), {"dynamic": [1]}, "dynamic"),
            (awq(), {"version": "gemv"}, "gemv"),
            (awq(), {"bits": 3}, "bits=3"),
            (awq(), {"bits": 8}, "8 bits. quantization_config's bits is wrong"),
            (awq(), {"zero_point": False}, "every zero 8"),
            (awq(), {"pack_dtype": "int16"}, "pack_dtype=int16"),
            (awq(), {"dynamic": {r"-:.*down": {}}}, "dynamic says by '-:.*down'"),
            (awq(), {"dynamic": {"+:(": {}}}, "no regular expression"),
            (awq(), {"dynamic": {".*down": {"bits": "4"}}}, "bits='4' and zero_point=True for model.layers.0.mlp.down"),
            (awq(), {"dynamic": {".*down": {"bits": 6}}}, "bits=6 and zero_point=True for model.layers.0.mlp.down"),
            (awq(), {"dynamic": {".*down": {"group_size": 4}}}, "group_size=4 for model.layers.0.mlp.down"),
            (awq(), {"dynamic": {".*down": {"group_size": 64}}}, "down_proj.qweight has 4 groups"),
            (awq(), {"dynamic": {".*down": {"format": "gemv"}}}, "version=gemv"),
            (awq(), {"modules_to_not_convert": ["down_proj"]}, "modules_to_not_convert"),
            (awq(), {"group_size": 64}, "group_size=64"),
            (auto_round(), {"packing_format": "auto_round:fp8"}, "packing_format='auto_round:fp8'"),
            (auto_round(), {"data_type": "mx_int"}, "data_type='mx_int'"),
            (auto_round(), {"act_bits": 8}, "act_bits=8"),
            (auto_round(), {"packing_format": ["auto_round"]}, "packing_format"),
            (auto_round(), {"extra_config": {"a": {"act_bits": 8}}}, "act_bits=8"),
            (auto_round(), {"extra_config": {"a": {"bits": 4, "data_type": "mx_fp"}}}, "data_type='mx_fp'"),
            (auto_round(), {"rotation_config": {"a": 1}}, "rotation_config="),
            (auto_round(), {"extra_config": {".*down.*": {"bits": 16}}}, "extra_config says by '.*down.*'"),
            (
                auto_round(),
                {"extra_config": {"model.layers.1.mlp.up_proj": {"bits": 16}}},
                "'model.layers.1.mlp.up_proj'",
            ),
            (auto_round(), {"extra_config": {".*down.*": {"bits": 2}}}, "bits=2"),
            (auto_round(), {"extra_config": {".*down(": {"bits": 8}}}, "no regular expression"),
            (auto_round(), {"extra_config": {"a": 1}}, "extra_config"),
            (auto_round(symmetric=True), {"packing_format": "auto_round"}, "every zero 8"),
            (auto_round("auto_round:auto_awq"), {"packing_format": "auto_round:auto_gptq"}, "bits is wrong|match"),
            (compressed(), {"format": "marlin-24"}, "marlin-24"),
            (compressed(symmetric=True), {"format": "marlin-24"}, "format=marlin-24"),
            (compressed(), {"ignore": ["re:.*down.*"]}, "ignore"),
            (compressed(), {"config_groups": {}}, "config_groups"),
            (compressed(), {"ignore": ["re:("]}, "no regular expression"),
            (compressed(), {"ignore": ["re:" + "a" * 20000]}, "20,000 characters"),
            (compressed(), {"transform_config": {"a": 1}}, "transform_config"),
            (compressed(symmetric=True), {"config_groups": compressed(bits=8).config["config_groups"]}, "zero_point"),
            (compressed(bits=8), {"config_groups": compressed().config["config_groups"]}, "num_bits"),
            (compressed(symmetric=True), {"config_groups": {"a": FLOAT_BITS}}, "'num_bits': 4.0"),
        ],
        ids=named,
    )
    def test_config_that_lies_or_is_not_served_is_refused_by_its_cause(
        self, tmp_path, model, case, changes, cause
    ) -> None:
        folder, _ = written(model, tmp_path / "quantized", case)
        set_config(folder, quantization_config=case.config | changes)
        with pytest.raises((ConfigError, UnsupportedModel), match=cause):
            whole(folder)

    @pytest.mark.parametrize(
        ("case", "leaf", "damage", "cause"),
        [
            (gptq(), "qweight", lambda t: t[:-1], "one integer for each of 56 inputs"),
            (gptq(), "qzeros", lambda t: t[:-1], "match"),
            (gptq(), "scales", lambda t: t[0], "matrix"),
            (gptq(), "scales", lambda t: t * torch.inf, "finite"),
            (gptq(), "g_idx", lambda t: t + 1, "g_idx"),
            (gptq(), "g_idx", lambda t: t.float(), "float32"),
            (gptq(ordered=True), "scales", lambda _: torch.zeros(1 << 40, 0), "groups"),
            (gptq(), "qweight", lambda t: t.long(), "int32"),
            (gptq(), "scales", None, "scales"),
            (awq(), "qweight", lambda t: t[:, :-1], "match"),
            (awq(), "qzeros", None, "qzeros"),
            (compressed(), "weight_shape", lambda t: t * 2, "match"),
            (compressed(), "weight_shape", lambda t: t.float(), "two integers"),
            (compressed(), "weight_shape", lambda _: torch.zeros(1 << 40, 0), "at most 2 numbers"),
            (compressed(ordered=True), "weight_g_idx", lambda t: t[:-1], "one integer for each of 64 inputs"),
            (compressed(), "weight_scale", lambda t: t[:, :1], "match|groups"),
        ],
        ids=named,
    )
    def test_damaged_tensors_are_refused_by_the_linears_name(self, tmp_path, model, case, leaf, damage, cause) -> None:
        folder, _ = written(model, tmp_path / "quantized", case)
        tensors = load_file(folder / "model.safetensors")
        name = f"model.layers.1.mlp.up_proj.{leaf}"
        tensor = tensors.pop(name)
        save(folder, tensors if damage is None else tensors | {name: damage(tensor)})
        with pytest.raises(ConfigError, match=cause) as refusal:
            whole(folder)
        assert "layers.1.mlp.up_proj" in str(refusal.value)

    @pytest.mark.parametrize("case", [gptq(), awq(), compressed()], ids=lambda case: case.config["quant_method"])
    def test_a_quantized_head_is_refused_by_its_name(self, tmp_path, model, case) -> None:
        folder, _ = written(model, tmp_path / "quantized", case)
        tensors = load_file(folder / "model.safetensors")
        head = tensors.pop("lm_head.weight")
        codes = case.entries(case.codes("lm_head.weight", head))
        save(folder, tensors | {f"lm_head.{leaf}": tensor for leaf, tensor in codes.items()})
        with pytest.raises(UnsupportedModel, match=r"stores lm_head quantized.*lm_head=False in GPTQModel"):
            read_model_config(folder)

    def test_a_plain_checkpoint_that_says_it_is_quantized_is_refused(self, tmp_path, model) -> None:
        folder, _ = written(model, tmp_path / "quantized", gptq(plain="proj"))
        with pytest.raises(ConfigError, match="stores no linear quantized"):
            read_model_config(folder)

    def test_a_weight_beside_its_codes_is_refused(self, tmp_path, model) -> None:
        for case in (gptq(), compressed()):
            folder, values = written(model, tmp_path / case.config["quant_method"], case)
            name = "model.layers.0.mlp.up_proj.weight"
            both = load_file(folder / "model.safetensors") | {name: load_file(values / "model.safetensors")[name]}
            save(folder, both)
            with pytest.raises(ConfigError, match=r"up_proj\.weight"):
                whole(folder)
