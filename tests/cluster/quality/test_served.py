"""The probes of a running server of two replicas, through the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from lorafleet.cluster.cli import cli
from tests.cluster.harness import ADMIN_KEY, SharedServer

pytestmark = pytest.mark.xdist_group("shared_server")

Call = Callable[..., Any]


@pytest.fixture
def call(shared_server: SharedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """What a command prints."""
    monkeypatch.setenv("LORAFLEET_URL", shared_server.running.url)
    monkeypatch.setenv("LORAFLEET_ADMIN_KEY", ADMIN_KEY)

    def run(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["lorafleet", "quality", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert not ended.value.code, said.err
        return json.loads(said.out)

    return run


def test_the_base_agrees_with_its_baseline_whichever_replica_is_asked(call: Call) -> None:
    ran = call("run", "base")
    assert (ran["id"], ran["error"], ran["measures"]["agreement"]) == ("base", "", 1.0)
    assert ran["baseline_at_s"] <= ran["at_s"]
    accepted = call("accept", "base")
    assert accepted["baseline_at_s"] >= ran["at_s"] and accepted["measures"]["drift"] == 0.0
    for _ in range(4):
        [shown] = call("show")["data"]
        assert shown["baseline_at_s"] >= accepted["baseline_at_s"] and shown["measures"]["perplexity"] > 1
