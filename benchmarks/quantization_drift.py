"""Measures how far each way to quantize the bundled demo model moves its predictions, on a CPU in float32.

    python benchmarks/quantization_drift.py --json docs/charts/results/quantization_drift.json
    python docs/site/models_table.py

The second command writes the table in docs/models.md. The texts are conversations of the demo's 459 held-out prompts
and their answers. The checkpoints are written by the tests' writers. Their codes are the nearest ones: GPTQ and AWQ
would calibrate them.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmark_results import Case, write_results
from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
sys.path += [str(DEMO), str(ROOT / "tests" / "support")]

import chat  # noqa: E402  needs the path above, as the others do
import score  # noqa: E402
import world  # noqa: E402

import float_checkpoints as floats  # noqa: E402
import int_checkpoints as ints  # noqa: E402
import quantized_models  # noqa: E402

UNITS = {
    "perplexity": "of all tokens of the conversations",
    "kl": "nats per token, from the float32 base to the quantized one",
    "top1_agreement": "share of the tokens",
    "answer_kl": "nats per token of the answers",
    "answer_top1_agreement": "share of the answers' tokens",
    "bytes_per_number": "bytes of the decoder's linears for each of their numbers",
}
BATCH = 64
Pack = Callable[[Tensor], dict[str, Tensor]]


def rounded(weight: Tensor, bits: int, group: int, symmetric: bool) -> ints.Codes:
    """Rounds to the nearest of the codes, which cover the smallest and the largest number of each group of columns."""
    inputs, top = weight.shape[1], 2**bits - 1
    size = inputs if group == -1 else group
    grouped = weight.float().view(len(weight), -1, size)
    low, high = grouped.amin(dim=2).clamp(max=0), grouped.amax(dim=2).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale_OG = ((high - low) / top).half()
    zero_OG = torch.full(scale_OG.shape, (top + 1) // 2)
    if not symmetric:
        zero_OG = (-low / scale_OG.float()).round().clamp(0, top).long()
    group_D = torch.arange(inputs) // size
    code_OD = (weight.float() / scale_OG[:, group_D].float() + zero_OG[:, group_D]).round().clamp(0, top)
    return ints.Codes(bits, code_OD.long(), scale_OG, zero_OG, group_D)


def of_ints(case: ints.Case) -> tuple[Pack, dict[str, Any]]:
    return lambda w: case.entries(rounded(w, case.bits, case.group, case.symmetric)), case.config


def of_floats(pack: Callable[[Tensor], floats.Packed], config: dict[str, Any]) -> tuple[Pack, dict[str, Any]]:
    return lambda w: pack(w)[0], config


def of_group(pack: Callable[[Tensor], floats.Packed], *numbers: Any, **more: Any) -> tuple[Pack, dict[str, Any]]:
    return of_floats(pack, floats.compressed({"group_0": floats.group(*numbers, **more)}, []))


METHODS: Sequence[Method] = ("nf4", "int4", "fp8")
STORED: dict[str, tuple[Pack, dict[str, Any]]] = {
    "GPTQ, 4 bits, groups of 128": of_ints(ints.gptq(group=128, symmetric=True)),
    "AWQ, 4 bits, groups of 128": of_ints(ints.awq(group=128)),
    "pack-quantized W4A16, groups of 128": of_ints(ints.compressed(group=128, symmetric=True)),
    "pack-quantized W8A16, channels": of_ints(ints.compressed(bits=8, group=-1, symmetric=True)),
    "FP8, channels": of_group(lambda w: floats.scaled(w, (1, w.shape[1]), floats.FP8), 8, "float", "channel"),
    "FP8, blocks of 128 x 128": of_floats(
        lambda w: floats.scaled(w, (128, 128), floats.FP8, "weight_scale_inv"),
        floats.DEEPSEEK | {"weight_block_size": [128, 128]},
    ),
    "MXFP8": of_group(floats.mxfp8, 8, "float", "group", group_size=32),
    "W8A8, channels": of_group(lambda w: floats.scaled(w, (1, w.shape[1]), torch.int8), 8, "int", "channel"),
    "LLM.int8": of_floats(floats.int8_of_bitsandbytes, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "NVFP4": of_group(
        lambda w: floats.nvfp4(w, "weight_packed", "weight_global_scale", divides=True),
        4,
        "float",
        "tensor_group",
        inputs=False,
        group_size=16,
    ),
    "MXFP4": of_group(floats.mxfp4, 4, "float", "group", inputs=False, group_size=32),
}


class Drift:
    """Compares models of other weights with the float32 base on the same tokens."""

    def __init__(self, limit: int | None) -> None:
        tokenizer = score.load_tokenizer()
        examples = []
        for question in world.split_world().held_out[:limit]:
            messages = chat.ask(question.prompt)
            prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            prompt_ids, answer_ids = tokenizer([prompt, question.answer + chat.END])["input_ids"]
            examples.append(chat.Example(prompt_ids + answer_ids, len(prompt_ids)))
        self._batches = list(chat.batches(examples, BATCH, tokenizer.pad_token_id, world.random.Random(0)))
        self._texts = [ids != tokenizer.pad_token_id for ids, _ in self._batches]
        self._label_T = self._of_texts([ids[:, 1:] for ids, _ in self._batches])
        self._is_answer_T = self._of_texts([labels[:, 1:] != chat.IGNORED for _, labels in self._batches])
        self._model: LlamaForCausalLM = score.load_base().eval()
        self._base_TV = self._log_probabilities()

    def figures(self, values: dict[str, Tensor]) -> dict[str, float]:
        """Returns the figures of the model with these weights, by the checkpoint's names."""
        self._model.load_state_dict(values | {"lm_head.weight": values["model.embed_tokens.weight"]})
        found_TV = self._log_probabilities()
        loss = -found_TV.gather(1, self._label_T[:, None]).mean().item()
        kl_T = (self._base_TV.exp() * (self._base_TV - found_TV)).sum(dim=1)
        agrees_T = (found_TV.argmax(dim=1) == self._base_TV.argmax(dim=1)).float()
        return {
            "perplexity": math.exp(loss),
            "kl": kl_T.mean().item(),
            "top1_agreement": agrees_T.mean().item(),
            "answer_kl": kl_T[self._is_answer_T].mean().item(),
            "answer_top1_agreement": agrees_T[self._is_answer_T].mean().item(),
        }

    @torch.inference_mode()
    def _log_probabilities(self) -> Tensor:
        """Returns those of every token but each conversation's first, float32 [T, V]."""
        return self._of_texts([self._model(input_ids=ids).logits[:, :-1] for ids, _ in self._batches]).log_softmax(-1)

    def _of_texts(self, batches: Sequence[Tensor]) -> Tensor:
        """Returns what [B, L - 1, …] has for tokens that are not padding."""
        return torch.cat([one[is_text[:, 1:]] for one, is_text in zip(batches, self._texts, strict=True)])


def served(folder: Path, method: Method | None) -> DecoderModel:
    config = read_model_config(folder)
    config = replace(config, quantization=resolved(config.quantization, method))
    model = DecoderModel(config, TPGroup(0, 1), torch.float32, torch.device("cpu"))
    load_weights(model, folder)
    return model


def bytes_per_number(model: DecoderModel) -> float:
    linears = [linear for _, linear in model.packed_linears()]
    size = sum(p.numel() * p.element_size() for linear in linears for p in linear.weight.parameters())
    return size / sum(linear.weight.num_outputs * linear.in_features for linear in linears)


def measure(drift: Drift, label: str, folder: Path, method: Method | None) -> Case:
    with torch.inference_mode():
        model = served(folder, method)
        figures = drift.figures({name: values().clone() for name, values in held_tensors(model).items()})
    figures["bytes_per_number"] = bytes_per_number(model)
    print(label, *(f"{name} {value:.5g}" for name, value in figures.items()), sep="  ", flush=True)
    return Case({"format": label}, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, help="only so many of the held-out prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to record the figures")
    args = parser.parse_args()
    drift, base = Drift(args.prompts), DEMO / "model"
    cases = [measure(drift, "float32", base, None)]
    cases += [measure(drift, f"--quantization {method}", base, method) for method in METHODS]
    with tempfile.TemporaryDirectory() as made:
        for label, (pack, config) in STORED.items():

            def entries(name: str, weight: Tensor, pack: Pack = pack) -> dict[str, Tensor]:
                if not quantized_models.is_linear(name):
                    return {name: weight}
                return {f"{name.removesuffix('.weight')}.{leaf}": tensor for leaf, tensor in pack(weight).items()}

            folder = Path(made) / label.replace(" ", "-").replace(",", "")
            quantized_models.written(base, folder, entries, {"quantization_config": config})
            cases.append(measure(drift, label, folder, None))
    write_results(args.json, UNITS, cases)


if __name__ == "__main__":
    main()
