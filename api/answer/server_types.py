"""Declares the answers about models and the server, and those of the trainers' routes."""

from __future__ import annotations

from typing import (
    Any,
    Literal,
    NotRequired,  # pydantic requires this one before Python 3.12.
)

from typing_extensions import TypedDict

from lorafleet.api.answer.answer_types import exactly


@exactly
class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    left_out: NotRequired[list[str]]  # An adapter's parts for pictures or sound, which are not served.


@exactly
class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


@exactly
class ServerVersion(TypedDict):
    version: str


@exactly
class ModelInfo(TypedDict):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: Literal[True]
    preferred_sampling_params: None
    weight_version: str
    has_image_understanding: Literal[False]
    has_audio_understanding: Literal[False]


@exactly
class ServerInfo(TypedDict):
    vllm_config: dict[str, Any] | str


@exactly
class WorldSize(TypedDict):
    world_size: int


@exactly
class Status(TypedDict):
    status: str


@exactly
class Awake(Status):
    base_changed: bool  # Whether the checkpoint had other weights than before the sleep.
    base_digest: str  # Digest of the weights that answer now.


@exactly
class StatusMessage(Status):
    message: str


@exactly
class Paused(TypedDict):
    is_paused: bool


@exactly
class Sleeping(TypedDict):
    is_sleeping: bool


@exactly
class GroupStatus(TypedDict):
    success: Literal[True]
    message: str


@exactly
class LoadedAdapters(TypedDict):
    success: Literal[True]
    error_message: str
    loaded_adapters: dict[str, str]  # Names and places of the adapters that the call has loaded.
