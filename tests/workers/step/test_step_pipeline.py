"""The order of overlapped steps: a step out of its turn is our own bug, and ends the engine instead of an answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine


@pytest.fixture
def engine(fleet, prompt) -> Iterator[Engine]:
    made = build_engine(EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for name in ("first", "second"):
        made.add(EngineRequest(request_id=name, prompt_token_ids=prompt(5), params=params))
    yield made
    made.close()


def launch(engine: Engine) -> None:
    planned = engine.pipeline.plan(engine.scheduler.schedule(engine.pipeline.chunks))
    assert engine.pipeline.launch(planned, began_s=0.0) == []


def test_a_step_is_collected_behind_the_launch_of_the_next(engine: Engine):
    pipeline = engine.pipeline
    launch(engine)
    assert pipeline.collect() is None
    assert pipeline.has_step
    launch(engine)
    step = pipeline.collect()
    assert step is not None and step.ends == [5, 5]
    assert not step.plain and all(len(sampled.tokens) == 1 for sampled in step.sampled), "prompts end in it"
    assert pipeline.has_step and len(pipeline.chunks) == 2


def test_a_third_step_is_not_launched_before_the_first_is_collected(engine: Engine):
    launch(engine)
    engine.pipeline.collect()
    launch(engine)
    with pytest.raises(AssertionError, match="between two launches"):
        launch(engine)


def test_what_has_ended_since_a_step_was_planned_is_not_launched(engine: Engine):
    planned = engine.pipeline.plan(engine.scheduler.schedule())
    engine.abort("first")
    engine.pipeline.launch(planned, began_s=0.0)
    engine.pipeline.collect()
    assert [chunk.sequence.request_id for chunk in engine.pipeline.chunks] == ["second"]


def test_without_chunks_nothing_is_launched(engine: Engine):
    assert engine.pipeline.launch(engine.pipeline.plan([]), began_s=0.0) == []
    assert engine.pipeline.collect() is None
    assert not engine.pipeline.has_step
