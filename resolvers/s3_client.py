"""S3 clients that are created anew after the server has rejected our credentials, and what S3's errors say.

A server may reject us because our credentials have been replaced. A new client uses what the profile or the environment
says by then, so no restart is needed. boto3 is imported in functions: only users of S3 pay half a second for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from botocore.config import Config

_REJECTED = {401, 403}

Client = TypeVar("Client")


class RenewedClient(Generic[Client]):
    """A client that `make` creates when it is first needed, and again after drop(). Threads may share it."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._made: Client | None = None
        self._lock = threading.Lock()

    def get(self) -> Client:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def drop(self) -> Client | None:
        """Returns the client, if there is one, and forgets it. Other threads may still use it."""
        with self._lock:
            dropped, self._made = self._made, None
            return dropped


def boto_client(
    options: Config, profile: str | None = None, region: str | None = None, endpoint_url: str | None = None
) -> Any:
    """Returns boto3's client for S3, which has no types. Without arguments, boto3 finds everything itself."""
    import boto3

    session = boto3.Session(profile_name=profile, region_name=region)
    return session.client("s3", endpoint_url=endpoint_url, config=options)


def error_code(error: BaseException | None) -> str:
    """Returns S3's code, such as "NoSuchKey", or "" if the error is not an answer of the server."""
    response: dict[str, Any] = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def http_status(error: BaseException | None) -> int:
    """Returns the HTTP status, or 0 if the error is not an answer of the server."""
    response: dict[str, Any] = getattr(error, "response", {})
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def rejects_credentials(error: BaseException | None) -> bool:
    """Returns whether the server rejects our credentials. It rejects a session that has expired with status 400."""
    return http_status(error) in _REJECTED or "Token" in error_code(error)
