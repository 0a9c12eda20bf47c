from __future__ import annotations

import pytest

from lorafleet.kernels.decoder.decoder_stack import LINEARS
from lorafleet.kernels.linear.linear_tuning import ROW_BOUNDS, LinearShape
from tests.kernels.harness import needs_triton

SHARED_BYTES = 227 << 10  # of a multiprocessor of an H200


@needs_triton
@pytest.mark.parametrize("num_sms", [78, 132, 148])
@pytest.mark.parametrize("num_rows", ROW_BOUNDS)
@pytest.mark.parametrize("name", LINEARS)
def test_every_candidate_divides_its_linear_and_fits_the_gpu(name: str, num_rows: int, num_sms: int) -> None:
    from lorafleet.kernels.linear.tune_linear import candidates, starting_shape

    inputs, outputs = LINEARS[name]
    shapes = list(candidates(name, num_rows, num_sms, early=True))
    for shape in (starting_shape(name, num_rows, num_sms, early=True), *shapes):
        assert shape.fits(sum(outputs), inputs)
        assert loaded_bytes(shape, num_rows) <= SHARED_BYTES
    assert any(shape.gated for shape in shapes) == (name == "gate_up")
    assert len(shapes) == len(set(shapes)) >= 4
    assert not any(shape.early for shape in candidates(name, num_rows, num_sms, early=False))


def loaded_bytes(shape: LinearShape, num_rows: int) -> int:
    """The bytes of W and x that a program has loaded ahead."""
    rows_of_w = shape.block_o * (2 if shape.gated else 1)
    return shape.stages * shape.block_d * 2 * (rows_of_w + max(16, num_rows))
