"""Provides servers that several files share, each of which does to its server what the others can bear."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cluster.harness import serving
from tests.cluster.last_tests import until_last_test
from tests.cluster.nodes import Nodes, running_nodes
from tests.cluster.one_replica import OneReplica
from tests.workers.conftest import AdapterDir, make_base, peft_warnings_ignored


@pytest.fixture(scope="session")
def one_replica(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneReplica]:
    """Serves one replica of `tiny`, with the adapter `good` and a folder where a resolver finds more.

    A test file that uses it sets `pytestmark = pytest.mark.xdist_group("one_replica")`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("one")
    make_base("llama").save_pretrained(root / "base")
    letters = ["<s>", "</s>", *string.ascii_letters, *string.digits]
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(root / "base")
    folder = root / "resolver"
    folder.mkdir()
    good = _good_adapter(root / "good")
    arguments = ["--model", str(root / "base"), "--served-model-name", "tiny", "--lora-modules", f"good={good.path}"]
    arguments += ["--lora-resolver-dir", str(folder), "--allow-runtime-lora-updating", "--device", "cpu"]
    arguments += ["--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "16", "--kv-cache-tokens", "2048"]
    with until_last_test(request) as stack:
        running = stack.enter_context(serving(arguments, root / "serve.log", last_streams="good"))
        yield OneReplica(running.url, running.pid, root / "serve.log", folder, good)


def _good_adapter(path: Path) -> AdapterDir:
    from peft import LoraConfig, get_peft_model

    with peft_warnings_ignored():
        settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(make_base("llama"), settings)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(str(path))
    return AdapterDir(path)


@pytest.fixture(scope="session")
def three_nodes(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    """Serves two replicas of `base` on a cluster of three nodes, with a folder where a resolver finds adapters.

    A test file that uses it sets `pytestmark = pytest.mark.xdist_group("three_nodes")`, and puts adapters into the
    folder under names of its own. test_failing_nodes.py, the last one, makes a node fail.
    """
    folder = tmp_path_factory.mktemp("nodes")
    arguments = {
        "model": str(tiny_model),
        "served_model_name": "base",
        "num_replicas": 2,
        "device": "cpu",
        "num_cpus": 1,
        "cpu_threads": 1,
        "max_loras": 4,
        "max_cpu_loras": 16,
        "kv_cache_tokens": 4096,
        "lora_resolver_dir": str(folder),
    }
    with until_last_test(request) as stack:
        yield stack.enter_context(running_nodes(arguments, folder))
