"""Provides fixtures that several folders share, and decides which tests run in one process: see README.md."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Tiny models gain nothing from more threads, and spinning threads slow down other processes. torch reads this when it
# is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Nothing here is compiled by torch, whose compiler bitsandbytes would import in 3 s of CPU when PEFT is imported.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# A server is a dozen processes, and each would compile all of lorafleet when it starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Each of some thousand clients would read every certificate authority of the machine, which takes 20 ms of CPU. No test
# connects to a host that one of them vouches for.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = tempfile.mkdtemp(prefix="lorafleet-no-authorities-")
os.environ["LORAFLEET_STATE_DIR"] = tempfile.mkdtemp(prefix="lorafleet-state-")  # The tests' own folder.

# A shell has a command in the background ignore SIGINT, and the programs that the tests start inherit that. Tests that
# interrupt them would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch
from huggingface_hub import ModelCard, ModelCardData

import s3_server
from s3_server import RadosGateway
from tiny_models import Reference, has_experts, make_adapter, make_layered_adapter, make_model

sys.dont_write_bytecode = False  # The modules that this process imports are those of the servers too.
pytest_plugins = ["tiny_tokenizers"]


def plain_card(data: ModelCardData, **_: Any) -> ModelCard:
    return ModelCard(f"---\n{data}\n---\n")


# PEFT writes a card beside each of some thousand adapters, and compiles its template each time, which takes 25 ms of
# CPU. No test reads one.
ModelCard.from_template = plain_card

# Every kind of plain LoRA that PEFT can save, by name.
ADAPTER_KINDS: dict[str, dict[str, object]] = {
    "all": {},
    "qv": {"target_modules": ["q_proj", "v_proj"], "r": 3},
    "rslora": {"use_rslora": True, "r": 16, "lora_alpha": 5},
    "patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"down_proj": 3, r"layers\.[01].*": 7},
    },
    "layers": {"layers_to_transform": [0, 2], "target_modules": ["o_proj", "gate_proj"], "r": 1, "lora_alpha": 2.5},
    "regex": {"target_modules": r".*\.(k|down)_proj", "r": 7},
    "linear": {"target_modules": "all-linear", "exclude_modules": ["q_proj"], "dtype": "bfloat16"},
    "large": {"r": 64, "lora_alpha": 8, "dtype": "float16"},
}
# The kinds of adapters of a mixture of experts. PEFT itself converts the names of layers into those of parameters.
EXPERT_ADAPTER_KINDS: dict[str, dict[str, object]] = {
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "linear": {"target_modules": "all-linear", "r": 5},
    "experts": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "r": 3},
    "down": {
        "target_modules": ["v_proj"],
        "target_parameters": ["mlp.experts.down_proj"],
        "rank_pattern": {r"experts\.down_proj": 2},
        "alpha_pattern": {"down_proj": 5},
    },
    "router": {"target_modules": [], "target_parameters": ["gate.weight", "gate_up_proj"], "use_rslora": True},
}


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Makes no tests of a function that needs a GPU where they are left out anyway: thousands of cases cost seconds."""
    if not _leaves_gpu_tests_out(collector.config) or not inspect.isfunction(obj):
        return None
    marks = getattr(obj, "pytestmark", [])
    needs_gpu = any(mark.name == "gpu" for mark in marks) or collector.get_closest_marker("gpu") is not None
    return [] if needs_gpu else None


def _leaves_gpu_tests_out(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput") and not torch.cuda.device_count()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips the tests that need more GPUs than there are, and leaves them out in several processes without a GPU.

    There are thousands of them, and each takes milliseconds in two processes to be skipped.
    """
    num_gpus = torch.cuda.device_count()
    if _leaves_gpu_tests_out(config):
        items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    for item in items:
        needed = max((_num_gpus(*mark.args, **mark.kwargs) for mark in item.iter_markers("gpu")), default=0)
        if needed > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU{'s' * (needed > 1)}"))


def _num_gpus(count: int = 1) -> int:
    """Takes the arguments of the marker gpu."""
    return count


def pytest_collection_finish() -> None:
    """Excludes the tests and modules from garbage collections, which otherwise walk millions of objects for a second.

    Each LLM begins with one, and so do many tests.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds the random numbers, so that a test has the same ones alone or among others."""
    random.seed(0)
    # Without a GPU, torch.manual_seed would note a stack for each kind of device, which takes a millisecond and memory.
    seed = torch.manual_seed if torch.cuda.device_count() else torch.default_generator.manual_seed
    seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from shared_processes import FilesTogether

    return FilesTogether(config, log)


class Fleet:
    """Holds one base model, an adapter of every kind, and the reference for both."""

    def __init__(self, root: Path, family: str) -> None:
        self.family = family
        self.base = make_model(root / family, family)
        self.reference = Reference(self.base)
        self._root = root

    @functools.cached_property
    def adapters(self) -> dict[str, Path]:
        """Folders of adapters, which not every test needs."""
        kinds = EXPERT_ADAPTER_KINDS if has_experts(self.family) else ADAPTER_KINDS
        adapters = {
            kind: make_adapter(self._root / f"{self.family}-{kind}", self.base, seed=10 + i, **options)
            for i, (kind, options) in enumerate(kinds.items())
        }
        if has_experts(self.family):
            adapters["layered"] = make_layered_adapter(self._root / f"{self.family}-layered", self.base)
        return adapters


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Fleet]:
    root = tmp_path_factory.mktemp("fleet")
    made: dict[str, Fleet] = {}

    def get(family: str) -> Fleet:
        if family not in made:
            made[family] = Fleet(root, family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def prompt() -> Callable[[int], list[int]]:
    """Returns a function that makes random token ids, always the same for a length, without special tokens."""

    def make(length: int) -> list[int]:
        return torch.randint(5, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()

    return make


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    reason = s3_server.why_not()
    if reason is not None:
        pytest.skip(reason)
    server = RadosGateway(tmp_path_factory.mktemp("rgw"))
    yield server
    server.stop()
