"""A checkpoint that `lorafleet quantize` writes is served with the bits that `--quantization` serves."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from family_cases import CASES, make_case
from lorafleet.offline.llm import LLM
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.protocol.quantization_methods import Method
from lorafleet.tools.quantized import quantized_checkpoint
from lorafleet.tools.quantized.quantized_checkpoint import default_folder, quantize_checkpoint
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.formats.written_linears import WRITTEN, WrittenLinear
from lorafleet.workers.bases.quantization import METHODS, resolved
from lorafleet.workers.bases.weights import held_tensors, load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup
from quantized_answers import GREEDY
from tests.workers.bases.test_start_memory import checkpoint, peak_bytes, plain
from tiny_models import make_model, stack_experts
from wrapper_cases import WRAPPERS, make_wrapper

MIXTURE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """llama_bias has inputs of 64 and 96, and biases. Layer 1 of the mixture is dense."""
    folder = tmp_path_factory.mktemp("plain")
    mixture = make_model(folder / "mixture", "qwen3_moe", num_hidden_layers=2, **MIXTURE)
    return {
        "dense": make_model(folder / "dense", "llama_bias", num_hidden_layers=2, dtype="bfloat16"),
        "fused": make_model(folder / "fused", "phi3", num_hidden_layers=1),
        "mixture": mixture,
        "stacked": stack_experts(Path(shutil.copytree(mixture, folder / "stacked"))),
    }


def parameters(folder: Path, method: Method | None, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Returns what a rank holds, with the codes of quantized weights."""
    config = read_model_config(folder)
    config = replace(config, quantization=resolved(config.quantization, method))
    model = DecoderModel(config, TPGroup(rank, size), config.dtype or torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        load_weights(model, folder)
    return dict(model.named_parameters())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", ["dense", "fused", "mixture", "stacked"])
def test_every_rank_holds_the_bits_that_are_quantized_at_a_start(tmp_path, bases, base, method) -> None:
    out = tmp_path / "out"
    done = quantize_checkpoint(bases[base], method, out)
    assert done.num_files == 1
    for rank, size in ((0, 1), (1, 2)):
        held, wanted = parameters(out, None, rank, size), parameters(bases[base], method, rank, size)
        assert held.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name


def answers(folder: Path, prompt, **options: object) -> list[tuple[list[int], list[float]]]:
    llm = LLM(str(folder), kv_cache_tokens=2048, **options)
    outputs = llm.generate([{"prompt_token_ids": prompt(n)} for n in (3, 20)], GREEDY)
    llm.close()
    return [(out.outputs[0].token_ids, [p.logprob for p in out.outputs[0].logprobs]) for out in outputs]


@pytest.mark.parametrize(
    ("base", "method"), [("dense", "nf4"), ("dense", "int4"), ("mixture", "fp8"), ("mixture", "nf4")]
)
def test_logprobs_are_those_of_quantizing_at_a_start(tmp_path, prompt, bases, base, method) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(bases[base], method, out)
    assert answers(out, prompt) == answers(bases[base], prompt, quantization=method)


@pytest.mark.parametrize("case", ["gpt_oss", "granite_moe", "starcoder2", "gemma4_small", "phi"])
def test_families_with_names_and_layouts_of_their_own_are_quantized(tmp_path, case) -> None:
    base, out = make_case(tmp_path / "base", CASES[case]), tmp_path / "out"
    quantize_checkpoint(base, "fp8", out)
    held, wanted = parameters(out, None, 0, 1), parameters(base, "fp8", 0, 1)
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name].view(torch.uint8), t.view(torch.uint8)) for name, t in wanted.items())


def test_parts_for_pictures_are_copied(tmp_path) -> None:
    base, out = make_wrapper(tmp_path / "base", WRAPPERS["gemma3"]), tmp_path / "out"
    quantize_checkpoint(base, "nf4", out)
    held, wanted = parameters(out, None, 0, 1), parameters(base, "nf4", 0, 1)
    assert all(torch.equal(held[name].view(torch.uint8), t.view(torch.uint8)) for name, t in wanted.items())
    before, after = stored(base), stored(out)
    pictures = [name for name in before if "vision" in name]
    assert pictures
    assert all(torch.equal(after[name], before[name]) for name in pictures)
    skipped = json.loads((out / "config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]
    assert any("vision" in name for name in skipped)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def test_transformers_and_bitsandbytes_read_nf4_with_the_values_that_are_served(tmp_path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = make_model(tmp_path / "base", "qwen3", num_hidden_layers=1, intermediate_size=128, dtype="bfloat16")
    quantize_checkpoint(base, "nf4", tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cpu")
    config = read_model_config(tmp_path / "out")
    model = DecoderModel(config, TPGroup(), torch.bfloat16, torch.device("cpu"))
    with torch.inference_mode():
        load_weights(model, tmp_path / "out")
    values = held_tensors(model)
    linears = {name: m for name, m in read.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    assert len(linears) == 7
    for name, linear in linears.items():
        weight = linear.weight
        found = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(found, values[f"{name}.weight"]()), name


def test_a_linear_of_int4_is_in_one_group_alone(tmp_path, bases) -> None:
    """compressed-tensors 0.20 prefers the class Linear of one group to a linear's name in another."""
    quantize_checkpoint(bases["dense"], "int4", tmp_path / "several")
    config = json.loads((tmp_path / "several" / "config.json").read_text())["quantization_config"]
    groups = list(config["config_groups"].values())
    assert {group["weights"]["group_size"]: len(group["targets"]) for group in groups} == {32: 4, 64: 10}
    assert "model.layers.0.mlp.down_proj" in groups[0]["targets"]
    alone = WRITTEN["int4"].config({"a": (8, 128), "b": (8, 256)}, [], torch.bfloat16)
    assert [group["targets"] for group in alone["config_groups"].values()] == [["Linear"]]


def test_files_are_of_bounded_size_and_name_every_tensor(tmp_path, bases) -> None:
    seen: list[tuple[int, int]] = []
    done = quantize_checkpoint(
        bases["mixture"], "nf4", tmp_path / "out", shard_bytes=30_000, progress=lambda *at: seen.append(at)
    )
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == done.num_files > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(tmp_path / "out").values()) == done.num_bytes
    alone = max(tensor.nbytes for tensor in stored(tmp_path / "out").values())
    assert all(sum(t.nbytes for t in load_file(file).values()) <= max(30_000, alone) for file in files)
    total = sum(tensor.nbytes for tensor in stored(bases["mixture"]).values())
    assert seen[-1] == (total, total)
    assert done.read_bytes == total
    held, wanted = parameters(tmp_path / "out", None, 0, 1), parameters(bases["mixture"], "nf4", 0, 1)
    assert all(torch.equal(held[name], tensor) for name, tensor in wanted.items())


def test_texts_and_tokenizers_are_copied_but_neither_code_nor_old_indexes(tmp_path, bases) -> None:
    base = Path(shutil.copytree(bases["dense"], tmp_path / "base"))
    (base / "additional_chat_templates").mkdir()
    copied = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "LICENSE"]
    for name in (*copied, "modeling.py", "pytorch_model.bin.index.json"):
        (base / name).write_text("text")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling.X"}}))
    out = default_folder(base, "nf4")
    assert out == default_folder(base / "additional_chat_templates" / "..", "nf4") == tmp_path / "base-nf4"
    quantize_checkpoint(base, "nf4", out)
    assert all((out / name).read_text() == "text" for name in copied)
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert not (out / "modeling.py").exists()
    assert not (out / "pytorch_model.bin.index.json").exists()
    written = json.loads((out / "config.json").read_text())
    assert written.pop("quantization_config")["quant_method"] == "bitsandbytes"
    assert written == config


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, bases, monkeypatch) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(bases["dense"], "int4", out)
    with pytest.raises(ConfigError, match="already exists"):
        quantize_checkpoint(bases["dense"], "nf4", out)
    with pytest.raises(ConfigError, match=r"already quantized \(compressed-tensors\)"):
        quantize_checkpoint(out, "nf4", tmp_path / "again")
    with pytest.raises(UnsupportedModel, match="20 inputs is quantized to int4 in groups of 4 columns"):
        quantize_checkpoint(make_case(tmp_path / "latent", CASES["deepseek_v3"]), "int4", tmp_path / "groups")
    generic = Path(shutil.copytree(bases["dense"], tmp_path / "generic"))
    config = json.loads((generic / "config.json").read_text())
    (generic / "config.json").write_text(json.dumps(config | {"architectures": ["BloomForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="Serve it with --quantization"):
        quantize_checkpoint(generic, "nf4", tmp_path / "of-generic")
    with monkeypatch.context() as patched:
        patched.setattr(quantized_checkpoint, "LINEAR", re.compile("none"))
        with pytest.raises(UnsupportedModel, match="no quantized format names such a linear"):
            quantize_checkpoint(bases["dense"], "nf4", tmp_path / "unnamed")
    with monkeypatch.context() as patched:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        patched.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(ConfigError, match="has 1,000 bytes free"):
            quantize_checkpoint(bases["dense"], "nf4", tmp_path / "small")
    with monkeypatch.context() as patched:
        patched.setattr(quantized_checkpoint, "copy_file", fail_to_write)
        with pytest.raises(ConfigError, match="No space left on device"):
            quantize_checkpoint(bases["dense"], "nf4", tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["generic", "latent", "out"]


def test_the_device_is_chosen_and_a_gpu_that_is_missing_or_full_is_refused(tmp_path, bases, monkeypatch) -> None:
    used: list[torch.device] = []

    def empty(_shape: object, _dtype: object, device: torch.device) -> WrittenLinear:
        used.append(device)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device=cuda, but torch sees no GPU"):
        quantize_checkpoint(bases["dense"], "nf4", tmp_path / "out", device="cuda")
    monkeypatch.setitem(WRITTEN, "nf4", replace(WRITTEN["nf4"], empty=empty))
    monkeypatch.setattr(quantized_checkpoint, "_check_space", lambda *_: None)
    with pytest.raises(ConfigError, match=r"cpu has no room for a linear of .*: no room. Use --device cpu"):
        quantize_checkpoint(bases["dense"], "nf4", tmp_path / "out")
    assert used == [torch.device("cpu")]
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", ["dense", "stacked"])
def test_a_gpu_writes_the_bits_of_a_cpu(tmp_path, bases, base, method) -> None:
    for device in ("cpu", "cuda"):
        quantize_checkpoint(bases[base], method, tmp_path / device, device=device)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "cuda" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()


def fail_to_write(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_damaged_checkpoint_is_refused(tmp_path, bases) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    damages = {
        "lacks 1 tensors": lambda tensors: tensors.pop(name),
        "config.json requires": lambda tensors: tensors.update({name: tensors[name][1:].clone()}),
        "contains NaN": lambda tensors: tensors[name].fill_(float("nan")),
    }
    for index, (message, damage) in enumerate(damages.items()):
        base = Path(shutil.copytree(bases["dense"], tmp_path / f"base-{index}"))
        tensors = load_file(base / "model.safetensors")
        damage(tensors)
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=message):
            quantize_checkpoint(base, "nf4", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    twice = Path(shutil.copytree(bases["stacked"], tmp_path / "twice"))
    tensors = load_file(twice / "model.safetensors") | {
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(64, 64)
    }
    save_file(tensors, twice / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"2 tensors of .* hold 'model\.layers.0.mlp.experts.0.up_proj.weight'"):
        quantize_checkpoint(twice, "nf4", tmp_path / "out")


@pytest.mark.parametrize("method", METHODS)
def test_memory_holds_one_linear_and_one_file(tmp_path, method) -> None:
    """The checkpoint has 32 MiB, and its largest linear 8 MiB."""
    base, shard_bytes = checkpoint(tmp_path / "base", plain, {}, 3, ""), 4 << 20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        quantize_checkpoint(base, method, tmp_path / "out", shard_bytes=shard_bytes)
    largest = max(tensor.nbytes for tensor in stored(tmp_path / "out").values())
    assert peak_bytes(seen, base) <= shard_bytes + largest + (6 << 20)  # the numbers under way
