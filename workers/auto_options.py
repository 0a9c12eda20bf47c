"""Resolves the options that may be "auto": the device, and the dtypes of the base, of the KV cache and of adapters."""

from __future__ import annotations

from pathlib import Path

import torch

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.bases.families.config_fields import DTYPES
from lorafleet.workers.bases.served_config import ServedConfig
from lorafleet.workers.bases.stored_tensors import stored_dtype

FP8_CAPABILITY = (8, 9)  # the first compute capability whose Triton kernels convert to and from e4m3


def choose_device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device=cuda, but torch sees no GPU. Install a CUDA build of torch, or use cpu.", "device")
    use_gpu = available if config.device == "auto" else config.device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")


def base_dtype(config: EngineConfig, model: ServedConfig, folder: Path) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    dtype = model.dtype or (torch.float32 if config.load_format == "dummy" else stored_dtype(folder))
    if dtype not in DTYPES.values():
        raise ConfigError(
            f"the checkpoint's weights are {dtype}, which is not supported; set dtype to one of {', '.join(DTYPES)}.",
            "dtype",
        )
    return dtype


def kv_dtype(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return dtype
    _check_fp8("kv_cache_dtype", device)
    return FP8


def lora_dtype(config: LoRAConfig, base: torch.dtype, device: torch.device) -> torch.dtype:
    dtype = config.serving_dtype(base)
    if dtype == FP8:
        _check_fp8("lora_dtype", device)
    return dtype


def _check_fp8(option: str, device: torch.device) -> None:
    if device.type == "cuda":
        check_fp8(option, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def check_fp8(option: str, capability: tuple[int, int], gpu: str) -> None:
    """Raises ConfigError if a GPU of this compute capability cannot serve fp8."""
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"{option}=fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or newer; {gpu} is older. Use "
            f"{option}=auto.",
            option,
        )
