"""Administration from Python, in any process of the Ray cluster, such as a trainer that pushes weights from memory.

from lorafleet.cluster.admin.admin_handle import get_directory
get_directory().push_tensors("sql", tensors, peft_config)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch import Tensor

from lorafleet.client.receiving import DownloadTarget
from lorafleet.cluster.admin.download_tar import changed_files
from lorafleet.cluster.admin.tensor_memory import copy_tensors
from lorafleet.cluster.catalogue.catalogue_files import stage
from lorafleet.cluster.directory.directory_actor import NAMESPACE
from lorafleet.protocol import admin_verbs as verbs
from lorafleet.protocol.admin_answers import Adapter, Downloaded, Version
from lorafleet.protocol.admin_verbs import REMOVE_S, PushTerms, Verb
from lorafleet.protocol.engine_control import (
    ALL_MEMORY,
    InFlight,
    MemoryTag,
    PauseMode,
    SleepEngine,
    SleepLevel,
    WakeEngine,
)
from lorafleet.protocol.errors import AdapterMissing, ConfigError, DirectoryUnavailable, InvalidRequest, Overloaded
from lorafleet.resolvers.source import is_uri

CALL_S = 600.0
ALIVE_S = 10.0  # Seconds in which the directory must answer a harmless call before the actual call is sent.

AnswerT = TypeVar("AnswerT")


class TermOptions(TypedDict, total=False):
    """The options of a push from Python: fields of PushTerms."""

    source: str
    replace: bool
    activate: bool
    num_replicas: int | None
    base_model_name: str | None
    metadata: dict[str, str]
    max_adapters: int | None
    max_bytes: int | None
    in_flight: InFlight


def get_directory(app_name: str = "lorafleet") -> DirectoryHandle:
    """Returns a handle to the directory of a running application. Raises ConfigError if there is none, or if the
    application serves more than one model."""
    prefix = f"directory:{app_name}:"
    named: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in named if actor["namespace"] == NAMESPACE]
    found = [name for name in names if name.startswith(prefix)]
    if len(found) != 1:
        there = sorted(name.split(":")[1] for name in names)
        raise ConfigError(
            f"app_name={app_name!r}: {len(found)} adapter directories of that name run in this Ray cluster "
            f"(applications: {', '.join(there) or 'none'}). Connect to the Ray cluster of the server, and name its app."
        )
    return DirectoryHandle(ray.get_actor(found[0], namespace=NAMESPACE))


class DirectoryHandle:
    """A handle to a running adapter directory. Every call blocks until it is done and durable, and raises a
    LorafleetError that says why it failed."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def push_tensors(
        self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], **options: Unpack[TermOptions]
    ) -> Adapter:
        """Pushes a new version from memory.

        Args:
            tensors: weights by PEFT's names, as get_peft_model_state_dict returns them.
            config: content of adapter_config.json, as LoraConfig.to_dict() returns it.
            options: fields of PushTerms (protocol/admin_verbs.py).
        """
        # PEFT's to_dict() contains sets and enums. Any other value that JSON cannot hold is a TypeError that names it.
        plain = json.dumps(dict(config), default=_sorted, sort_keys=True).encode()
        terms = _terms("memory", options)
        memory = copy_tensors(tensors, plain)
        try:
            try:
                return self._call(verbs.PushMemory(name, memory.seal(), terms))
            except AdapterMissing:  # The directory is on another node. Ray carries the bytes there.
                return self._call(verbs.PushBytes(name, plain, np.frombuffer(memory.weights, np.uint8), terms))
        finally:
            memory.close()

    def push_folder(self, name: str, path: str, **options: Unpack[TermOptions]) -> Adapter:
        """Pushes an adapter from a folder that the directory's process can read, normally on the head node."""
        return self._call(verbs.PushFolder(name, path, _terms(path, options)))

    def download(self, name: str, to: str, version: int | None = None, *, force: bool = False) -> Downloaded:
        """Copies an adapter's files to a folder that is absent or empty. This process must be able to read them, which
        is so if the catalogue is a folder that all nodes see; AdminClient downloads any adapter.

        Args:
            version: None for the one that the name stands for.
            force: Replaces the files of an adapter that is in the folder already.

        Raises FileExistsError, and AdapterChanged if the files are not those that were registered.
        """
        located = self._call(verbs.LocateAdapter(name, version))
        path, digest = located.lora.lora_path, located.lora.digest
        if is_uri(path):
            raise InvalidRequest(
                f"the files of adapter {name!r} are at {path}, which this process does not read. Use "
                "AdminClient.download, which gets them over HTTP."
            )
        target = DownloadTarget(name, to, force)
        with target.temporary_folder() as folder:
            found = stage(path, folder)
            if found != digest:
                raise changed_files(digest, found)
            return Downloaded(name, located.version, digest, target.take(folder), str(target.path))

    def list_adapters(self, after: str = "", limit: int = 100) -> list[Adapter]:
        return self._call(verbs.ListAdapters(after, limit)).data

    def show(self, name: str) -> Adapter:
        return self._call(verbs.ShowAdapter(name))

    def alias(self, name: str, split: Mapping[int, float] | int, alias: str | None = None) -> Adapter:
        """Moves the alias, by default the adapter's own name. `split` is one version, or maps versions to weights."""
        return self._call(verbs.MoveAlias.to(name, split, alias))

    def unalias(self, name: str, alias: str) -> Adapter:
        return self._call(verbs.RemoveAlias(name, alias))

    def rollback(self, name: str, alias: str | None = None) -> Adapter:
        return self._call(verbs.RollBackAlias(name, alias))

    def pin(self, name: str, num_replicas: int = 1) -> Adapter:
        return self._call(verbs.PinAdapter(name, num_replicas))

    def unpin(self, name: str) -> Adapter:
        return self._call(verbs.UnpinAdapter(name))

    def prefetch(self, name: str, num_replicas: int = 1) -> list[str]:
        return self._call(verbs.PrefetchAdapter(name, num_replicas)).replicas

    def remove(self, name: str, wait_s: float = REMOVE_S) -> None:
        self._call(verbs.RemoveAdapter(name, wait_s))

    def verify(self, name: str) -> list[Version]:
        verified = self._call(verbs.VerifyAdapter(name)).verified
        return [version for version in self.show(name).versions if version.number in verified]

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> list[str]:
        """Gives the GPU memory of all replicas back, as POST /sleep does, and returns the replicas."""
        return self._call(verbs.ControlEngines(SleepEngine(level, mode))).replicas

    def wake_up(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> list[str]:
        """Takes these parts of the GPU memory of all replicas again, and returns the replicas."""
        return self._call(verbs.ControlEngines(WakeEngine(tuple(tags)))).replicas

    def _call(self, verb: Verb[AnswerT]) -> AnswerT:
        name = type(verb).__name__
        try:
            ray.get(self._actor.address.remote(), timeout=ALIVE_S)
            answer: AnswerT = ray.get(self._actor.administer.remote(verb), timeout=CALL_S)
        except GetTimeoutError as error:
            raise DirectoryUnavailable(
                f"{name}: the adapter directory does not answer. Check with show() whether the change was made before "
                "you repeat it."
            ) from error
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise Overloaded(
                f"{name}: the adapter directory is being restarted. Check with show() whether the change was made, and "
                "repeat it if it was not."
            ) from error
        return answer


def _terms(source: str, options: TermOptions) -> PushTerms:
    options.setdefault("source", source)
    return PushTerms(**options)


def _sorted(value: object) -> list[Any]:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"adapter_config.json cannot hold {value!r}.")
