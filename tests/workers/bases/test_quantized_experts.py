"""Quantized experts from checkpoints of each format and by the server's option, against plain checkpoints with their
values: what ranks hold, and what they answer with adapters on the experts."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import float_checkpoints
import int_checkpoints
from family_cases import CASES as FAMILY_CASES
from family_cases import make_case
from float_checkpoints import FORMS, float_checkpoint, mxfp4
from int_checkpoints import awq, compressed, gptq
from lorafleet.kernels.moe.expert_codes import ExpertCodes
from lorafleet.kernels.quant.base_weight import PlainWeight
from lorafleet.offline.llm import LoRARequest, SamplingParams
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.quantization import METHODS, resolved, stored_quantization
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.slots.base_weights import FileWeights
from lorafleet.workers.tp.group import TPGroup
from quantized_answers import served
from quantized_models import ROUNDED, with_values, written
from ranks import start_llm
from tests.workers.models.test_moe_adapters import adapted, make_adapter
from tests.workers.models.test_moe_families import FAMILIES, HIDDEN, Family, checkpoint, output, reference
from tiny_models import Reference, make_layered_adapter, make_model, stack_experts

WEIGHTS = "model.safetensors"
EXPERT = "model.layers.0.mlp.experts.1.up_proj"
CASES = {
    "gptq": gptq(),
    "gptq-desc-act": gptq(symmetric=False, ordered=True),
    "awq": awq(),
    "awq-dynamic": awq(
        config={"dynamic": {r".*experts\.1\.": {"bits": 8}}}, other={r"experts\.1\.": {"bits": 8}}, plain="o_proj"
    ),
    "compressed-asymmetric": compressed(),
    "compressed-mixed": compressed(other={"gate_proj": {"bits": 8, "group": -1}}),
    "plain experts": gptq(plain="experts"),
    "plain linears": gptq(plain=r"self_attn|layers\.1"),
}
MAKERS: dict[str, Callable[[Path, Path], tuple[Path, Path]]] = {
    **{form: functools.partial(float_checkpoint, form=form) for form in FORMS},
    **{name: functools.partial(int_checkpoints.written, case=case) for name, case in CASES.items()},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 1 is dense."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    options = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return make_model(folder, "qwen3_moe", num_hidden_layers=2, **options)


def loaded(folder: Path, rank: int = 0, size: int = 1, config: ModelConfig | None = None) -> DecoderModel:
    config = read_model_config(folder) if config is None else config
    model = DecoderModel(config, TPGroup(rank, size), torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        load_weights(model, folder)
    return model


def mixture(model: DecoderModel) -> SparseMLP:
    [(_, found)] = model.mixtures()
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_every_rank_holds_the_files_values(tmp_path, model, name) -> None:
    folder, values = MAKERS[name](model, tmp_path / "quantized")
    files = FileWeights(folder, torch.float32, False, read_model_config(folder).quantization)
    assert torch.equal(
        files.weight(EXPERT.removeprefix("model.")), load_file(values / WEIGHTS)[f"{EXPERT}.weight"].float()
    )
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        quantized, plain = loaded(folder, rank, size), loaded(values, rank, size)
        own = mixture(quantized)
        assert {isinstance(w, ExpertCodes) for w in (own.gate_up_EUD, own.down_EDI)} == {name != "plain experts"}
        kinds = {type(linear.weight) for names, linear in quantized.packed_linears() if "mlp.gate" not in names[0]}
        assert (kinds == {PlainWeight}) == (name == "plain linears")
        held, wanted = held_tensors(quantized), held_tensors(plain)
        assert all(torch.equal(held[tensor](), wanted[tensor]()) for tensor in wanted)


@pytest.mark.parametrize("method", METHODS)
def test_plain_experts_are_quantized_as_they_are_read(tmp_path, model, method) -> None:
    """From both layouts, so that no rank's part changes the blocks. Routers stay plain."""
    rounded = ROUNDED.get(method, lambda w: METHODS["int4"].quantize(w)[...].to(w.dtype))
    values = with_values(model, tmp_path / "values", rounded)
    stacked = stack_experts(Path(shutil.copytree(model, tmp_path / "stacked")))
    for folder in (model, stacked):
        config = read_model_config(folder)
        config = replace(config, quantization=resolved(config.quantization, method))
        for rank, size in ((0, 1), (1, 2)):
            held = held_tensors(loaded(folder, rank, size, config))
            wanted = held_tensors(loaded(values, rank, size))
            assert held.keys() == wanted.keys()
            assert all(torch.equal(held[name](), wanted[name]()) for name in wanted)
    own = mixture(loaded(model, config=config))
    plain = mixture(loaded(model))
    sizes = [sum(p.nbytes for n, p in m.named_parameters() if n.startswith(("gate_up", "down"))) for m in (own, plain)]
    assert sizes[0] < sizes[1] / 3.5  # of float32
    assert isinstance(own.gate.weight, PlainWeight)


@pytest.mark.parametrize(("name", "ranks"), [("fp8, blocks", 2), ("gptq-desc-act", 1)])
def test_answers_with_adapters_on_experts_are_those_of_the_values(tmp_path, model, prompt, name, ranks) -> None:
    folder, values = MAKERS[name](model, tmp_path / "quantized")
    adapter = make_layered_adapter(tmp_path / "adapter", values)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
    jobs = [(prompt(n), lora) for n in (3, 20) for lora in (None, LoRARequest("a", 1, str(adapter)))]
    found = []
    for base, size in ((folder, ranks), (values, 1)):
        llm = start_llm(str(base), size, enable_lora=True) if size > 1 else served(base)
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        found.append([out.outputs[0] for out in llm.generate(prompts, greedy, lora_request=[lora for _, lora in jobs])])
        llm.close()
    of_transformers = Reference(values)
    for (ids, lora), quantized, plain in zip(jobs, *found, strict=True):
        assert quantized.token_ids == plain.token_ids
        logprobs = [p.logprob for p in quantized.logprobs]
        assert logprobs == pytest.approx([p.logprob for p in plain.logprobs], abs=1e-5)
        if lora is None:
            expected = of_transformers.greedy(ids, greedy.max_tokens)
            assert quantized.token_ids == expected.tokens
            assert logprobs == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2"])
def test_families_with_names_of_their_own_are_read_as_released(tmp_path, monkeypatch, family) -> None:
    """In blocks of FP8: w1, w2 and w3 of MiniMax, and DeepSeek's latent attention and shared experts."""
    ends = "_proj.weight", "_proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight"
    monkeypatch.setattr(float_checkpoints, "is_linear", lambda name: name.endswith(ends))
    plain = make_case(tmp_path / "plain", FAMILY_CASES[family])
    folder, values = float_checkpoint(plain, tmp_path / "quantized", "fp8, blocks")
    for rank, size in ((0, 1), (1, 2)):
        quantized, wanted = loaded(folder, rank, size), held_tensors(loaded(values, rank, size))
        assert all(isinstance(own.down_EDI, ExpertCodes) for _, own in quantized.mixtures())
        held = held_tensors(quantized)
        assert all(torch.equal(held[tensor](), wanted[tensor]()) for tensor in wanted)


class TestGPTOSS:
    INNER = 64

    @pytest.fixture(scope="class")
    def dense(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_model(tmp_path_factory.mktemp("moe") / "dense", "qwen3", num_hidden_layers=1)

    def family(self) -> Family:
        found = FAMILIES["gpt-oss"]
        options = found.options | {"intermediate_size": self.INNER}
        return replace(found, options=options, experts=replace(found.experts, intermediate_size=self.INNER))

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """Quantizes the experts, gives the module their values, and returns the checkpoint's tensors."""
        found = dict(module.state_dict())
        for leaf in ("gate_up_proj", "down_proj"):
            packed = [mxfp4(matrix.T.contiguous()) for matrix in found.pop(f"experts.{leaf}")]
            getattr(module.experts, leaf).data.copy_(torch.stack([values.T for _, values in packed]))
            blocks = torch.stack([own["weight_packed"] for own, _ in packed])
            found[f"experts.{leaf}_blocks"] = blocks.unflatten(-1, (-1, 16))
            found[f"experts.{leaf}_scales"] = torch.stack([own["weight_scale"] for own, _ in packed])
        return found

    def config(self, folder: Path, dense: Path, tensors: dict[str, Tensor], **settings: object) -> ModelConfig:
        config = checkpoint(folder, dense, self.family(), tensors)
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        return replace(config, quantization=stored_quantization(quantization | settings, folder))

    @torch.no_grad()
    @pytest.mark.filterwarnings("ignore")  # PEFT does not know the model around the mixture.
    def test_experts_in_mxfp4_equal_transformers_over_their_values(self, tmp_path, dense) -> None:
        module = reference(self.family())
        config = self.config(tmp_path / "a", dense, self.tensors(module))
        x_TD = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
        expected = module(x_TD.unsqueeze(0))[0].view_as(x_TD)
        close = functools.partial(torch.testing.assert_close, atol=2e-5 * expected.abs().max().item(), rtol=1e-5)
        assert isinstance(mixture(loaded(tmp_path / "a", config=config)).down_EDI, ExpertCodes)
        own = make_adapter(tmp_path / "adapter", module, "gpt-oss", x_TD)
        assert (own - expected).abs().max() > 0.1 * expected.abs().max()
        for ranks in (1, 2, 4):  # four ranks have half a group of columns each
            close(output(config, tmp_path / "a", x_TD, ranks), expected)
        expected[::2] = own[::2]
        for ranks in (1, 2):
            close(adapted(config, tmp_path / "a", tmp_path / "adapter", x_TD, ranks), expected)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            ("fewer scales", r"gate_up_proj_blocks has shape \[8, 128, 2, 16\] and .*_scales \[8, 128, 1\]"),
            ("fewer experts", "lacks 8 tensors"),
            ("dtype", r"down_proj_blocks is stored as torch\.int16"),
            ("excluded", "stored quantized, but quantization_config says by 'model.layers.0.mlp'"),
        ],
    )
    def test_damaged_experts_are_refused_by_name(self, tmp_path, dense, damage, message) -> None:
        tensors = self.tensors(reference(self.family()))
        up, down = "experts.gate_up_proj", "experts.down_proj"
        settings = {}
        if damage == "fewer scales":
            tensors[f"{up}_scales"] = tensors[f"{up}_scales"][:, :, :1]
        elif damage == "fewer experts":
            tensors |= {f"{down}_{kind}": tensors[f"{down}_{kind}"][:0] for kind in ("blocks", "scales")}
        elif damage == "dtype":
            tensors[f"{down}_blocks"] = tensors[f"{down}_blocks"].short()
        else:
            settings = {"modules_to_not_convert": ["model.layers.0.mlp"]}
        with pytest.raises(ConfigError, match=message):
            loaded(tmp_path / "a", config=self.config(tmp_path / "a", dense, tensors, **settings))


def test_a_router_that_is_stored_quantized_is_held_with_its_values(tmp_path, model) -> None:
    values: dict[str, Tensor] = {}

    def entries(name: str, weight: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("_proj.weight", "mlp.gate.weight")):
            return {name: weight}
        packed, values[name] = float_checkpoints.scaled(weight, tuple(weight.shape), torch.float8_e4m3fn)
        return {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in packed.items()}

    folder = written(model, tmp_path / "quantized", entries, {"quantization_config": {"quant_method": "fp8"}})
    engine = loaded(folder)
    name = "model.layers.0.mlp.gate.weight"
    assert isinstance(mixture(engine).gate.weight, PlainWeight)
    assert torch.equal(held_tensors(engine)[name](), values[name])
    files = FileWeights(folder, torch.float32, False, engine.config.quantization)
    assert torch.equal(files.weight("layers.0.mlp.gate"), values[name])


def test_quantized_layers_that_predict_further_tokens_are_not_read(tmp_path, model) -> None:
    folder, _ = float_checkpoint(model, tmp_path / "quantized", "fp8, blocks")
    tensors = load_file(folder / WEIGHTS)
    further = {name.replace("layers.0", "layers.2"): tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors | further, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"layers\.2\."):
        loaded(folder)
    unread, settings = ("model.layers.2.",), json.loads((folder / "config.json").read_text())["quantization_config"]
    quantization = stored_quantization(settings, folder, unread=unread)
    config = replace(read_model_config(folder), mtp_names=unread, quantization=quantization)
    assert mixture(loaded(folder, config=config)) is not None


@pytest.mark.parametrize("damage", ["no scale", "NaN", "shape", "plain", "beside", "unknown"])
def test_damaged_experts_are_refused_by_the_tensors_name(tmp_path, model, damage) -> None:
    folder, values = float_checkpoint(model, tmp_path / "quantized", "fp8, blocks")
    tensors, plain = load_file(folder / WEIGHTS), load_file(values / WEIGHTS)
    code, scale = f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv"
    error, message = ConfigError, EXPERT
    if damage in ("no scale", "plain"):  # Blocks do not divide the matrix, so that it may be plain.
        tensors |= {code: plain[code]} if damage == "plain" else {}
        if damage == "no scale":
            del tensors[scale]
        error, message = UnsupportedModel, r"experts\.0\.gate_proj is stored as .*experts\.1\.up_proj unquantized"
    elif damage == "NaN":
        tensors[scale][0, 0] = torch.nan
    elif damage == "shape":
        tensors[code] = tensors[code][:-24]
    elif damage == "beside":
        tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(3, 128, 64)
        message = "experts.gate_up_proj' beside its quantized form"
    else:
        tensors |= {name.replace("experts.1", "experts.7"): tensors[name].clone() for name in (code, scale)}
        message = r"experts\.7\.up_proj"
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(error, match=message):
        loaded(folder)
