"""Builds the speculation of an engine from its options, or refuses a model for which drafts could change answers."""

from __future__ import annotations

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.served_config import ServedConfig
from lorafleet.workers.kv_cache_sizing import draft_states_for
from lorafleet.workers.schedule.step_budget import StepBudget
from lorafleet.workers.speculation.ahead_drafts import AheadDrafter, AheadDrafts
from lorafleet.workers.speculation.awaited_drafts import AwaitingDrafter
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from lorafleet.workers.speculation.ngram_drafter import NgramDrafter
from lorafleet.workers.speculation.speculation import Speculation


def start_speculation(
    config: EngineConfig,
    model: ServedConfig,
    budget: StepBudget,
    drafter: ModelDrafter | None = None,
) -> Speculation | None:
    """Returns None if nothing is drafted. Raises ConfigError if the model cannot go back behind wrong drafts.

    Args:
        drafter: The drafter with a model, if a model drafts.
    """
    options = config.speculative_config
    if options is None:
        return None
    if model.rope.depends_on_length:
        raise ConfigError(
            f"speculative_config: {model.architecture} rotates all keys anew when a sequence gets longer than a limit, "
            "which drafts could exceed. Leave out speculative_config.",
            "speculative_config",
        )
    most_drafts = draft_states_for(config, model) if model.states else None
    ahead: AheadDrafter | None = AwaitingDrafter(NgramDrafter(options)) if options.method == "ngram" else drafter
    return Speculation(
        ahead,
        budget,
        options.num_speculative_tokens,
        config.most_sampled,
        most_drafts=most_drafts,
        is_certain=drafter is not None,
        ahead=None if ahead is None else AheadDrafts(ahead),
    )
