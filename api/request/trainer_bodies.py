"""Declares the bodies and queries of the routes that trainers call, by the names of vLLM and SGLang."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lorafleet.api.request.body_fields import Label, ModelName, Object, Path, RequestId, Seed
from lorafleet.api.request.bounds import AtMost, Within
from lorafleet.api.request.fields import Strict, Tolerant
from lorafleet.protocol import limits
from lorafleet.protocol.adapter_formats.safetensors_header import MAX_TENSORS
from lorafleet.protocol.adapter_formats.serialized_tensors import TensorFormat
from lorafleet.protocol.adapter_formats.tensor_bucket import MAX_DIMENSIONS
from lorafleet.protocol.engine_control import MemoryTag, PauseMode
from lorafleet.protocol.weights_group_place import GroupBackend

TensorName = Annotated[str, AtMost(limits.MAX_TENSOR_NAME_CHARS)]
TensorText = Annotated[str, AtMost(limits.MAX_TENSOR_TEXT_CHARS)]  # base64
GroupName = Annotated[str, AtMost(limits.MAX_GROUP_NAME_CHARS)]
TensorSize = Annotated[int, Within(limits.TENSOR_SIZE)]
Checksum = Annotated[str, AtMost(limits.CHECKSUM_CHARS)]


class PauseQuery(Strict):
    """The query of vLLM's /pause."""

    mode: PauseMode | None = None  # Default: abort, as in vLLM.
    wait_for_inflight_requests: bool = False  # vLLM's former name of mode=wait.
    clear_cache: bool = True  # Forgets cached prefixes too; has no effect with mode=keep.


class SleepQuery(Strict):
    """The query of vLLM's /sleep."""

    level: int = Field(
        1, ge=1, le=2
    )  # 1: the weights go to host memory. 2: they are read from the checkpoint at the wake-up.
    mode: PauseMode = "abort"  # The fate of requests in flight, as in PauseQuery.


class WakeUpQuery(Strict):
    """The query of vLLM's /wake_up."""

    tags: list[MemoryTag] | None = Field(None, min_length=1, max_length=8)  # The parts to wake up. Default: all.


class MemoryOccupationRequest(Strict):
    """The body of SGLang's /release_memory_occupation and /resume_memory_occupation."""

    # The parts of the memory. Default: all. cuda_graph has no effect beside the others, which graphs come and go with.
    tags: list[MemoryTag | Literal["cuda_graph"]] | None = Field(None, max_length=8)


class ServerInfoQuery(Strict):
    config_format: Literal["text", "json"] = "text"


class WorldSizeQuery(Strict):
    include_dp: bool = True  # Has no effect: replicas are not ranks of one group.


class PauseGenerationRequest(Strict):
    """The body of SGLang's /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGenerationRequest(Strict):
    """The body of SGLang's /continue_generation."""

    torch_empty_cache: bool | None = None  # Has no effect.


class AbortRequest(Strict):
    """The body of SGLang's /abort_request."""

    rid: RequestId | None = None
    abort_all: bool = False
    abort_message: Annotated[str, AtMost(limits.MAX_TEXT_CHARS)] | None = None  # Has no effect.


class FlushQuery(Strict):
    """The query of SGLang's /flush_cache and of vLLM's /reset_prefix_cache, whose parameters have no effect."""

    timeout: Annotated[float, Field(ge=0, le=3600)] | None = None
    reset_running_requests: Literal[False] | None = None
    reset_external: bool | None = None


class LoadAdapterRequest(Tolerant):
    lora_name: ModelName | None = None
    lora_path: Path | None = None
    load_inplace: bool | None = None


class UnloadAdapterRequest(Tolerant):
    lora_name: ModelName | None = None
    lora_int_id: Seed | None = None


class SGLangLoadRequest(Strict):
    """The body of SGLang's /load_lora_adapter, which prime-rl sends too."""

    lora_name: ModelName = Field(min_length=1)
    lora_path: Path = Field(min_length=1)
    load_inplace: bool = True  # Whether an adapter of this name gets a new version.
    pinned: Literal[False] | None = None  # /v1/adapters/NAME/pin pins adapters.


class SGLangUnloadRequest(Strict):
    """The body of SGLang's /unload_lora_adapter."""

    lora_name: ModelName = Field(min_length=1)


class TensorLoadRequest(Strict):
    """The body of SGLang's /load_lora_adapter_from_tensors, with safetensors in the place of pickles."""

    lora_name: ModelName = Field(min_length=1)
    config_dict: Object  # Content of adapter_config.json.
    serialized_named_tensors: Annotated[list[TensorText], AtMost(limits.MAX_TENSOR_COPIES)] = Field(min_length=1)
    load_format: TensorFormat | None = None  # Default: safetensors.
    expected_checksums: Annotated[dict[TensorName, Checksum], AtMost(MAX_TENSORS)] | None = (
        None  # SHA-256 of each tensor's bytes, in hexadecimal.
    )
    pinned: Literal[False] | None = None  # /v1/adapters/NAME/pin pins adapters.
    added_tokens_config: None = None  # An adapter with its own tokens is uploaded as files.
    lora_id: None = None  # Adapters have names here.


class JoinGroupRequest(Strict):
    """The body of SGLang's /init_weights_update_group."""

    group_name: GroupName = Field("weight_update_group", min_length=1)
    master_address: Annotated[str, AtMost(limits.MAX_HOST_CHARS)] = Field(min_length=1)  # Host of rank 0.
    master_port: Annotated[int, Within(limits.PORT)]
    rank_offset: Annotated[int, Within(limits.GROUP_RANK)]  # The server's rank.
    world_size: Annotated[int, Within(limits.GROUP_SIZE)]
    backend: GroupBackend = "nccl"
    timeout_s: Annotated[float, Within(limits.RECEIVE_S)] = 60.0  # Time in which all members must have met.


class LeaveGroupRequest(Strict):
    """The body of SGLang's /destroy_weights_update_group."""

    group_name: GroupName = Field("weight_update_group", min_length=1)


class DistributedLoadRequest(Strict):
    """The body of SGLang's /load_lora_adapter_from_distributed. The tensors are broadcast in the order of the lists."""

    lora_name: ModelName = Field(min_length=1)
    config_dict: Object  # Content of adapter_config.json.
    names: Annotated[list[TensorName], AtMost(MAX_TENSORS)] = Field(min_length=1)
    dtypes: Annotated[list[Annotated[str, AtMost(limits.MAX_DTYPE_CHARS)]], AtMost(MAX_TENSORS)]
    shapes: Annotated[list[Annotated[list[TensorSize], AtMost(MAX_DIMENSIONS)]], AtMost(MAX_TENSORS)]
    group_name: GroupName = Field("weight_update_group", min_length=1)
    upsert: bool = True  # Whether an adapter of this name gets a new version.
    pinned: Literal[False] | None = None  # /v1/adapters/NAME/pin pins adapters.
    added_tokens_config: None = None  # An adapter with its own tokens is uploaded as files.
    lora_id: None = None  # Adapters have names here.


class FinishSessionQuery(Strict):
    """The query of the route by which SkyRL tells its router that a session has ended."""

    session_id: Label
