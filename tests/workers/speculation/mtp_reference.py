"""Makes tiny checkpoints with a random layer for several tokens (MTP), and computes its drafts in plain torch.

The layer itself is transformers' module of the family, with one layer. What stands before and behind it is written as
in section 2.2 of the DeepSeek-V3 report (arXiv 2412.19437), which transformers does not have.
"""

# T tokens · D hidden size

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from family_cases import CASES, SMALL, FamilyCase, make_case
from tests.workers.speculation.drafting import Drafted

# The names of the parts before and behind the layer: two norms, the linear behind them, and the last norm.
QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
FAMILIES = ["qwen3_5", "qwen3_5_moe", "qwen3_next", "deepseek_v3", "glm4_moe", "glm4_moe_lite"]


def _is_qwen(family: str) -> bool:
    return family.startswith("qwen")


def _one_layer(case: FamilyCase) -> PreTrainedModel:
    """Returns a random model whose only layer is of the kind that predicts further tokens."""
    options: dict[str, Any] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
    options |= {"layer_types": ["full_attention"]} if "layer_types" in case.options else {}
    model_class = getattr(transformers, case.name + case.suffix)
    known = model_class.config_class().to_dict() | case.options
    config = model_class.config_class(**(SMALL | case.options | {k: v for k, v in options.items() if k in known}))
    torch.manual_seed(7)
    model: PreTrainedModel = model_class(config)
    for tensor in model.state_dict().values():
        if tensor.ndim == 1:
            nn.init.normal_(tensor, mean=1.0, std=0.2)
    return model.eval()


def make_mtp_checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    """Writes a model of the family with a layer for several tokens, with the names that releases have.

    Args:
        changes: Values of config.json.
    """
    case = CASES[family]
    base = make_case(folder, case)
    config = json.loads((base / "config.json").read_text())
    if not _is_qwen(family):
        config["num_nextn_predict_layers"] = 1
    (base / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | mtp_tensors(family, config["num_hidden_layers"]), base / "model.safetensors")
    return base


def mtp_tensors(family: str, num_layers: int) -> dict[str, Tensor]:
    """Returns the tensors of the layer behind so many layers, by their names in the checkpoint."""
    prefix = "mtp.layers.0." if _is_qwen(family) else f"model.layers.{num_layers}."
    with tempfile.TemporaryDirectory() as folder:
        _one_layer(CASES[family]).save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
    of_layer = {name: tensor for name, tensor in saved.items() if name.startswith("model.layers.0.")}
    found = {prefix + name.removeprefix("model.layers.0."): tensor for name, tensor in of_layer.items()}
    size = len(saved["model.norm.weight"])
    generator = torch.Generator().manual_seed(11)
    names = QWEN if _is_qwen(family) else tuple(prefix + name for name in DEEPSEEK)
    for name in names:
        shape = (size, 2 * size) if name.endswith(("fc", "eh_proj")) else (size,)
        mean = 0.0 if len(shape) == 2 or _is_qwen(family) else 1.0
        found[f"{name}.weight"] = mean + 0.2 * torch.randn(shape, generator=generator)
    if not _is_qwen(family):  # Releases repeat both tables there.
        for name in ("embed_tokens", "shared_head.head"):
            found[f"{prefix}{name}.weight"] = saved["model.embed_tokens.weight"].clone()
    return found


def _loaded(case: FamilyCase, tensors: dict[str, Tensor]) -> nn.Module:
    """Returns the decoder of one layer that has these tensors, without the norm behind it."""
    with tempfile.TemporaryDirectory() as folder:
        model = _one_layer(case)
        model.save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        saved = load_file(path)
        save_file(saved | {name: tensors[name] for name in saved if name in tensors}, path, {"format": "pt"})
        assert sum(name in tensors for name in saved) > 5
        decoder: nn.Module = type(model).from_pretrained(folder).eval().model
    decoder.norm = nn.Identity()
    return decoder


class MTPReference:
    """Drafts from a transformers model's last hidden states."""

    def __init__(self, folder: Path, family: str) -> None:
        raw = json.loads((folder / "config.json").read_text())
        num_layers, self._is_qwen = raw["num_hidden_layers"], _is_qwen(family)
        stored = load_file(folder / "model.safetensors")
        below = "mtp.layers.0." if self._is_qwen else f"model.layers.{num_layers}."
        names = QWEN if self._is_qwen else tuple(below + name for name in DEEPSEEK)
        self._weights = [stored[f"{name}.weight"] for name in names]
        self._eps = raw.get("rms_norm_eps", 1e-6)
        layer = {n.replace(below, "model.layers.0.", 1): t for n, t in stored.items() if n.startswith(below)}
        self._layer = _loaded(CASES[family], layer | {"model.embed_tokens.weight": stored["model.embed_tokens.weight"]})

    def wrong(self, target: PreTrainedModel, drafted: list[Drafted]) -> list[Drafted]:
        """Returns the entries whose drafts are others than the layer's."""
        found: list[Drafted] = []
        for request in {name for name, _, _ in drafted}:
            own = [entry for entry in drafted if entry[0] == request]
            features_TD = self._features(target, max((known for _, known, _ in own), key=len))
            for entry in own:
                _, known, draft = entry
                if draft != self._drafts(target, known, features_TD[: len(known) - 1], len(draft)):
                    found.append(entry)
        return found

    @torch.no_grad()
    def _features(self, target: PreTrainedModel, tokens: list[int]) -> Tensor:
        """Returns the target's last hidden states behind the tokens, [T, D]."""
        return target(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]

    @torch.no_grad()
    def _drafts(self, target: PreTrainedModel, tokens: list[int], features_TD: Tensor, count: int) -> list[int]:
        decoder = target.get_base_model() if hasattr(target, "get_base_model") else target
        embedding, head = decoder.get_input_embeddings(), decoder.get_output_embeddings()
        embedding_norm, hidden_norm, fc, last_norm = self._weights
        found: list[int] = []
        for _ in range(count):
            embedded_TD = embedding(torch.tensor([*tokens[1:], *found]))
            normed = [self._norm(embedded_TD, embedding_norm), self._norm(features_TD, hidden_norm)]
            joined_TD = F.linear(torch.cat(normed, dim=1), fc)
            hidden_TD = self._layer(inputs_embeds=joined_TD[None], use_cache=False).last_hidden_state[0]
            normed_TD = self._norm(hidden_TD, last_norm)
            found.append(int(F.linear(normed_TD[-1], head.weight).argmax()))
            features_TD = torch.cat([features_TD, (normed_TD if self._is_qwen else hidden_TD)[-1:]])
        return found

    def _norm(self, x_TD: Tensor, weight_D: Tensor) -> Tensor:
        """Returns the RMS norm. Qwen stores weights minus one."""
        return F.rms_norm(x_TD, (len(weight_D),), weight_D + 1 if self._is_qwen else weight_D, self._eps)
