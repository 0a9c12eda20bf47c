"""Damaged, hostile and unsupported adapters: each is refused at once, with its error class and the cause named."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import shutil
import socket
import struct
import tarfile
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
    AdapterTooLarge,
    AdapterUnsupported,
    RankTooLarge,
)
from lorafleet.workers.lora.files import AdapterFolder, OpenFile, open_weights

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
CANARY = Path("/tmp/lorafleet-evil")  # is there once an adapter's code has run
SECRET = "the-secret-of-another-file"
SLOW_REGEX = r"(?:a|.|..|...)*Z?(?<!oj)"
EVIL_CODE = f"import os\nos.system('touch {CANARY}')\n"
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


def kind_is(method: str, tensors: dict[str, Any], target: str = "layers.0.self_attn.q_proj", **config: Any) -> Damage:
    """An adapter of another method on one module, [32, 32]. tensors: by leaf, of a shape or with values."""

    def damage(a: Any) -> None:
        fields = {"peft_type": method, "task_type": "CAUSAL_LM", "target_modules": [target], **config}
        (a.path / "adapter_config.json").write_text(json.dumps(fields))
        module = f"base_model.model.model.{target}"
        named = {
            leaf if leaf.startswith("base_model") else f"{module}.{leaf}": (
                value if isinstance(value, torch.Tensor) else torch.ones(value)
            )
            for leaf, value in tensors.items()
        }
        a.write(named)

    return damage


def loha(r: int, **config: Any) -> Damage:
    leaves = {"hada_w1_a": (32, r), "hada_w1_b": (r, 32), "hada_w2_a": (32, r), "hada_w2_b": (r, 32)}
    return kind_is("LOHA", leaves, r=config.pop("said_r", r), **config)


def dora(magnitude: torch.Tensor) -> Damage:
    leaves = {"lora_A.weight": (4, 32), "lora_B.weight": (32, 4), "lora_magnitude_vector": magnitude}
    return kind_is("LORA", leaves, r=4, lora_alpha=8, use_dora=True)


def vera(r: int, **config: Any) -> Damage:
    leaves = {"vera_lambda_b": (32,), "vera_lambda_d": (config.pop("kept", r),)}
    return kind_is("VERA", leaves, r=r, save_projection=False, **config)


def adalora(pattern: Any, rank: int = 4, **config: Any) -> Damage:
    leaves = {"lora_A": (rank, 32), "lora_B": (32, rank), "lora_E": (rank, 1)}
    name = "model.layers.0.self_attn.q_proj.lora_E"
    return kind_is("ADALORA", leaves, lora_alpha=8, rank_pattern={name: pattern}, **({"init_r": 4} | config))


def with_tokens(tokens: Any, *shape: int) -> Damage:
    """LoRA with trained tokens of the embedding."""

    def damage(a: Any) -> None:
        a.set(trainable_token_indices=tokens)
        rows = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
        a.write(a.tensors | {rows: torch.ones(shape)})

    return damage


def vast_tables(a: Any) -> None:
    """Sixty million tokens, in a file of holes."""
    a.set(modules_to_save=["embed_tokens", "lm_head"])
    path = a.path / "adapter_model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, end = json.loads(data[8 : 8 + size]), len(data) - 8 - size
    for name in ("model.embed_tokens", "lm_head"):
        entry = {"dtype": "F32", "shape": [60_000_000, 32], "data_offsets": [end, end + 60_000_000 * 128]}
        header[f"base_model.model.{name}.weight"] = entry
        end = entry["data_offsets"][1]
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data[8 + size :])
        file.truncate(8 + len(text) + end)


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


def outside(a: Any) -> Path:
    """A file beside the adapter's folder that nobody may see."""
    path = Path(a.path.parent / "secret.json")
    path.write_text(json.dumps({"peft_type": "LORA", SECRET: SECRET}))
    return path


def linked(name: str, target: Callable[[Any], Path | str]) -> Damage:
    def damage(a: Any) -> None:
        (a.path / name).unlink()
        (a.path / name).symlink_to(target(a))

    return damage


def folder_is(make: Callable[[Any], object]) -> Damage:
    def damage(a: Any) -> None:
        shutil.rmtree(a.path)
        make(a)

    return damage


def socket_at(path: Path) -> None:
    """By a short name, since a socket's path may have 108 characters."""
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def holes(size: int) -> Damage:
    """A valid header over so many bytes that nobody ever wrote."""

    def damage(a: Any) -> None:
        entry = {"dtype": "F32", "shape": [size // 128, 32], "data_offsets": [0, size]}
        header = json.dumps({f"{Q0}.lora_A.weight": entry}).encode()
        with open(a.path / "adapter_model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + size)

    return damage


def tiny_tensors(count: int) -> Damage:
    def damage(a: Any) -> None:
        entries = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)}
        header = json.dumps(entries).encode()
        weights_are(lambda _: struct.pack("<Q", len(header)) + header + bytes(count))(a)

    return damage


def said_length(size: int) -> Damage:
    return weights_are(lambda d: struct.pack("<Q", size) + d[8:])


def cut_in_header(d: bytes) -> bytes:
    (size,) = struct.unpack("<Q", d[:8])
    return d[: 8 + size - 1]


def cut_behind_header(d: bytes) -> bytes:
    (size,) = struct.unpack("<Q", d[:8])
    return d[: 8 + size + 1]


def tar_of(_: Any) -> bytes:
    """torch's format before 0.4: a tar of pickles."""
    buffer, content = io.BytesIO(), pickle.dumps(Evil())
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def old_torch_file(a: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(a.tensors, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def zip_of(pickled: bytes, **records: bytes) -> bytes:
    """What torch.save would write around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {"data.pkl": pickled, "version": b"3", "byteorder": b"little", **records}.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def text_op(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def tuple_key_bomb(_: Any) -> bytes:
    """A key of tuples in tuples, each twice in the next: hashing it takes 2^40 steps."""
    return zip_of(opcodes(b"}", b")", *[b"q\x00h\x00\x86"] * 40, b"K\x01", b"s"))


def bytearray_bomb(_: Any) -> bytes:
    """bytearray(10^11), which torch's weights_only lets a pickle call."""
    size = (10**11).to_bytes(6, "little")
    return zip_of(opcodes(b"}", text_op("a"), b"cbuiltins\nbytearray\n", b"\x8a\x06" + size, b"\x85R", b"s"))


def many_entries(_: Any) -> bytes:
    return zip_of(opcodes(b"}", b"(", *(text_op(f"t{i}") + b"K\x01" for i in range(100_000)), b"u"))


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
    "14 GB of holes behind a header": (holes(14 << 30), AdapterMalformed, "without lora_B"),
    "the folder is a file": (folder_is(lambda a: a.path.write_text(SECRET)), AdapterMissing, "not a folder"),
    "the folder is a link to another": (
        folder_is(lambda a: a.path.symlink_to("/etc")),
        AdapterMissing,
        "has no adapter_config.json",
    ),
    "config leads to another file": (linked("adapter_config.json", outside), AdapterMalformed, "symlink that leaves"),
    "weights lead to another file": (
        linked("adapter_model.safetensors", outside),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "weights lead up and down again": (
        linked("adapter_model.safetensors", lambda a: f"../{outside(a).name}"),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "weights lead to a device": (
        linked("adapter_model.safetensors", lambda _: "/dev/random"),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "weights lead to the process's memory": (
        linked("adapter_model.safetensors", lambda _: "/proc/self/mem"),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "config is a folder": (replaced_by("adapter_config.json", os.mkdir), AdapterMalformed, "regular file"),
    "weights are a socket": (
        replaced_by("adapter_model.safetensors", socket_at),
        AdapterMissing,
        "cannot be opened",
    ),
    "config of a terabyte of holes": (replaced_by("adapter_config.json", sparse_weights), AdapterMalformed, "at most"),
    "code beside the config": (
        lambda a: (a.set(auto_map={"AutoModel": "evil.Model"}), (a.path / "evil.py").write_text(EVIL_CODE)),
        AdapterUnsupported,
        "'auto_map'",
    ),
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
    "config of 10 MB": (config_is(json.dumps({"peft_type": "LORA", "x": "a" * 10**7})), AdapterMalformed, "at most"),
    "a value nested deeply": (
        config_is('{"peft_type": "LORA", "rank_pattern": ' + '{"a":' * 100_000),
        AdapterMalformed,
        "nested too deeply",
    ),
    "key twice, within": (
        raw_config("rank_pattern", '{"q_proj": 4, "q_proj": 8}'),
        AdapterMalformed,
        "'q_proj' occurs twice",
    ),
    "infinity in config": (raw_config("lora_alpha", "-Infinity"), AdapterMalformed, "Infinity"),
    "alpha 1e308": (config_has(lora_alpha=1e308), AdapterMalformed, "finite"),
    "alpha is a list": (config_has(lora_alpha=[1]), AdapterMalformed, "lora_alpha is [1]"),
    "r 2^63": (config_has(r=2**63), AdapterMalformed, "rank 4 in the weights"),
    "r is an object": (config_has(r={"a": 1}), AdapterMalformed, "r is {'a': 1}"),
    "catastrophic rank_pattern": (config_has(rank_pattern={SLOW_REGEX: 4}), AdapterMalformed, "backtracking"),
    "catastrophic alpha_pattern": (config_has(alpha_pattern={SLOW_REGEX: 4}), AdapterMalformed, "backtracking"),
    "catastrophic exclude_modules": (config_has(exclude_modules=SLOW_REGEX), AdapterMalformed, "backtracking"),
    "catastrophic layers_pattern": (
        config_has(layers_pattern=["(?:a|.|..|...)*Z?(?<!.)"], layers_to_transform=[0]),
        AdapterMalformed,
        "backtracking",
    ),
    "many slow patterns": (
        config_has(rank_pattern={f"(?:a|.|..|...)*Z{i}": 4 for i in range(10_000)}),
        AdapterMalformed,
        "backtracking",
    ),
    "too many patterns": (
        config_has(rank_pattern={f"layer{i}": 4 for i in range(20_000)}),
        AdapterMalformed,
        "20000 entries",
    ),
    "repeats of repeats": (config_has(target_modules="(((a{1,99}){1,99}){1,99}){1,99}"), AdapterMalformed, ""),
    "regex of 20 000 characters": (config_has(target_modules="q_proj|" * 3000), AdapterMalformed, "at most 16384"),
    "targets with control characters": (config_has(target_modules=["\x1b[31m\r\n"]), AdapterMalformed, ""),
    "a key that is half a character": (
        config_is('{"peft_type": "LORA", "\\ud800": 1}'),
        AdapterUnsupported,
        "\\ud800",
    ),
    "a method of 10 kB": (config_has(peft_type="X" * 10_000), AdapterUnsupported, "XXX…"),
    "a method that is a list": (config_has(peft_type=["LORA"]), AdapterUnsupported, "['LORA']"),
    "the base's name is a number": (config_has(base_model_name_or_path=7), AdapterMalformed, "base_model_name_or_path"),
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
    "tensor name of megabytes": (with_tensor("a." * 3_000_000 + "weight", 1), AdapterMalformed, "6000006 characters"),
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
    "NaN in float16": (
        lambda a: a.map(lambda k, v: (k, v.to(torch.float16).index_fill(1, torch.tensor(0), torch.nan))),
        AdapterMalformed,
        "NaN",
    ),
    "values that no float32 holds": (
        tensor_is("lora_A.weight", lambda t: t.double() * 1e300),
        AdapterMalformed,
        "overflow",
    ),
    "no rows": (tensor_is("lora_A.weight", lambda t: t[:0]), AdapterMalformed, "must be a matrix"),
    "a number for a matrix": (tensor_is("lora_A.weight", lambda t: t.sum()), AdapterMalformed, "must be a matrix"),
    "many dimensions": (
        tensor_is("lora_A.weight", lambda t: t.reshape(*[1] * 60, *t.shape)),
        AdapterMalformed,
        "must be a matrix",
    ),
    "a name of a million characters": (with_tensor("a" * 10**6, 1), AdapterMalformed, "aaa…"),
    "a name with control characters": (with_tensor("\x1b[2J\x00", 1), AdapterMalformed, "\\x1b[2J\\x00"),
    "a name that climbs": (with_tensor("../../../etc/passwd", 1), AdapterMalformed, "not one that PEFT writes"),
    # --- other kinds ---
    "LoHa whose rank squared is too large": (loha(100), RankTooLarge, "has rank 10000 as LoHa with r=100"),
    "LoHa of rank 10^9": (loha(4, said_r=10**9), AdapterMismatch, "hada_w1_a"),
    "LoHa without a factor": (
        kind_is("LOHA", {"hada_w1_a": (32, 4), "hada_w1_b": (4, 32), "hada_w2_a": (32, 4)}, r=4),
        AdapterMalformed,
        "hada_w2_b",
    ),
    "LoHa of rank 0": (loha(1, said_r=0), AdapterMalformed, "r is 0"),
    "LoKr of other sizes": (
        kind_is("LOKR", {"lokr_w1": (7, 7), "lokr_w2": (5, 5)}, r=4),
        AdapterMismatch,
        "Kronecker product is [35, 35]",
    ),
    "LoKr of a vast product": (
        kind_is("LOKR", {"lokr_w1": (2000, 2000), "lokr_w2": (2000, 2000)}, r=4),
        AdapterMismatch,
        "[4000000, 4000000]",
    ),
    "LoKr of nothing": (
        kind_is("LOKR", {"lokr_w1": (0, 4), "lokr_w2": (8, 8)}, r=4),
        AdapterMalformed,
        "must be a matrix",
    ),
    "LoKr with both a factor and its parts": (
        kind_is("LOKR", {"lokr_w1": (4, 4), "lokr_w1_a": (4, 4), "lokr_w1_b": (4, 4), "lokr_w2": (8, 8)}, r=4),
        AdapterMalformed,
        "lokr_w1_a",
    ),
    "VeRA of rank 10^9": (vera(10**9, kept=8), AdapterMismatch, "vera_lambda_d"),
    "VeRA of rank 10^6 in truth": (vera(10**6), RankTooLarge, "has rank 1000000"),
    "VeRA with a key of 2^70": (vera(8, projection_prng_key=2**70), AdapterMalformed, "projection_prng_key"),
    "VeRA with a negative key": (vera(8, projection_prng_key=-1), AdapterMalformed, "projection_prng_key"),
    "VeRA whose projections are too small": (
        kind_is(
            "VERA",
            {
                "vera_lambda_b": (32,),
                "vera_lambda_d": (8,),
                "base_model.vera_A": (8, 16),
                "base_model.vera_B": (16, 8),
            },
            r=8,
        ),
        AdapterMalformed,
        "do not cover",
    ),
    "AdaLoRA with a long mask": (adalora([True] * 5), AdapterMalformed, "list of 4 times"),
    "AdaLoRA with a mask of numbers": (adalora([1, 1, 1, 1]), AdapterMalformed, "list of 4 times"),
    "AdaLoRA whose mask keeps less": (adalora([True, False, False, False]), AdapterMismatch, "ask for [1, 32]"),
    "AdaLoRA of rank 10^9": (adalora(None, init_r=10**9), AdapterMismatch, "[1000000000, 32]"),
    "AdaLoRA of rank 0": (adalora(None, init_r=0), AdapterMalformed, "init_r is 0"),
    "DoRA with NaN": (dora(torch.full((32,), torch.nan)), AdapterMalformed, "NaN"),
    "DoRA with infinities": (dora(torch.full((32,), -torch.inf)), AdapterMalformed, "infinite"),
    "DoRA of another size": (dora(torch.ones(16)), AdapterMismatch, "lora_magnitude_vector"),
    "IA3, turned": (
        kind_is("IA3", {"ia3_l": (1, 32)}, feedforward_modules=[]),
        AdapterMismatch,
        "ia3_l [1, 32]",
    ),
    "IA3 of many dimensions": (
        kind_is("IA3", {"ia3_l": (32, 1, 1)}, feedforward_modules=[]),
        AdapterMismatch,
        "ia3_l [32, 1, 1]",
    ),
    "IA3 by a slow expression": (
        kind_is("IA3", {"ia3_l": (32, 1)}, feedforward_modules=SLOW_REGEX),
        AdapterMalformed,
        "backtracking",
    ),
    "a negative token": (with_tokens([-1], 1, 32), AdapterMalformed, "token"),
    "a token twice": (with_tokens([5, 5], 2, 32), AdapterMalformed, "each once"),
    "a token beyond the vocabulary": (with_tokens([10**9], 1, 32), AdapterMalformed, "token 1000000000"),
    "fewer rows than tokens": (with_tokens([5, 6], 1, 32), AdapterMismatch, "ask for [2, 32]"),
    "tables of sixty million tokens": (vast_tables, AdapterTooLarge, "60000000 tokens"),
    "aLoRA beyond the vocabulary": (config_has(alora_invocation_tokens=[64]), AdapterMismatch, "tokens 0 to 63"),
    "aLoRA with a negative token": (config_has(alora_invocation_tokens=[-1]), AdapterMalformed, "list of token ids"),
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
    "one byte": (weights_are(lambda d: d[:1]), AdapterMalformed, "truncated"),
    "a length and nothing else": (weights_are(lambda d: d[:8]), AdapterMalformed, "truncated"),
    "truncated at the header's end": (weights_are(cut_in_header), AdapterMalformed, "truncated"),
    "truncated behind the header": (weights_are(cut_behind_header), AdapterMalformed, "truncated"),
    "header of no length": (said_length(0), AdapterMalformed, "not valid JSON"),
    "header one byte too long": (said_length(10**6), AdapterMalformed, "truncated"),
    "header of 2^64 - 1": (said_length(2**64 - 1), AdapterMalformed, "header"),
    "header of 2^63": (said_length(2**63), AdapterMalformed, "header"),
    "header of 100 MB": (
        weights_are(lambda _: struct.pack("<Q", 100 << 20) + b" " * (100 << 20)),
        AdapterMalformed,
        "at most 8388608",
    ),
    "header of blanks": (raw_header(b" " * (8 << 20)), AdapterMalformed, "not valid JSON"),
    "header is not UTF-8": (raw_header(b'{"\xff": 1}'), AdapterMalformed, "UTF-8"),
    "header is a list": (raw_header(b"[1]"), AdapterMalformed, "must hold an object"),
    "NaN in the header": (raw_header(b'{"a": NaN}'), AdapterMalformed, "NaN"),
    "number of 10^5 digits in the header": (
        raw_header(b'{"a": ' + b"1" * 100_000 + b"}"),
        AdapterMalformed,
        "not acceptable JSON",
    ),
    "metadata of lists": (header_is(lambda h: h.update(__metadata__=[1])), AdapterMalformed, "__metadata__"),
    "10^5 tiny tensors": (tiny_tensors(100_000), AdapterMalformed, "100000 tensors"),
    "as many tensors as may be, all strangers": (tiny_tensors(20_000), AdapterMalformed, "'t0'"),
    "shape of 2^63": (entry(shape=[2**63, 1]), AdapterMalformed, "wrongly"),
    "shape whose product is 2^64": (entry(shape=[2**32, 2**32]), AdapterMalformed, "do not hold"),
    "shape of 10^30": (entry(shape=[10**30]), AdapterMalformed, "wrongly"),
    "negative shape": (entry(shape=[-4, -32]), AdapterMalformed, "wrongly"),
    "shape of 10^5 dimensions": (entry(shape=[1] * 100_000), AdapterMalformed, "do not hold"),
    "offset of 2^63": (entry(data_offsets=[0, 2**63]), AdapterMalformed, "wrongly"),
    "three offsets": (entry(data_offsets=[0, 512, 512]), AdapterMalformed, "wrongly"),
    "two tensors in one place": (
        header_is(lambda h: h[f"{Q0}.lora_B.weight"].update(data_offsets=[0, 512])),
        AdapterMalformed,
        "overlaps",
    ),
    "half as wide as it says": (entry(dtype="F16"), AdapterMalformed, "do not hold"),
    "twice as wide as it says": (entry(dtype="F64"), AdapterMalformed, "do not hold"),
    "truth for numbers": (entry(dtype="BOOL"), AdapterUnsupported, "BOOL"),
    "unheard-of numbers": (entry(dtype="Q7"), AdapterUnsupported, "Q7"),
    "no name of numbers": (entry(dtype=32), AdapterMalformed, "wrongly"),
    "torch's file, renamed": (lambda a: weights_are(lambda _: saved(a.tensors))(a), AdapterMalformed, "safetensors"),
    # --- .bin ---
    "bare pickle": (bin_is(lambda _: pickle.dumps(Evil())), AdapterMalformed, "zip format"),
    "code in a .bin": (bin_is(lambda _: saved({"a": Evil()})), AdapterUnsupported, "more than tensors"),
    "safetensors, renamed": (
        lambda a: (a.path / "adapter_model.safetensors").rename(a.path / "adapter_model.bin"),
        AdapterMalformed,
        "zip format",
    ),
    "a tar of pickles": (bin_is(tar_of), AdapterMalformed, "zip format"),
    "torch's format before 1.6": (bin_is(old_torch_file), AdapterMalformed, "zip format"),
    "code called by name": (
        bin_is(lambda _: zip_of(opcodes(b"cos\nsystem\n", text_op(f"touch {CANARY}"), b"\x85R"))),
        AdapterUnsupported,
        "more than tensors",
    ),
    "code as a tensor's function": (
        bin_is(lambda _: zip_of(opcodes(b"}", text_op("a"), b"ctorch\nload\n", text_op("/etc/passwd"), b"\x85Rs"))),
        AdapterUnsupported,
        "more than tensors",
    ),
    "a compiled program": (
        bin_is(lambda _: zip_of(opcodes(b"}"), **{"code/__torch__.py": EVIL_CODE.encode(), "constants.pkl": b"N."})),
        AdapterMalformed,
        "",
    ),
    "a key that is hashed for years": (bin_is(tuple_key_bomb), AdapterMalformed, "a key that is a tuple"),
    "a hundred gigabytes asked for": (
        bin_is(bytearray_bomb),
        AdapterUnsupported,
        "it calls 'builtins.bytearray'",
    ),
    "10^5 entries in a .bin": (bin_is(many_entries), AdapterMalformed, "not a dense tensor"),
    "truncated .bin": (bin_is(lambda a: saved(a.tensors)[:-500]), AdapterMalformed, "truncated"),
    "zip bomb": (bin_is(zip_bomb), AdapterMalformed, "compressed"),
    ".bin of a list": (bin_is(lambda _: saved([1])), AdapterMalformed, "must hold a dict"),
    ".bin of numbers": (bin_is(lambda _: saved({"a": 1})), AdapterMalformed, "not a dense tensor"),
    ".bin of a sparse tensor": (
        bin_is(lambda _: saved({"a": torch.eye(3).to_sparse()})),
        AdapterUnsupported,
        "_get_layout",
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
    assert time.thread_time() - start < 30  # of CPU: the largest take 1 s, and CI's cores are slow and shared
    assert type(caught.value) is error
    assert caught.value.message.startswith("adapter 'sql'")
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


def while_weights_are_read(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    read = OpenFile.read_into

    def read_while_changing(self: OpenFile, target: memoryview, digest: Any) -> None:
        read(self, target, digest)
        if self.name.endswith(".safetensors"):
            change()

    monkeypatch.setattr(OpenFile, "read_into", read_while_changing)


def test_a_file_that_changes_while_it_is_read_is_refused(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    while_weights_are_read(monkeypatch, lambda: os.utime(adapter.path / "adapter_model.safetensors", ns=(1, 1)))
    with pytest.raises(AdapterChanged, match="changed while it was read"):
        adapter.load()


def test_content_changed_under_the_old_time_is_noticed(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter.path / "adapter_model.safetensors"
    times = path.stat()

    def overwrite() -> None:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    while_weights_are_read(monkeypatch, overwrite)
    with pytest.raises(AdapterChanged, match="changed while it was read"):
        adapter.load()


def test_a_file_that_is_being_written_is_not_begun_with(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sleep = adapter.path / "adapter_model.safetensors", time.sleep

    def sleep_and_write(seconds: float) -> None:
        sleep(seconds)
        path.write_bytes(path.read_bytes())

    monkeypatch.setattr("lorafleet.workers.lora.files.time.sleep", sleep_and_write)
    path.write_bytes(path.read_bytes())
    with (
        pytest.raises(AdapterChanged, match=r"safetensors is being written"),
        AdapterFolder.at(adapter.path).open(path.name, 1 << 20),
    ):
        pass


def test_a_folder_that_is_replaced_amid_a_load_is_never_mixed(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = adapter.path.parent / "other"
    shutil.copytree(adapter.path, other)
    type(adapter)(other).set(lora_alpha=99)

    def replace() -> None:
        if other.exists():
            adapter.path.rename(adapter.path.parent / "old")
            other.rename(adapter.path)

    while_weights_are_read(monkeypatch, replace)
    with pytest.raises(AdapterChanged, match="json changed while the weights were read"):
        adapter.load()


def test_a_file_that_grows_or_shrinks_amid_a_load_is_refused(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter.path / "adapter_model.safetensors"
    for size in (path.stat().st_size + 4096, 64):
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            while_weights_are_read(patch, lambda: os.truncate(path, size))  # noqa: B023  # it is called in this turn
            with pytest.raises((AdapterChanged, AdapterMalformed), match=r"changed while|truncated"):
                adapter.load()
        path.write_bytes(before)


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
