"""Administration from Python, in any process of the Ray cluster, such as a trainer that pushes weights from memory.

from lorafleet.cluster.admin.admin_handle import get_directory
get_directory().push_tensors("sql", tensors, peft_config)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from safetensors.torch import save
from torch import Tensor

from lorafleet.cluster.admin.administration import REMOVE_S
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Share, VersionRecord
from lorafleet.cluster.directory.directory_actor import NAMESPACE
from lorafleet.protocol.errors import ConfigError, DirectoryUnavailable, Overloaded

CALL_S = 600.0
ALIVE_S = 10.0  # Seconds in which the directory must answer a harmless call before the actual call is sent.


def get_directory(app_name: str = "lorafleet") -> DirectoryHandle:
    """Returns a handle to the directory of a running application. Raises ConfigError if there is none, or if the
    application serves more than one model."""
    prefix = f"directory:{app_name}:"
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    found = [one["name"] for one in named if one["namespace"] == NAMESPACE and one["name"].startswith(prefix)]
    if len(found) != 1:
        there = sorted(one["name"].split(":")[1] for one in named if one["namespace"] == NAMESPACE)
        raise ConfigError(
            f"app_name={app_name!r}: {len(found)} adapter directories of that name run in this Ray cluster "
            f"(applications: {', '.join(there) or 'none'}). Connect to the cluster that serves, and name its app."
        )
    return DirectoryHandle(ray.get_actor(found[0], namespace=NAMESPACE))


class DirectoryHandle:
    """A handle to a running adapter directory. Every call blocks until it is done and durable, and raises a
    LorafleetError that says why it failed."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def push_tensors(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], **options: Any
    ) -> AdapterRecord:
        """Pushes a new version from memory.

        Args:
            tensors: weights by PEFT's names, as get_peft_model_state_dict returns them.
            config: content of adapter_config.json, as LoraConfig.to_dict() returns it.
            options: further fields of administration.Pushed.
        """
        weights = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        adapter: AdapterRecord = self._call(
            "push_bytes", name=name, weights=weights, config=_plain(config), options=options
        )
        return adapter

    def push_folder(self, name: str, path: str, **options: Any) -> AdapterRecord:
        """Pushes an adapter from a folder that the directory's process can read, normally on the head node."""
        adapter: AdapterRecord = self._call("push_folder", name=name, path=path, options=options)
        return adapter

    def list_adapters(self, after: str = "", limit: int = 100) -> list[AdapterRecord]:
        adapters: list[AdapterRecord] = self._call("list_adapters", after=after, limit=limit)
        return adapters

    def show(self, name: str) -> AdapterRecord:
        return self._adapter("show", name)

    def alias(self, name: str, split: Mapping[int, float] | int, alias: str | None = None) -> AdapterRecord:
        """Moves the alias, by default the adapter's own name. `split` is one version, or maps versions to weights."""
        weights = {split: 1.0} if isinstance(split, int) else split
        shares = [Share(version, weight) for version, weight in weights.items()]
        return self._adapter("alias", name, shares=shares, alias=alias)

    def unalias(self, name: str, alias: str) -> AdapterRecord:
        return self._adapter("unalias", name, alias=alias)

    def rollback(self, name: str, alias: str | None = None) -> AdapterRecord:
        return self._adapter("rollback", name, alias=alias)

    def pin(self, name: str, num_replicas: int = 1) -> AdapterRecord:
        return self._adapter("pin", name, num_replicas=num_replicas)

    def unpin(self, name: str) -> AdapterRecord:
        return self._adapter("unpin", name)

    def prefetch(self, name: str, num_replicas: int = 1) -> list[str]:
        replicas: list[str] = self._call("prefetch", name=name, num_replicas=num_replicas)
        return replicas

    def remove(self, name: str, wait_s: float = REMOVE_S) -> None:
        self._call("remove", name=name, wait_s=wait_s)

    def verify(self, name: str) -> list[VersionRecord]:
        versions: list[VersionRecord] = self._call("verify", name=name)
        return versions

    def _adapter(self, verb: str, name: str, **arguments: Any) -> AdapterRecord:
        adapter: AdapterRecord = self._call(verb, name=name, **arguments)
        return adapter

    def _call(self, verb: str, **arguments: Any) -> Any:
        try:
            ray.get(self._actor.address.remote(), timeout=ALIVE_S)
            return ray.get(self._actor.administer.remote(verb, arguments), timeout=CALL_S)
        except GetTimeoutError as error:
            raise DirectoryUnavailable(
                f"{verb}: the adapter directory does not answer. Look with show() before you repeat it."
            ) from error
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise Overloaded(
                f"{verb}: the adapter directory is being restarted. Look with show(), and repeat."
            ) from error


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the config to plain JSON data, since PEFT's to_dict() contains sets and enums. Raises TypeError, which
    names the value, for anything else that JSON cannot hold."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(config), default=_sorted))
    return plain


def _sorted(value: object) -> list[Any]:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"adapter_config.json cannot hold {value!r}.")
