from __future__ import annotations

import pytest

from lorafleet.kernels.decoder.decoder_stack import LINEARS
from lorafleet.kernels.linear.linear_tuning import MOST_SPLIT_ROWS, ROW_BOUNDS, LinearShape
from tests.kernels.harness import needs_triton

SHARED_BYTES = 227 << 10  # of a multiprocessor of an H200


FEW = [rows for rows in ROW_BOUNDS if rows <= MOST_SPLIT_ROWS]
MANY = [rows for rows in ROW_BOUNDS if rows > MOST_SPLIT_ROWS]


@needs_triton
@pytest.mark.parametrize("num_sms", [78, 132, 148])
@pytest.mark.parametrize("num_rows", FEW)
@pytest.mark.parametrize("name", LINEARS)
def test_every_candidate_divides_its_linear_and_fits_the_gpu(name: str, num_rows: int, num_sms: int) -> None:
    from lorafleet.kernels.linear.tune_linear import candidates, starting_shape

    inputs, outputs = LINEARS[name]
    shapes = list(candidates(name, num_rows, num_sms, early=True))
    start = starting_shape(name, num_rows, num_sms, early=True)
    assert start is not None
    for shape in (start, *shapes):
        assert not shape.is_wide and shape.fits(sum(outputs), inputs)
        assert loaded_bytes(shape, num_rows) <= SHARED_BYTES
    assert any(shape.gated for shape in shapes) == (name == "gate_up")
    assert len(shapes) == len(set(shapes)) >= 4
    assert not any(shape.early for shape in candidates(name, num_rows, num_sms, early=False))


@needs_triton
@pytest.mark.parametrize("num_rows", MANY)
@pytest.mark.parametrize("name", LINEARS)
def test_only_gate_and_up_have_candidates_for_many_rows(name: str, num_rows: int) -> None:
    from lorafleet.kernels.linear.tune_linear import candidates, starting_shape

    inputs, outputs = LINEARS[name]
    shapes = list(candidates(name, num_rows, 132, early=True))
    assert starting_shape(name, num_rows, 132, early=True) == (shapes[0] if shapes else None)
    assert (len(shapes) >= 4) if name == "gate_up" else not shapes
    assert len(shapes) == len(set(shapes))
    for shape in shapes:
        assert shape.is_wide and shape.gated and shape.fits(sum(outputs), inputs)
        assert loaded_bytes(shape, shape.block_t) <= SHARED_BYTES
    assert not list(candidates(name, num_rows, 132, early=False))


def loaded_bytes(shape: LinearShape, num_rows: int) -> int:
    """The bytes of W and x that a program has loaded ahead."""
    rows_of_w = shape.block_o * (2 if shape.gated else 1)
    return shape.stages * shape.block_d * 2 * (rows_of_w + max(16, num_rows))
