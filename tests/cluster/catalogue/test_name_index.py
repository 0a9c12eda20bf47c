from __future__ import annotations

import random

from lorafleet.cluster.catalogue.name_index import NameIndex


def test_a_page_is_what_sorting_all_names_would_give() -> None:
    source, index, names = random.Random(0), NameIndex(), set[str]()
    for step in range(3000):
        name = f"{source.randrange(500):03}"
        if name in names and step > 200:
            names.remove(name)
            index.remove(name)
        elif name not in names:
            names.add(name)
            index.add(name)
        after, end, limit = f"{source.randrange(500):03}", f"{source.randrange(500):03}", source.randrange(1, 50)
        if step > 100:
            assert index.between(after, end, limit) == sorted(one for one in names if after < one < end)[:limit]
    assert len(index) == len(names)
