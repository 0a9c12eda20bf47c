from __future__ import annotations

import pytest
import torch

from lorafleet.workers.adapters.casting import CHUNK, cast, max_magnitude, max_of_columns, max_of_rows

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [[1.5, -2.5], [-1.0, -3.0], [0.0, -0.0], [2.0], [-2.0, 1.0], [1e-6, 0.0]])
def test_max_magnitude_equals_torch(dtype: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values, dtype=dtype)
    assert max_magnitude(x).equal(x.abs().max())
    assert max_magnitude(x).dtype is dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_max_magnitude_shows_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    x = torch.randn(100, 7).to(dtype)
    x[40, 3] = bad
    assert not max_magnitude(x).isfinite()
    assert not max_magnitude(x.T).isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (640, 16), (67, 3), (4, 1000)], ids=str)
def test_max_of_rows_and_of_columns_equal_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape).to(dtype)
    x[0] = -x[0].abs()
    for matrix in (x, x.T, -x.abs()):
        assert torch.equal(max_of_rows(matrix), matrix.abs().amax(1))
        assert torch.equal(max_of_columns(matrix), matrix.abs().amax(0))


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_cast_equals_torch(source: torch.dtype, target: torch.dtype) -> None:
    x = torch.randn(3, CHUNK // 2 + 1).to(source)
    for tensor in (x, x.T, x[:, 3:]):
        result = cast(tensor, target)
        assert result.stride(1) == 1
        assert result.equal(tensor.to(target))
