"""Ranges of files over HTTP: a server's description of a file, and the file's bytes, as long as it is the same file.

Redirects are followed one by one, and the caller allows or rejects each. Credentials are sent to their own host only.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import httpx

from lorafleet.protocol.errors import AdapterChanged, AdapterUnavailable, InvalidRequest
from lorafleet.protocol.strict_json import shown
from lorafleet.resolvers.checksum import Checksum
from lorafleet.resolvers.deadline import FetchDeadline
from lorafleet.resolvers.source import Interrupted

CONNECT_S = 5.0
MAX_REDIRECTS = 5
MISSING = {404, 410}
BUSY = {408, 425, 429}

_NUMBER = r"([0-9]{1,18})"  # Python refuses to parse numbers with thousands of digits.
_CONTENT_RANGE = re.compile(rf"bytes {_NUMBER}-{_NUMBER}/{_NUMBER}")
_LENGTH = re.compile(_NUMBER)
_SHA256 = re.compile(r"sha-256=:([A-Za-z0-9+/=]+):")


@dataclass(frozen=True, slots=True)
class Described:
    """A server's description of a file."""

    size: int
    validator: str  # a strong ETag, else the date of the last change, else ""
    in_ranges: bool
    checksum: Checksum | None


class RangeReader:
    """Reads files in ranges. `allowed` says whether a URL that a server redirects to may be followed."""

    def __init__(self, allowed: Callable[[str], bool], headers: Mapping[str, str] | None = None) -> None:
        # No compression, since ranges count the bytes that are sent. No proxy or .netrc but what HTTPS_PROXY says.
        self._headers = {"accept-encoding": "identity", "user-agent": "lorafleet", **(headers or {})}
        self._allowed = allowed
        self._client = httpx.Client(limits=httpx.Limits(max_connections=None, max_keepalive_connections=16))

    def describe(self, url: str, deadline: FetchDeadline) -> Described | None:
        """Returns the server's description of the file, or None if the server has no such file."""
        with self._get(url, {"range": "bytes=0-0", "want-repr-digest": "sha-256=1"}, deadline) as answer:
            if answer.status_code in MISSING:
                return None
            _check_status(answer, url, {200, 206, 416})
            checksum = _checksum(answer)
            if answer.status_code == 416:  # an empty file has no first byte
                return Described(0, "", in_ranges=False, checksum=checksum)
            if answer.status_code == 206:
                return Described(_content_range(answer, url)[2], _validator(answer), in_ranges=True, checksum=checksum)
            length = answer.headers.get("content-length", "")
            if not _LENGTH.fullmatch(length):
                raise AdapterUnavailable(f"{url}: the server does not report the file's size, so it is not fetched.")
            return Described(int(length), _validator(answer), in_ranges=False, checksum=checksum)

    def read(
        self, url: str, start: int, end: int, size: int, validator: str, *, in_ranges: bool, deadline: FetchDeadline
    ) -> Generator[bytes, None, None]:
        """Yields the bytes [start, end) of the file.

        `validator` is the one that describe() returned. Raises AdapterChanged if the file is another one by now.
        """
        headers = {"range": f"bytes={start}-{end - 1}"} if in_ranges else {}
        if validator:
            headers["if-match" if validator.startswith('"') else "if-unmodified-since"] = validator
        with self._get(url, headers, deadline) as answer:
            if answer.status_code in {412, 416, *MISSING} or (in_ranges and answer.status_code == 200):
                raise AdapterChanged(f"{url} changed while it was read.")
            _check_status(answer, url, {206 if in_ranges else 200})
            if in_ranges and _content_range(answer, url) != (start, end - 1, size):
                raise AdapterChanged(f"{url} changed while it was read: {answer.headers['content-range']}.")
            if validator and _validator(answer) != validator:
                raise AdapterChanged(f"{url} changed while it was read.")
            with _errors():
                yield from answer.iter_raw()  # chunks as they come: a broken connection would lose larger ones

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def _get(self, url: str, headers: Mapping[str, str], deadline: FetchDeadline) -> Iterator[httpx.Response]:
        first = _parsed(url)
        with contextlib.ExitStack() as opened:
            for _ in range(MAX_REDIRECTS + 1):
                answer = opened.enter_context(self._stream(httpx.URL(url), first, headers, deadline))
                if not answer.has_redirect_location:
                    yield answer
                    return
                url = _joined(url, answer.headers["location"])
                if not self._allowed(url):
                    raise AdapterUnavailable(f"{first} redirects to {url}, which is not allowed.")
                opened.pop_all().close()
        raise AdapterUnavailable(f"{first} redirects more than {MAX_REDIRECTS} times.")

    @contextlib.contextmanager
    def _stream(
        self, url: httpx.URL, first: httpx.URL, headers: Mapping[str, str], deadline: FetchDeadline
    ) -> Iterator[httpx.Response]:
        sent = {**self._headers, **headers}
        if (url.scheme, url.host, url.port) != (first.scheme, first.host, first.port):
            sent.pop("authorization", None)
        limit = httpx.Timeout(deadline.socket_s(), connect=min(CONNECT_S, deadline.left_s()))
        request = self._client.build_request("GET", url, headers=sent, timeout=limit)
        with _errors():
            answer = self._client.send(request, stream=True, follow_redirects=False)
        try:
            yield answer
        finally:
            answer.close()


def _parsed(url: str) -> httpx.URL:
    try:
        return httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise InvalidRequest(f"{shown(url)} is not a URL: {error}", "lora_path") from None


def _joined(url: str, location: str) -> str:
    """Resolves the location of a redirect. Raises AdapterUnavailable if that is no URL."""
    try:
        return str(httpx.URL(url).join(location))
    except (httpx.InvalidURL, UnicodeError, ValueError) as error:
        raise AdapterUnavailable(f"{url} redirects to {shown(location)}, which is not a URL: {error}") from None


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        raise Interrupted(f"no answer in time ({type(error).__name__})") from None
    except (httpx.HTTPError, httpx.StreamError) as error:
        raise Interrupted(f"{type(error).__name__}: {error}") from None


def _check_status(answer: httpx.Response, url: str, wanted: set[int]) -> None:
    status = answer.status_code
    if status in wanted:
        return
    if status >= 500 or status in BUSY:
        raise Interrupted(f"HTTP {status}")
    raise AdapterUnavailable(f"{url}: the server answers HTTP {status} {answer.reason_phrase}.")


def _content_range(answer: httpx.Response, url: str) -> tuple[int, int, int]:
    found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if found is None:
        raise AdapterUnavailable(f"{url}: the server sends a part of the file without a valid Content-Range.")
    return int(found[1]), int(found[2]), int(found[3])


def _validator(answer: httpx.Response) -> str:
    """Returns an empty string if the server gives no validator, or one that could not be sent back."""
    etag: str = answer.headers.get("etag", "")
    found: str = etag if etag.startswith('"') else answer.headers.get("last-modified", "")
    return found if found.isascii() else ""


def _checksum(answer: httpx.Response) -> Checksum | None:
    """Returns the sha256 of the header Repr-Digest (RFC 9530), or None if there is no valid one."""
    found = _SHA256.search(answer.headers.get("repr-digest", ""))
    if found is None:
        return None
    try:
        return Checksum("sha256", base64.b64decode(found[1], validate=True).hex())
    except binascii.Error:
        return None
