"""Starts the publication of KV events, if the configuration has it."""

from __future__ import annotations

import logging

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.kv_events.block_events import BlockEvents
from lorafleet.workers.kv_events.event_publisher import EventPublisher
from lorafleet.workers.kv_events.event_sockets import EventSockets
from lorafleet.workers.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)


def start_events(config: EngineConfig, scheduler: Scheduler) -> None:
    """Publishes the events of the scheduler's prefix cache. Raises ConfigError if there can be none, or if no port is
    free. Call it when others have registered with the prefix cache."""
    if config.kv_events is None or not config.kv_events.is_on:
        return
    memory = scheduler.memory
    if memory.snapshots is not None or not scheduler.kv.enable_prefix_caching:
        raise ConfigError(
            "kv_events_config: the model has recurrent layers, so its cached blocks are of use only up to a snapshot "
            "of their states, and KV events do not say where those are. Leave out kv_events_config.",
            "kv_events_config",
        )
    sockets = EventSockets.bind(config.kv_events, config.most_replicas)
    memory.events = BlockEvents(scheduler.kv, lambda: scheduler.running, EventPublisher(config.kv_events, sockets))
    log.info("KV events are published on port %d", sockets.port)
