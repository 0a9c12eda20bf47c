"""Answers an engine's requests for adapters: loads and pins, and what becomes of sequences whose adapter fails to
load."""

from __future__ import annotations

from concurrent.futures import Future

from lorafleet.protocol.engine_config import OnLoadFailure
from lorafleet.protocol.errors import InvalidRequest, LorafleetError, to_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager


class AdapterRequests:
    """The requests of one engine. `loras` is None if the engine runs without LoRA."""

    def __init__(self, loras: WorkerLoRAManager | None, scheduler: Scheduler, on_load_failure: OnLoadFailure) -> None:
        self._loras = loras
        self._scheduler = scheduler
        self._on_load_failure = on_load_failure

    def load(self, lora: LoRARequest) -> Future[AdapterInfo]:
        return self._rejected() if self._loras is None else self._loras.load(lora)

    def pin(self, lora: LoRARequest) -> Future[AdapterInfo]:
        try:
            return self._rejected() if self._loras is None else self._loras.pin(lora)
        except LorafleetError as error:
            return _failed(error)

    def poll(self) -> list[tuple[Sequence, LorafleetError]]:
        """Takes in finished loads. Returns the sequences that cannot be served since their adapter failed to load."""
        faults: list[tuple[Sequence, LorafleetError]] = []
        if self._loras is None:
            return faults
        for digest, error in self._loras.poll():
            waiting = [s for s in self._scheduler.waiting if s.lora is not None and s.lora.digest == digest]
            faults += [(sequence, error) for sequence in waiting if not self._falls_back(sequence, error)]
        return faults

    def _falls_back(self, sequence: Sequence, error: LorafleetError) -> bool:
        """Lets the base model answer if that is configured and possible. Returns whether it does."""
        if self._on_load_failure != "base" or sequence.num_generated > 0 or sequence.needs_adapter:
            return False
        sequence.lora, sequence.fallback_reason = None, to_wire(error).message
        return True

    @staticmethod
    def _rejected() -> Future[AdapterInfo]:
        return _failed(InvalidRequest("this server runs without LoRA; start it with --enable-lora."))


def _failed(error: LorafleetError) -> Future[AdapterInfo]:
    failed: Future[AdapterInfo] = Future()
    failed.set_exception(error)
    return failed
