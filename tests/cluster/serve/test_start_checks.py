"""What is wrong with the files of a server is said before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorafleet.cluster.config import parse_args
from lorafleet.cluster.serve.start_checks import check_paths
from lorafleet.protocol.errors import ConfigError


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_draft_model_that_is_not_there_is_named(tmp_path: Path, method: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = {"model": str(tmp_path), "speculative_config": {"method": method, "model": str(tmp_path)}}
    check_paths(parse_args(given))
    given["speculative_config"] = {"method": method, "model": "Qwen/Qwen2.5-0.5B"}
    with pytest.raises(ConfigError, match=r"speculative_config: model 'Qwen/Qwen2\.5-0\.5B' is not a local folder"):
        check_paths(parse_args(given))


def test_a_folder_for_kv_blocks_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = {"model": str(tmp_path), "kv_host_gib": 1, "kv_disk_gib": 1, "kv_disk_dir": str(tmp_path)}
    check_paths(parse_args(given))
    with pytest.raises(ConfigError, match="kv_disk_dir '/nowhere/at/all' does not exist"):
        check_paths(parse_args(given | {"kv_disk_dir": "/nowhere/at/all"}))
