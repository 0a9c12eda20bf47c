"""An engine without a loop, which a test steps by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.errors import from_wire
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineRequest, TokenLogprobs, WeightSwitch
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.startup import build_engine

NUM_TOKENS = 12
PATIENCE_S = 120  # Work of other threads takes long on a busy machine.


class SteppedEngine:
    """The engine, and what its requests have got so far."""

    def __init__(self, base: Path, **options: Any) -> None:
        config = EngineConfig(
            model=str(base), **{"kv_cache_tokens": 2048, "lora": LoRAConfig(max_loras=3), "device": "cpu"} | options
        )
        self.engine = build_engine(config, lambda _done, _total: None, lambda: None, None)
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.switches: dict[str, list[WeightSwitch]] = {}
        self.ended: dict[str, str] = {}

    def load(self, name: str, path: Path, version: int = 1) -> LoRARequest:
        loading = self.engine.load_adapter(LoRARequest(name, 1, str(path)))
        self.until(loading.done)
        return LoRARequest(name, 1, str(path), loading.result().digest, version=version)

    def add(self, name: str, ids: list[int], lora: LoRARequest | None = None, **fields: Any) -> None:
        given = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | fields.pop("params", {})
        params = SamplingParams(**given)
        self.engine.add(EngineRequest(request_id=name, prompt_token_ids=ids, params=params, lora=lora, **fields))

    def step(self) -> None:
        for output in self.engine.step():
            if output.error is not None:
                raise from_wire(output.error)
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
            self.switches.setdefault(output.request_id, []).extend(output.switches)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason

    def until(self, condition: Callable[[], bool]) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends, "it never came"
            self.step()

    def order(self, control: EngineControl) -> None:
        """Has an order carried out. Raises what it raises."""
        done = self.engine.control(control)
        self.until(done.done)
        done.result()
