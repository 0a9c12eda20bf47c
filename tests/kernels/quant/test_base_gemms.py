from __future__ import annotations

import torch

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_gemms import gemms_of
from lorafleet.kernels.quant.base_weight import PlainWeight
from lorafleet.kernels.quant.int_weight import IntScheme
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from lorafleet.kernels.quant.tiled_weight import TiledWeight

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
SCRATCH = Scratch(DTYPE, CPU)


def test_a_base_is_named_by_the_kernels_that_multiply_all_of_its_weights() -> None:
    plain = PlainWeight.empty(64, 64, DTYPE, CPU)
    tiled = [
        TiledWeight(scheme, 64, 64, DTYPE, CPU, SCRATCH) for scheme in (NF4Scheme(), IntScheme(4, 32, has_zeros=True))
    ]
    e4m3 = ScaledScheme().empty(64, 64, DTYPE, CPU, SCRATCH)
    e4m3.pair_tokens = 128  # as on a GPU that multiplies e4m3
    assert gemms_of([plain, plain]) == "plain"
    assert gemms_of(tiled) == "four bits"
    assert gemms_of([e4m3]) == "e4m3"


def test_weights_of_several_kinds_or_without_such_kernels_have_no_measured_split() -> None:
    plain = PlainWeight.empty(64, 64, DTYPE, CPU)
    assert gemms_of([plain, TiledWeight(NF4Scheme(), 64, 64, DTYPE, CPU, SCRATCH)]) is None
    assert gemms_of([NF4Scheme().empty(64, 64, DTYPE, CPU, SCRATCH)]) is None
    int8 = ScaledScheme(code_dtype=torch.int8).empty(64, 64, DTYPE, CPU, SCRATCH)
    assert gemms_of([int8]) is None
