"""Defines the dashboard that shows how load and adapters are spread over the replicas."""

from __future__ import annotations

from lorafleet.cluster.monitoring.board_queries import JOB, one, part, rate, sum_of
from lorafleet.cluster.monitoring.panels import Dashboard, Panel, PanelRow, Query

CLUSTER = Dashboard(
    "lorafleet-cluster",
    "lorafleet · cluster",
    "How load and adapters are spread over the replicas: directory, placement, routing's outcome.",
    (
        PanelRow(
            "Replicas",
            (
                Panel(
                    "Replicas",
                    (
                        Query(f"count(vllm:num_requests_running{{{JOB}}})", "in the scrape"),
                        Query(f"lorafleet_directory_replicas{{{JOB}}}", "that call the directory"),
                        Query(f"sum(lorafleet_client_engine_alive{{{JOB}}})", "whose engine lives"),
                    ),
                ),
                one("Scrape complete", f"lorafleet_scrape_complete{{{JOB}}}", "{{instance}}"),
                one(
                    "Answer tokens by replica",
                    sum_of("replica", "vllm:generation_tokens_total"),
                    "{{replica}}",
                    "tokps",
                ),
                one(
                    "Sequences by replica",
                    f"lorafleet_client_sequences{{{JOB}}}",
                    "{{replica}}",
                    text="Not yet ended.",
                ),
                one(
                    "Busiest beside the mean",
                    f"max({sum_of('replica', 'vllm:generation_tokens_total')}) / "
                    f"avg({sum_of('replica', 'vllm:generation_tokens_total')})",
                    "answer tokens",
                    text="1: all replicas answer as much.",
                ),
                one(
                    "Messages to the engines",
                    sum_of("replica", "lorafleet_client_batches_total"),
                    "{{replica}}",
                    "ops",
                ),
            ),
        ),
        PanelRow(
            "Directory and placement",
            (
                Panel(
                    "Adapters",
                    (
                        Query(f"lorafleet_directory_adapters{{{JOB}}}", "in the catalogue"),
                        Query(f"lorafleet_directory_placed_adapters{{{JOB}}}", "placed"),
                        Query(f"lorafleet_directory_homes{{{JOB}}}", "homes"),
                    ),
                ),
                Panel(
                    "Placement",
                    (
                        Query(rate("lorafleet_directory_placements_total"), "first homes"),
                        Query(rate("lorafleet_directory_moves_total"), "moves"),
                        Query(rate("lorafleet_directory_rebalances_total"), "rounds that moved something"),
                        Query(rate("lorafleet_directory_reads_ahead_total"), "read ahead"),
                    ),
                    "ops",
                ),
                one("Bytes that move", rate("lorafleet_directory_moved_bytes_total"), unit="Bps"),
                one(
                    "Time of a round, mean",
                    f"{rate('lorafleet_directory_placement_round_seconds_total')} / "
                    f"{rate('lorafleet_directory_placement_rounds_total')}",
                    unit="s",
                ),
                one("Reports of replicas", rate("lorafleet_directory_reports_total"), unit="ops"),
                one(
                    "Sequences whose adapter had no slot",
                    part('tier!="gpu"', "lorafleet_adapter_hits_total"),
                    "of those with adapters",
                    "percentunit",
                    text="What routing and placement could not spare them.",
                ),
            ),
        ),
    ),
)
