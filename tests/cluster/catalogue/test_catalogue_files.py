from __future__ import annotations

from pathlib import Path

from lorafleet.cluster.catalogue.catalogue_files import stage
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest


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
