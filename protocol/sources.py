"""The configuration of adapter sources and their limits: one frozen dataclass for each kind of source.

cluster/config.py fills them from YAML and the command line. Every field is checked here, once.
"""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from lorafleet.protocol.errors import ConfigError

PLACEHOLDERS = ("base_model_name", "lora_name")
TIMEOUT_S = 300.0
MAX_BYTES = 4 << 30
CACHE_BYTES = 64 << 30

_STRICT = {"extra": "forbid"}  # pydantic rejects unknown keys.


@dataclass(frozen=True, slots=True)
class S3Config:
    """Settings for adapters in S3. Credentials are found as AWS's tools find theirs: environment, profile, instance
    role."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _STRICT

    # "s3://bucket/prefix/{base_model_name}/{lora_name}". None: only complete s3:// URIs are served.
    uri: str | None = None
    endpoint_url: str | None = None  # URL of a server other than AWS.
    region: str | None = None
    profile: str | None = None  # Profile in ~/.aws/config.
    anonymous: bool = False  # For public buckets: requests are not signed.
    timeout_s: float = TIMEOUT_S  # For one adapter, from the request to the last byte.
    max_bytes: int = MAX_BYTES  # Total size of one adapter's files; a larger adapter is rejected before it is read.

    def __post_init__(self) -> None:
        _check_limits("s3", self.timeout_s, self.max_bytes)
        if self.uri is not None:
            _check_template("s3", self.uri, "s3://")
        if self.anonymous and self.profile is not None:
            raise ConfigError(
                "lora_resolver_s3: anonymous requests cannot use a profile; remove one of the two options."
            )


@dataclass(frozen=True, slots=True)
class HTTPConfig:
    """Settings for adapters over HTTP. Nothing outside the allowed prefixes is requested, not even after a redirect."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _STRICT

    uri: str | None = None  # "https://host/adapters/{lora_name}". None: only complete URIs are served.
    allow: tuple[str, ...] = ()  # URL prefixes, each ending in "/". If empty, the fixed beginning of uri is allowed.
    timeout_s: float = TIMEOUT_S
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        _check_limits("http", self.timeout_s, self.max_bytes)
        if self.uri is not None:
            _check_template("http", self.uri, "https://", "http://")
        for prefix in self.allowed:
            if not prefix.startswith(("https://", "http://")) or not prefix.endswith("/") or prefix.count("/") < 3:
                raise ConfigError(
                    f"lora_resolver_http: {prefix!r} cannot be allowed as a prefix; give a URL that ends in '/', such "
                    "as https://adapters.example.org/public/."
                )
        if not self.allowed:
            raise ConfigError("lora_resolver_http allows nothing; give a uri, or prefixes in allow.")

    @property
    def allowed(self) -> tuple[str, ...]:
        if self.allow or self.uri is None:
            return self.allow
        fixed = self.uri.partition("{")[0]
        return (fixed[: fixed.rindex("/") + 1],)


@dataclass(frozen=True, slots=True)
class HubConfig:
    """Settings for adapters on the Hugging Face hub. The token is huggingface_hub's own: HF_TOKEN, or the one that
    `hf auth login` has stored."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = _STRICT

    allow: tuple[str, ...]  # Repos, "org/name" or with wildcards "org/*". No other repo is requested.
    repo: str = "{lora_name}"  # Repo for an adapter's name; anything after "org/name" is a folder in it.
    revision: str = "main"  # Branch, tag or commit.
    endpoint: str | None = None  # URL of another hub. Default: HF_ENDPOINT, or huggingface.co.
    timeout_s: float = TIMEOUT_S
    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        _check_limits("hub", self.timeout_s, self.max_bytes)
        _check_template("hub", self.repo, "")
        if not self.allow or not all(self.allow):
            raise ConfigError("lora_resolver_hub allows nothing; name repos in allow, such as org/*.")


@dataclass(frozen=True, slots=True)
class SourcesConfig:
    """The settings that a process of a node needs to open an adapter from any source."""

    s3: S3Config = field(default_factory=S3Config)
    http: HTTPConfig | None = None
    hub: HubConfig | None = None
    cache_dir: str | None = None  # On a local disk, shared by all processes of a node. Default: ~/.cache/lorafleet.
    cache_bytes: int = CACHE_BYTES  # The least recently used adapters are evicted first.

    def __post_init__(self) -> None:
        if self.cache_bytes < 1:
            raise ConfigError(f"lora_cache_bytes is {self.cache_bytes}; it must be positive.")

    @property
    def cache_path(self) -> Path:
        if self.cache_dir is not None:
            return Path(self.cache_dir)
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorafleet"


def _check_limits(name: str, timeout_s: float, max_bytes: int) -> None:
    if not timeout_s > 0:
        raise ConfigError(f"lora_resolver_{name}: timeout_s is {timeout_s}; it must be positive.")
    if max_bytes < 1:
        raise ConfigError(f"lora_resolver_{name}: max_bytes is {max_bytes}; it must be positive.")


def _check_template(name: str, template: str, *schemes: str) -> None:
    known = " and ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    if not template.startswith(schemes):
        raise ConfigError(f"lora_resolver_{name}: {template!r} must begin with {' or '.join(schemes)}.")
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"lora_resolver_{name}: {template!r} has a stray brace: {error}.") from None
    used = [name for _, name, spec, conversion in parts if name is not None and not spec and conversion is None]
    if len(used) != sum(name is not None for _, name, _, _ in parts) or not set(used) <= set(PLACEHOLDERS):
        raise ConfigError(f"lora_resolver_{name}: {template!r} may have only the placeholders {known}.")
    if "lora_name" not in used:
        raise ConfigError(
            f"lora_resolver_{name}: {template!r} lacks {{lora_name}}, so all adapters would have the same address."
        )
