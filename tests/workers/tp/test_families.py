"""The models of family_cases.py and wrapper_cases.py on two ranks: base and adapters have the logits of one rank."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.base_weights import FileWeights
from lorafleet.workers.tp.group import TPGroup
from rank_logits import CPU, step_logits
from ranks import on_ranks
from wrapper_cases import WRAPPERS, make_wrapper, make_wrapper_adapter, wrapped_text


@torch.inference_mode()
def logits(group: TPGroup, base: Path, adapter: Path, fully_sharded: bool = False) -> Tensor:
    config = read_model_config(base)
    model = DecoderModel(config, group, torch.float32, CPU)
    load_weights(model, base)
    layout = BaseLayout.of(config)
    weights = FileWeights(base, torch.float32, config.tie_word_embeddings, names=layout.names)
    return step_logits(model, base, Base(layout, weights), adapter, fully_sharded)


def all_logits(group: TPGroup, folders: dict[str, tuple[Path, Path, bool]]) -> dict[str, Tensor]:
    return {name: logits(group, *arguments) for name, arguments in folders.items()}


def test_two_ranks_answer_as_one_does(tmp_path: Path) -> None:
    folders = {}
    for name, case in CASES.items():
        base = make_case(tmp_path / name, case)
        folders[name] = base, make_case_adapter(tmp_path / f"{name}-lora", base, case), False
    for name, wrapper in WRAPPERS.items():
        base, adapter = make_wrapper(tmp_path / f"{name} wrapper", wrapper), tmp_path / f"{name} wrapper-lora"
        make_wrapper_adapter(adapter, base, wrapper, use_dora=True)
        folders[f"{name} wrapper"] = base, adapter, False
    text, adapter, _ = folders["gemma3n"]
    wrapped = wrapped_text(text, tmp_path / "gemma3n wrapper", "Gemma3nForConditionalGeneration")
    folders["gemma3n wrapper"] = wrapped, adapter, False
    # Attention needs all of A for each head of an absorbed linear, however adapters are divided.
    folders["fully sharded"] = *folders["deepseek_v3"][:2], True
    alone = all_logits(TPGroup(), folders)
    for of_rank in on_ranks(2, all_logits, folders):
        for name, expected in alone.items():
            torch.testing.assert_close(of_rank[name], expected, atol=1e-4, rtol=0, msg=name)
