from __future__ import annotations

import psutil
import torch

from lorafleet.workers.tp.group import TPGroup
from ranks import on_ranks


def collectives(group: TPGroup) -> tuple[list[float], list[list[int]], list[int]]:
    mine = torch.full((3,), float(group.rank + 1))
    parts = group.all_gather(torch.tensor([group.rank, 10 * group.rank]))
    return group.all_reduce(mine).tolist(), parts.tolist(), group.broadcast(torch.tensor([group.rank + 7])).tolist()


def test_every_rank_gets_the_same() -> None:
    for result in on_ranks(3, collectives):
        assert result == ([6.0] * 3, [[0, 0], [1, 10], [2, 20]], [7])


def test_group_of_one_needs_no_process_group() -> None:
    assert collectives(TPGroup()) == ([1.0] * 3, [[0, 0]], [7])


def listening_on(_: TPGroup) -> set[str]:
    sockets = psutil.Process().net_connections("inet")
    return {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}


def test_nothing_listens_on_the_network():
    first, second = on_ranks(2, listening_on)
    assert first | second == {"127.0.0.1"}
