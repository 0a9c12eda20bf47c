"""Whether a caller may ask for one more generation now, and what it has left: the point that every generating route
passes once its prompts are known (make_samples in generation.py). cluster/tenancy/ counts for the whole cluster.
"""

from __future__ import annotations

from typing import Protocol

from starlette.types import Scope

from lorafleet.workers.openai.caller import Caller

_ADMISSION = "lorafleet.admission"  # in the ASGI scope


class Admission(Protocol):
    """Of one request."""

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit headers."""
        ...

    def end(self) -> None:
        """The request is answered, or broken off."""
        ...


class Quotas(Protocol):
    async def admit(self, caller: Caller, num_prompt_tokens: int) -> Admission | None:
        """None where nothing of the caller's is limited. Raises QuotaExceeded."""
        ...

    def charge(self, caller: Caller, num_tokens: int) -> None:
        """Tokens that were answered."""
        ...


def set_admission(scope: Scope, admission: Admission) -> None:
    scope[_ADMISSION] = admission


def admission_of(scope: Scope) -> Admission | None:
    admission: Admission | None = scope.get(_ADMISSION)
    return admission
