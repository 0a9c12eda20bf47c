"""Reads and writes the file of keys and tenants (--api-keys), which is YAML or JSON and has hashes, never keys.
Reading is strict, and writing is atomic.

A server reads the file beside its requests, so reading takes time in proportion to its size, which is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Self

import msgspec
import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lorafleet.api.access.caller import Caller, Scope
from lorafleet.protocol.errors import ConfigError, LorafleetError
from lorafleet.protocol.names import MAX_HOLDER, check_adapter_name, check_tenant, tenant_id

try:
    from yaml import CSafeDumper as _Dumper
    from yaml import CSafeLoader as _Loader  # Five times as fast as the loader in Python.
except ImportError:
    from yaml import SafeDumper as _Dumper  # type: ignore[assignment]  # the same interface
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]

MAX_FILE_BYTES = 32 << 20  # 100,000 keys take about 13 MB.
MAX_DEPTH = 16  # Levels of nesting; a file of keys has 6.
MAX_KEYS = 100_000
MAX_TENANTS = 100_000
MAX_PLACES = 1000  # Name prefixes of one tenant, and sources of one tenant.
MAX_PLACE_CHARS = 4096
MAX_LIMIT = 10**12  # The largest value that a limit may have.
MAX_LIMIT_BYTES = 2**60
MAX_FAULTS = 10  # Faults that one message lists.
HASH_PREFIX = "sha256:"
_HASH = re.compile(rf"{HASH_PREFIX}[0-9a-f]{{64}}")
_KEY_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]{0,63}")


def _tenant(name: str) -> str:
    with _as_value_error():
        check_tenant(name)
    return name


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except LorafleetError as error:
        raise ValueError(error.message) from None


Tenant = Annotated[str, AfterValidator(_tenant)]
Places = Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_PLACE_CHARS)]], Field(max_length=MAX_PLACES)]
Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RateLimits(_Strict):
    """Limits over all replicas together. None means that there is no limit."""

    requests_per_minute: Limit | None = None  # A generation counts as its number of sequences.
    tokens_per_minute: Limit | None = None  # Tokens of prompts and answers.
    max_concurrent: Limit | None = None  # Sequences that run at the same time.
    count_auxiliary_tokens: bool = False  # Whether tokens_per_minute includes those of /tokenize and the like.

    @property
    def limits_anything(self) -> bool:
        limits = (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent)
        return any(limit is not None for limit in limits)


class TenantLimits(RateLimits):
    adapters: int | None = Field(default=None, ge=0, le=MAX_LIMIT)
    adapter_bytes: int | None = Field(
        default=None, ge=0, le=MAX_LIMIT_BYTES
    )  # For all versions of its adapters, in the serving dtype.


class TenantEntry(_Strict):
    """The settings of one tenant in the file."""

    # Number of this tenant among those that have had the name. Each is another tenant, to whom nothing of the others
    # belongs.
    holder: int = Field(default=1, ge=1, le=MAX_HOLDER)
    # When `lorafleet keys revoke` removed its last key. It says that a new key must not go to another tenant unnoticed.
    without_keys_since: datetime | None = None
    limits: TenantLimits = TenantLimits()
    # Names with these prefixes are this tenant's alone: of public adapters, and of adapters that resolvers find.
    name_prefixes: Places = []
    sources: Places = []  # Folders and URI prefixes from which it may push, besides uploading.

    @field_validator("name_prefixes")
    @classmethod
    def _are_beginnings_of_names(cls, prefixes: list[str]) -> list[str]:
        for prefix in prefixes:
            with _as_value_error():
                check_adapter_name(prefix.removesuffix("/"))
        return prefixes


class KeyEntry(_Strict):
    """The entry of one key in the file."""

    id: str
    hash: str
    scopes: frozenset[Scope] = Field(min_length=1)
    tenant: Tenant | None = None
    expires: datetime | None = None  # A date or a time, in UTC if it has no zone.
    limits: RateLimits = RateLimits()

    @field_validator("id")
    @classmethod
    def _is_short(cls, value: str) -> str:
        if not _KEY_ID.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a valid id: an id has 1 to 64 letters, digits and characters of '._@-', and begins "
                "with a letter, a digit or '_'"
            )
        return value

    @field_validator("hash")
    @classmethod
    def _is_hash(cls, value: str) -> str:
        if not _HASH.fullmatch(value):
            raise ValueError(
                f"it must be {HASH_PREFIX} followed by 64 hexadecimal digits, as `lorafleet keys hash` prints it"
            )
        return value

    @field_validator("expires")
    @classmethod
    def _with_zone(cls, value: datetime | None) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

    @property
    def mark(self) -> str:
        """Identity of the key, which depends on its secret. So a key that is given the id of another is not the same
        key. It is a hash of the hash, which logs may have and which opens nothing."""
        return hashlib.sha256(f"lorafleet key {self.hash}".encode()).hexdigest()[:32]

    @property
    def expires_s(self) -> float | None:
        return None if self.expires is None else self.expires.timestamp()


class KeyFile(_Strict):
    keys: list[KeyEntry] = Field(default=[], max_length=MAX_KEYS)
    tenants: dict[Tenant, TenantEntry] = Field(default={}, max_length=MAX_TENANTS)

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        _check_ids([key.id for key in self.keys])
        _check_hashes(self.keys)
        outermost_prefixes(owners_of(self.tenants))
        return self

    def tenant_id(self, tenant: str) -> str:
        """Returns the identity of the present holder of a tenant's name."""
        return tenant_id(tenant, self.tenants[tenant].holder if tenant in self.tenants else 1)

    @property
    def tenant_ids(self) -> set[str]:
        named = {key.tenant for key in self.keys if key.tenant is not None} | set(self.tenants)
        return {self.tenant_id(tenant) for tenant in named}

    def caller_of(self, key: KeyEntry) -> Caller:
        tenant = None if key.tenant is None else self.tenant_id(key.tenant)
        return Caller(tenant, key.id, key.scopes, key_mark=key.mark)


def _check_ids(ids: Iterable[str]) -> None:
    seen: set[str] = set()
    for key_id in ids:
        if key_id in seen:
            raise ValueError(f"two keys have the id {key_id!r}; give each its own")
        seen.add(key_id)


def _check_hashes(keys: Iterable[KeyEntry]) -> None:
    """Raises ValueError if two keys have the same hash. The message names the keys, since a hash is never shown."""
    id_of_hash: dict[str, str] = {}
    for key in keys:
        other = id_of_hash.setdefault(key.hash, key.id)
        if other != key.id:
            raise ValueError(f"the keys {other!r} and {key.id!r} have the same hash; give each its own")


def outermost_prefixes(owners: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Returns the (prefix, tenant) pairs sorted and in lower case, without those that lie within another of the same
    tenant.

    Raises ValueError if one lies within another tenant's. Case does not distinguish names here, since the hubs and
    file systems that resolvers search may ignore it.
    """
    found: list[tuple[str, str]] = []
    for prefix, tenant in sorted((prefix.lower(), tenant) for prefix, tenant in owners):
        if not found or not prefix.startswith(found[-1][0]):  # Sorted, so what lies within follows at once.
            found.append((prefix, tenant))
        elif tenant != found[-1][1]:
            raise ValueError(
                f"name_prefixes: {prefix!r} of tenant {tenant!r} lies within {found[-1][0]!r} of tenant "
                f"{found[-1][1]!r}; a name can belong to only one tenant"
            )
    return found


def parse(text: str, where: str) -> KeyFile:
    """Parses the text of such a file. Raises ConfigError, whose message names the place and never shows a hash."""
    try:
        content = _parsed(text)
    except (yaml.YAMLError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        line = f" (line {place.line + 1})" if place is not None else ""
        raise ConfigError(
            f"{where} is neither YAML nor JSON{line}. Correct it; a running server keeps its keys."
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where} must contain an object with `keys` and `tenants`, such as {{keys: []}}.")
    try:
        return KeyFile.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_input=False)
        faults = "; ".join(f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in found[:MAX_FAULTS])
        if len(found) > MAX_FAULTS:
            faults += f"; and {len(found) - MAX_FAULTS} more faults"
        raise ConfigError(f"{where}: {faults}") from None


def _parsed(text: str) -> object:
    """Parses JSON, or else YAML. JSON is YAML too, but a JSON parser is a hundred times as fast."""
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(text)
    _check_depth(text)
    return yaml.load(text, _Loader)


def _check_depth(text: str) -> None:
    """Raises YAMLError for text with too many levels of nesting. The compiled loader recurses, so endless nesting
    would end the process."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} levels of nesting")


def read(path: Path) -> KeyFile:
    """Reads the file at this path. Raises ConfigError if it cannot be read or is wrong."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} has more than {MAX_FILE_BYTES} bytes, the most that a key file may have. Remove keys."
            )
        return parse(content.decode(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Check --api-keys.") from None


def write(path: Path, file: KeyFile) -> None:
    """Writes the whole file or nothing. A new file is readable by its owner only."""
    content = file.model_dump(mode="json", exclude_defaults=True)
    content.setdefault("keys", [])
    for key in content["keys"]:
        key["scopes"] = sorted(key["scopes"])
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as out:
            yaml.dump(content, out, _Dumper, sort_keys=False)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def owners_of(tenants: Mapping[str, TenantEntry]) -> Iterator[tuple[str, str]]:
    """Yields (prefix, tenant) for each name prefix."""
    for name, tenant in tenants.items():
        for prefix in tenant.name_prefixes:
            yield prefix, name
