"""Adapters in an S3 bucket: s3fs lists them, and boto3 reads ranges of one version of an object."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from lorafleet.protocol.adapter_formats.adapter_files import DRAFT_FOLDER
from lorafleet.protocol.errors import AdapterChanged, AdapterUnavailable, InvalidRequest
from lorafleet.protocol.sources import S3Config
from lorafleet.resolvers import checksum
from lorafleet.resolvers.checksum import Checksum
from lorafleet.resolvers.deadline import SOCKET_S, FetchDeadline
from lorafleet.resolvers.download import PARALLEL_PARTS
from lorafleet.resolvers.s3_client import RenewedClient, boto_client, error_code, http_status, rejects_credentials
from lorafleet.resolvers.source import Interrupted, RemoteFile, wanted_names

CONNECT_S = 5.0
CHUNK_BYTES = 1 << 17  # the most that a broken connection loses
BUSY = {"SlowDown", "RequestTimeout", "RequestTimeTooSkewed", "ServiceUnavailable", "InternalError", "Throttling"}
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}|arn:[^/]+")  # The library accepts these, and the ARN of an access point.


@dataclass(frozen=True, slots=True)
class _Clients:
    boto: Any  # neither library has types
    fs: Any


class S3Source:
    def __init__(self, config: S3Config) -> None:
        self.timeout_s = config.timeout_s
        self.max_bytes = config.max_bytes
        self._clients = RenewedClient(lambda: _make_clients(config))

    def find(self, uri: str, deadline: FetchDeadline) -> list[RemoteFile]:
        bucket, prefix = split(uri)
        entries = self._list(uri, bucket, prefix, deadline)
        folder = f"{bucket}/{prefix}/"
        if any(entry["name"] == f"{folder}{DRAFT_FOLDER}" for entry in entries):
            entries += self._list(uri, bucket, f"{prefix}/{DRAFT_FOLDER}", deadline)
        listed = {entry["name"].removeprefix(folder): entry for entry in entries if entry["type"] == "file"}
        found = []
        for name in wanted_names(list(listed), uri):
            key, etag, size = f"{prefix}/{name}", listed[name]["ETag"].strip('"'), int(listed[name]["size"])
            what = self._checksum(bucket, key, etag, size, deadline)
            found.append(RemoteFile(name, f"s3://{bucket}/{key}", size, etag, what))
        return found

    def read(self, file: RemoteFile, start: int, end: int, deadline: FetchDeadline) -> Generator[bytes, None, None]:
        bucket, key = split(file.location)
        with self._errors(file.location, deadline):
            answer = self._clients.get().boto.get_object(
                Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", IfMatch=f'"{file.version}"'
            )
            with contextlib.closing(answer["Body"]) as body:
                yield from body.iter_chunks(CHUNK_BYTES)

    def close(self) -> None:
        clients = self._clients.drop()
        if clients is not None:
            clients.boto.close()

    def _list(self, uri: str, bucket: str, prefix: str, deadline: FetchDeadline) -> list[dict[str, Any]]:
        from fsspec.asyn import sync

        fs = self._clients.get().fs
        with self._errors(uri, deadline):
            try:
                # This is fs.ls with a time limit, which fs.ls itself does not have.
                listed = sync(
                    fs.loop, fs._ls, f"{bucket}/{prefix}", detail=True, refresh=True, timeout=deadline.left_s()
                )
            except FileNotFoundError as error:
                if error_code(error.__cause__) == "NoSuchBucket":
                    raise AdapterUnavailable(f"there is no bucket {bucket!r}. Create it, or correct the URI.") from None
                return []
        return list(listed)

    def _checksum(self, bucket: str, key: str, etag: str, size: int, deadline: FetchDeadline) -> Checksum | None:
        """Returns the best checksum that the server knows, or None if it has none.

        This is the server's own sha256, the sha256 in `x-amz-meta-sha256`, or the ETag's md5.
        """
        location = f"s3://{bucket}/{key}"
        asked = {"Bucket": bucket, "Key": key, "IfMatch": f'"{etag}"'}
        with self._errors(location, deadline):
            head = self._clients.get().boto.head_object(**asked, ChecksumMode="ENABLED")
            given = head.get("ChecksumSHA256")
            if given and "-" not in given:
                return Checksum("sha256", _hex(given))
            if "sha256" in head["Metadata"]:
                return Checksum("sha256", head["Metadata"]["sha256"].lower())
            if head.get("ServerSideEncryption", "AES256") != "AES256":
                return None  # then the ETag is not an md5
            first = self._clients.get().boto.head_object(**asked, PartNumber=1) if "-" in etag else {}
            return checksum.of_etag(etag, size, first["ContentLength"] if "PartsCount" in first else None)

    @contextlib.contextmanager
    def _errors(self, what: str, deadline: FetchDeadline) -> Iterator[None]:
        """Converts the libraries' errors to ours."""
        from botocore import exceptions as boto
        from fsspec.exceptions import FSTimeoutError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except FSTimeoutError:
            deadline.left_s()
            raise Interrupted("no answer in time") from None
        except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound) as error:
            self._clients.drop()
            raise AdapterUnavailable(
                f"{what}: {str(error).rstrip('.')}. Set credentials, or set anonymous for a public bucket."
            ) from None
        except boto.TokenRetrievalError as error:
            self._clients.drop()
            raise AdapterUnavailable(f"{what}: {error}") from None
        except (boto.ClientError, OSError) as error:
            cause = error if isinstance(error, boto.ClientError) else error.__cause__
            if not isinstance(cause, boto.ClientError):
                raise Interrupted(repr(error)) from None
            self._refused(what, cause)
        except (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, HTTPError) as error:
            raise Interrupted(_first_line(error)) from None
        except boto.BotoCoreError as error:  # such as an answer that is not S3's, or an invalid bucket name
            raise AdapterUnavailable(f"{what}: {_first_line(error)}.") from None

    def _refused(self, what: str, error: Any) -> None:
        status, code = http_status(error), error_code(error)
        if status == 412 or code in ("NoSuchKey", "404"):
            raise AdapterChanged(f"{what} changed while it was read.")
        if status >= 500 or status == 429 or code in BUSY:
            raise Interrupted(f"{code} (HTTP {status})")
        self._clients.drop()
        if rejects_credentials(error):
            raise AdapterUnavailable(
                f"{what}: the server refuses this cluster's credentials: {code} (HTTP {status}). Renew them, or grant "
                "them s3:ListBucket and s3:GetObject there; no restart is needed."
            )
        raise AdapterUnavailable(f"{what}: the server answers {code} (HTTP {status}).")


def split(uri: str) -> tuple[str, str]:
    """Splits a URI into the bucket and the key, without slashes around the key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    key = key.strip("/")
    if not _BUCKET.fullmatch(bucket) or not key or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidRequest(f"{uri!r} is not the URI of an adapter's folder; write s3://bucket/folder.", "lora_path")
    return bucket, key


def _make_clients(config: S3Config) -> _Clients:
    import s3fs  # imported here, so that only users of S3 pay half a second for it
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.exceptions import ProfileNotFound

    timeouts: dict[str, Any] = {
        "connect_timeout": min(CONNECT_S, config.timeout_s),
        "read_timeout": min(SOCKET_S, config.timeout_s),
        "retries": {"total_max_attempts": 1},  # download.py retries from where the read stopped
    }
    signature = {"signature_version": UNSIGNED} if config.anonymous else {}
    options = Config(**timeouts, **signature, max_pool_connections=4 * PARALLEL_PARTS)
    try:
        boto = boto_client(options, config.profile, config.region, config.endpoint_url)
    except ProfileNotFound as error:
        raise AdapterUnavailable(f"S3: {error}. Add it to the AWS configuration, or name another profile.") from None
    fs = s3fs.S3FileSystem(
        anon=config.anonymous,
        profile=config.profile,
        endpoint_url=config.endpoint_url,
        client_kwargs={"region_name": config.region} if config.region else {},
        config_kwargs=timeouts,
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    fs.retries = 1
    return _Clients(boto, fs)


def _hex(base64: str) -> str:
    import binascii

    return binascii.a2b_base64(base64).hex()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
