"""Every error that a user or the outside world can cause, in one tree.

    LorafleetError
    ├── ConfigError              the server cannot start as configured
    │   ├── UnsupportedModel     the checkpoint needs something this engine does not do
    │   └── NothingToShare       the KV cache has no memory that adapters could borrow
    ├── InvalidRequest           the request is wrong; `param` names the field
    │   ├── ContextOverflow      prompt and max_tokens do not fit the context or the KV cache
    │   ├── BodyTooLarge         the HTTP body is larger than the server accepts
    │   ├── BodyTimeout          the HTTP body did not arrive in time
    │   ├── UnsupportedMediaType the HTTP body is not declared as JSON
    │   └── UnsupportedRoute     the route belongs to a feature of another server that this one does not have
    ├── ModelNotFound            there is no such base model or adapter
    ├── WeightVersionMismatch    the adapter is at another version than the request demands
    ├── ResponseNotFound         no replica stores such a response
    ├── BatchFileNotFound        the caller has no such file of a batch
    ├── BatchNotFound            the caller has no such batch
    ├── Forbidden                the server was not started with this feature
    ├── Unauthorized             the API key is missing or wrong
    ├── AdapterError             one adapter cannot be used
    │   ├── AdapterMissing       the path holds no adapter files
    │   ├── AdapterMalformed     the files are damaged or contradict each other
    │   ├── AdapterUnsupported   it needs a PEFT feature that is not served; the message names it
    │   ├── AdapterMismatch      it is well-formed, but made for another base model
    │   ├── RankTooLarge         its rank is over lora.max_lora_rank
    │   ├── AdapterChanged       the bytes under the path are not the ones that were registered
    │   ├── AdapterTooLarge      it is larger than the configuration allows
    │   ├── AdapterUnavailable   its source does not answer, denies access or is too slow: try again later
    │   ├── AdapterExists        the name is taken
    │   └── InvalidAdapterName   it is empty, too long or the base's own, or has path parts or control characters
    ├── Overloaded               the request may succeed later; `retry_after_s` says when
    │   ├── QueueFull            too many requests are queued already
    │   ├── DirectoryUnavailable the adapter directory does not answer
    │   ├── QuotaExceeded        the caller's key or tenant has used up its quota
    │   └── QueueTimeout         the request could not start before its timeout
    ├── StoreError               the catalogue's store does not answer, or rejects the call
    │   ├── StoreRefused         the store has certainly not carried out a write
    │   ├── OutcomeUnknown       a change may or may not be in the catalogue's log
    │   └── CatalogueDamaged     an object of the catalogue is lost, or its bytes differ from what was written
    ├── ClientTooSlow            too much of a stream waits for its client, so it ends
    ├── LogUnwritable            the audit or usage log cannot be written, and unlogged actions are not allowed
    └── EngineDead               the engine loop stopped; the replica is being replaced

Errors cross the process boundary as (class name, message, param, …): see to_wire and from_wire.
api/answer/error_responses.py maps each class to an HTTP status.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

import msgspec


class LorafleetError(Exception):
    """Base of all errors. The message is for the user: it gives the value, the bound and the remedy."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[type[LorafleetError], tuple[str, str | None]]:
        return type(self), (self.message, self.param)


class ConfigError(LorafleetError):
    pass


class UnsupportedModel(ConfigError):
    pass


class NothingToShare(ConfigError):
    pass


class InvalidRequest(LorafleetError):
    pass


class ContextOverflow(InvalidRequest):
    pass


class BodyTooLarge(InvalidRequest):
    pass


class BodyTimeout(InvalidRequest):
    pass


class UnsupportedMediaType(InvalidRequest):
    pass


class UnsupportedRoute(InvalidRequest):
    pass


class ModelNotFound(LorafleetError):
    pass


class WeightVersionMismatch(LorafleetError):
    """An error with the version that the adapter is at."""

    def __init__(self, message: str, param: str | None = None, present: int = 0) -> None:
        super().__init__(message, param)
        self.present = present

    def __reduce__(self) -> tuple[type[LorafleetError], tuple[str, str | None, int]]:  # type: ignore[override]  # wider
        return type(self), (self.message, self.param, self.present)


class ResponseNotFound(LorafleetError):
    pass


class BatchFileNotFound(LorafleetError):
    pass


class BatchNotFound(LorafleetError):
    pass


class Forbidden(LorafleetError):
    pass


class Unauthorized(LorafleetError):
    pass


class AdapterError(LorafleetError):
    pass


class AdapterMissing(AdapterError):
    pass


class AdapterMalformed(AdapterError):
    pass


class AdapterUnsupported(AdapterError):
    pass


class AdapterMismatch(AdapterError):
    pass


class RankTooLarge(AdapterError):
    pass


class AdapterChanged(AdapterError):
    pass


class AdapterTooLarge(AdapterError):
    pass


class AdapterUnavailable(AdapterError):
    pass


class AdapterExists(AdapterError):
    pass


class InvalidAdapterName(AdapterError):
    pass


class Overloaded(LorafleetError):
    def __init__(self, message: str, param: str | None = None, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, param)
        self.retry_after_s = retry_after_s  # None: waiting does not help.

    def __reduce__(  # type: ignore[override]  # wider
        self,
    ) -> tuple[type[LorafleetError], tuple[str, str | None, float | None]]:
        return type(self), (self.message, self.param, self.retry_after_s)


class QueueFull(Overloaded):
    pass


class QueueTimeout(Overloaded):
    pass


class DirectoryUnavailable(Overloaded):
    pass


class QuotaExceeded(Overloaded):
    """An error with headers for the HTTP response, OpenAI's x-ratelimit ones."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = 1.0,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message, param, retry_after_s)
        self.headers = headers

    def __reduce__(  # type: ignore[override]  # wider
        self,
    ) -> tuple[type[LorafleetError], tuple[str, str | None, float | None, dict[str, str]]]:
        return type(self), (self.message, self.param, self.retry_after_s, dict(self.headers))


class StoreError(LorafleetError):
    pass


class LogUnwritable(LorafleetError):
    pass


class StoreRefused(StoreError):
    pass


class OutcomeUnknown(StoreError):
    pass


class CatalogueDamaged(StoreError):
    pass


class ClientTooSlow(LorafleetError):
    pass


class EngineDead(LorafleetError):
    pass


class WireError(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None  # Only set for Overloaded.


def _subclasses(cls: type[LorafleetError]) -> dict[str, type[LorafleetError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found |= _subclasses(child)
    return found


def fault_of(error: Exception) -> LorafleetError:
    """Returns the error that a client receives where an internal fault ended its request alone."""
    return LorafleetError(f"The engine failed at this request ({type(error).__name__}); the server's log says why.")


def encodable(message: str) -> str:
    """Escapes lone surrogates, which a message may quote from a path or a text and which cannot be encoded."""
    return message.encode(errors="backslashreplace").decode()


def to_wire(error: LorafleetError) -> WireError:
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return WireError(type(error).__name__, encodable(error.message), error.param, retry_after_s)


@functools.cache
def _errors_by_name() -> dict[str, type[LorafleetError]]:
    """Returns the classes of this module by name; all are defined before the first error crosses to another process."""
    return _subclasses(LorafleetError)


def from_wire(error: WireError) -> LorafleetError:
    made = _errors_by_name().get(error.kind, LorafleetError)(error.message, error.param)
    if isinstance(made, Overloaded) and error.retry_after_s is not None:
        made.retry_after_s = error.retry_after_s
    return made
