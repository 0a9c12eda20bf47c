"""A machine's clock may jump. So what decides by it is listed here, and everything else goes by a monotonic clock."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("api", "client", "cluster", "kernels", "offline", "protocol", "resolvers", "sandbox", "workers")
READS = re.compile(r"\btime\.time\b|\bdatetime\.(?:now|today|utcnow)\b")

SHOWN = {  # Times that are shown or recorded. Nothing is decided by them.
    "api/access/audit.py",
    "api/answer/envelope.py",
    "api/answer/pooled_work.py",
    "api/front_config.py",
    "api/routes/responses_api.py",
    "api/telemetry/recent.py",
    "api/telemetry/sequence_observer.py",
    "api/telemetry/traffic_history.py",
    "api/text/template_program.py",
    "cluster/admin/listed_adapters.py",
    "cluster/admin/registration.py",
    "cluster/cli/answer_tables.py",
    "cluster/cli/cli_keys.py",
    "cluster/cli/cli_usage.py",
    "cluster/console/state_api.py",
    "cluster/directory/replica_table.py",
    "cluster/serve/residency_metrics.py",
    "workers/kv_events/event_publisher.py",
    "workers/step/late_work.py",
}
DECIDED = {
    "api/access/gate.py": "keys expire at a time of the calendar",
    "cluster/catalogue/folder_store.py": "at start alone: what a crash left behind long ago",
    "cluster/catalogue/steady_clock.py": "believes a jump only after it has lasted",
    "cluster/quality/monitor.py": "probes run earlier or later",
    "protocol/adapter_formats/adapter_files.py": "waits for one tick of the file system's clock, at most",
}


def test_only_these_modules_read_the_clock_that_may_jump() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if READS.search(path.read_text())
    }
    assert found - SHOWN - DECIDED.keys() == set(), "use time.monotonic, or say here what a jump would do"
