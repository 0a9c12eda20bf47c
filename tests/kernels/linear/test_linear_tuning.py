from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lorafleet.kernels.linear.linear_tuning import (
    FOLDER,
    ROW_BOUNDS,
    LinearShape,
    choose_shape,
    linear_shape,
    read_shapes,
    shapes_path,
    write_shapes,
)

SMALL, LARGE = LinearShape(splits=2), LinearShape(block_o=128, stages=4, warps=8)
WIDE = LinearShape(gated=True, block_t=128)
BF16 = torch.bfloat16


def test_a_step_uses_the_shape_of_the_next_larger_bound() -> None:
    shapes = {"6144x4096": {8: SMALL, 64: LARGE}}
    found = [choose_shape(shapes, 6144, 4096, rows) for rows in (1, 2, 8, 9, 16, 33, 64, 65)]
    assert found == [None, SMALL, SMALL, None, None, LARGE, LARGE, None]
    assert choose_shape(shapes, 4096, 6144, 8) is None
    assert choose_shape({"28672x4096": {256: WIDE}}, 28672, 4096, 225) is WIDE
    assert choose_shape({"28672x4096": {256: WIDE}}, 28672, 4096, 257) is None


def test_without_data_cublas_computes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU that nobody has measured")
    assert linear_shape(torch.device("cuda"), BF16, 6144, 4096, 8) is None
    assert linear_shape(torch.device("cpu"), BF16, 6144, 4096, 8) is None


def test_data_of_the_gpu_are_used_but_not_for_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "Some_GPU.json"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("lorafleet.kernels.linear.linear_tuning.FOLDER", path.parent)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    write_shapes(shapes_path("Some GPU"), {"6144x4096": {8: SMALL}})
    assert path.exists()
    assert linear_shape(torch.device("cuda"), BF16, 6144, 4096, 8) == SMALL
    assert linear_shape(torch.device("cuda"), torch.float32, 6144, 4096, 8) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    with pytest.raises(ValueError, match="early=false"):
        linear_shape(torch.device("cuda"), BF16, 6144, 4096, 8)
    write_shapes(shapes_path("Some GPU"), {"28672x4096": {256: replace(WIDE, early=False)}})
    with pytest.raises(ValueError, match="no data for more than 64 rows"):
        linear_shape(torch.device("cuda"), BF16, 28672, 4096, 250)


def test_shapes_are_read_as_they_were_written(tmp_path: Path) -> None:
    shapes = {"6144x4096": {1: SMALL, 64: LARGE}, "28672x4096": {16: LinearShape(gated=True, prefetch=1024), 96: WIDE}}
    path = tmp_path / "GPU.json"
    assert read_shapes(path) == {}
    write_shapes(path, shapes)
    assert read_shapes(path) == shapes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_o": 48}, "block_o=48"),
        ({"splits": 0}, "splits=0"),
        ({"prefetch": 100}, "prefetch=100"),
        ({"gated": True, "splits": 2}, "splits=1"),
        ({"gated": True, "block_t": 32}, "block_t=32"),
        ({"block_t": 128}, "block_t=128 needs gated=true"),
        ({"gated": True, "block_t": 128, "prefetch": 256}, "prefetch=0"),
        ({"gated": True, "block_t": 128}, "block_t=128 for 8 rows"),
        ({"block_o": 256, "block_d": 64}, "do not divide 4224x4096"),
        ({"block_d": 256, "splits": 15}, "do not divide 4224x4096"),
    ],
    ids=str,
)
def test_a_shape_that_is_not_possible_is_refused(tmp_path: Path, fields: dict[str, int], message: str) -> None:
    path = tmp_path / "GPU.json"
    path.write_text(json.dumps({"4224x4096": {"8": fields}}))
    with pytest.raises(ValueError, match=message):
        read_shapes(path)


def test_many_rows_without_a_tile_of_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "GPU.json"
    path.write_text(json.dumps({"28672x4096": {"96": {"gated": True}}}))
    with pytest.raises(ValueError, match="block_t=0 for 96 rows"):
        read_shapes(path)


def test_an_unknown_number_of_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "GPU.json"
    path.write_text(json.dumps({"4096x4096": {"12": {}}}))
    with pytest.raises(ValueError, match="12 rows"):
        read_shapes(path)


def test_every_split_has_a_loop_step_or_the_shape_does_not_fit() -> None:
    for inputs in (256, 4096, 14336):
        for block_d in (16, 64, 128, 256):
            for splits in range(1, 17):
                shape = LinearShape(block_d=block_d, splits=splits)
                steps, last = shape.steps(inputs), shape.last_steps(inputs)
                assert (splits - 1) * steps + last == inputs // block_d
                assert shape.fits(4096, inputs) == (0 < last <= steps)


def test_data_files_can_be_read() -> None:
    for path in FOLDER.glob("*.json"):
        assert all(rows in ROW_BOUNDS for by_rows in read_shapes(path).values() for rows in by_rows)
