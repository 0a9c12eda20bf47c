"""Damaged, hostile and unsupported adapters: each is refused at once, with its error class and the cause named."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import socket
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lorafleet.workers.errors import (
    AdapterChanged,
    AdapterError,
    AdapterMalformed,
    AdapterMismatch,
    AdapterMissing,
    AdapterUnsupported,
    RankTooLarge,
)
from lorafleet.workers.lora.files import AdapterFolder, OpenFile, open_weights

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
CANARY = Path("/tmp/lorafleet-evil")  # is there once an adapter's code has run
SECRET = "the-secret-of-another-file"
Damage = Callable[[Any], object]


def config_is(text: str | bytes) -> Damage:
    data = text.encode() if isinstance(text, str) else text
    return lambda a: (a.path / "adapter_config.json").write_bytes(data)


def config_has(**changes: object) -> Damage:
    return lambda a: a.set(**changes)


def raw_config(key: str, text: str) -> Damage:
    """A value that json.dumps would not write."""

    def damage(a: Any) -> None:
        config = {k: v for k, v in a.config.items() if k != key}
        (a.path / "adapter_config.json").write_text(json.dumps(config)[:-1] + f', "{key}": {text}}}')

    return damage


def weights_are(change: Callable[[bytes], bytes]) -> Damage:
    def damage(a: Any) -> None:
        path = a.path / "adapter_model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def header_is(change: Callable[[dict[str, Any]], object]) -> Damage:
    def rewrite(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return weights_are(rewrite)


def raw_header(text: bytes) -> Damage:
    return weights_are(lambda _: struct.pack("<Q", len(text)) + text)


def tensor_is(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda a: a.map(lambda k, v: (k, change(v) if k == f"{Q0}.{name}" else v))


def without(part: str) -> Damage:
    return lambda a: a.write({k: v for k, v in a.tensors.items() if part not in k})


def with_tensor(name: str, *shape: int) -> Damage:
    return lambda a: a.write(a.tensors | {name: torch.ones(shape)})


def renamed(old: str, new: str) -> Damage:
    return lambda a: a.map(lambda k, v: (k.replace(old, new), v))


def replaced_by(name: str, make: Callable[[Any], object]) -> Damage:
    def damage(a: Any) -> None:
        (a.path / name).unlink()
        make(a.path / name)

    return damage


def bin_is(data: Callable[[Any], bytes]) -> Damage:
    def damage(a: Any) -> None:
        content = data(a)
        (a.path / "adapter_model.safetensors").unlink()
        (a.path / "adapter_model.bin").write_bytes(content)

    return damage


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {CANARY}",)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def zip_bomb(_: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (64 << 20))
    return buffer.getvalue()


def many_tensors(a: Any) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    raw_header(json.dumps({f"t{i}": entry for i in range(50_000)}).encode())(a)


def sparse_weights(path: Any) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def entry(**changes: object) -> Damage:
    return header_is(lambda h: h[f"{Q0}.lora_A.weight"].update(changes))


CASES: dict[str, tuple[Damage, type[AdapterError], str]] = {
    # --- files ---
    "no folder": (lambda a: a.path.rename(a.path.parent / "gone"), AdapterMissing, "no folder"),
    "no config": (lambda a: (a.path / "adapter_config.json").unlink(), AdapterMissing, "adapter_config.json"),
    "no weights": (lambda a: (a.path / "adapter_model.safetensors").unlink(), AdapterMissing, "adapter_model"),
    "mlx file name": (
        lambda a: (a.path / "adapter_model.safetensors").rename(a.path / "adapters.safetensors"),
        AdapterUnsupported,
        "mlx",
    ),
    "weights are a folder": (replaced_by("adapter_model.safetensors", os.mkdir), AdapterMalformed, "regular file"),
    "weights are a FIFO": (replaced_by("adapter_model.safetensors", os.mkfifo), AdapterMalformed, "regular file"),
    "config is a FIFO": (replaced_by("adapter_config.json", os.mkfifo), AdapterMalformed, "regular file"),
    "config is a device": (
        replaced_by("adapter_config.json", lambda p: p.symlink_to("/dev/zero")),
        AdapterMalformed,
        "symlink",
    ),
    "config is a link to itself": (
        replaced_by("adapter_config.json", lambda p: p.symlink_to(p)),
        AdapterMissing,
        "adapter_config.json",
    ),
    "link out of the folder": (
        replaced_by("adapter_model.safetensors", lambda p: p.symlink_to("/etc/hostname")),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "a terabyte of holes": (replaced_by("adapter_model.safetensors", sparse_weights), AdapterMalformed, "at most"),
    # --- config ---
    "empty config": (config_is(""), AdapterMalformed, "not valid JSON"),
    "config is a list": (config_is("[1]"), AdapterMalformed, "must hold an object"),
    "config is not UTF-8": (config_is(b'{"r": "\xff"}'), AdapterMalformed, "UTF-8"),
    "config is nested deeply": (config_is("[" * 100_000), AdapterMalformed, "nested too deeply"),
    "config is huge": (config_is(" " * (2 << 20)), AdapterMalformed, "at most"),
    "key twice": (config_is('{"peft_type": "LORA", "r": 4, "r": 8}'), AdapterMalformed, "'r' occurs twice"),
    "NaN in config": (raw_config("lora_alpha", "NaN"), AdapterMalformed, "NaN"),
    "infinity by exponent": (raw_config("lora_alpha", "1e999"), AdapterMalformed, "lora_alpha is inf"),
    "number of 10^5 digits": (raw_config("r", "1" * 100_000), AdapterMalformed, "not acceptable JSON"),
    "no peft_type": (config_has(peft_type=None), AdapterMalformed, "peft_type"),
    "r 0": (config_has(r=0), AdapterMalformed, "r is 0"),
    "r -1": (config_has(r=-1), AdapterMalformed, "r is -1"),
    "r true": (config_has(r=True), AdapterMalformed, "r is True"),
    "r text": (config_has(r="4"), AdapterMalformed, "r is '4'"),
    "r 4.0": (config_has(r=4.0), AdapterMalformed, "r is 4.0"),
    "r null": (config_has(r=None), AdapterMalformed, "r is None"),
    "r 10^9": (config_has(r=10**9), AdapterMalformed, "rank 4 in the weights, and 1000000000"),
    "r disagrees": (config_has(r=8), AdapterMalformed, "rank 4 in the weights, and 8"),
    "alpha text": (config_has(lora_alpha="16"), AdapterMalformed, "lora_alpha is '16'"),
    "alpha null": (config_has(lora_alpha=None), AdapterMalformed, "lora_alpha is None"),
    "alpha over every float": (config_has(lora_alpha=10**400), AdapterMalformed, "finite"),
    "rsLoRA is text": (config_has(use_rslora="yes"), AdapterMalformed, "use_rslora"),
    "rank_pattern is a list": (config_has(rank_pattern=["q_proj"]), AdapterMalformed, "rank_pattern"),
    "rank_pattern value": (config_has(rank_pattern={"q_proj": [True]}), AdapterMalformed, "rank_pattern['q_proj']"),
    "rank_pattern is no regex": (config_has(rank_pattern={"q_proj(": 4}), AdapterMalformed, "no regular expression"),
    "rank_pattern disagrees": (config_has(rank_pattern={"q_proj": 2}), AdapterMalformed, "and 2 by"),
    "targets are numbers": (config_has(target_modules=[1]), AdapterMalformed, "target_modules"),
    "no targets": (config_has(target_modules=[]), AdapterMalformed, "does not target"),
    "regex with flags": (config_has(target_modules="(?i).*Q_PROJ"), AdapterUnsupported, "target_modules"),
    "regex of escapes": (config_has(target_modules=r"\u0071_proj"), AdapterUnsupported, "target_modules"),
    "catastrophic regex": (config_has(target_modules=r"(?:a|.|..|...)*Z?(?<!oj)"), AdapterMalformed, "backtracking"),
    "regex nested deeply": (config_has(target_modules="(" * 4000 + ")" * 4000), AdapterMalformed, "regular expression"),
    "layers are text": (config_has(layers_to_transform=["0"]), AdapterMalformed, "layers_to_transform"),
    "layers with a regex": (
        config_has(layers_to_transform=[0], target_modules=".*q_proj"),
        AdapterMalformed,
        "layers_to_transform",
    ),
    "layers_pattern alone": (config_has(layers_pattern="layers"), AdapterMalformed, "layers_pattern"),
    "unknown task": (config_has(task_type="DANCE"), AdapterMalformed, "task_type"),
    # --- features ---
    "LoRA's keys in LoHa": (config_has(peft_type="LOHA"), AdapterUnsupported, "'bias'"),
    "method of a later PEFT": (config_has(peft_type="WONDER"), AdapterUnsupported, "knows no such method"),
    "prompt tuning": (config_has(peft_type="PROMPT_TUNING"), AdapterUnsupported, "PROMPT_TUNING"),
    "DoRA": (config_has(use_dora=True), AdapterMalformed, "without lora_magnitude_vector"),
    "unknown biases": (config_has(bias="some"), AdapterMalformed, "bias is 'some'"),
    "lora_bias": (config_has(lora_bias=True), AdapterMalformed, "without lora_B.bias"),
    "lora_bias with DoRA": (config_has(lora_bias=True, use_dora=True), AdapterUnsupported, "lora_bias with DoRA"),
    "two variants": (config_has(kasa_config={}, use_dora=True), AdapterUnsupported, "use_dora with kasa_config"),
    "KaSA over PiSSA": (config_has(kasa_config={}, init_lora_weights="pissa"), AdapterUnsupported, "kasa_config with"),
    "modules_to_save": (config_has(modules_to_save=["lm_head"]), AdapterMalformed, "modules_to_save"),
    "a whole linear saved": (config_has(modules_to_save=["k_proj"]), AdapterUnsupported, "self_attn.k_proj whole"),
    "a whole MLP saved": (config_has(modules_to_save=["mlp"]), AdapterUnsupported, "model.layers.0.mlp whole"),
    "an expression saved": (config_has(modules_to_save=["(a|a)*"]), AdapterMalformed, "no name of a module"),
    "norms saved, not there": (config_has(modules_to_save=["norm"]), AdapterMalformed, "has no tensor for it"),
    "trained tokens": (config_has(trainable_token_indices=[1]), AdapterMalformed, "trained tokens"),
    "trained tokens twice": (config_has(trainable_token_indices=[1, 1]), AdapterMalformed, "each once"),
    "trained tokens are text": (config_has(trainable_token_indices=["a"]), AdapterMalformed, "list of token ids"),
    "trained tokens of another": (
        config_has(trainable_token_indices={"wte": [1]}),
        AdapterUnsupported,
        "trainable_token_indices names 'wte'",
    ),
    "aLoRA's tokens are text": (config_has(alora_invocation_tokens="<s>"), AdapterMalformed, "alora_invocation_tokens"),
    "aLoRA with biases": (config_has(alora_invocation_tokens=[1], bias="all"), AdapterUnsupported, "activated LoRA"),
    "layer replication": (config_has(layer_replication=[[0, 2]]), AdapterUnsupported, "layer replication"),
    "LoRA on parameters": (config_has(target_parameters=["experts"]), AdapterUnsupported, "target_parameters"),
    "QALoRA": (config_has(use_qalora=True), AdapterUnsupported, "QALoRA"),
    "KaSA": (config_has(kasa_config={"beta": 1e-4}), AdapterMalformed, "without lora_diag"),
    "PiSSA": (config_has(init_lora_weights="pissa_niter_16"), AdapterUnsupported, "PiSSA"),
    "CorDA": (config_has(init_lora_weights="corda"), AdapterUnsupported, "CorDA"),
    "LoftQ": (config_has(init_lora_weights="loftq"), AdapterUnsupported, "LoftQ"),
    "unknown initialisation": (config_has(init_lora_weights="magic"), AdapterUnsupported, "'magic'"),
    "classifier": (config_has(task_type="SEQ_CLS"), AdapterUnsupported, "SEQ_CLS"),
    "merged linears of 2023": (config_has(enable_lora=[True, False]), AdapterUnsupported, "enable_lora"),
    "key of a later PEFT": (config_has(use_wonders=True), AdapterUnsupported, "'use_wonders'"),
    "code in the config": (config_has(auto_map={"AutoModel": "evil.py"}), AdapterUnsupported, "'auto_map'"),
    # --- tensors ---
    "magnitude vector": (with_tensor(f"{Q0}.lora_magnitude_vector", 32), AdapterMalformed, "magnitude_vector' has no"),
    "tensors of another method": (with_tensor(f"{Q0}.hada_w1_a", 32, 4), AdapterUnsupported, "LoHa"),
    "embedding LoRA": (
        with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", 4, 64),
        AdapterMalformed,
        "embed_tokens",
    ),
    "head of another size": (with_tensor("base_model.model.lm_head.weight", 64, 16), AdapterMismatch, "lm_head"),
    "head alone resized": (with_tensor("base_model.model.lm_head.weight", 70, 32), AdapterMalformed, "saved whole"),
    "LoRA on the head": (with_tensor("base_model.model.lm_head.lora_A.weight", 4, 32), AdapterMalformed, "lm_head"),
    "norm that is not saved": (with_tensor("base_model.model.model.norm.weight", 32), AdapterMalformed, "for norm"),
    "linear that is not saved": (with_tensor(f"{Q0}.weight", 32, 32), AdapterMalformed, "q_proj.weight"),
    "saved bias": (with_tensor(f"{Q0}.base_layer.bias", 32), AdapterMalformed, "base_layer.bias"),
    "bias on B": (with_tensor(f"{Q0}.lora_B.bias", 32), AdapterMalformed, "lora_B.bias"),
    "mlx tensors": (renamed(".lora_A.weight", ".lora_a"), AdapterUnsupported, "mlx"),
    "unknown tensor": (with_tensor("surprise", 1), AdapterMalformed, "'surprise'"),
    "unknown infix": (renamed("lora_A.weight", "lora_A.other.weight"), AdapterUnsupported, "lora_A.other"),
    "two names for one": (with_tensor(f"{Q0}.lora_A.default.weight", 4, 32), AdapterMalformed, "are both lora_A"),
    "A without B": (without("layers.1.self_attn.q_proj.lora_B"), AdapterMalformed, "without lora_B"),
    "B without A": (without("layers.1.self_attn.q_proj.lora_A"), AdapterMalformed, "without lora_A"),
    "no tensors": (without("lora"), AdapterMalformed, "no tensors"),
    "missing module": (without("layers.2.self_attn.v_proj"), AdapterMalformed, "targets layers.2.self_attn.v_proj"),
    "stray modules": (config_has(target_modules=["q_proj"]), AdapterMalformed, "layers.0.self_attn.v_proj"),
    "head targeted, not saved": (
        config_has(target_modules=["q_proj", "v_proj", "lm_head"]),
        AdapterMalformed,
        "lm_head",
    ),
    "layer of a larger model": (renamed("layers.2.", "layers.40."), AdapterMismatch, "layers.40"),
    "module of another family": (renamed("q_proj", "query_key_value"), AdapterMismatch, "query_key_value"),
    "experts": (renamed("self_attn.q_proj", "mlp.experts.0.w1"), AdapterMismatch, "mlp.experts.0.w1"),
    "ranks of A and B differ": (tensor_is("lora_B.weight", lambda t: t[:, :3]), AdapterMalformed, "rank 3 in lora_B"),
    "wrong input size": (tensor_is("lora_A.weight", lambda t: t[:, :16]), AdapterMismatch, "[4, 16]"),
    "wrong output size": (tensor_is("lora_B.weight", lambda t: t.repeat(2, 1)), AdapterMismatch, "[64, 4]"),
    "transposed": (lambda a: a.map(lambda k, v: (k, v.T)), AdapterMismatch, "transposed"),
    "vector for a matrix": (tensor_is("lora_A.weight", lambda t: t[0]), AdapterMalformed, "must be a matrix"),
    "ZeRO-3": (tensor_is("lora_A.weight", lambda _: torch.empty(0)), AdapterMalformed, "ZeRO-3"),
    "integers": (tensor_is("lora_A.weight", lambda t: t.to(torch.int32)), AdapterUnsupported, "I32"),
    "float8": (tensor_is("lora_A.weight", lambda t: t.to(torch.float8_e4m3fn)), AdapterUnsupported, "F8_E4M3"),
    "NaN": (tensor_is("lora_A.weight", lambda t: t.index_fill(1, torch.tensor(5), torch.nan)), AdapterMalformed, "NaN"),
    "infinity": (tensor_is("lora_B.weight", lambda t: t / 0), AdapterMalformed, "infinite"),
    # --- safetensors ---
    "empty weights": (weights_are(lambda _: b""), AdapterMalformed, "truncated"),
    "truncated in the header": (weights_are(lambda d: d[:100]), AdapterMalformed, "truncated"),
    "truncated in the data": (weights_are(lambda d: d[:-5]), AdapterMalformed, "truncated"),
    "bytes at the end": (weights_are(lambda d: d + b"PK"), AdapterMalformed, "belong to no tensor"),
    "pickle, renamed": (weights_are(lambda _: pickle.dumps(Evil())), AdapterMalformed, "not a safetensors file"),
    "header bomb": (weights_are(lambda d: struct.pack("<Q", 1 << 62) + d[8:]), AdapterMalformed, "header"),
    "header is no JSON": (raw_header(b"{]"), AdapterMalformed, "not valid JSON"),
    "header key twice": (raw_header(b'{"a": 1, "a": 2}'), AdapterMalformed, "occurs twice"),
    "header nested deeply": (raw_header(b'{"a":' * 50_000), AdapterMalformed, "nested too deeply"),
    "many tensors": (many_tensors, AdapterMalformed, "50000 tensors"),
    "negative offset": (entry(data_offsets=[-512, 0]), AdapterMalformed, "wrongly"),
    "offsets backwards": (entry(data_offsets=[512, 0]), AdapterMalformed, "wrongly"),
    "hole": (entry(data_offsets=[8, 520]), AdapterMalformed, "hole"),
    "overlap": (
        header_is(lambda h: h[f"{Q0}.lora_B.weight"].update(data_offsets=[256, 768])),
        AdapterMalformed,
        "overlaps",
    ),
    "shape beyond its bytes": (entry(shape=[4, 64]), AdapterMalformed, "do not hold"),
    "shape overflow": (entry(shape=[1 << 40, 1 << 40]), AdapterMalformed, "do not hold"),
    "shape of floats": (entry(shape=[4.0, 32]), AdapterMalformed, "wrongly"),
    "unknown entry key": (entry(stride=[1, 2]), AdapterMalformed, "wrongly"),
    # --- .bin ---
    "bare pickle": (bin_is(lambda _: pickle.dumps(Evil())), AdapterMalformed, "zip format"),
    "code in a .bin": (bin_is(lambda _: saved({"a": Evil()})), AdapterUnsupported, "more than tensors"),
    "truncated .bin": (bin_is(lambda a: saved(a.tensors)[:-500]), AdapterMalformed, "truncated"),
    "zip bomb": (bin_is(zip_bomb), AdapterMalformed, "compressed"),
    ".bin of a list": (bin_is(lambda _: saved([1])), AdapterMalformed, "must hold a dict"),
    ".bin of numbers": (bin_is(lambda _: saved({"a": 1})), AdapterMalformed, "not a dense tensor"),
    ".bin of a sparse tensor": (
        bin_is(lambda _: saved({"a": torch.eye(3).to_sparse()})),
        AdapterMalformed,
        "not a dense tensor",
    ),
    ".bin of a vast view": (
        bin_is(lambda _: saved({f"{Q0}.lora_A.weight": torch.ones(1).expand(1 << 20, 1 << 20)})),
        AdapterMalformed,
        "more values than bytes",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_adapter_is_refused_at_once_and_by_name(adapter: Any, case: str) -> None:
    damage, error, words = CASES[case]
    damage(adapter)
    start = time.thread_time()
    with pytest.raises(error) as caught:
        adapter.load()
    assert time.thread_time() - start < 1
    assert type(caught.value) is error
    assert caught.value.message.startswith("adapter 'sql': ")
    assert words in caught.value.message
    assert len(caught.value.message) < 700
    caught.value.message.encode()
    assert not CANARY.exists()


def test_rank_over_the_limit_says_what_to_raise(make_adapter: Any) -> None:
    adapter = make_adapter(rank_pattern={"v_proj": 9})
    with pytest.raises(RankTooLarge, match=r"adapter 'sql' has rank 9; .*lora.max_lora_rank=8.* to 9 .* rank <= 8"):
        adapter.load(max_lora_rank=8)
    assert adapter.load(max_lora_rank=9).rank == 9


def test_values_that_overflow_the_serving_dtype_are_named(adapter: Any) -> None:
    adapter.map(lambda k, v: (k, v.clone().fill_(1e5) if k.endswith("2.self_attn.v_proj.lora_B.weight") else v))
    assert adapter.load(dtype=torch.bfloat16).rank == 4
    with pytest.raises(AdapterMalformed, match=r"layers.2.*up to 1e\+05.*float16"):
        adapter.load(dtype=torch.float16)


def test_a_scaling_that_overflows_the_serving_dtype_is_named(adapter: Any) -> None:
    adapter.set(lora_alpha=1e6)
    assert adapter.load(dtype=torch.float32).rank == 4
    with pytest.raises(AdapterMalformed, match="scaling 250000"):
        adapter.load(dtype=torch.float16)


def test_other_bytes_than_registered_are_refused(adapter: Any) -> None:
    digest = adapter.load().digest
    adapter.map(lambda k, v: (k, v * 2))
    with pytest.raises(AdapterChanged, match="digest"):
        adapter.load(expected_digest=digest)


def test_a_file_that_changes_while_it_is_read_is_refused(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = OpenFile.read_into

    def read_while_writing(self: OpenFile, target: memoryview, digest: Any) -> None:
        read(self, target, digest)
        if self.name.endswith(".safetensors"):
            os.utime(adapter.path / self.name, ns=(1, 1))

    monkeypatch.setattr(OpenFile, "read_into", read_while_writing)
    with pytest.raises(AdapterChanged, match="changed while it was read"):
        adapter.load()


def test_a_path_with_nul_is_missing() -> None:
    with pytest.raises(AdapterMissing, match="NUL"):
        AdapterFolder.at("/tmp/a\0b")


def test_a_socket_is_not_opened(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter.path / "adapter_model.safetensors"
    path.unlink()
    monkeypatch.chdir(adapter.path)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
        with pytest.raises(AdapterMissing, match=os.strerror(errno.ENXIO)):
            open_weights(AdapterFolder.at(adapter.path))
