from lorafleet.cluster.directory import RouteTable
from lorafleet.cluster.routing import SPILL_REQUESTS, ReplicaChooser


def chooser(**tables: dict[str, object]) -> ReplicaChooser:
    made = ReplicaChooser()
    made.update(RouteTable(1, tables.get("gpu", {}), tables.get("cpu", {}), tables.get("load", {})))  # type: ignore[arg-type]  # short for tests
    return made


def test_a_slot_comes_before_host_memory_before_the_rest() -> None:
    made = chooser(gpu={"sql": ("b",)}, cpu={"sql": ("b", "c")})
    ranked = made.rank("sql", ["a", "b", "c", "d"])
    assert ranked[:2] == ["b", "c"]


def test_without_a_holder_the_less_loaded_of_two_is_taken() -> None:
    made = chooser(load={"a": 5, "b": 1})
    assert made.rank("sql", ["a", "b"])[0] == "b"


def test_choices_count_until_the_next_table() -> None:
    made = chooser(gpu={"sql": ("a", "b")})
    chosen = []
    for _ in range(4):
        first = made.rank("sql", ["a", "b"])[0]
        made.count(first)
        chosen.append(first)
    assert sorted(chosen) == ["a", "a", "b", "b"]


def test_a_holder_that_is_swamped_is_passed_over() -> None:
    made = chooser(gpu={"sql": ("a",)}, load={"a": SPILL_REQUESTS + 1})
    assert made.rank("sql", ["a", "b"])[0] == "b"


def test_a_holder_that_is_gone_is_not_chosen() -> None:
    assert chooser(gpu={"sql": ("gone",)}).rank("sql", ["a"]) == ["a"]
    assert chooser().rank("sql", []) == []
