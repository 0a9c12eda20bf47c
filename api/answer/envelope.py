"""Writes the fields around the choices in every response and chunk: ID, kind, time, and the model that answered."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from lorafleet.api.answer.generation import Sample, fallback_of
from lorafleet.api.routes.operations import REQUEST_ID
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import MAX_REQUEST_ID_CHARS, cut


def request_id(request: Request, prefix: str, given: str | None) -> str:
    """Returns the prefix and the body's request_id, else the X-Request-Id header, else a new ID."""
    return prefix + (given or _sent_id(request) or uuid.uuid4().hex)


def given_id(request: Request, given: str | None) -> tuple[str, str] | None:
    """Returns the ID that the client gives the request, and the name of the field or header; None if it gives none."""
    sent = _sent_id(request)
    return (given, "request_id") if given else None if sent is None else (sent, REQUEST_ID)


def draw_key(request: Request, given: str | None, seed: int | None) -> str | None:
    """Returns the key that selects a version of a split: the client's request ID, else its seed, else None (random)."""
    named = given or _sent_id(request)
    return named or (None if seed is None else f"seed {seed}")


def _sent_id(request: Request) -> str | None:
    given = request.headers.get(REQUEST_ID)
    if given is not None:
        check_request_id(given, REQUEST_ID)
    return given


def check_request_id(given: str, param: str) -> None:
    """Checks an ID that is copied to every chunk, log line and usage record. Raises InvalidRequest."""
    if len(given) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            f"`{param}` has {len(given)} characters; at most {MAX_REQUEST_ID_CHARS} are allowed.", param
        )
    if not given.isprintable():
        raise InvalidRequest(f"`{param}` is {cut(repr(given))}; all its characters must be printable.", param)


@dataclass(frozen=True, slots=True)
class Envelope:
    id: str
    kind: str  # The `object` entry.
    base_id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk(self, sample: Sample) -> dict[str, object]:
        """Returns the fields of a chunk. The sample must have answered something, else the model is not known yet."""
        model = sample.model.name if sample.fallback_reason is None else self.base_id
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": model,
        }

    def whole(self, samples: Sequence[Sample]) -> dict[str, object]:
        answered_by_base = next((s for s in samples if s.fallback_reason is not None), samples[0])
        return {**self.chunk(answered_by_base), **self.fallback(samples)}

    def fallback(self, samples: Sequence[Sample]) -> dict[str, object]:
        reason = fallback_of(samples)
        return {} if reason is None else {"lora_fallback": reason}
