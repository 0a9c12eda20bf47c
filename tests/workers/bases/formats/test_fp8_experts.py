"""Mixtures that transformers quantizes to FP8 and saves, against plain checkpoints with their values.

transformers decodes experts that it reads one by one. Those that are stacked keep their codes as values on a CPU, so
that it cannot be the reference itself.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from family_cases import CASES, make_case
from float_checkpoints import float_checkpoint
from lorafleet.kernels.moe.expert_codes import ExpertCodes
from lorafleet.offline.llm import LoRARequest, SamplingParams
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.base_weights import FileWeights
from lorafleet.workers.tp.group import TPGroup
from quantized_answers import served
from ranks import start_llm
from tiny_models import Reference, make_layered_adapter, make_model

WEIGHTS = "model.safetensors"
EXPERTS = "model.layers.0.mlp.experts"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
Damage = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def save_fp8(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Returns a function that saves a checkpoint as transformers quantizes it, which it does on GPUs alone."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)

    def save(
        plain: Path, folder: Path, block: tuple[int, int], in_original_format: bool, scales: str = "float"
    ) -> Path:
        config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scales)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.float32)
        shutil.copytree(plain, folder)
        model.save_pretrained(folder, save_original_format=in_original_format)
        return folder

    return save


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 16 x 16 hold rows of both gate and up, and do not divide the inputs of down."""
    options = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return make_model(tmp_path_factory.mktemp("plain") / "model", "qwen3_moe", num_hidden_layers=2, **options)


def with_values(folder: Path, values: Path) -> Path:
    """Writes the plain checkpoint of the values. Blocks divide every quantized matrix."""
    shutil.copytree(folder, values)
    tensors = load_file(folder / WEIGHTS)
    found: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        found[name] = stored
        if stored.dtype == torch.float8_e4m3fn:
            scale = tensors[f"{name}_scale_inv"].float()
            rows, columns = (size // blocks for size, blocks in zip(stored.shape[-2:], scale.shape[-2:], strict=True))
            whole = scale.repeat_interleave(rows, dim=-2).repeat_interleave(columns, dim=-1)
            found[name] = stored.float() * whole
    save_file(found, values / WEIGHTS, {"format": "pt"})
    set_quantization(values, None)
    return values


def set_quantization(folder: Path, settings: dict[str, object] | None) -> None:
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("quantization_config")
    changed = {} if settings is None else {"quantization_config": own | settings}
    (folder / "config.json").write_text(json.dumps(config | changed))


def loaded(folder: Path, rank: int = 0, size: int = 1) -> DecoderModel:
    model = DecoderModel(read_model_config(folder), TPGroup(rank, size), torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        load_weights(model, folder)
    return model


def assert_holds(folder: Path, values: Path) -> None:
    """Compares what the ranks hold with what they hold of the values."""
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        quantized = loaded(folder, rank, size)
        held, wanted = held_tensors(quantized), held_tensors(loaded(values, rank, size))
        assert all(isinstance(own.gate_up_EUD, ExpertCodes) for _, own in quantized.mixtures())
        assert all(torch.equal(held[name](), wanted[name]()) for name in wanted)


@pytest.mark.parametrize("scales", ["float", "ue8m0"])
def test_stacked_experts_have_the_files_values(tmp_path, plain, save_fp8, scales) -> None:
    folder = save_fp8(plain, tmp_path / "fp8", (16, 16), False, scales)
    stored = load_file(folder / WEIGHTS)
    assert stored[f"{EXPERTS}.gate_up_proj"].dtype == torch.float8_e4m3fn
    assert stored[f"{EXPERTS}.gate_up_proj_scale_inv"].shape == (3, 3, 4)
    assert stored[f"{EXPERTS}.down_proj"].dtype == torch.float32  # 24 columns
    values = with_values(folder, tmp_path / "values")
    assert_holds(folder, values)
    files = FileWeights(folder, torch.float32, False, read_model_config(folder).quantization)
    up = load_file(values / WEIGHTS)[f"{EXPERTS}.gate_up_proj"][2, 24:]
    assert torch.equal(files.weight(f"{EXPERTS.removeprefix('model.')}.2.up_proj"), up)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma4_experts", "granite_moe", "glm4_moe"])
@pytest.mark.parametrize("in_original_format", [False, True])
def test_families_are_read_as_transformers_saves_them(tmp_path, save_fp8, family, in_original_format) -> None:
    """Granite keeps the names that its experts were released with, but not those of their scales. Blocks divide Gemma's
    router, but not the gate of Qwen's shared expert."""
    case = CASES[family]
    options = case.options | ({"num_experts": 8} if family == "gemma4_experts" else {})
    base = make_case(tmp_path / "plain", type(case)(case.name, options))
    values = with_values(save_fp8(base, tmp_path / "stacked", (8, 8), False), tmp_path / "values")
    assert_holds(save_fp8(base, tmp_path / "fp8", (8, 8), in_original_format), values)


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacks experts as transformers does when it reads those of a checkpoint that has them one by one."""
    found, of_experts = {}, {name: tensor for name, tensor in tensors.items() if name.startswith(EXPERTS)}
    for leaf, end in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
        gate, up, down = (
            torch.stack([of_experts[f"{EXPERTS}.{expert}.{name}_proj.{leaf}"] for expert in range(3)])
            for name in ("gate", "up", "down")
        )
        found |= {f"{EXPERTS}.gate_up_proj{end}": torch.cat([gate, up], dim=1), f"{EXPERTS}.down_proj{end}": down}
    return {name: tensor for name, tensor in tensors.items() if name not in of_experts} | found


@pytest.fixture
def of_singles(tmp_path: Path, plain: Path) -> tuple[Path, Path]:
    """Returns a checkpoint whose last block of each gate and up is smaller, and the plain one of its values."""
    folder, values = float_checkpoint(plain, tmp_path / "singles", "fp8, blocks")
    save_file(stacked(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})
    return folder, values


def test_gate_and_up_may_have_blocks_of_their_own(of_singles) -> None:
    assert_holds(*of_singles)


def test_one_scale_for_each_matrix_or_each_of_its_halves(tmp_path, of_singles) -> None:
    """A static scale of activations is not needed, and not read."""
    folder, _ = of_singles
    tensors = load_file(folder / WEIGHTS)
    name = f"{EXPERTS}.gate_up_proj"
    for count in (1, 2):
        scale = torch.rand(3, count, 1, generator=torch.Generator().manual_seed(count)) + 0.5
        own = {f"{name}_scale_inv": scale, f"{name}_activation_scale": torch.ones(3)}
        down = {f"{EXPERTS}.down_proj_scale_inv": torch.ones(3, 1, 1)}
        linears = [n for n in tensors if n.endswith("proj.weight_scale_inv")]
        whole = tensors | own | down | {n: torch.tensor([0.5]) for n in linears}
        other = Path(shutil.copytree(folder, tmp_path / f"whole-{count}"))
        save_file(whole, other / WEIGHTS, {"format": "pt"})
        set_quantization(other, {"weight_block_size": None, "activation_scheme": "static"})
        rows = tensors[name].float() * scale.repeat_interleave(48 // count, dim=1)
        held = held_tensors(loaded(other))
        for expert in range(3):
            assert torch.equal(held[f"{EXPERTS}.{expert}.gate_proj.weight"](), rows[expert, :24])
            assert torch.equal(held[f"{EXPERTS}.{expert}.up_proj.weight"](), rows[expert, 24:])


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_with_adapters_on_experts_are_those_of_transformers(tmp_path, plain, save_fp8, prompt, ranks) -> None:
    folder = save_fp8(plain, tmp_path / "fp8", (8, 8), False)
    values = with_values(folder, tmp_path / "values")
    adapter = make_layered_adapter(tmp_path / "adapter", values)
    jobs = [(prompt(n), lora) for n in (3, 20) for lora in (None, LoRARequest("a", 1, str(adapter)))]
    found = []
    for base, size in ((folder, ranks), (values, 1)):
        llm = start_llm(str(base), size, enable_lora=True) if size > 1 else served(base)
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        found.append([out.outputs[0] for out in llm.generate(prompts, GREEDY, lora_request=[lora for _, lora in jobs])])
        llm.close()
    of_transformers = Reference(values)
    for (ids, lora), quantized, of_values in zip(jobs, *found, strict=True):
        assert quantized.token_ids == of_values.token_ids
        logprobs = [p.logprob for p in quantized.logprobs]
        assert logprobs == pytest.approx([p.logprob for p in of_values.logprobs], abs=1e-5)
        if lora is None:
            expected = of_transformers.greedy(ids, GREEDY.max_tokens)
            assert quantized.token_ids == expected.tokens
            assert logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def changed(leaf: str, change: Callable[[Tensor], Tensor]) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERTS}.{leaf}"] = change(tensors[f"{EXPERTS}.{leaf}"]).contiguous()

    return damage


def single_beside(tensors: dict[str, Tensor]) -> None:
    name = f"{EXPERTS}.1.up_proj.weight"
    tensors |= {name: tensors[f"{EXPERTS}.gate_up_proj"][1, 24:].clone(), f"{name}_scale_inv": torch.ones(1, 2)}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}.gate_up_proj_scale_inv"), "gate_up_proj is stored as F8_E4M3 without a scale"),
        (lambda t: t.pop(f"{EXPERTS}.down_proj"), "experts.down_proj is missing"),
        (changed("gate_up_proj", lambda t: t[:, :-1]), r"gate_up_proj has shape \[3, 47, 64\]"),
        (changed("gate_up_proj", lambda t: t[0]), "instead of 3 dimensions"),
        (changed("gate_up_proj", lambda _: torch.zeros(1 << 20, 48, 0)), "at most 16,384"),
        (changed("gate_up_proj", lambda t: t[:, :-2]), r"has shape \[23, 64\]; config.json requires \[24, 64\]"),
        (changed("gate_up_proj", lambda t: t.transpose(1, 2)), "one scale for each 24 rows of 64 requires 3"),
        (changed("gate_up_proj", lambda t: t.view(torch.uint8) | 127), "stored as torch.uint8"),
        (changed("gate_up_proj", lambda t: (t.view(torch.uint8) | 127).view(t.dtype)), "contains NaN"),
        (changed("gate_up_proj_scale_inv", lambda t: t * torch.nan), "negative, infinite or NaN"),
        (changed("gate_up_proj_scale_inv", lambda t: t[:2]), r"gate_up_proj_scale_inv has shape \[2, 2, 2\]"),
        (changed("gate_up_proj_scale_inv", lambda t: t[..., :1]), "one scale for each 24 x 48"),
        (changed("gate_up_proj_scale_inv", lambda _: torch.zeros(1 << 20, 6, 0)), "at most 16,384"),
        (changed("down_proj_scale_inv", lambda t: t[:, :1]), "one scale for each 24 rows of 64 requires 3"),
        (changed("down_proj", lambda t: t[:2]), r"experts\.2\.down_proj unquantized"),
        (single_beside, "up_proj is stored alone and with all experts"),
    ],
)
def test_damaged_experts_are_refused_by_their_cause(of_singles, damage: Damage, message: str) -> None:
    folder, _ = of_singles
    tensors = load_file(folder / WEIGHTS)
    damage(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        loaded(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}.1.up_proj.weight"), "experts.gate_up_proj is missing"),
        (lambda t: t.pop(f"{EXPERTS}.gate_up_proj_scale_inv"), "gate_proj.weight is stored as F8_E4M3 without a scale"),
        (changed("1.up_proj.weight", lambda t: t[0, 0]), "instead of two dimensions"),
        (changed("1.up_proj.weight", lambda t: t[:-8]), "one scale for each 8 rows of 32 requires 4"),
        (changed("gate_up_proj_scale_inv", lambda t: t[:2]), "unquantized"),
        (lambda t: t.update({f"{EXPERTS}.1.up_proj.weight_scale_inv": torch.ones(3, 8)}), "stored alone and with all"),
        (lambda t: t.update({f"{EXPERTS}.gate_up_proj": torch.ones(3, 48, 64)}), "stored alone and with all"),
    ],
)
def test_damaged_experts_with_stacked_scales_are_refused(tmp_path, plain, save_fp8, damage: Damage, message) -> None:
    folder = save_fp8(plain, tmp_path / "fp8", (8, 8), True)
    tensors = load_file(folder / WEIGHTS)
    damage(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        loaded(folder)


def test_experts_that_config_json_calls_plain_must_be_plain(of_singles) -> None:
    folder, _ = of_singles
    set_quantization(folder, {"modules_to_not_convert": ["model.layers.0.mlp"]})
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.experts is stored quantized"):
        read_model_config(folder)
