"""A layer's mixture of experts against transformers' own module, whose tensors are in the loaded checkpoint."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lorafleet.kernels.moe.expert_activation import ClampedSwiGLU
from lorafleet.kernels.moe.routing_rule import ExpertGroups
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.experts_config import ExpertsConfig, SharedExpertConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from tiny_models import make_model

HIDDEN, EXPERTS, INNER = 64, 8, 24
LAYERS = frozenset({0})


@dataclass(frozen=True)
class Family:
    model: str  # transformers' package
    module: str  # its class of a layer's mixture
    config: str
    options: dict[str, Any]
    experts: ExpertsConfig


def experts(per_token: int, sums_to_one: bool, **options: Any) -> ExpertsConfig:
    return ExpertsConfig(EXPERTS, per_token, INNER, sums_to_one, LAYERS, **options)


CORRECTED = {"scores": "sigmoid", "correction_name": "gate.e_score_correction_bias", "router_float32": True}
DEEPSEEK = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": INNER,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
FAMILIES = {
    "gpt-oss": Family(
        "gpt_oss",
        "GptOssMLP",
        "GptOssConfig",
        {"intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 3},
        experts(
            3,
            True,
            router_bias=True,
            router_name="router",
            activation=ClampedSwiGLU(),
            biases=True,
            transposed=True,
            interleaved=True,
        ),
    ),
    "deepseek v3": Family(
        "deepseek_v3",
        "DeepseekV3MoE",
        "DeepseekV3Config",
        DEEPSEEK | {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
        experts(
            3,
            True,
            **CORRECTED,
            groups=ExpertGroups(4, 2, "top_two"),
            scaling=2.5,
            shared=SharedExpertConfig(2 * INNER),
        ),
    ),
    "deepseek v2": Family(
        "deepseek_v2",
        "DeepseekV2Moe",
        "DeepseekV2Config",
        DEEPSEEK | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        experts(
            3,
            False,
            groups=ExpertGroups(4, 2, "max"),
            scaling=16.0,
            router_float32=True,
            shared=SharedExpertConfig(2 * INNER),
        ),
    ),
    "glm 4.5": Family(
        "glm4_moe",
        "Glm4MoeMoE",
        "Glm4MoeConfig",
        DEEPSEEK | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": False},
        experts(3, False, **CORRECTED, shared=SharedExpertConfig(INNER)),
    ),
    "llama 4": Family(
        "llama4",
        "Llama4TextMoe",
        "Llama4TextConfig",
        {"intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 1},
        experts(
            1,
            False,
            scores="sigmoid",
            scales_input=True,
            router_name="router",
            transposed=True,
            adapters_swapped=True,
            shared=SharedExpertConfig(INNER, "shared_expert"),
        ),
    ),
    "qwen 2": Family(
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        "Qwen2MoeConfig",
        {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "num_experts_per_tok": 3}
        | {"shared_expert_intermediate_size": 40},
        experts(3, False, shared=SharedExpertConfig(40, "shared_expert", gate_name="shared_expert_gate")),
    ),
    "nemotron h": Family(
        "nemotron_h",
        "NemotronHMoE",
        "NemotronHConfig",
        DEEPSEEK | {"moe_shared_expert_intermediate_size": 40, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        experts(
            3,
            True,
            **CORRECTED,
            groups=ExpertGroups(4, 2, "top_two"),
            scaling=2.5,
            activation="relu2",
            shared=SharedExpertConfig(40),
        ),
    ),
    "minimax m2": Family(
        "minimax_m2",
        "MiniMaxM2SparseMoeBlock",
        "MiniMaxM2Config",
        {"intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 3},
        experts(3, True, scores="sigmoid", correction_name="e_score_correction_bias"),
    ),
    "ernie 4.5": Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeSparseMoeBlock",
        "Ernie4_5_MoeConfig",
        {"moe_intermediate_size": INNER, "moe_num_experts": EXPERTS, "moe_k": 3, "moe_num_shared_experts": 1},
        experts(
            3,
            True,
            correction_name="gate.moe_statics.e_score_correction_bias",
            router_float32=True,
            shared=SharedExpertConfig(INNER),
        ),
    ),
    "hunyuan": Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1Moe",
        "HunYuanMoEV1Config",
        {"intermediate_size": INNER, "num_experts": EXPERTS, "moe_topk": 3, "num_shared_expert": 1},
        experts(3, True, router_float32=True, router_name="gate.wg", shared=SharedExpertConfig(INNER, "shared_mlp")),
    ),
    "granite": Family(
        "granitemoe",
        "GraniteMoeMoE",
        "GraniteMoeConfig",
        {"intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 3},
        experts(3, True, router_name="router"),
    ),
}


def reference(family: Family) -> nn.Module:
    package = f"transformers.models.{family.model}"
    config = getattr(importlib.import_module(f"{package}.configuration_{family.model}"), family.config)(
        hidden_size=HIDDEN, **family.options
    )
    config._experts_implementation = "eager"
    module: nn.Module = getattr(importlib.import_module(f"{package}.modeling_{family.model}"), family.module)(config)
    torch.manual_seed(4)
    for tensor in module.state_dict().values():
        nn.init.normal_(tensor, std=0.3)
    return module.eval()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe") / "dense", "qwen3", num_hidden_layers=1)


def checkpoint(folder: Path, dense: Path, family: Family, tensors: dict[str, Tensor]) -> ModelConfig:
    """Saves the dense model with these tensors in the place of its MLP's."""
    folder.mkdir()
    kept = {name: tensor for name, tensor in load_file(dense / "model.safetensors").items() if ".mlp." not in name}
    own = {f"model.layers.0.mlp.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(kept | own, folder / "model.safetensors")
    return replace(read_model_config(dense), experts=family.experts)


def output(config: ModelConfig, folder: Path, x_TD: Tensor, ranks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the mixture's output, summed over the ranks."""
    total = torch.zeros_like(x_TD)
    for rank in range(ranks):
        model = DecoderModel(config, TPGroup(rank, ranks), dtype, torch.device("cpu"))
        load_weights(model, folder)
        out = next(model.decoder_layers()).mlp(x_TD, None)
        assert out.delta_TO is None and out.affine_2T is None
        total += out.y_TO
    return total


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layout of transformers 4."""
    found = {}
    for name, tensor in tensors.items():
        for expert, matrix in enumerate(tensor if name.startswith("experts.") else ()):
            leaf = name.removeprefix("experts.")
            halves = matrix.chunk(2) if leaf == "gate_up_proj" else (matrix,)
            leaves = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
            found |= {f"experts.{expert}.{n}.weight": half for n, half in zip(leaves, halves, strict=True)}
        if not name.startswith("experts."):
            found[name] = tensor
    return found


LAYOUTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "deepseek v3": one_by_one,
    "nemotron h": one_by_one,
}


@torch.inference_mode()
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers(name: str, dense: Path, tmp_path: Path) -> None:
    family = FAMILIES[name]
    module = reference(family)
    x_TD = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(2))
    expected = module(x_TD.unsqueeze(0))
    expected = (expected[0] if isinstance(expected, tuple) else expected).view_as(x_TD)
    config = checkpoint(tmp_path / "a", dense, family, module.state_dict())
    check = functools.partial(torch.testing.assert_close, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)
    for ranks in (1, 2):
        check(output(config, tmp_path / "a", x_TD, ranks), expected)
    if name in LAYOUTS:
        checkpoint(tmp_path / "b", dense, family, LAYOUTS[name](module.state_dict()))
        check(output(config, tmp_path / "b", x_TD, 1), expected)


@torch.inference_mode()
def test_gemmas_router_has_an_input_and_scales_of_its_own(dense: Path, tmp_path: Path) -> None:
    gemma4 = importlib.import_module("transformers.models.gemma4.modeling_gemma4")
    options = {"num_experts": EXPERTS, "moe_intermediate_size": INNER, "top_k_experts": 3}
    config = gemma4.Gemma4TextConfig(hidden_size=HIDDEN, **options)
    config._experts_implementation = "eager"
    block = nn.ModuleDict({"router": gemma4.Gemma4TextRouter(config), "experts": gemma4.Gemma4TextExperts(config)})
    torch.manual_seed(4)
    for tensor in block.state_dict().values():
        nn.init.normal_(tensor, std=0.3)
    router_x_TD, x_TD = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(2))
    _, weights, chosen = block["router"](router_x_TD)
    expected = block["experts"](x_TD, chosen, weights)
    router = {"router_name": "router.proj", "expert_scale_name": "router.per_expert_scale"}
    own = Family("", "", "", {}, experts(3, True, activation="gelu_tanh", **router))
    tensors = {name: tensor for name, tensor in block.state_dict().items() if name != "router.scale"}
    model = DecoderModel(
        checkpoint(tmp_path / "a", dense, own, tensors), TPGroup(0, 1), torch.float32, torch.device("cpu")
    )
    load_weights(model, tmp_path / "a")
    scaled_TD = block["router"].norm(router_x_TD) * block["router"].scale * HIDDEN**-0.5
    found = next(model.decoder_layers()).mlp(x_TD, None, scaled_TD).y_TO
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)


@torch.inference_mode()
def test_the_router_may_be_more_exact_than_the_model(dense: Path, tmp_path: Path) -> None:
    """The logits of two experts differ by less than bfloat16 can tell."""
    family = FAMILIES["glm 4.5"]
    tensors = reference(family).state_dict()
    tensors["gate.weight"] = torch.zeros(EXPERTS, HIDDEN)
    tensors["gate.weight"][:, 0] = 4.0
    tensors["gate.weight"][5, 1] = 2**-9
    config = checkpoint(
        tmp_path / "a", dense, family, {n: t.bfloat16() if "bias" not in n else t for n, t in tensors.items()}
    )
    model = DecoderModel(config, TPGroup(0, 1), torch.bfloat16, torch.device("cpu"))
    load_weights(model, tmp_path / "a")
    x_TD = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    x_TD[0, :2] = 0.25
    mlp = next(model.decoder_layers()).mlp
    logits = mlp.gate(x_TD.float(), None).y_TO
    assert logits.dtype == torch.float32 and logits[0].argmax() == 5
    assert mlp(x_TD, None).y_TO.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": ExpertGroups(3, 1, "max")}, "n_group=3 .* 8 experts"),
        ({"groups": ExpertGroups(8, 4, "top_two")}, "have 2 experts or more"),
        ({"groups": ExpertGroups(4, 1, "max")}, "must hold the chosen experts"),
    ],
)
def test_groups_that_cannot_hold_the_choice_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experts(3, True, **options)
