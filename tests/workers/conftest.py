"""Provides adapters made by PEFT itself, on tiny random bases."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.adapters.base_layout import BaseLayout, peft_name
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.slots.lora_model import LoRAModel

NUM_LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@functools.cache
def _base(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)) if family == "llama" else Qwen2ForCausalLM(Qwen2Config(**SIZES))


def make_base(family: str) -> PreTrainedModel:
    """Returns a copy, which PEFT may change. Making a model takes several times as long as copying it."""
    base = copy.deepcopy(_base(family))
    torch.manual_seed(0)
    return base


class TransformersWeights:
    """Reads the weights of a transformers model as they are."""

    def __init__(self, base: PreTrainedModel) -> None:
        self._tensors = base.state_dict()

    def weight(self, module: str) -> Tensor:
        return self._tensors[f"{peft_name(module)}.weight"]

    def bias(self, module: str) -> Tensor:
        return self._tensors[f"{peft_name(module)}.bias"]

    def beside_the_steps(self) -> AbstractContextManager[None]:
        return nullcontext()


def base_of(base: PreTrainedModel) -> Base:
    modules = {n.removeprefix("model."): m for n, m in base.named_modules()}
    linears = {n: m for n, m in modules.items() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    layout = BaseLayout(
        linears={n: (m.in_features, m.out_features) for n, m in linears.items()},
        vocab_size=base.config.vocab_size,
        hidden_size=base.config.hidden_size,
        attention_heads=(base.config.num_attention_heads, base.config.num_key_value_heads),
        tied=base.config.tie_word_embeddings,
        biased=frozenset(n for n, m in linears.items() if m.bias is not None),
        norms={n: m.weight.shape[0] for n, m in modules.items() if n.endswith("norm")},
        norm_offset=1.0 if "gemma" in base.config.model_type else 0.0,
    )
    return Base(layout, TransformersWeights(base), "tiny")


@contextmanager
def peft_warnings_ignored() -> Iterator[None]:
    """Ignores PEFT's own warnings about odd configs and with the newest transformers; ours stay errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class AdapterDir:
    """A folder with an adapter, and ways to damage it."""

    path: Path
    family: str = "llama"

    @property
    def config(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "adapter_config.json").read_text()))

    def set(self, **changes: object) -> AdapterDir:
        (self.path / "adapter_config.json").write_text(json.dumps(self.config | changes))
        return self

    @property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.path / "adapter_model.safetensors")

    def write(self, tensors: dict[str, Tensor]) -> AdapterDir:
        save_file({k: v.contiguous() for k, v in tensors.items()}, self.path / "adapter_model.safetensors")
        return self

    def map(self, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> AdapterDir:
        return self.write(dict(change(k, v) for k, v in self.tensors.items()))

    def load(
        self,
        dtype: torch.dtype = torch.float32,
        expected_digest: str = "",
        *,
        keeps_draft: bool = False,
        **config: Any,
    ) -> LoRAModel:
        return LoRAModel.from_local_checkpoint(
            self.path,
            base=base_of(make_base(self.family)),
            config=LoRAConfig(**config),
            dtype=dtype,
            name="sql",
            expected_digest=expected_digest,
            keeps_draft=keeps_draft,
        )

    def peft_deltas(self) -> dict[str, Tensor]:
        """Returns the change that PEFT makes to each weight of the base when it loads this folder."""
        with peft_warnings_ignored():
            loaded = PeftModel.from_pretrained(make_base(self.family), str(self.path))
        layers = {n: m for n, m in loaded.base_model.model.named_modules() if isinstance(m, LoraLayer)}
        return {n.removeprefix("model."): m.get_delta_weight("default").detach() for n, m in layers.items()}


MakeAdapter = Callable[..., AdapterDir]


def write_adapter(path: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> AdapterDir:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    with peft_warnings_ignored():
        model = get_peft_model(make_base(family), LoraConfig(**(settings | fields)))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(str(path))
    # PEFT sorts the keys that it writes, even those whose order matters, but the file decides what an adapter is.
    patterns = {k: v for k, v in fields.items() if k in ("rank_pattern", "alpha_pattern")}
    adapter = AdapterDir(path, family).set(**patterns)
    return adapter if dtype is torch.float32 else adapter.map(lambda k, v: (k, v.to(dtype)))


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    return functools.partial(write_adapter, tmp_path / "sql")


@pytest.fixture(scope="session")
def _plain_adapter(tmp_path_factory: pytest.TempPathFactory) -> AdapterDir:
    return write_adapter(tmp_path_factory.mktemp("plain") / "sql")


@pytest.fixture
def adapter(_plain_adapter: AdapterDir, tmp_path: Path) -> AdapterDir:
    """Returns an adapter of rank 4 on q_proj and v_proj of a three-layer Llama, which the test may change."""
    shutil.copytree(_plain_adapter.path, tmp_path / "sql")
    return AdapterDir(tmp_path / "sql")
