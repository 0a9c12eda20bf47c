"""The file of keys and tenants (--api-keys), YAML or JSON: read strictly, written whole. It has hashes, never keys."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lorafleet.workers.errors import ConfigError, LorafleetError
from lorafleet.workers.lora.names import check_adapter_name, check_tenant
from lorafleet.workers.openai.caller import Caller, Scope

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


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RateLimits(_Strict):
    """Over all replicas together. None: no limit."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)  # of prompts and answers
    max_concurrent: int | None = Field(default=None, ge=1)  # requests at a time

    @property
    def limits_anything(self) -> bool:
        return any(one is not None for one in (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent))


class TenantLimits(RateLimits):
    adapters: int | None = Field(default=None, ge=0)
    adapter_bytes: int | None = Field(default=None, ge=0)  # of all versions of its adapters, in the serving dtype


class TenantEntry(_Strict):
    """name_prefixes: names of public adapters and of what resolvers find that begin so are this tenant's alone.
    sources: where it may push from besides uploading: folders and URI prefixes."""

    limits: TenantLimits = TenantLimits()
    name_prefixes: list[str] = []
    sources: list[str] = []

    @field_validator("name_prefixes")
    @classmethod
    def _are_beginnings_of_names(cls, prefixes: list[str]) -> list[str]:
        for prefix in prefixes:
            with _as_value_error():
                check_adapter_name(prefix.removesuffix("/"))
        return prefixes


class KeyEntry(_Strict):
    """expires: a date or a time; without a zone it is UTC."""

    id: str
    hash: str
    scopes: frozenset[Scope] = Field(min_length=1)
    tenant: Tenant | None = None
    expires: datetime | None = None
    limits: RateLimits = RateLimits()

    @field_validator("id")
    @classmethod
    def _is_short(cls, value: str) -> str:
        if not _KEY_ID.fullmatch(value):
            raise ValueError(
                f"{value!r} is no id: 1 to 64 letters, digits and '._@-' that begin with a letter or digit"
            )
        return value

    @field_validator("hash")
    @classmethod
    def _is_hash(cls, value: str) -> str:
        if not _HASH.fullmatch(value):
            raise ValueError(f"it must be {HASH_PREFIX} and 64 hexadecimal digits, as `lorafleet keys hash` prints it")
        return value

    @field_validator("expires")
    @classmethod
    def _with_zone(cls, value: datetime | None) -> datetime | None:
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value

    @property
    def caller(self) -> Caller:
        return Caller(self.tenant, self.id, self.scopes)

    @property
    def expires_s(self) -> float | None:
        return None if self.expires is None else self.expires.timestamp()


class KeyFile(_Strict):
    keys: list[KeyEntry] = []
    tenants: dict[Tenant, TenantEntry] = {}

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for what in ("id", "hash"):
            values = [getattr(key, what) for key in self.keys]
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"two keys have the {what} {value!r}; give each its own")
        for (prefix, name), (longer, other) in itertools.permutations(owners_of(self.tenants), 2):
            if longer.startswith(prefix) and name != other:
                raise ValueError(
                    f"name_prefixes: {longer!r} of tenant {other!r} lies within {prefix!r} of tenant {name!r}; a name "
                    "can be one tenant's only"
                )
        return self


def parse(text: str, where: str) -> KeyFile:
    """Raises ConfigError, which names the place and never shows a hash."""
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        line = f" (line {place.line + 1})" if place is not None else ""
        raise ConfigError(f"{where} is neither YAML nor JSON{line}. Mend it; the keys read before go on.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where} must hold an object with `keys` and `tenants`; it may be {{keys: []}}.")
    try:
        return KeyFile.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_input=False)
        )
        raise ConfigError(f"{where}: {faults}") from None


def read(path: Path) -> KeyFile:
    try:
        return parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Check --api-keys.") from None


def write(path: Path, file: KeyFile) -> None:
    """Whole or not at all, and readable by its owner only where it is new."""
    content = file.model_dump(mode="json", exclude_defaults=True)
    content.setdefault("keys", [])
    for key in content["keys"]:
        key["scopes"] = sorted(key["scopes"])
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as out:
            yaml.safe_dump(content, out, sort_keys=False)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def owners_of(tenants: Mapping[str, TenantEntry]) -> Iterator[tuple[str, str]]:
    """(prefix, tenant)."""
    for name, tenant in tenants.items():
        for prefix in tenant.name_prefixes:
            yield prefix, name
