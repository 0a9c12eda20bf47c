"""Divides the options of a server by what a deploy does with a changed one, and carries those that running replicas
take.

The marks of the options (protocol/options.py, Change) decide. Ray Serve replaces a replica only if the version of its
deployment differs, so that version is a digest of the options without a mark. The others reach replicas as the
deployment's `user_config`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from lorafleet import __version__
from lorafleet.cluster.config import KEY_VARIABLES, AppArgs
from lorafleet.cluster.tenancy.key_source import is_key_text
from lorafleet.protocol.engine_config import Device
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.options import Change

Seal = Callable[[str], str]  # Stores a secret, and returns a name that reveals nothing about it.
Unseal = Callable[[str], str]  # Returns the secret that has this name.

UserConfig = dict[str, Any]  # Ray Serve's, which is JSON.


def change_of(name: str) -> Change | None:
    """Returns the mark of an option, or None if a change of it replaces the replicas."""
    return next((mark for mark in AppArgs.model_fields[name].metadata if isinstance(mark, Change)), None)


def options_with(change: Change | None) -> frozenset[str]:
    return frozenset(name for name in AppArgs.model_fields if change_of(name) is change)


def version_of(args: AppArgs, device: Device, runtime_env: Mapping[str, Any]) -> str:
    """Returns the version of the deployment, which is the same for all deploys that need no other replicas."""
    env_vars = {name: value for name, value in runtime_env.get("env_vars", {}).items() if name not in _KEYS}
    built_from = {
        "lorafleet": __version__,
        "runtime_env": {**runtime_env, "env_vars": env_vars},
        "device": device,
        "options": args.model_dump(mode="json", include=set(options_with(None))),
        # Limits, usage and the audit log exist only with keys. Other keys are taken in place.
        "keys": [getattr(args, name) is not None for name in sorted(KEY_VARIABLES)],
        # The ports of the events depend on the number of replicas.
        "kv_events_replicas": 0 if args.kv_events_config is None else args.most_replicas,
    }
    return hashlib.sha256(json.dumps(built_from, sort_keys=True, default=str).encode()).hexdigest()[:16]


def user_config_of(args: AppArgs, seal: Seal) -> UserConfig:
    """Returns the options that running replicas take. Ray shows them to everyone who may see its dashboard, so keys
    are sealed."""
    options = args.model_dump(mode="json", include=set(options_with(Change.IN_REPLICA)))
    return options | {name: seal(value) for name, value in options.items() if _is_secret(name, value)}


def with_user_config(args: AppArgs, user_config: UserConfig, unseal: Unseal) -> AppArgs:
    """Returns the arguments with the options of user_config_of(). Raises ConfigError if it has others."""
    expected = options_with(Change.IN_REPLICA)
    if user_config.keys() != expected:
        wrong = ", ".join(sorted(user_config.keys() ^ expected))
        raise ConfigError(
            f"user_config of the deployment has other options than lorafleet gives it ({wrong}). Remove user_config "
            "from `deployments` in the Serve file, and set the options under `args`."
        )
    present = {name: getattr(args, name) for name in AppArgs.model_fields}
    return AppArgs.model_validate(present | opened(user_config, unseal))


def opened(user_config: UserConfig, unseal: Unseal) -> UserConfig:
    """Returns the options with the keys that are sealed in them."""
    return {
        name: unseal(value) if isinstance(value, str) and value.startswith(SEALED) else value
        for name, value in user_config.items()
    }


SEALED = "sealed:"
_KEYS = frozenset(KEY_VARIABLES.values())


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and (name == "admin_key" or (name == "api_keys" and is_key_text(value)))
