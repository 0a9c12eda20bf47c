"""The verbs of adapter administration, each declared once: its message, the type of its answer, and its HTTP route.

A message is sent as it is. Its fields are the path, query or body of the HTTP call and the argument of the directory's
actor, and the server derives its route and its entry in /openapi.json from it. Administration (cluster/admin) says what
each verb does. A message holds the name that its sender uses: over HTTP a bare or full name, and inside the cluster
always the full name (names.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, TypeVar, get_args

import msgspec
from msgspec import Meta

from lorafleet.protocol import limits
from lorafleet.protocol.admin_answers import (
    Adapter,
    AdapterPage,
    Downloaded,
    Prefetched,
    PushedVersion,
    Removed,
    Verified,
)
from lorafleet.protocol.engine_control import EngineControl, InFlight
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.limits import Range
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest, SealedAdapter

RECEIVE_S = 60.0  # Seconds in which the broadcasts of a push must be done.
REMOVE_S = 60.0  # Seconds that a removal waits for in-flight requests before it continues without the caller.

AnswerT = TypeVar("AnswerT", covariant=True)

# The server checks these bounds when it parses a call (api/request/message_models.py).
Name = Annotated[str, Meta(max_length=limits.MAX_MODEL_CHARS)]
Place = Annotated[str, Meta(max_length=limits.MAX_PATH_CHARS)]
GroupName = Annotated[str, Meta(max_length=limits.MAX_GROUP_NAME_CHARS)]
DeviceName = Annotated[str, Meta(max_length=limits.MAX_DEVICE_CHARS)]
Replicas = Annotated[int, limits.REPLICAS]
Metadata = Annotated[
    dict[
        Annotated[str, Meta(max_length=limits.MAX_METADATA_KEY_CHARS)],
        Annotated[str, Meta(max_length=limits.MAX_METADATA_CHARS)],
    ],
    Meta(max_length=limits.MAX_METADATA),
]
VersionWeights = Annotated[
    dict[Annotated[str, Meta(max_length=10)], Annotated[float, limits.SPLIT_WEIGHT]], Meta(max_length=limits.MAX_SPLIT)
]

ADAPTERS = "/v1/adapters"
ADAPTER = f"{ADAPTERS}/{{name}}"
# Headers of a download.
DIGEST_HEADER = "x-lorafleet-digest"
VERSION_HEADER = "x-lorafleet-version"  # Absent if a resolver found the adapter, so that it has no versions.


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """The place of a verb in the HTTP API. `{name}` in the path stands for the field `name`; other fields are in the
    query of a GET or DELETE and in the JSON body of a POST."""

    method: str
    path: str
    summary: str  # For the OpenAPI document.
    schema: str = ""  # Name of the schema of the query or body there; "" if all fields are in the path.
    about: str | None = None  # Description of that schema.
    in_query: bool = False  # Whether a POST has its fields in the query, as routes of other servers have them.

    @property
    def in_path(self) -> tuple[str, ...]:
        return ("name",) if "{name}" in self.path else ()


class Verb(msgspec.Struct, Generic[AnswerT], frozen=True, omit_defaults=True):
    """A message to administration, which is answered by an AnswerT."""

    http: ClassVar[HttpRoute | None] = None  # None: the verb is for processes of the cluster only.
    quick: ClassVar[bool] = False  # Whether the answer comes at once and nothing has to be loaded, read or written.

    @classmethod
    def answer_type(cls) -> type[AnswerT]:
        [base] = [one for one in cls.__dict__["__orig_bases__"] if get_args(one)]
        [answer] = get_args(base)
        return answer  # type: ignore[no-any-return]  # The argument of Verb[...] in the class statement.

    def check(self) -> None:
        """Raises InvalidRequest if fields contradict each other."""


class AdapterVerb(Verb[AnswerT], frozen=True, omit_defaults=True):
    """A verb for one adapter."""

    name: Name


# -- over HTTP --------------------------------------------------------------------------------------------------------


class ListAdapters(Verb[AdapterPage], frozen=True, omit_defaults=True):
    """Returns a page of adapters, in the order of their names."""

    http = HttpRoute("GET", ADAPTERS, "A page of adapters, by name", "ListQuery")
    quick = True

    after: Name = ""
    limit: Annotated[int, Range(1, limits.MAX_ADAPTERS_LISTED)] = 100


class ListOwned(Verb[AdapterPage], frozen=True):
    """Returns a page of the adapters that a tenant owns. A tenant's ListAdapters becomes this."""

    quick = True

    after: str
    limit: int
    tenant: str


class ShowAdapter(AdapterVerb[Adapter], frozen=True, omit_defaults=True):
    http = HttpRoute("GET", ADAPTER, "One adapter")
    quick = True


class PushOptions(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The options of a push over HTTP."""

    activate: bool = True  # Directs the name's requests to this version.
    replicas: Replicas | None = 1  # Number of replicas that must load the version before the call returns; None: all.
    pin: Replicas | None = None  # Number of replicas to pin the adapter on; None changes no pins.
    base_model_name: Name | None = None
    # The tenant that will own the adapter. Only the operator may name another tenant than the caller's own.
    tenant: Annotated[str, Meta(max_length=limits.MAX_TENANT_CHARS)] | None = None
    metadata: Metadata = {}
    # Treatment of requests that the former version is answering, see protocol/engine_control.py. Other values than
    # finish require `activate`.
    in_flight: InFlight = "finish"


class PushAdapter(PushOptions, Verb[Adapter], frozen=True, omit_defaults=True):
    """Pushes an adapter from a folder or URI that the server reads."""

    http = HttpRoute("POST", ADAPTERS, "Push an adapter from a folder of the server or a URI", "PushRequest")

    name: Name
    source: Place


class UploadAdapter(AdapterVerb[Adapter], frozen=True, omit_defaults=True):
    """Pushes an adapter whose files are in the body, as a tar. The options are JSON text in the query."""

    http = HttpRoute("PUT", f"{ADAPTER}/files", "Push an adapter's files", "UploadQuery")

    source: Place = "upload"
    options: PushOptions = PushOptions()


class UploadTensors(AdapterVerb[PushedVersion], frozen=True, omit_defaults=True):
    """Pushes an adapter from memory. The body is described in adapter_formats/tensor_push.py, and the options are JSON
    text in the query."""

    http = HttpRoute("PUT", f"{ADAPTER}/tensors", "Push an adapter's tensors", "TensorsQuery")

    source: Place = "memory"
    options: PushOptions = PushOptions()
    # With one of these two, the body ends with its head, and the tensors come from elsewhere
    # (adapter_formats/announced_tensors.py).
    group: GroupName | None = None  # A process group that the replica has joined, whose rank 0 broadcasts the tensors.
    device: DeviceName | None = None  # UUID of a GPU of the replica's node, in whose memory they are.
    timeout_s: Annotated[float, limits.RECEIVE_S] = RECEIVE_S  # Time in which the broadcasts of a group must be done.


class MoveAlias(AdapterVerb[Adapter], frozen=True, omit_defaults=True):
    """Moves an alias to other versions of its adapter."""

    http = HttpRoute(
        "POST",
        f"{ADAPTER}/alias",
        "Move an alias",
        "AliasRequest",
        "A move of an alias to either one version or a split; exactly one of the two must be given.",
    )

    alias: Name | None = None  # None: the adapter's own name.
    version: Annotated[int, limits.VERSION] | None = None
    split: VersionWeights | None = None  # Version -> weight.

    @classmethod
    def to(cls, name: str, target: int | Mapping[int, float], alias: str | None) -> MoveAlias:
        if isinstance(target, int):
            return cls(name, alias, version=target)
        return cls(name, alias, split={str(version): weight for version, weight in target.items()})

    def weights(self) -> dict[int, float]:
        """Returns the weight of each version. Raises InvalidRequest."""
        if (self.version is None) == (self.split is None):
            raise InvalidRequest("Give either `version`, or `split` with a weight for each version.", "version")
        if self.version is not None:
            return {self.version: 1.0}
        for number in self.split or {}:
            if not number.isdecimal():
                raise InvalidRequest(f"`split` has the version {number!r}; versions are numbers, such as 1.", "split")
            if number != str(int(number)):
                raise InvalidRequest(
                    f"`split` has the version {number!r}; write it as {str(int(number))!r}, so that it is there once.",
                    "split",
                )
        return {int(number): weight for number, weight in (self.split or {}).items()}

    def check(self) -> None:
        self.weights()


class RemoveAlias(AdapterVerb[Adapter], frozen=True, omit_defaults=True):
    http = HttpRoute("DELETE", ADAPTER, "Remove an adapter, or one alias", "RemoveQuery")

    alias: Name


class RollBackAlias(AdapterVerb[Adapter], frozen=True, omit_defaults=True):
    """Moves an alias back to what it stood for before its last move."""

    http = HttpRoute("POST", f"{ADAPTER}/rollback", "Move an alias back", "RollbackRequest")

    alias: Name | None = None  # None: the adapter's own name.


class PinAdapter(AdapterVerb[Adapter], frozen=True, omit_defaults=True):
    """Pins the adapter in slots of some replicas."""

    http = HttpRoute("POST", f"{ADAPTER}/pin", "Keep an adapter in slots", "ReplicasRequest")

    replicas: Replicas = 1


class UnpinAdapter(AdapterVerb[Adapter], frozen=True, omit_defaults=True):
    http = HttpRoute("POST", f"{ADAPTER}/unpin", "Let an adapter's slots go", "EmptyRequest")


class DownloadAdapter(AdapterVerb[Downloaded], frozen=True, omit_defaults=True):
    """Sends the files of one version as an uncompressed tar."""

    http = HttpRoute("POST", f"{ADAPTER}/download", "Download an adapter's files", "DownloadRequest")

    version: Annotated[int, limits.VERSION] | None = None  # None: the version that the name stands for.


class PrefetchAdapter(AdapterVerb[Prefetched], frozen=True, omit_defaults=True):
    """Loads the adapter on some replicas."""

    http = HttpRoute("POST", f"{ADAPTER}/prefetch", "Load an adapter before it is asked for", "ReplicasRequest")

    replicas: Replicas = 1


class VerifyAdapter(AdapterVerb[Verified], frozen=True, omit_defaults=True):
    """Reads the files of every version again and compares their digests."""

    http = HttpRoute("POST", f"{ADAPTER}/verify", "Compare an adapter's files with their digests", "EmptyRequest")


class RemoveAdapter(AdapterVerb[Removed], frozen=True, omit_defaults=True):
    """Removes the adapter with all its versions and aliases."""

    http = HttpRoute("DELETE", ADAPTER, "Remove an adapter, or one alias", "RemoveQuery")

    wait_s: Annotated[float, limits.REMOVE_WAIT_S] = REMOVE_S


# -- inside the cluster -----------------------------------------------------------------------------------------------


class PushTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    """The way in which a pushed version is to be served, and what the push may take."""

    source: str  # Origin of the version, for people.
    replace: bool = True  # Gives an existing name a new version; if False, an existing name raises AdapterExists.
    activate: bool = True  # Moves the name's alias to the new version.
    num_replicas: int | None = 1  # Number of replicas that must load the version before the call returns; None: all.
    base_model_name: str | None = None
    metadata: dict[str, str] = {}
    max_adapters: int | None = None  # Number of adapters that the owning tenant may have; None: no limit.
    max_bytes: int | None = None  # Bytes of adapters that the owning tenant may have; None: no limit.
    in_flight: InFlight = "finish"  # Treatment of requests that the former version is answering.


class RegisterAdapter(AdapterVerb[Adapter], frozen=True):
    """Registers an adapter whose files are already in the store."""

    digest: str  # Digest of the files in the store.
    terms: PushTerms


class PushMemory(AdapterVerb[Adapter], frozen=True):
    """Pushes an adapter from sealed memory, if that is on the directory's node."""

    memory: SealedAdapter
    terms: PushTerms


class PushBytes(AdapterVerb[Adapter], frozen=True):
    """Pushes an adapter from the memory of another node."""

    config: bytes  # Content of adapter_config.json.
    weights: Any  # Content of a safetensors file: a numpy array of uint8, which Ray passes without a copy of its own.
    terms: PushTerms


class PushFolder(AdapterVerb[Adapter], frozen=True):
    """Pushes an adapter from a folder that the directory's process can read."""

    path: str
    terms: PushTerms


class PreloadAdapter(AdapterVerb[None], frozen=True):
    """Loads content in sealed memory on the replicas of its node, before it is registered. It is an attempt: replicas
    that do not have it afterwards load it when it is registered."""

    digest: str
    memory: SealedAdapter
    terms: PushTerms


class Located(msgspec.Struct, frozen=True):
    """One version of an adapter, with the place of its files."""

    lora: LoRARequest
    version: int | None = None  # None: a resolver found the adapter, so it has no versions.


class LocateAdapter(AdapterVerb[Located], frozen=True):
    """Finds the files of one version, by the adapter's name or by an alias."""

    quick = True

    version: int | None = None  # None: the version that the name stands for.


class Seeded(msgspec.Struct, frozen=True):
    lora: (
        LoRARequest | None
    )  # The adapter that the name stands for; None if the name was removed after the application had started.


class SeedAdapter(Verb[Seeded], frozen=True):
    """Registers an adapter of lora_modules that a replica has read from its own path."""

    lora: LoRARequest
    info: AdapterInfo
    application: str  # Identifies the application, so that restarts of its replicas leave later changes alone.


class Unlisted(msgspec.Struct, frozen=True):
    names: list[str]  # The adapters that were removed.


class UnlistAdapters(Verb[Unlisted], frozen=True):
    """Removes the adapters that an application has listed in lora_modules before, and lists no more."""

    application: str  # As in SeedAdapter.
    listed: tuple[str, ...]  # The adapters that it lists now.


class TakeLease(Verb[bool], frozen=True):
    """Takes or renews a replica's lease for a task, and returns whether the replica holds it."""

    quick = True

    task: str
    replica_id: str
    for_s: float


class Controlled(msgspec.Struct, frozen=True):
    replicas: list[str]  # The replicas that have carried out the order.


class ControlEngines(Verb[Controlled], frozen=True):
    """Has all replicas carry out an order that concerns all their requests."""

    control: EngineControl


# Verbs that a replica passes on to the directory as they come over HTTP. It handles the files of pushes and downloads
# itself.
PassedOnVerb = (
    ListAdapters
    | ShowAdapter
    | MoveAlias
    | RemoveAlias
    | RollBackAlias
    | PinAdapter
    | UnpinAdapter
    | PrefetchAdapter
    | VerifyAdapter
    | RemoveAdapter
)
HttpVerb = PassedOnVerb | PushAdapter | UploadAdapter | UploadTensors | DownloadAdapter
DirectoryVerb = (
    PassedOnVerb
    | ListOwned
    | LocateAdapter
    | RegisterAdapter
    | PreloadAdapter
    | PushMemory
    | PushBytes
    | PushFolder
    | SeedAdapter
    | UnlistAdapters
    | TakeLease
    | ControlEngines
)


def route_of(verb: Verb[object] | type[Verb[object]]) -> HttpRoute:
    assert verb.http is not None, f"{verb} has no route"
    return verb.http
