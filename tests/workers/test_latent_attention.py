"""What tests/workers/test_families.py does not show of latent attention: adapters in the layout of transformers 4,
other kinds of adapters on the absorbed kv_b_proj, what is refused on it, and layers for further tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import AdapterUnsupported, ConfigError
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.reader import read_adapter
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.kv_cache_sizing import allocate_caches, bytes_per_token
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from tiny_models import Reference

CPU = torch.device("cpu")
NEW_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
CASE = CASES["deepseek_v3"]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("latent") / "base", CASE)


def assert_answers(
    base: Path, adapters: Mapping[str, Path], references: Mapping[str, tuple[Reference, Path | None]], prompt: Any
) -> None:
    """Compares the adapters and the base, all in one batch, with each one's reference."""
    llm = LLM(str(base), enable_lora=True, max_loras=4, max_num_batched_tokens=32, max_num_seqs=8, kv_cache_tokens=2048)
    names = [*adapters, ""]
    requests = [LoRARequest(name, i + 1, str(adapters[name])) if name else None for i, name in enumerate(names)]
    ids = prompt(37)
    outputs = llm.generate([{"prompt_token_ids": ids}] * len(names), PARAMS, lora_request=requests)
    for name, output in zip(names, outputs, strict=True):
        reference, adapter = references[name]
        [completion] = output.outputs
        expected = reference.greedy(ids, NEW_TOKENS, adapter, likely=completion.token_ids)
        assert completion.token_ids == expected.tokens, name
        assert [p.logprob for p in completion.logprobs] == pytest.approx(expected.logprobs, abs=1e-3), name


def peft_adapter(folder: Path, base: Path, config: peft.PeftConfig) -> Path:
    """Saves a PEFT adapter with random numbers."""
    wrapped = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    torch.manual_seed(3)
    for _, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, mean=float(parameter.ndim == 2 and 1 in parameter.shape), std=0.2)
    wrapped.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning")  # of lora_bias, which is meant
def test_kinds_of_adapters_on_the_absorbed_linear_answer_as_peft_does(base: Path, tmp_path: Path, prompt: Any) -> None:
    both = ["kv_b_proj", "o_proj"]
    adapters = {
        "ia3": peft_adapter(tmp_path / "ia3", base, peft.IA3Config(target_modules=both, feedforward_modules=[])),
        "bias": peft_adapter(tmp_path / "bias", base, peft.LoraConfig(r=2, target_modules=both, lora_bias=True)),
        "norms": make_case_adapter(
            tmp_path / "norms", base, CASE, modules_to_save=["kv_a_layernorm", "q_a_layernorm"], r=20
        ),
    }
    reference = Reference(base)
    assert_answers(base, adapters, {name: (reference, adapters.get(name)) for name in (*adapters, "")}, prompt)


def test_adapters_of_transformers_4_change_all_linears(base: Path, tmp_path: Path, prompt: Any) -> None:
    """PEFT on transformers 5 drops LoRA on dense and shared experts' linears, so the reference is a merged base."""
    tensors: dict[str, Tensor] = {}
    generator, weights = torch.Generator().manual_seed(4), load_file(base / WEIGHTS)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and "_proj" in module:
            a = 0.15 * torch.randn(3, weight.shape[1], generator=generator)
            b = 0.15 * torch.randn(weight.shape[0], 3, generator=generator)
            weights[name] = weight + 2.0 * b @ a
            prefix = f"base_model.model.{module}"
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
    merged = Path(shutil.copytree(base, tmp_path / "merged"))
    save_file(weights, merged / WEIGHTS, {"format": "pt"})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    leaves = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": leaves}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    references = {"all": (Reference(merged), None), "": (Reference(base), None)}
    assert_answers(base, {"all": adapter}, references, prompt)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            peft.LoraConfig(
                r=2, target_modules=["q_b_proj", "kv_b_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM"
            ),
            r"activated LoRA .* on layers\.0\.self_attn\.kv_b_proj is not supported",
        ),
        (
            peft.LoKrConfig(r=8, target_modules=["kv_b_proj"]),
            r"LoKr on layers\.[01]\.self_attn\.kv_b_proj is not supported with a rank over",
        ),
    ],
)
def test_what_heads_cannot_take_apart_is_refused(
    base: Path, tmp_path: Path, config: peft.PeftConfig, message: str
) -> None:
    adapter = peft_adapter(tmp_path / "adapter", base, config)
    layout = Base(BaseLayout.of(read_model_config(base)))
    with pytest.raises(AdapterUnsupported, match=message):
        read_adapter(adapter, base=layout, max_rank=2, dtype=torch.float32, name="a")


def test_layers_for_further_tokens_are_not_read(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    weights = load_file(folder / WEIGHTS)
    draft = {"model.layers.2.eh_proj.weight": torch.ones(2, 2), "model.layers.2.self_attn.o_proj.weight": torch.ones(3)}
    save_file(weights | draft, folder / WEIGHTS)
    model = DecoderModel(read_model_config(folder), TPGroup(), torch.float32, CPU)
    load_weights(model, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"model\.layers\.2"):
        load_weights(DecoderModel(read_model_config(folder), TPGroup(), torch.float32, CPU), folder)


def test_the_cache_holds_one_latent_vector_and_one_key_a_token(base: Path) -> None:
    config = read_model_config(base)
    spec = attention_spec(config, 16, torch.float32, torch.float32, CPU, {})
    assert bytes_per_token(spec) == 4 * 2 * (24 + 8)
    cache = allocate_caches(EngineConfig(str(base), block_size=16), config, spec, 3)[0]
    assert cache.v_NPGD.untyped_storage().data_ptr() == cache.k_NPGD.untyped_storage().data_ptr()
    assert cache.k_NPGD.shape == (3, 16, 1, 32) and cache.v_NPGD.shape == (3, 16, 1, 24)
