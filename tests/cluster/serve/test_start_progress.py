"""What `lorafleet serve` prints while replicas start."""

from __future__ import annotations

import io

from rich.console import Console

from lorafleet.cluster.serve.start_progress import StartProgress


def printed(lines: list[tuple[str, str]], *, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, highlight=False, width=100)
    with StartProgress(console) as progress:
        for replica_id, text in lines:
            progress.line(replica_id, text)
    return stream.getvalue()


LOADING = [("r0", f"weights: {percent} %") for percent in range(0, 101, 3)]


def test_without_a_terminal_a_load_prints_a_line_for_each_quarter() -> None:
    lines = printed([("r0", "model: 3 layers"), *LOADING, ("r0", "weights: 2 GiB")], terminal=False).splitlines()
    assert lines == [
        *("  r0: model: 3 layers", "  r0: weights: 27 %", "  r0: weights: 51 %", "  r0: weights: 75 %"),
        "  r0: weights: 2 GiB",
    ]


def test_each_replica_has_quarters_of_its_own() -> None:
    text = printed([("r0", "weights: 50 %"), ("r1", "weights: 50 %"), ("r0", "weights: 60 %")], terminal=False)
    assert text.splitlines() == ["  r0: weights: 50 %", "  r1: weights: 50 %"]


def test_on_a_terminal_a_load_is_a_bar() -> None:
    text = printed(LOADING, terminal=True)
    assert "r0: weights:" in text
    assert "%" not in text
