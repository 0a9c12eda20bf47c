"""How a step's tokens are shared between streams and prompts. The answers do not depend on it: test_overlap.py,
test_matches_transformers.py."""

from __future__ import annotations

from lorafleet.workers.kv_cache import KVCacheManager
from lorafleet.workers.models.rope import RopeConfig
from lorafleet.workers.sampling_params import SamplingParams
from lorafleet.workers.scheduler import Scheduler
from lorafleet.workers.sequence import Sequence


def sequence(name: str, num_prompt: int, max_tokens: int = 1000) -> Sequence:
    tokens = [len(name) % 1000] * num_prompt
    return Sequence(name, tokens, num_prompt, SamplingParams(), seed=0, max_tokens=max_tokens)


def scheduler(*, max_num_seqs=256, most=8192, mixed=512, caching=False) -> Scheduler:
    rope = RopeConfig(head_dim=8, theta=10000.0, max_position_embeddings=16384)
    return Scheduler(KVCacheManager(4096, 16, caching), None, rope, max_num_seqs, most, mixed)


def step(scheduled: Scheduler) -> dict[str, int]:
    """The next step's tokens by sequence; the step is taken as done."""
    chunks = scheduled.schedule()
    for chunk in chunks:
        scheduled.launched(chunk)
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}


def test_a_long_prompt_comes_in_small_chunks_while_others_stream():
    s = scheduler()
    for i in range(32):
        s.add(sequence(f"stream {i}", 10))
    assert sum(step(s).values()) == 320
    s.add(sequence("long", 2000))
    for chunk in (480, 480, 480, 480, 80):
        assert step(s) == {f"stream {i}": 1 for i in range(32)} | {"long": chunk}
    assert step(s)["long"] == 1


def test_where_nothing_streams_a_prompt_has_the_whole_step():
    s = scheduler()
    s.add(sequence("long", 10000))
    s.add(sequence("behind", 100))
    assert step(s) == {"long": 8192}
    assert step(s) == {"long": 10000 - 8192, "behind": 100}


def test_prompts_have_half_of_a_mixed_step_beside_however_many_streams():
    s = scheduler(max_num_seqs=600)
    for i in range(500):
        s.add(sequence(f"stream {i}", 2))
    step(s)
    s.add(sequence("long", 2000))
    assert step(s)["long"] == 256


def test_no_step_is_over_max_num_batched_tokens():
    s = scheduler(max_num_seqs=60, most=64, mixed=512)
    for i in range(30):
        s.add(sequence(f"stream {i}", 2))
    step(s)
    s.add(sequence("long", 2000))
    assert step(s)["long"] == 34


def test_prompts_that_come_together_compute_what_they_share_once():
    s = scheduler(caching=True)
    for name in ("one", "two", "six"):
        s.add(sequence(name, 100))
    assert step(s) == {"one": 100, "two": 4, "six": 4}
    assert step(s) == {"one": 1, "two": 1, "six": 1}


def test_a_shared_prompt_over_several_steps_is_computed_once_too():
    s = scheduler(caching=True, most=256)
    for name in ("one", "two"):
        s.add(sequence(name, 400))
    assert step(s) == {"one": 256}
    assert step(s) == {"one": 144, "two": 16}
