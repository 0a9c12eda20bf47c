"""Adapters over a quantized base, against transformers + PEFT in float32 over the plain base with the same values."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from lorafleet.kernels.quant.e4m3_pairs import joined, split_pairs
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.scaled_matrix import quantize_rows
from lorafleet.kernels.quant.scaled_weight import ScaledWeight
from lorafleet.offline.llm import LLM, SamplingParams
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.formats.quantization_settings import NamePatterns
from lorafleet.workers.bases.quantization import Quantization, resolved
from lorafleet.workers.bases.stored_tensors import Stored, StoredTensors
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.base_weights import FileWeights, ModelWeights
from lorafleet.workers.tp.group import TPGroup
from quantized_answers import assert_answers_as, served
from quantized_models import (
    ROUNDED,
    bitsandbytes_checkpoint,
    compressed_checkpoint,
    with_config,
    with_values,
)
from ranks import start_llm
from tiny_models import make_model

# Of these, linears of 64 and 96 inputs have blocks that end amid rows.
FAMILIES = ["llama_bias", "qwen3", "gemma2", "phi3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows are whole blocks: bitsandbytes 0.50 on a CPU gives wrong values for some others."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    return make_model(folder, "qwen3", num_hidden_layers=2, intermediate_size=128)


@pytest.mark.parametrize("method", ["nf4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_checkpoint_is_quantized_as_it_is_read(tmp_path, prompt, family, method) -> None:
    plain = make_model(tmp_path / "model", family, num_hidden_layers=2)
    values = with_values(plain, tmp_path / "values", ROUNDED[method])
    assert_answers_as(served(plain, quantization=method), values, prompt)


@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("nf4", False), ("fp4", True)])
def test_a_checkpoint_of_bitsandbytes_is_served_with_its_values(tmp_path, model, prompt, kind, nested) -> None:
    pytest.importorskip("bitsandbytes")
    quantized, values = bitsandbytes_checkpoint(model, tmp_path / "quantized", kind, nested)
    llm = served(quantized)
    assert all(w.packed_OH.dtype == torch.uint8 for w in weights(llm))
    assert_answers_as(llm, values, prompt)


def test_projections_with_other_books_or_dtypes_do_not_share_a_weight(tmp_path, model) -> None:
    """A weight has one book. So q, k and v with several ones are held unquantized, with their own values."""
    pytest.importorskip("bitsandbytes")
    folder, values = bitsandbytes_checkpoint(model, tmp_path / "quantized", nested=False)
    tensors, wanted = load_file(folder / "model.safetensors"), load_file(values / "model.safetensors")
    k, v = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "kv")
    tensors[f"{k}.quant_map"] *= 0.5
    wanted[k] *= 0.5
    key = f"{v}.quant_state.bitsandbytes__nf4"
    changed = json.loads(bytes(tensors[key].tolist())) | {"dtype": "bfloat16"}
    tensors[key] = torch.tensor(list(json.dumps(changed).encode()), dtype=torch.uint8)
    wanted[v] = wanted[v].bfloat16().float()
    save_file(tensors, folder / "model.safetensors")
    decoder = DecoderModel(read_model_config(folder), TPGroup(), torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        load_weights(decoder, folder)
    held = held_tensors(decoder)
    assert all(torch.equal(held[name](), wanted[name]) for name in held if "layers.0.self_attn" in name)


def test_a_rank_reads_only_its_rows_of_bitsandbytes_codes(tmp_path, model, monkeypatch) -> None:
    pytest.importorskip("bitsandbytes")
    quantized, _ = bitsandbytes_checkpoint(model, tmp_path / "quantized")
    read: Counter[str] = Counter()
    stored = StoredTensors.stored

    class Counted:
        def __init__(self, tensor: Stored, name: str) -> None:
            self.tensor, self.name = tensor, name

        def get_shape(self) -> list[int]:
            return self.tensor.get_shape()

        def __getitem__(self, place: Any) -> torch.Tensor:
            found = self.tensor[place]
            read[self.name] += found.numel()
            return found

    monkeypatch.setattr(StoredTensors, "stored", lambda self, name: Counted(stored(self, name), name))
    loaded_rank(quantized, 1, 2)
    tensors = load_file(quantized / "model.safetensors")
    for module in ("self_attn.q_proj", "mlp.up_proj"):  # divided by rows
        name = f"model.layers.0.{module}.weight"
        assert read[name] <= tensors[name].numel() // 2 + 8, name  # and some numbers of its head


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_row", [False, True])
def test_codes_of_bitsandbytes_may_be_stored_as_any_dtype(tmp_path, model, storage, is_row) -> None:
    pytest.importorskip("bitsandbytes")
    quantized, _ = bitsandbytes_checkpoint(model, tmp_path / "quantized")
    tensors = load_file(quantized / "model.safetensors")
    wanted = held_tensors(loaded_rank(quantized, 1, 2))
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        column = tensors[name].flatten().view(storage)[:, None]
        tensors[name] = column.T.contiguous() if is_row else column
    save_file(tensors, quantized / "model.safetensors")
    held = held_tensors(loaded_rank(quantized, 1, 2))
    assert all(torch.equal(held[name](), wanted[name]()) for name in wanted)


def loaded_rank(folder: Path, rank: int, size: int) -> DecoderModel:
    engine = DecoderModel(read_model_config(folder), TPGroup(rank, size), torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        load_weights(engine, folder)
    return engine


@pytest.mark.parametrize("skipped", ["layers.1", "q_proj"])
def test_linears_that_were_skipped_stay_as_they_are(tmp_path, model, prompt, skipped) -> None:
    """q_proj alone: k and v share its linear, which then holds their values."""
    pytest.importorskip("bitsandbytes")
    quantized, values = bitsandbytes_checkpoint(model, tmp_path / "quantized", skipped=skipped)
    llm = served(quantized)
    kinds = {type(w).__name__ for w in weights(llm)}
    assert kinds == {"PlainWeight", "NF4Weight"}
    assert_answers_as(llm, values, prompt)


def test_an_fp8_checkpoint_of_llm_compressor_is_served_with_its_values(tmp_path, model, prompt) -> None:
    values = with_values(model, tmp_path / "values", ROUNDED["fp8"])
    assert_answers_as(served(compressed_checkpoint(model, tmp_path / "quantized")), values, prompt)


def test_values_were_rounded_to_the_dtype_that_was_quantized(tmp_path, prompt) -> None:
    pytest.importorskip("bitsandbytes")
    half = make_model(tmp_path / "model", "qwen3", num_hidden_layers=1, intermediate_size=128, dtype="bfloat16")
    quantized, values = bitsandbytes_checkpoint(half, tmp_path / "quantized")
    assert_answers_as(served(quantized, dtype="float32"), values, prompt)


def quantized(model: Path, folder: Path, checkpoint: str) -> tuple[Path, Path, dict[str, str]]:
    """What is served, the plain checkpoint with its values, and the engine's options."""
    if checkpoint == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
        return *bitsandbytes_checkpoint(model, folder / "quantized"), {}
    return model, with_values(model, folder / "values", ROUNDED[checkpoint]), {"quantization": checkpoint}


@pytest.mark.parametrize("checkpoint", ["bitsandbytes", "nf4", "fp8"])
def test_two_ranks_answer_as_one(tmp_path, model, prompt, checkpoint) -> None:
    folder, values, options = quantized(model, tmp_path, checkpoint)
    llm = start_llm(str(folder), 2, enable_lora=True, **options)
    try:
        assert_answers_as(llm, values, prompt)
    finally:
        llm.close()


@pytest.mark.parametrize("checkpoint", ["bitsandbytes", "nf4", "fp8"])
def test_adapters_that_need_the_bases_weights_get_the_values_that_are_served(tmp_path, model, checkpoint) -> None:
    folder, values, options = quantized(model, tmp_path, checkpoint)
    engine = served(folder, **options)._engine.runner.steps.model
    config = engine.config
    held, files = (
        ModelWeights(engine, held_tensors(engine)),
        FileWeights(folder, torch.float32, False, config.quantization),
    )
    for name, want in load_file(values / "model.safetensors").items():
        module = name.removesuffix(".weight").removeprefix("model.")
        assert torch.equal(held.weight(module), want)
        assert torch.equal(files.weight(module), want)


class TestRefusals:
    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({"quant_method": "hqq"}, "hqq"),
            ({"quant_method": "quanto"}, "quanto"),
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "stores no linear quantized"),
            ({"quant_method": "bitsandbytes"}, "load_in_8bit"),
            ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3}}}}, "num_bits"),
            ({}, None),
        ],
    )
    def test_other_checkpoints_are_refused_with_the_remedy(self, tmp_path, model, config, named) -> None:
        folder = with_config(model, tmp_path / "model", quantization_config=config)
        if named is None:
            assert read_model_config(folder).quantization is None
            return
        with pytest.raises(UnsupportedModel, match=named) as refusal:
            read_model_config(folder)
        assert "quantization=nf4" in str(refusal.value)

    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ("nf4", "Expected `object`, got `str`"),
            ({"quant_method": "fp8", "ignored_layers": "lm_head"}, r"ignored_layers"),
            ({"quant_method": "compressed-tensors", "ignore": "lm_head"}, r"\$\.ignore"),
            ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, "config_groups"),
            ({"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": "Linear"}}}, "targets"),
            ({"quant_method": "compressed-tensors", "kv_cache_scheme": [8]}, "kv_cache_scheme"),
            ({"quant_method": "gptq", "dynamic": {"+:a": None}}, "dynamic"),
            ({"quant_method": ["awq"]}, "quant_method"),
            ({"quant_method": "modelopt", "quantization": {"exclude_modules": [1]}}, "exclude_modules"),
        ],
    )
    def test_settings_of_another_type_are_refused_by_their_key(self, tmp_path, model, config, named) -> None:
        with pytest.raises(ConfigError, match=named):
            read_model_config(with_config(model, tmp_path / "model", quantization_config=config))

    def test_a_pattern_may_not_run_for_ever(self) -> None:
        patterns, slow = NamePatterns(budget_s=0.05), r"(?:a|.|..|...)*Z?(?<!oj)$"
        assert patterns.match("ignore", slow, "aaa")
        with pytest.raises(ConfigError, match=r"ignore has the pattern '\(\?:a.*backtracking"):
            patterns.match("ignore", slow, f"{'a' * 64}oj")
        with pytest.raises(ConfigError, match="backtracking"):
            patterns.match("ignore", "b", "b")  # The budget is for all patterns.

    @pytest.mark.parametrize(
        "pattern",
        [
            "(?:a{600}){600}",
            "(?:a{600,}){1200,1300}",
            f"{'(?:a|' * 17}b{')+' * 17}",
            f"{'(?:a|' * 17}b{')++' * 17}",
            "(?x)(?:a{ 600 }) {600}",
        ],
    )
    def test_a_pattern_may_not_take_all_memory(self, pattern: str) -> None:
        """Compiled, these have up to 720,000 nodes, and with one count or group more they would have thousands of
        times as many."""
        patterns = NamePatterns()
        assert patterns.match(
            "ignore", r"model\.layers\.\d{1,2}\.(?:mlp|self_attn)\.(?:\w+_)+proj", "model.layers.3.mlp.a_proj"
        )
        with pytest.raises(ConfigError, match=r"ignore has the pattern .* too much memory"):
            patterns.match("ignore", pattern, "a")

    def test_the_memory_is_for_all_patterns(self) -> None:
        patterns = NamePatterns()
        for number in range(209):
            patterns.match("ignore", f"{number:03}a{{1000}}", "a")
        with pytest.raises(ConfigError, match="too much memory"):
            patterns.match("ignore", "209a{1000}", "a")

    def test_a_count_with_too_many_digits_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no regular expression"):
            NamePatterns().match("ignore", f"a{{{'1' * 5000}}}", "a")

    def test_a_checkpoint_is_not_quantized_twice(self) -> None:
        stored = Quantization(rounding=NF4Scheme())
        assert resolved(stored, None) is resolved(stored, "nf4") is stored
        with pytest.raises(ConfigError, match="already"):
            resolved(stored, "fp8")

    @pytest.mark.parametrize("number", [float("nan"), float("-inf")])
    def test_plain_weights_without_a_value_are_not_quantized(self, tmp_path, model, number) -> None:
        folder = Path(shutil.copytree(model, tmp_path / "model"))
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][3, 5] = number
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=f"{name} contains NaN or an infinite number"):
            served(folder, quantization="fp8")

    @pytest.mark.parametrize(
        ("damage", "state"),
        [
            ("state", {}),
            ("blocksize", {"blocksize": 32}),
            ("no blocks", {"blocksize": 0}),
            ("no number", {"nested_offset": float("nan")}),
            ("negative sizes", {"shape": [-128, -64]}),
            ("deep", {}),
            ("vast state", {}),
            ("a vast block", {"blocksize": 2**60}),
            ("vast blocks of blocks", {"nested_blocksize": 2**55}),
            ("absmax", {}),
            ("nested absmax", {}),
            ("weight", {}),
            ("one number", {}),
            ("lacking", {}),
        ],
    )
    def test_damaged_checkpoints_are_refused_by_the_tensors_name(self, tmp_path, model, damage, state) -> None:
        pytest.importorskip("bitsandbytes")
        folder, _ = bitsandbytes_checkpoint(model, tmp_path / "quantized")
        name = "model.layers.1.mlp.up_proj.weight"
        tensors = load_file(folder / "model.safetensors")
        key = f"{name}.quant_state.bitsandbytes__nf4"
        changed = json.loads(bytes(tensors[key].tolist())) | state
        tensors[key] = torch.tensor(list(json.dumps(changed).encode()), dtype=torch.uint8)
        if damage == "state":
            tensors[key] = tensors[key][:-3]
        elif damage == "deep":
            tensors[key] = torch.tensor(list(b"[" * 60_000), dtype=torch.uint8)
        elif damage == "vast state":
            tensors[key] = torch.zeros(1 << 40, 0, dtype=torch.uint8)
        elif damage == "a vast block":
            tensors[f"{name}.absmax"] = tensors[f"{name}.absmax"][:1]
            tensors[f"{name}.nested_absmax"] = tensors[f"{name}.nested_absmax"][:1]
        elif damage == "vast blocks of blocks":
            tensors[f"{name}.nested_absmax"] = tensors[f"{name}.nested_absmax"][:1]
        elif damage == "absmax":
            tensors[f"{name}.absmax"] = tensors[f"{name}.absmax"][:-1]
        elif damage == "nested absmax":
            tensors[f"{name}.nested_absmax"] = tensors[f"{name}.nested_absmax"][0].clone()
        elif damage == "weight":
            tensors[name] = tensors[name][:-1]
        elif damage == "one number":
            tensors[name] = tensors[name][0, 0].clone()
        else:
            del tensors[f"{name}.quant_map"]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj"):
            served(folder)

    def test_codes_that_do_not_match_their_state_are_named_and_not_their_magnitudes(self, tmp_path, model) -> None:
        pytest.importorskip("bitsandbytes")
        folder, _ = bitsandbytes_checkpoint(model, tmp_path / "quantized")
        name = "model.layers.1.mlp.up_proj.weight"
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = tensors[name][:-1].clone()
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=f"{name}: {len(tensors[name])} bytes do not match a weight of"):
            served(folder)


def weights(llm: LLM) -> list[torch.nn.Module]:
    return [linear.weight for _, linear in llm._engine.runner.steps.model.packed_linears()]


def test_the_weights_take_the_bytes_that_the_method_promises(model) -> None:
    sizes = {
        method: sum(p.nbytes for w in weights(served(model, quantization=method)) for p in w.parameters())
        for method in (None, "fp8", "nf4")
    }
    assert sizes["fp8"] < sizes[None] / 3.7  # of float32
    assert sizes["nf4"] < sizes[None] / 5


def exact_fp8_linear(weight: ScaledWeight, x_TD: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """In float32: what the kernels round, and nothing else."""
    if weight.rounds(len(x_TD)):
        by_kernel = len(x_TD) <= weight.pair_tokens
        x_TD = joined(split_pairs(x_TD, rounds_x=True)) if by_kernel else quantize_rows(x_TD)[...]
    values_OD = weight.code_OD.float() * weight.scale_OG
    return F.linear(x_TD.float(), values_OD, None if bias_O is None else bias_O.float()).to(weight.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_a_gpu_answers_as_over_the_plain_values(tmp_path, prompt, monkeypatch, method) -> None:
    """In bf16, by captured graphs and prompts of all lengths. fp8 rounds the activations of longer steps too: how far
    that alone leads off is told by the same engine with linears in float32. The two are not nearer to each other than
    to the plain values, since a token's scale follows one number of it, and all others are rounded anew."""
    options = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    plain = make_model(tmp_path / "model", "qwen3", dtype="bfloat16", initializer_range=0.05, **options)
    params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, logprobs=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt(n)} for n in (3, 14, 40, 300)]

    def logprobs(folder: Path, quantization: str | None) -> torch.Tensor:
        llm = LLM(str(folder), kv_cache_tokens=4096, max_num_seqs=8, quantization=quantization)
        outputs = llm.generate(prompts, params)
        llm.close()
        return torch.tensor([p.logprob for output in outputs for p in output.prompt_logprobs[1:]])

    found = logprobs(plain, method)
    expected = logprobs(with_values(plain, tmp_path / "values", ROUNDED[method]), None)
    error = (found - expected).abs().mean()
    if method == "nf4":
        assert error < 0.02
        return
    monkeypatch.setattr(ScaledWeight, "linear", exact_fp8_linear)
    error_of_rounding = (logprobs(plain, method) - expected).abs().mean()
    assert 0.02 < error_of_rounding < 0.1
    assert error < 1.2 * error_of_rounding
