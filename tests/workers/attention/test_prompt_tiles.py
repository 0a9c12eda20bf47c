from __future__ import annotations

import pytest

from lorafleet.workers.attention.prompt_tiles import filled_share


@pytest.mark.parametrize(
    ("queries", "share"),
    [(1, 32 / 132), (128, 32 / 132), (256, 64 / 132), (512, 128 / 132), (513, 160 / 264), (8192, 2048 / 2112)],
)
def test_one_prompt_fills_the_gpu_by_its_tiles(queries: int, share: float) -> None:
    assert filled_share([queries], [131072], 32, 132) == pytest.approx(share)


def test_short_prompts_beside_a_long_one_do_not_hide_that_the_rest_of_the_gpu_waits() -> None:
    alone = filled_share([128], [100_000], 32, 132)
    assert filled_share([128, 128, 128, 128], [100_000, 128, 128, 128], 32, 132) == pytest.approx(alone, rel=0.01)
    assert filled_share([128] * 4, [100_000] * 4, 32, 132) == pytest.approx(128 / 132)


def test_the_order_of_the_prompts_does_not_matter() -> None:
    lens = [(300, 4096), (17, 70_000), (1024, 1024)]
    shares = {
        filled_share([n for n, _ in some], [c for _, c in some], 8, 132)
        for some in (lens, lens[::-1], lens[1:] + lens[:1])
    }
    assert len(shares) == 1
