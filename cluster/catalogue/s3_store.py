"""The store in an S3 bucket. `If-None-Match: *` ensures that a key is created only once, whoever else writes.

It uses boto3 rather than s3fs, which cannot send conditions and hides the outcome of a write. boto3 finds the
credentials and the endpoint itself, in the environment, a profile or the instance role (AWS_ENDPOINT_URL_S3 for servers
other than Amazon's). They are read again after the server has rejected them, so renewed ones need no restart.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError

from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME, stored_files
from lorafleet.protocol.errors import AdapterMissing, ConfigError, StoreError, StoreRefused
from lorafleet.resolvers.s3_client import RenewedClient, boto_client, error_code, rejects_credentials
from lorafleet.resolvers.source import wanted_names

TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
ABSENT = {"NoSuchKey", "404", "NotFound"}
NAMES_FIELD = "lorafleet-files"  # Metadata field of an adapter's config: the names of its files.


def _make_client() -> Any:
    return boto_client(Config(retries={"mode": "standard", "max_attempts": 5}, connect_timeout=5, read_timeout=30))


class S3Store:
    """The store below an s3:// prefix. `make_client` returns boto3's client."""

    def __init__(self, uri: str, make_client: Callable[[], Any] = _make_client, setting: str = "catalog_uri") -> None:
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise ConfigError(f"{setting}={uri!r} names no bucket; give s3://bucket/prefix.")
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._renewed = RenewedClient(make_client)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def create(self, key: str, content: bytes) -> bool:
        with self._errors(f"{key} cannot be written"):
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=content, IfNoneMatch="*")
            except ClientError as error:
                if error_code(error) in TAKEN:
                    return False
                raise
        return True

    def read(self, key: str) -> bytes | None:
        with self._errors(f"{key} cannot be read"):
            try:
                answer = self._client.get_object(Bucket=self._bucket, Key=self._key(key))
            except ClientError as error:
                if error_code(error) in ABSENT:
                    return None
                raise
            content: bytes = answer["Body"].read()
            return content

    def keys(self, prefix: str) -> list[str]:
        return sorted(self._sizes(prefix))

    def files_bytes(self, digest: str) -> int:
        return sum(self._sizes(f"adapters/{digest}/").values())

    def _sizes(self, prefix: str) -> dict[str, int]:
        """Returns the bytes of each object with the prefix, by its key."""
        with self._errors(f"{prefix} cannot be listed"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._key(prefix)
            )
            found = [item for page in pages for item in page.get("Contents", ())]
            return {item["Key"].removeprefix(self._prefix): item["Size"] for item in found}

    def delete(self, key: str) -> None:
        with self._errors(f"{key} cannot be deleted"):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def put_files(self, digest: str, folder: Path) -> None:
        paths = stored_files(folder)
        self._put(digest, paths, lambda name, place: self._client.upload_file(str(paths[name]), **place))

    def draft(self) -> S3Draft:
        return S3Draft(self._put_contents)

    def _put_contents(self, digest: str, contents: Mapping[str, Sequence[bytes | memoryview]]) -> None:
        def upload(name: str, place: dict[str, Any]) -> None:
            self._client.upload_fileobj(io.BufferedReader(_Parts(contents[name])), **place)

        self._put(digest, contents, upload)

    def _put(self, digest: str, files: Iterable[str], upload: Callable[[str, dict[str, Any]], None]) -> None:
        """Uploads an adapter's files. The config goes last, and its metadata names all files; has_files() looks for
        each of them."""
        order = sorted(files, key=lambda name: (name == CONFIG_NAME, name))
        names = {NAMES_FIELD: ",".join(order)}
        with self._errors(f"the files of adapter {digest[:12]} cannot be written"):
            for name in order:
                key = self._key(f"adapters/{digest}/{name}")
                fields = {"Metadata": names} if name == CONFIG_NAME else {}
                upload(name, {"Bucket": self._bucket, "Key": key, "ExtraArgs": fields})

    def files_uri(self, digest: str) -> str:
        return f"{self.uri}/adapters/{digest}"

    def has_files(self, digest: str) -> bool:
        with self._errors(f"the files of adapter {digest[:12]} cannot be read"):
            names = self._names(digest)
        prefix = f"adapters/{digest}/"
        return names is not None and names <= {key.removeprefix(prefix) for key in self.keys(prefix)}

    def stored_digests(self) -> list[str]:
        prefix = self._key("adapters/")
        with self._errors("adapters/ cannot be listed"):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix, Delimiter="/"
            )
            folders = [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ())]
        return [folder.removeprefix(prefix).rstrip("/") for folder in folders]

    def fetch_files(self, digest: str, folder: Path) -> None:
        prefix = f"adapters/{digest}/"
        # Keys of the bucket may have any text, such as "..", so only names of an adapter's files become paths.
        names = wanted_names([key.removeprefix(prefix) for key in self.keys(prefix)], self.files_uri(digest))
        if not names:
            raise AdapterMissing(f"the catalogue {self.uri} has no files of adapter {digest[:12]}.")
        with self._errors(f"the files of adapter {digest[:12]} cannot be read"):
            for name in names:
                target = folder / name
                target.parent.mkdir(exist_ok=True)
                self._client.download_file(self._bucket, self._key(prefix + name), str(target))

    def delete_files(self, digest: str) -> None:
        """Deletes an adapter's files. The config goes first, since without it there is no adapter."""
        names = self.keys(f"adapters/{digest}/")
        for key in sorted(names, key=lambda key: key != f"adapters/{digest}/{CONFIG_NAME}"):
            self.delete(key)

    @property
    def _client(self) -> Any:
        return self._renewed.get()

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _names(self, digest: str) -> set[str] | None:
        """Returns the names of the files that were stored together, or None if there is no config.

        Older releases stored no list of names; for their files only the config is returned.
        """
        try:
            key = self._key(f"adapters/{digest}/{CONFIG_NAME}")
            answer = self._client.head_object(Bucket=self._bucket, Key=key)
        except ClientError as error:
            if error_code(error) in ABSENT:
                return None
            raise
        return {CONFIG_NAME, *filter(None, answer["Metadata"].get(NAMES_FIELD, "").split(","))}

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError, Boto3Error) as error:
            cause = error if isinstance(error, ClientError) else error.__context__  # boto3's transfers hide it.
            kind = StoreRefused if isinstance(cause, ClientError) and _is_certain(cause) else StoreError
            if rejects_credentials(cause) or isinstance(error, NoCredentialsError | PartialCredentialsError):
                self._renewed.drop()
                raise kind(
                    f"store {self.uri}: {what}: the server refuses this cluster's credentials: {error}. Renew "
                    "them; no restart is needed. Check whether it was done before you repeat it."
                ) from error
            raise kind(f"store {self.uri}: {what}: {error}. Check whether it was done before you repeat it.") from error


class S3Draft:
    """Files in memory that are uploaded when their digest is known, since it is part of their keys."""

    def __init__(self, put: Callable[[str, Mapping[str, Sequence[bytes | memoryview]]], None]) -> None:
        self._put = put
        self._contents: dict[str, list[bytes | memoryview]] = {}

    def write(self, name: str, content: bytes | memoryview) -> None:
        self._contents.setdefault(name, []).append(content)

    def publish(self, digest: str) -> None:
        self._put(digest, self._contents)

    def discard(self) -> None:
        self._contents.clear()


class _Parts(io.RawIOBase):
    """A file whose content is in several parts of memory, which are not copied together."""

    def __init__(self, parts: Iterable[bytes | memoryview]) -> None:
        self._rest = [memoryview(part) for part in parts][::-1]

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while self._rest and not len(self._rest[-1]):
            self._rest.pop()
        if not self._rest:
            return 0
        part = self._rest[-1][: len(target)]
        target[: len(part)] = part
        self._rest[-1] = self._rest[-1][len(part) :]
        return len(part)


def _is_certain(error: ClientError) -> bool:
    """Returns whether the first and only attempt was rejected; boto3 repeats attempts that were not answered."""
    answer: dict[str, int] = error.response.get("ResponseMetadata", {})
    return 400 <= answer.get("HTTPStatusCode", 0) < 500 and answer.get("RetryAttempts", 0) == 0
