"""Makes the files in tests/workers/bases/formats/library_files by the libraries that quantize models, on a CPU.

    pip install llmcompressor==0.14.0.1 gptqmodel==7.7.0 nvidia-modelopt==0.47.0 auto-round==0.16.1
    PYTHONPATH=src:tests/support python tests/support/library_files.py FOLDER [llmcompressor gptqmodel …]

The libraries are no dependencies of the tests, and do not go together in one environment. Each file has the tensors of
one linear [32, 256] as the library stored them. Its metadata has the library's quantization_config, and the difference
that `values`, the first rows of the weight, may have: 0 if they are the library's own dequantized numbers, else a part
of the largest one, since they were computed by its 16-bit product, or are those before quantization.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny_models import make_model

TOKENIZER = Path(__file__).parents[2] / "demo" / "model"
LINEAR = "model.layers.0.mlp.down_proj"
OUTPUTS, ROWS = 32, 8
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*(gate|up)_proj"]  # have fewer inputs than a group
TOKENS = torch.randint(3, 60, (16, 24), generator=torch.Generator().manual_seed(1)).tolist()
SAMPLES = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in TOKENS]


def extract(folder: Path, out: Path, library: str, values: Tensor, tolerance: float) -> None:
    tensors = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if name.startswith(LINEAR)
    }
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    config.pop("meta", None)
    metadata = {"library": library, "quantization_config": json.dumps(config), "tolerance": str(tolerance)}
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors | {"values": values[:ROWS].float().contiguous()}, out, metadata)
    shutil.rmtree(folder)


def by_llm_compressor(base: Path, out: Path) -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    def group(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
        args = None if inputs is None else QuantizationArgs(**inputs)
        return {
            "g": QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=args)
        }

    presets = [
        "FP8",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
        "W4A16",
        "W4A16_ASYM",
        "W8A16",
        "W8A8",
        "NVFP4A16",
        "NVFP4",
        "MXFP4A16",
        "MXFP4",
        "MXFP8",
        "W4AFP8",
        "W4A8",
    ]
    recipes: dict[str, Any] = {
        name: QuantizationModifier(targets="Linear", scheme=name, ignore=IGNORED) for name in presets
    }
    asymmetric = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    recipes |= {
        "W4A16_CHANNEL": QuantizationModifier(
            config_groups=group({"num_bits": 4, "strategy": "channel"}), ignore=IGNORED
        ),
        "W8A16_ASYM": QuantizationModifier(config_groups=group(asymmetric | {"num_bits": 8}), ignore=IGNORED),
        "FP8_WEIGHTS": QuantizationModifier(
            config_groups=group({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64}), ignore=IGNORED
        ),
        "ACTORDER": GPTQModifier(config_groups=group(asymmetric | {"actorder": "weight"}), ignore=IGNORED),
    }
    for name, recipe in recipes.items():
        model, folder = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), out / "whole"
        oneshot(
            model=model,
            recipe=recipe,
            dataset=Dataset.from_list(SAMPLES),
            max_seq_length=24,
            num_calibration_samples=16,
        )
        model.save_pretrained(folder, save_compressed=True)
        read = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
        )
        # It decodes NVFP4 through bfloat16.
        tolerance = 2.0**-8 if name.startswith("NVFP4") else 0.0
        values = read.get_submodule(LINEAR).weight
        extract(folder, out / f"llmcompressor-{name}.safetensors", "llmcompressor 0.14.0.1", values.detach(), tolerance)


def by_gptqmodel(base: Path, out: Path) -> None:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    awq = {"method": METHOD.AWQ, "format": FORMAT.GEMM}
    cases: dict[str, dict[str, Any]] = {
        "GPTQ": {"sym": True, "desc_act": False},
        "GPTQ_ASYM": {"sym": False, "desc_act": False},
        "GPTQ_DESC_ACT": {"sym": True, "desc_act": True},
        "GPTQ_8": {"bits": 8, "group_size": -1, "act_group_aware": False},
        "GPTQ_V2": {"sym": False, "group_size": 64, "format": FORMAT.GPTQ_V2},
        "GPTQ_DYNAMIC": {"dynamic": {r"-:.*up_proj.*": {}, r"+:.*down_proj.*": {"bits": 8, "group_size": 64}}},
        "AWQ": awq,
        "AWQ_ASYM": awq | {"sym": False},
        "AWQ_8": awq | {"bits": 8, "sym": False},
        "AWQ_DYNAMIC": awq | {"dynamic": {r"-:.*up_proj.*": {}, r"+:.*down_proj.*": {"bits": 8}}},
    }
    wide = out / "wide"
    make_base(wide, 2 * OUTPUTS)
    for name, options in cases.items():
        folder, is_awq = out / "whole", "AWQ" in name
        model = GPTQModel.load(
            str(wide if is_awq else base), QuantizeConfig(**{"bits": 4, "group_size": 32} | options), device="cpu"
        )
        model.quantize(SAMPLES, batch_size=1)
        model.save(str(folder))
        backend = BACKEND.TORCH_AWQ if is_awq else BACKEND.TORCH
        linear = GPTQModel.load(str(folder), device="cpu", backend=backend).model.get_submodule(LINEAR)
        with torch.inference_mode():
            values = linear(torch.eye(256, dtype=linear.scales.dtype)).T
        if (
            is_awq
        ):  # It does not quantize so few outputs, so half of them are left out: the last columns of each tensor.
            tensors = load_file(folder / "model.safetensors")
            halves = {n: t[:, : t.shape[1] // 2].contiguous() for n, t in tensors.items() if n.startswith(LINEAR)}
            save_file(halves, folder / "model.safetensors")
        extract(folder, out / f"gptqmodel-{name}.safetensors", "GPTQModel 7.7.0", values.clone(), 0.01)


def by_modelopt(base: Path, out: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    tolerances = {  # of rounding, as a part of the largest number
        "FP8_DEFAULT_CFG": 2.0**-4,
        "FP8_PER_CHANNEL_PER_TOKEN_CFG": 2.0**-4,
        "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": 2.0**-4,
        "MXFP8_DEFAULT_CFG": 2.0**-4,
        "NVFP4_DEFAULT_CFG": 0.2,
        "W4A16_NVFP4_CFG": 0.2,
        "MXFP4_DEFAULT_CFG": 0.3,
    }
    for name, tolerance in tolerances.items():
        folder = out / "whole"
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
        values = model.get_submodule(LINEAR).weight.detach().clone()
        mtq.quantize(model, getattr(mtq, name), lambda own: [own(torch.tensor([row])) for row in TOKENS])
        export_hf_checkpoint(model, export_dir=folder)
        short = name.removesuffix("_CFG").removesuffix("_DEFAULT")
        extract(folder, out / f"modelopt-{short}.safetensors", "ModelOpt 0.47.0", values, tolerance)


def by_auto_round(base: Path, out: Path) -> None:
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM

    excluded = {"model.layers.0.mlp.up_proj": {"bits": 16}}
    cases: dict[str, dict[str, Any]] = {
        "W4A16": {},
        "W4A16_ASYM": {"sym": False},  # packed as AWQ
        "MIXED": {"layer_config": excluded | {LINEAR: {"bits": 8, "group_size": 64}}},
    }
    for name, options in cases.items():
        settings = {"scheme": "W4A16", "group_size": 32, "iters": 0}
        of_cpu = {"device_map": "cpu", "disable_opt_rtn": True, "disable_model_free": True}  # which needs no samples
        AutoRound(str(base), **(settings | of_cpu | options)).quantize_and_save(str(out / "whole"), "auto_round")
        [folder] = (out / "whole").iterdir()
        is_awq = "ASYM" in name  # which it does not multiply on a CPU
        linear = AutoModelForCausalLM.from_pretrained(base if is_awq else folder, device_map="cpu").get_submodule(
            LINEAR
        )
        with torch.inference_mode():
            values = linear.weight.clone() if is_awq else linear(torch.eye(256, dtype=torch.float16)).T.clone()
        out_file, tolerance = out / f"autoround-{name}.safetensors", 0.1 if is_awq else 0.01
        extract(folder, out_file, "AutoRound 0.16.1", values, tolerance)


MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "llmcompressor": by_llm_compressor,
    "gptqmodel": by_gptqmodel,
    "modelopt": by_modelopt,
    "autoround": by_auto_round,
}


def make_base(folder: Path, outputs: int) -> None:
    if not folder.exists():
        make_model(folder, "qwen3", num_hidden_layers=1, hidden_size=outputs, intermediate_size=256)
        for name in ("tokenizer.json", "tokenizer_config.json"):  # GPTQModel needs one, whatever it has
            shutil.copy(TOKENIZER / name, folder)


def main() -> None:
    out = Path(sys.argv[1])
    make_base(out / "base", OUTPUTS)
    for name in sys.argv[2:] or MAKERS:
        MAKERS[name](out / "base", out)


if __name__ == "__main__":
    main()
