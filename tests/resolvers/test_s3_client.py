"""A client is created when it is needed, and again after the server has rejected our credentials."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from lorafleet.resolvers.s3_client import RenewedClient, error_code, http_status, rejects_credentials


def answer(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject")


def test_a_client_is_created_once_until_it_is_dropped() -> None:
    clients = RenewedClient(iter("abc").__next__)
    assert clients.drop() is None
    assert [clients.get(), clients.get()] == ["a", "a"]
    assert clients.drop() == "a"
    assert clients.get() == "b"


@pytest.mark.parametrize(
    ("error", "code", "status", "rejects"),
    [
        (answer("AccessDenied", 403), "AccessDenied", 403, True),
        (answer("ExpiredToken", 400), "ExpiredToken", 400, True),
        (answer("NoSuchKey", 404), "NoSuchKey", 404, False),
        (EndpointConnectionError(endpoint_url="http://s3.invalid"), "", 0, False),
        (None, "", 0, False),
    ],
)
def test_an_error_says_whether_new_credentials_could_help(
    error: Exception | None, code: str, status: int, rejects: bool
) -> None:
    assert (error_code(error), http_status(error), rejects_credentials(error)) == (code, status, rejects)
