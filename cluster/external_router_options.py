"""Declares the options for routers outside of the cluster, which choose among servers by adapters and prefixes."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from lorafleet.cluster.json_text import parse_json
from lorafleet.protocol.kv_events_config import KVEventsConfig
from lorafleet.protocol.options import Change


def _parse(value: Any) -> Any:
    return parse_json(value) if isinstance(value, str) else value


class ExternalRouterOptions(BaseModel, frozen=True):
    """The part of AppArgs (cluster/config.py) that concerns such routers (docs/kv-events.md)."""

    metrics_lora_info: bool = Field(
        False,
        description="Show in /metrics which adapters each replica holds, in vLLM's series for routers such as the "
        "Gateway API inference extension and llm-d.",
    )
    kv_events_config: Annotated[KVEventsConfig | None, BeforeValidator(_parse)] = Field(
        None,
        description="Publish which prefixes each replica's KV cache holds, for routers that read vLLM's KV events. "
        'JSON as in vLLM: {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}, and publisher, '
        "replay_endpoint, buffer_steps, hwm, max_queue_size, topic. Default: no events.",
    )
    insecure_kv_events: Annotated[bool, Change.BY_SERVE] = Field(
        False,
        description="Publish KV events even on an address that is open to the network. They have the tokens of all "
        "prompts and answers, and whoever reaches the port receives them.",
    )

    @model_validator(mode="after")
    def _keeps_tokens_private(self) -> Self:
        events = self.kv_events_config
        if events is None or not events.is_on or self.insecure_kv_events:
            return self
        for endpoint in events.listening:
            if endpoint.is_exposed:
                raise ValueError(
                    f"kv_events_config listens on all addresses at port {endpoint.port}. KV events have the tokens of "
                    "all prompts and answers, and ZeroMQ asks subscribers for no key: anyone who can reach the port "
                    f"can read them. Use tcp://127.0.0.1:{endpoint.port}. If only the router can reach the port, set "
                    "insecure_kv_events."
                )
        return self
