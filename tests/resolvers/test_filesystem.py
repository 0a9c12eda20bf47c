from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from lorafleet.protocol.errors import AdapterMalformed, ConfigError, InvalidAdapterName
from lorafleet.resolvers.filesystem import FilesystemResolver


def write(folder: Path, base: object = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


async def test_an_adapter_in_the_folder_is_found(tmp_path: Path) -> None:
    write(tmp_path / "sql")
    write(tmp_path / "org" / "json")
    resolver = FilesystemResolver(tmp_path)
    found = await resolver.resolve_lora("base", "sql")
    assert found is not None
    assert (found.lora_name, found.lora_path, found.base_model_name) == ("sql", str(tmp_path / "sql"), "base")
    assert found.lora_int_id > 0
    assert await resolver.resolve_lora("base", "org/json") is not None
    assert await resolver.resolve_lora("base", "org") is None
    assert await resolver.resolve_lora("base", "missing") is None
    assert await resolver.resolve_lora("base", "sql/adapter_config.json") is None


@pytest.mark.parametrize("name", ["../sql", "/etc", "a/../../b", ".sql", "a\0b", "a\nb", "x" * 257, ""])
async def test_a_name_that_no_adapter_can_have_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path / "sql")
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises(InvalidAdapterName):
        await FilesystemResolver(inner).resolve_lora("base", name)


async def test_a_symlink_out_of_the_folder_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outside = write(tmp_path / "outside")
    inner = tmp_path / "inner"
    write(inner / "real")
    (inner / "out").symlink_to(outside)
    (inner / "alias").symlink_to(inner / "real")
    resolver = FilesystemResolver(inner)
    assert await resolver.resolve_lora("base", "out") is None
    assert "symlink" in caplog.text
    found = await resolver.resolve_lora("base", "alias")
    assert found is not None and found.within == str(inner), "whoever reads it later looks again"


@pytest.mark.parametrize(
    ("trained_on", "fits"),
    [
        (None, True),
        ("", True),
        ("base", True),
        ("org/base", True),
        ("/models/Llama-3.1-8B/", True),
        ("meta-llama/Llama-3.1-8B", True),
        ("meta-llama/Llama-3.2-1B", False),
        ("Llama", False),
    ],
)
async def test_only_adapters_of_the_served_base_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trained_on: str | None, fits: bool
) -> None:
    write(tmp_path / "sql", trained_on)
    resolver = FilesystemResolver(tmp_path, base_model_names=["/models/Llama-3.1-8B"])
    with caplog.at_level(logging.WARNING):
        found = await resolver.resolve_lora("base", "sql")
    assert (found is not None) == fits
    assert fits or (str(trained_on) in caplog.text and "served base is base" in caplog.text)


async def test_a_damaged_config_is_an_error_not_a_miss(tmp_path: Path) -> None:
    (write(tmp_path / "sql") / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterMalformed, match=r"adapter 'sql': adapter_config\.json is not valid JSON"):
        await FilesystemResolver(tmp_path).resolve_lora("base", "sql")


def test_a_missing_directory_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="gone"):
        FilesystemResolver(tmp_path / "gone")
