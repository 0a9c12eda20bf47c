from collections import Counter

import pytest

from lorafleet.cluster.routing.routing import MAX_HOLDERS, ReplicaChooser, ReplicaLoad, Tier


def chooser(replicas: str, loads: dict[str, ReplicaLoad] | None = None, **tiers: tuple[str, Tier]) -> ReplicaChooser:
    """tiers: replica=(adapter, tier)."""
    made = ReplicaChooser(seed=0)
    made.set_replicas(replicas)
    for replica_id in replicas:
        made.set_load(replica_id, (loads or {}).get(replica_id, ReplicaLoad(free_slots=4)))
    for replica_id, (adapter, tier) in tiers.items():
        made.set_tier(replica_id, adapter, tier)
    return made


def busy(num_tokens: int) -> ReplicaLoad:
    return ReplicaLoad(num_waiting=1, queued_tokens=num_tokens, free_slots=4)


@pytest.mark.parametrize(("better", "worse"), [("gpu", "coming"), ("coming", "cpu"), ("gpu", "cpu")])
def test_the_nearer_tier_is_chosen(better: Tier, worse: Tier) -> None:
    made = chooser("abcd", b=("sql", worse), c=("sql", better))
    assert made.rank("sql")[:2] == ["c", "b"]


def test_a_holder_comes_before_a_home_that_has_to_read() -> None:
    made = chooser("abcd", b=("sql", "cpu"))
    made.set_homes("sql", ["d"], 84_000_000)
    assert made.rank("sql")[:2] == ["b", "d"]


def test_without_a_holder_the_home_reads_it() -> None:
    made = chooser("abcd")
    made.set_homes("sql", ["d"], 84_000_000)
    assert made.rank("sql")[0] == "d"


def test_a_name_that_nobody_placed_has_the_same_home_in_every_router() -> None:
    firsts = {
        name: {ReplicaChooser(seed=seed) for seed in range(3)} for name in ("sql", "chat", "code", "mail", "news")
    }
    homes = []
    for name, choosers in firsts.items():
        for one in choosers:
            one.set_replicas("abcdefgh")
        chosen = {one.rank(name)[0] for one in choosers}
        assert len(chosen) == 1
        homes += list(chosen)
    assert len(set(homes)) > 1


def test_a_swamped_holder_spills_to_the_least_busy() -> None:
    made = chooser("abc", {"a": busy(100_000), "b": busy(50_000), "c": busy(100)}, a=("sql", "gpu"))
    assert made.rank("sql")[0] == "c"


def test_a_copy_in_host_memory_beats_a_slot_beside_a_much_larger_batch() -> None:
    def ranked(num_running: int) -> list[str]:
        loads = {
            "a": ReplicaLoad(num_running=num_running, free_slots=4),
            "b": ReplicaLoad(num_running=20, free_slots=4),
        }
        return chooser("ab", loads, a=("sql", "gpu"), b=("sql", "cpu")).rank("sql")

    assert ranked(40) == ["a", "b"]
    assert ranked(80) == ["b", "a"]


def test_an_adapter_that_nobody_holds_is_read_where_the_fewest_are_held() -> None:
    made = chooser("abc")
    for replica_id, num_held in (("a", 40), ("b", 10), ("c", 30)):
        for number in range(num_held):
            made.set_tier(replica_id, f"{replica_id}{number}", "cpu")
    names = [f"new{number}" for number in range(20)]
    assert {made.rank(name)[0] for name in names} == {"b"}
    for number in range(10):
        made.set_tier("b", f"b{number}", "gpu")  # It counts once.
    assert {made.rank(name)[0] for name in names} == {"b"}
    for number in range(40):
        made.set_tier("a", f"a{number}", None)
    assert {made.rank(name)[0] for name in names} == {"a"}


def test_an_adapter_that_nobody_holds_is_read_where_there_is_room_even_if_others_read_sooner() -> None:
    made = chooser("abc", {"b": ReplicaLoad(free_slots=4, reading_bytes=500_000_000, cpu_loras=4)})
    for replica_id in "ac":
        made.set_load(replica_id, ReplicaLoad(free_slots=4, cpu_loras=3))
    for replica_id in "abc":
        for number in range(3):
            made.set_tier(replica_id, f"{replica_id}{number}", "cpu")
    assert made.rank("new")[0] == "b"
    made.sent("new", "b", 10)
    assert made.rank("other")[0] != "b", "what is being read there takes the room"
    made.set_load("b", ReplicaLoad(free_slots=4, reading_bytes=500_000_000, cpu_loras=4))
    assert made.rank("other")[0] == "b"
    made.set_tier("b", "new", "coming")
    assert made.rank("other")[0] != "b", "without room anywhere, the disk decides"


@pytest.mark.parametrize(("reading_bytes", "chosen"), [(0, "b"), (400_000_000, "b"), (1_500_000_000, "a")])
def test_an_empty_replica_gets_all_cold_reads_until_they_wait_too_long_there(reading_bytes: int, chosen: str) -> None:
    made = chooser("ab", {"b": ReplicaLoad(free_slots=4, reading_bytes=reading_bytes, cpu_loras=3)})
    made.set_load("a", ReplicaLoad(free_slots=4, cpu_loras=3))
    for number in range(3):
        made.set_tier("a", f"a{number}", "cpu")
    assert made.rank("new")[0] == chosen


def full(**fields: int) -> ReplicaLoad:
    return ReplicaLoad(cpu_loras=1, **fields)


@pytest.mark.parametrize(("ahead", "chosen"), [(3, "a"), (5, "a"), (40, "b")])
def test_where_all_memory_is_full_some_adapters_wait_for_slots_before_another_replica_reads(
    ahead: int, chosen: str
) -> None:
    made = chooser("ab", {"a": full(free_slots=-ahead), "b": full(free_slots=0)}, a=("sql", "cpu"), b=("other", "cpu"))
    assert made.rank("sql")[0] == chosen


@pytest.mark.parametrize(("num_running", "chosen"), [(200, "a"), (400, "b")])
def test_where_all_memory_is_full_a_busier_replica_keeps_its_adapter_for_longer(num_running: int, chosen: str) -> None:
    loads = {"a": full(num_running=num_running, free_slots=4), "b": full(free_slots=4)}
    made = chooser("ab", loads, a=("sql", "gpu"), b=("other", "cpu"))
    assert made.rank("sql")[0] == chosen
    made = chooser("ab", {"a": loads["a"], "b": ReplicaLoad(free_slots=4)}, a=("sql", "gpu"))
    assert made.rank("sql")[0] == "b", "there is room"


def test_what_a_forgotten_replica_held_does_not_count_when_it_comes_back() -> None:
    made = chooser("ab", b=("sql", "cpu"))
    made.set_replicas("a")
    made.forget("b")
    made.set_tier("b", "sql", None)
    made.set_replicas("ab")
    for replica_id, adapter in (("a", "x"), ("b", "y"), ("b", "z")):
        made.set_tier(replica_id, adapter, "cpu")
    assert made.rank("new")[0] == "a"


def test_a_busier_holder_still_beats_a_read() -> None:
    made = chooser("abc", {"a": busy(2000)}, a=("sql", "gpu"))
    assert made.rank("sql")[0] == "a"


def test_base_requests_go_to_the_least_busy() -> None:
    made = chooser("abc", {"a": busy(100), "b": busy(10), "c": busy(1000)}, c=("", "gpu"))
    assert made.rank("")[0] == "b"


def test_what_was_sent_counts_until_the_replica_reports() -> None:
    made = chooser("abcd")
    for _ in range(8):
        made.sent("", made.rank("")[0], 500)
    sent = Counter[str]()
    for _ in range(8):
        first = made.rank("")[0]
        made.sent("", first, 500)
        sent[first] += 1
    assert set(sent.values()) == {2}
    made.set_load("c", ReplicaLoad(free_slots=4))
    assert made.rank("")[0] == "c"


def test_requests_for_one_cold_adapter_go_together_before_any_report() -> None:
    made = chooser("abcdefgh")
    chosen = set()
    for _ in range(5):
        first = made.rank("cold")[0]
        made.sent("cold", first, 10)
        chosen.add(first)
    assert len(chosen) == 1


def test_a_replica_without_a_free_slot_is_passed_over_for_an_equal_one() -> None:
    full = ReplicaLoad(free_slots=-2)
    made = chooser("ab", {"a": full, "b": ReplicaLoad(free_slots=1)}, a=("sql", "cpu"), b=("sql", "cpu"))
    assert made.rank("sql")[0] == "b"


def test_a_replica_that_is_gone_is_not_chosen() -> None:
    made = chooser("a", gone=("sql", "gpu"))
    assert made.rank("sql") == ["a"]
    made.set_homes("sql", ["gone"], 1)
    assert made.rank("sql") == ["a"]
    made.set_replicas([])
    assert made.rank("sql") == []


def test_a_replica_that_comes_back_is_known_as_before() -> None:
    made = chooser("ab", b=("sql", "gpu"))
    made.set_replicas("a")
    made.set_replicas("ab")
    assert made.rank("sql")[0] == "b"


PROMPT = tuple(range(21))  # The prefixes of a prompt of 32 KiB.


def test_a_prompt_is_sent_where_its_beginning_was_seen_unless_that_replica_is_busier_by_more_than_it_saves() -> None:
    made = chooser("abcd")
    first = made.rank("", PROMPT)[0]
    made.sent("", first, 100, PROMPT)
    assert made.rank("", PROMPT)[0] == first
    assert made.rank("", (99,))[0] != first
    assert made.rank("sql", PROMPT) == made.rank("sql")  # another adapter's KV is of no use
    made.set_load(first, busy(7_000))
    assert made.rank("", PROMPT)[0] == first
    made.set_load(first, busy(10_000))
    assert made.rank("", PROMPT)[0] != first


def test_the_replica_that_has_seen_most_of_a_prompt_saves_most() -> None:
    made = chooser("abcd")
    made.sent("", "c", 100, PROMPT)
    for other in "abd":
        made.sent("", other, 100, PROMPT[:10])
    for replica_id in "abcd":
        made.set_load(replica_id, ReplicaLoad(free_slots=4))
    assert made.rank("", (*PROMPT, 100))[0] == "c"
    made.set_load("c", busy(6_000))  # It saves 8192 - 1280 tokens more than the others.
    assert made.rank("", (*PROMPT, 100))[0] == "c"
    made.set_load("c", busy(7_500))
    assert made.rank("", (*PROMPT, 100))[0] in "abd"


def test_what_has_left_a_replica_s_cache_saves_nothing_there() -> None:
    now = [100.0]
    made = ReplicaChooser(seed=0, clock=lambda: now[0])
    made.set_replicas("abc")
    made.sent("", "b", 100, PROMPT)
    for replica_id in "abc":
        made.set_load(replica_id, busy(1000) if replica_id == "b" else ReplicaLoad(free_slots=4))
    now[0] = 130.0
    assert made.rank("", PROMPT)[0] == "b"
    made.set_load("b", ReplicaLoad(1, 0, 1000, kept_s=31.0))
    assert made.rank("", PROMPT)[0] == "b"
    made.set_load("b", ReplicaLoad(1, 0, 1000, kept_s=29.0))
    assert made.rank("", PROMPT)[0] != "b"
    made.sent("", "a", 100, PROMPT)
    assert made.rank("", PROMPT)[0] == "a"


def test_cached_tokens_are_no_work_that_others_wait_for() -> None:
    made = chooser("ab")
    made.sent("", "a", 9000, PROMPT)
    made.set_load("a", ReplicaLoad())
    made.sent("", "a", 9000, PROMPT)  # Of these, 808 are new.
    made.sent("", "b", 2000)
    assert made.rank("")[0] == "a"


def test_of_many_holders_some_are_looked_at_and_all_are_used() -> None:
    names = [f"r{i}" for i in range(40)]
    made = ReplicaChooser(seed=1)
    made.set_replicas(names)
    for name in names:
        made.set_load(name, ReplicaLoad(free_slots=4))
        made.set_tier(name, "hot", "gpu")
    used = set()
    for _ in range(400):
        ranked = made.rank("hot")
        assert len(ranked) <= MAX_HOLDERS + 1
        made.sent("hot", ranked[0], 300)
        used.add(ranked[0])
    assert len(used) == 40


def test_what_nobody_has_is_read_where_the_disk_is_free() -> None:
    reading = ReplicaLoad(free_slots=4, reading_bytes=400_000_000)
    names = [f"r{i}" for i in range(8)]
    for idle in names:
        made = chooser("", {})
        made.set_replicas(names)
        for name in names:
            made.set_load(name, ReplicaLoad(free_slots=4) if name == idle else reading)
        assert made.rank("cold")[0] == idle


def test_a_burst_for_what_nobody_has_stays_together_wherever_its_first_request_went() -> None:
    made = chooser("abcdefgh", {"c": ReplicaLoad(free_slots=5)})
    for name in "abdefgh":
        made.set_load(name, ReplicaLoad(free_slots=4, reading_bytes=200_000_000))
    chosen = set()
    for _ in range(20):
        first = made.rank("cold")[0]
        made.sent("cold", first, 10)
        chosen.add(first)
    assert chosen == {"c"}


def test_a_full_batch_is_waited_for_only_where_it_is_worth_it() -> None:
    full = ReplicaLoad(num_running=4, free_slots=4, free_places=-20)
    made = chooser("ab", {"a": full, "b": ReplicaLoad(num_running=4, free_slots=4)}, a=("sql", "gpu"), b=("sql", "cpu"))
    assert made.rank("sql")[0] == "b"
    made.set_load("a", ReplicaLoad(num_running=4, free_slots=4, free_places=1))
    assert made.rank("sql")[0] == "a"


def test_without_reports_an_adapters_requests_stay_where_it_is_and_the_bases_spread() -> None:
    made = chooser("ab", a=("sql", "gpu"))
    for _ in range(1000):
        made.sent("sql", "a", 1000)
    assert made.rank("sql")[0] == "b"
    assert made.rank("sql", by_load=False)[0] == "a"
    assert made.rank("", by_load=False)[0] == "b"


def test_without_reports_the_less_busy_of_two_holders_comes_first() -> None:
    made = chooser("abc", {"a": busy(50_000), "b": busy(100)}, a=("sql", "gpu"), b=("sql", "gpu"))
    assert made.rank("sql", by_load=False)[:2] == ["b", "a"]
