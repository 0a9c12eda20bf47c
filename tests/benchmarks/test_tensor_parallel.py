from __future__ import annotations

import tensor_parallel
from lorafleet.workers.tp.sharding_choice import MeasuredSteps


def test_only_steps_of_both_layouts_with_the_most_adapters_are_recorded() -> None:
    rows = [
        tensor_parallel.Row("8b", size, layout, batch, adapters, ms, 0.0, 0.0)
        for size, layout, batch, adapters, ms in [
            (1, "off", 8, 64, 5.4),
            (2, "off", 8, 0, 3.4),
            (2, "off", 8, 64, 3.7),
            (2, "off", 64, 64, 5.6),
            (2, "on", 8, 0, 3.3),
            (2, "on", 8, 64, 4.0),
            (4, "on", 8, 64, 3.2),
        ]
    ]
    assert tensor_parallel.steps_of_sizes(rows) == {2: [MeasuredSteps(8, 4.0, 3.7)]}
