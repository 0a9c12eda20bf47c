"""Reads a batch's input from a file or from S3, and publishes its outputs there, each at once and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lorafleet.offline.batch.batch_journal import journal_lines
from lorafleet.protocol.errors import ConfigError, LorafleetError
from lorafleet.resolvers.durable import sync
from lorafleet.resolvers.s3_client import boto_client, http_status

S3 = "s3://"
FINGERPRINT_FIELD = "lorafleet-batch"  # Metadata of an output in S3: the fingerprint of its input.
NOT_FOUND = 404


class FileOutput:
    """An output in a local file. Its journal lies beside it and is renamed at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)
        self.journal = path.with_name(path.name + ".partial")

    def is_published(self, fingerprint: str) -> bool:
        """Returns whether the output is there. Raises ConfigError if the file is not an output of this input."""
        if not self._path.exists():
            return False
        if not self._path.is_file():
            raise ConfigError(f"{self._path} is not a regular file; choose another output.")
        if self._path.stat().st_size == 0:
            return False
        with self._path.open("rb") as file:
            for _ in journal_lines(file, self._path, fingerprint):
                pass
        return True

    def reopen(self) -> None:
        """Makes a published output a journal again, since the run ended before the other output was published."""
        if not self.journal.exists():
            self._rename(self._path, self.journal)

    def publish(self, _: str) -> None:
        self._rename(self.journal, self._path)

    def _rename(self, source: Path, target: Path) -> None:
        try:
            source.replace(target)
            sync(target.absolute().parent)
        except OSError as error:
            raise LorafleetError(f"{source} cannot be renamed to {target}: {error.strerror}.") from None


class S3Output:
    """An output in S3. Its journal is a local file, which is uploaded at the end. A multipart upload creates the object
    only when all parts are there.

    Args:
        client: boto3's client for S3.
        folder: The folder of the journal.
    """

    def __init__(self, uri: str, client: Any, folder: Path) -> None:
        self._bucket, self._key = split_object_uri(uri)
        self._client = client
        self.name = uri
        self.journal = folder / (self._key.rpartition("/")[2] + ".partial")

    def is_published(self, fingerprint: str) -> bool:
        """Returns whether the output is there. Raises ConfigError if the object is not an output of this input."""
        from botocore.exceptions import ClientError

        with _s3_errors(self.name):
            try:
                head = self._client.head_object(Bucket=self._bucket, Key=self._key)
            except ClientError as error:
                if http_status(error) == NOT_FOUND:
                    return False
                raise
        if head["Metadata"].get(FINGERPRINT_FIELD) != fingerprint:
            raise ConfigError(f"{self.name} exists and is not an output of this input. Remove it, or choose another.")
        return True

    def reopen(self) -> None:
        """Does nothing, since the journal stays until both outputs are published."""

    def publish(self, fingerprint: str) -> None:
        metadata = {"Metadata": {FINGERPRINT_FIELD: fingerprint}}
        with _s3_errors(self.name):
            self._client.upload_file(str(self.journal), self._bucket, self._key, ExtraArgs=metadata)


Output = FileOutput | S3Output


def output_at(place: str, work_dir: Path, client: Callable[[], Any]) -> Output:
    """Returns the output at a path or an S3 URI."""
    return S3Output(place, client(), work_dir) if place.startswith(S3) else FileOutput(Path(place))


@contextmanager
def opened_input(place: str, copy: Path, client: Callable[[], Any]) -> Iterator[BinaryIO]:
    """Opens the input at a path or an S3 URI. `copy` is the file to which an S3 object is downloaded; it is removed at
    the end."""
    if place.startswith(S3):
        bucket, key = split_object_uri(place)
        with _s3_errors(place):
            client().download_file(bucket, key, str(copy))
    try:
        file = (copy if place.startswith(S3) else Path(place)).open("rb")
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror}.") from None
    try:
        with file:
            yield file
    finally:
        if place.startswith(S3):
            copy.unlink(missing_ok=True)


def split_object_uri(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix(S3).partition("/")
    if not bucket or not key or key.endswith("/"):
        raise ConfigError(f"{uri!r} names no object; write s3://bucket/key.")
    return bucket, key


def make_client() -> Any:
    """Returns boto3's client, which finds credentials and AWS_ENDPOINT_URL_S3 by itself."""
    from botocore.config import Config

    return boto_client(Config(retries={"mode": "standard", "max_attempts": 5}, connect_timeout=5, read_timeout=60))


@contextmanager
def _s3_errors(uri: str) -> Iterator[None]:
    """Converts boto3's errors to ours."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError, OSError) as error:
        raise LorafleetError(f"{uri}: {str(error).partition(chr(10))[0]}") from None
