from __future__ import annotations

from pathlib import Path

from lorafleet.kernels.lora import lora_tuning
from lorafleet.kernels.tuned_data import SAME_PROCESSOR, measured_path, tuned_path

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"


def test_a_gpu_uses_the_data_of_the_same_processor_until_it_has_its_own(tmp_path: Path) -> None:
    assert SAME_PROCESSOR[H100] == H200
    assert measured_path(tmp_path, H100) == tuned_path(tmp_path, H200) == tmp_path / "NVIDIA_H200.json"
    own = tuned_path(tmp_path, H100)
    own.touch()
    assert measured_path(tmp_path, H100) == own
    assert measured_path(tmp_path, H100, ".sm_split.json") == tmp_path / "NVIDIA_H200.sm_split.json"


def test_an_unknown_gpu_has_only_its_own_file(tmp_path: Path) -> None:
    assert measured_path(tmp_path, "A/B C") == tuned_path(tmp_path, "A/B C") == tmp_path / "A_B_C.json"


def test_the_data_of_each_processor_exists() -> None:
    for gpu in SAME_PROCESSOR.values():
        assert tuned_path(lora_tuning.FOLDER, gpu).exists()
