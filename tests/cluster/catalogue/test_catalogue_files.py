from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lorafleet.cluster.admin.download_tar import open_packed
from lorafleet.cluster.catalogue.catalogue_files import stage
from lorafleet.protocol.adapter_formats.adapter_files import (
    CHUNK_BYTES,
    SAFETENSORS_NAME,
    folder_digest,
    read_buffer,
    stored_files,
)


def test_staging_takes_what_the_digest_covers_and_nothing_else(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    kept = {
        "adapter_config.json": "{}",
        "adapter_model.safetensors": "w",
        "tokenizer.json": "t",
        "chat_template.jinja": "c",
    }
    for folder in (source, target):
        folder.mkdir()
    for name, text in (kept | {"README.md": "of no meaning", "optimizer.pt": "o"}).items():
        (source / name).write_text(text)
    assert stage(source, target) == folder_digest(source) == folder_digest(target)
    assert {path.name: path.read_text() for path in target.iterdir()} == kept


def test_no_file_is_in_memory_as_a_whole_while_it_is_staged_or_sent(tmp_path: Path, monkeypatch: Any) -> None:
    """A server is sent strangers' files, of which a draft LoRA may have 512 MiB."""
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source / "draft", target):
        folder.mkdir(parents=True)
    for folder in (source, source / "draft"):
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        save_file({"a": torch.randint(0, 255, (2 * CHUNK_BYTES + 5,), dtype=torch.uint8)}, folder / SAFETENSORS_NAME)
    buffers: list[int] = []

    def counted(num_bytes: int) -> Any:
        buffers.append(num_bytes)
        return read_buffer(num_bytes)

    monkeypatch.setattr("lorafleet.protocol.adapter_formats.adapter_files.read_buffer", counted)
    tracemalloc.start()
    try:
        digest = stage(source, target)
        open_packed(target, digest).close()
        assert tracemalloc.get_traced_memory()[1] < CHUNK_BYTES / 4
    finally:
        tracemalloc.stop()
    assert max(buffers) == CHUNK_BYTES
    assert stored_files(target).keys() == stored_files(source).keys()
