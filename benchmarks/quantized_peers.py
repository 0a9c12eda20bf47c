"""Holds the weights of a linear as other projects do, and multiplies them by their kernels, for quantized_linears.py.

The projects are optional. vLLM has Marlin's kernels; of its package, only the compiled library and scalar_type.py are
loaded. humming-kernels compiles its kernels at first use, so it needs a CUDA toolkit or the wheels of its own extra.
bitsandbytes chooses between its kernel and writing the values, as it does in a model.
"""

# T tokens · D in · O out · G groups of a row

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lorafleet.kernels.quant.int_weight import ROUNDED_GROUP, round_to_nearest

E4M3_MAX = 448.0
MARLIN_COLUMNS = [column + 8 * row for column in range(8) for row in range(8)]  # its order of scales of groups
MARLIN_WHOLE_COLUMNS = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]  # and of whole rows
# Marlin makes bf16 of e4m3 without correcting the exponents' bias, and expects the correction in the scales.
MARLIN_E4M3_FACTOR = 2.0**120


class PeerWeight:
    """A weight that a peer's kernels multiply."""

    def __init__(self, values_OD: Tensor, held: list[Tensor], product: Callable[[Tensor], Tensor]) -> None:
        self.values_OD = values_OD  # what the codes mean
        self._held = held  # all tensors that the kernels read
        self._product = product

    def parameters(self) -> list[Tensor]:
        return self._held

    def linear(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        product_TO = self._product(x_TD)
        return product_TO if bias_O is None else product_TO + bias_O


def marlin_int4(values_OD: Tensor) -> PeerWeight:
    matrix = round_to_nearest(values_OD, 4, ROUNDED_GROUP)
    return _marlin("uint4b8", matrix.code_OD, 4, matrix.scale_OG, MARLIN_COLUMNS, 1.0, matrix[...])


def marlin_fp8(values_OD: Tensor) -> PeerWeight:
    scale_O1 = values_OD.abs().amax(dim=1, keepdim=True) / E4M3_MAX
    code_OD = (values_OD.float() / scale_O1.float()).to(torch.float8_e4m3fn)
    values_OD = code_OD.float() * scale_O1.float()
    return _marlin(
        "float8_e4m3fn", code_OD.view(torch.uint8), 8, scale_O1, MARLIN_WHOLE_COLUMNS, MARLIN_E4M3_FACTOR, values_OD
    )


def humming_int4(values_OD: Tensor) -> PeerWeight:
    return _humming(values_OD, {"dtype": "int4", "group_size": ROUNDED_GROUP})


def humming_fp8(values_OD: Tensor) -> PeerWeight:
    return _humming(values_OD, {"dtype": "float8e4m3"})


def bitsandbytes_nf4(values_OD: Tensor) -> PeerWeight:
    bitsandbytes = importlib.import_module("bitsandbytes")
    codes, state = bitsandbytes.functional.quantize_4bit(values_OD, blocksize=64, quant_type="nf4")
    exact_OD = bitsandbytes.functional.dequantize_4bit(codes, state)
    return PeerWeight(exact_OD, [codes, state.absmax], lambda x_TD: bitsandbytes.matmul_4bit(x_TD, codes.t(), state))


# A peer's name in the table, the scheme of quantized_linears.py that holds as many bits, and the peer's weight.
PEERS: dict[str, tuple[str, Callable[[Tensor], PeerWeight]]] = {
    "marlin-int4": ("int4", marlin_int4),
    "humming-int4": ("int4", humming_int4),
    "bitsandbytes-nf4": ("nf4", bitsandbytes_nf4),
    "marlin-fp8": ("fp8-exact", marlin_fp8),
    "humming-fp8": ("fp8-exact", humming_fp8),
}


def _marlin(
    type_name: str,
    code_OD: Tensor,
    bits: int,
    scale_OG: Tensor,
    columns: list[int],
    factor: float,
    values_OD: Tensor,
) -> PeerWeight:
    ops, kind = _vllm_ops(), getattr(importlib.import_module("vllm.scalar_type").scalar_types, type_name).id
    outputs, inputs = code_OD.shape
    no_order = torch.empty(0, dtype=torch.int32, device=code_OD.device)
    packed = ops.gptq_marlin_repack(gptq_words(code_OD, bits), no_order, inputs, outputs, bits, False)
    scales = (scale_OG.T.float() * factor).to(scale_OG.dtype).reshape(-1, len(columns))[:, columns]
    scales = scales.reshape(-1, outputs).contiguous()
    programs = torch.cuda.get_device_properties(code_OD.device).multi_processor_count
    locks = torch.zeros(programs, dtype=torch.int32, device=code_OD.device)

    def product(x_TD: Tensor) -> Tensor:
        shape = (len(x_TD), outputs, inputs)
        options = (True, False, True, False)  # all of K is here; no atomics, sums in float32, no zeros in float
        result: Tensor = ops.marlin_gemm(
            x_TD, None, packed, None, scales, None, None, None, None, None, locks, kind, *shape, *options
        )
        return result

    return PeerWeight(values_OD, [packed, scales], product)


def gptq_words(code_OD: Tensor, bits: int) -> Tensor:
    """Returns codes as GPTQ packs them, int32 [D * bits / 32, O]. A word's lowest bits have the first input's code."""
    in_word = 32 // bits
    shift_1W1 = (bits * torch.arange(in_word, device=code_OD.device))[None, :, None]
    word_DO = (code_OD.T.long().view(-1, in_word, len(code_OD)) << shift_1W1).sum(dim=1)
    return torch.where(word_DO >= 1 << 31, word_DO - (1 << 32), word_DO).int().contiguous()


def _vllm_ops() -> torch._ops._OpNamespace:
    """Loads vLLM's compiled library. Raises ModuleNotFoundError if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'vllm', whose kernels the kinds marlin-… multiply with")
    if not hasattr(torch.ops._C, "marlin_gemm"):
        for folder in spec.submodule_search_locations:
            for library in sorted(Path(folder).glob("_C*.so")):
                torch.ops.load_library(str(library))
    return torch.ops._C


def _humming(values_OD: Tensor, weight_config: dict[str, str | int]) -> PeerWeight:
    layers = importlib.import_module("humming.layer")
    outputs, inputs = values_OD.shape
    layer = layers.HummingLayer(outputs, inputs, weight_config=weight_config, torch_dtype=values_OD.dtype).cuda()
    tensors = layers.HummingWeightSchema.quant_tensor(values_OD, layer.weight_schema, values_OD.dtype)
    exact_OD = layer.weight_schema.dequant_tensors(tensors)
    layer.load_from_tensors(tensors)
    layer.transform()
    return PeerWeight(exact_OD, list(layer.parameters()), layer)
