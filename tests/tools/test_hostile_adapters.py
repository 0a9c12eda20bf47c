"""What the server refuses, the tools refuse: by an error of ours, at once, without running or showing anything."""

from __future__ import annotations

import shutil
import time
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lorafleet.protocol.errors import LorafleetError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.convert import convert
from lorafleet.tools.inspection import fit, inspect_folder
from lorafleet.tools.merging import merge
from lorafleet.tools.reading import read_forms
from tests.workers.adapters.bad_adapters.cases import CASES
from tests.workers.adapters.bad_adapters.damage import CANARY, SECRET
from tests.workers.conftest import AdapterDir, make_base

AT_ONCE_S = 2.0
REPAIRED = ["unknown infix"]  # another adapter's name in the tensors, which is what convert is for


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and a sound adapter: rank 4 on q_proj and v_proj."""
    root = tmp_path_factory.mktemp("hostile")
    base = make_base("llama")
    base.save_pretrained(root / "base")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(str(root / "adapter"))
    return root / "base", root / "adapter"


@pytest.mark.parametrize("case", CASES)
def test_a_bad_adapter_is_refused_by_every_tool(made, tmp_path, case):
    base, sound = made
    folder = tmp_path / "sql"
    shutil.copytree(sound, folder)
    CASES[case][0](AdapterDir(folder))
    said, started = [], time.thread_time()
    found = inspect_or_none(folder)
    said.append(str(found))
    on_base = fit(folder, "sql", BaseModel.of_config(base), LoRAConfig(), 1, fully_sharded=True)
    assert on_base.refusal is not None
    with BaseModel.opened(base) as opened:
        for tool in (
            lambda: convert(folder, tmp_path / "converted", opened),
            lambda: merge(opened, folder, read_forms(folder, opened, "sql").forms, tmp_path / "merged"),
        ):
            try:
                tool()
            except LorafleetError as error:
                said.append(error.message)
    assert not (tmp_path / "merged").exists()
    assert (tmp_path / "converted").exists() == (case in REPAIRED)
    assert time.thread_time() - started < 4 * AT_ONCE_S  # it is read four times
    assert not CANARY.exists()
    assert not any(SECRET in text for text in said)


def inspect_or_none(folder: Path) -> object:
    try:
        return inspect_folder(folder, "sql")
    except LorafleetError as error:
        return error.message
