"""PEFT's adapters that need the base's weights over quantized checkpoints, against PEFT over the values."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import HRAConfig, IA3Config, LoKrConfig

from float_checkpoints import float_checkpoint
from int_checkpoints import gptq, written
from lorafleet.offline.llm import LoRARequest
from quantized_models import bitsandbytes_checkpoint
from ranks import start_llm
from tests.workers.conftest import peft_warnings_ignored
from tests.workers.test_kinds_over_families import PARAMS, TOLERANCE, lora, save
from tiny_models import ALL_TARGETS, Reference, make_model

KINDS = {  # the change of W is computed from W or scales it, except with the last one
    "dora": lora(use_dora=True),
    "pissa": lora(init_lora_weights="pissa"),
    "olora": lora(init_lora_weights="olora"),
    "hra": HRAConfig(r=4, target_modules=ALL_TARGETS),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "lokr": LoKrConfig(r=2, alpha=3, target_modules=ALL_TARGETS),
}


def checkpoint(model: Path, folder: Path, form: str) -> tuple[Path, Path]:
    """Writes a quantized checkpoint, and the plain one of its values."""
    if form == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
        return bitsandbytes_checkpoint(model, folder)
    if form == "gptq":
        return written(model, folder, gptq(symmetric=False, ordered=True))
    return float_checkpoint(model, folder, form)


@pytest.mark.parametrize(("form", "ranks"), [("bitsandbytes", 1), ("gptq", 1), ("fp8, blocks", 2)])
def test_adapters_that_need_the_base_answer_as_peft_does_over_the_values(
    tmp_path: Path, prompt, form: str, ranks: int
) -> None:
    model = make_model(tmp_path / "plain", "qwen3", num_hidden_layers=1, initializer_range=0.1)
    folder, values = checkpoint(model, tmp_path / "quantized", form)
    paths = {kind: save(tmp_path / kind, values, config) for kind, config in KINDS.items()}
    llm = start_llm(str(folder), ranks, enable_lora=True, max_loras=8)
    try:
        loras = [LoRARequest(kind, i + 1, str(path)) for i, (kind, path) in enumerate(paths.items())]
        prompts = [prompt(12 + i) for i in range(len(loras) + 1)]
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], PARAMS, [None, *loras])
    finally:
        llm.close()
    reference = Reference(values)
    with peft_warnings_ignored():
        for tokens, output, path in zip(prompts, outputs, [None, *paths.values()], strict=True):
            [completion] = output.outputs
            found = [p.logprob for p in output.prompt_logprobs[1:]] + [p.logprob for p in completion.logprobs]
            expected = reference.logprobs(tokens + completion.token_ids, path)
            assert found == pytest.approx(expected, abs=TOLERANCE), path
