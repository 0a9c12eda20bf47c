from lorafleet.cluster.routing import prefix_table
from lorafleet.cluster.routing.prefix_table import MAX_SEEN, PrefixTable


def kept(_replica_id: str, _sent_s: float) -> bool:
    return True


def test_each_replica_is_told_with_the_longest_prefix_that_it_has_seen() -> None:
    table = PrefixTable()
    table.put("sql", (1, 2, 3), "a", 0.0, 0.0)
    table.put("sql", (1, 2, 9), "b", 1.0, 0.0)
    assert table.longest("sql", (1, 2, 3, 4), kept) == {"a": 3, "b": 2}
    assert table.longest("sql", (1, 8), kept) == {"a": 1, "b": 1}
    assert table.longest("sql", (5,), kept) == table.longest("", (1, 2, 3), kept) == {}


def test_what_a_replica_has_lost_does_not_count_and_a_new_request_renews_it() -> None:
    table = PrefixTable()
    table.put("", (1, 2), "a", 10.0, 0.0)
    table.put("", (1,), "a", 20.0, 0.0)
    assert table.longest("", (1, 2), lambda _, sent_s: sent_s > 15.0) == {"a": 1}


def test_the_table_is_bounded_in_prefixes_and_in_replicas_of_each() -> None:
    table = PrefixTable()
    for number in range(MAX_SEEN + 2):
        table.put("", (1,), f"r{number}", float(number), 0.0)
    assert list(table.longest("", (1,), kept)) == ["r4", "r3", "r2"]
    for number in range(0, prefix_table.MAX_PREFIXES, 20):
        table.put("", range(2 + number, 22 + number), "a", 0.0, 0.0)
    assert table.longest("", (1,), kept) == {}
    assert table.longest("", (2 + prefix_table.MAX_PREFIXES // 2,), kept) == {"a": 1}


def test_a_replica_is_told_how_much_of_a_prompt_it_had_and_kept() -> None:
    table = PrefixTable()
    assert table.put("", (1, 2), "a", 10.0, 0.0) == 0
    assert table.put("", (1, 2, 3), "b", 11.0, 0.0) == 0
    assert table.put("", (1, 2, 3), "a", 12.0, 10.0) == 2
    assert table.put("", (1, 2, 3), "a", 13.0, 12.5) == 0
    assert table.put("sql", (1, 2, 3), "a", 14.0, 0.0) == 0
