"""Writes prometheus.yml for one lorafleet. It has one target, since whichever replica answers gives the metrics of
all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from lorafleet.cluster.monitoring.shipped_files import RULES_FILE
from lorafleet.protocol.errors import ConfigError

JOB_NAME = "lorafleet"
METRICS_PATH = "/metrics"


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """The server that Prometheus scrapes."""

    url: str = "http://127.0.0.1:8000"  # The address to which clients send their requests.
    # Has a key of the metrics scope, if keys are configured. Prometheus reads it again at each scrape.
    bearer_token_file: Path | None = None
    ca_file: Path | None = None  # For an https server whose certificate no system CA signed.
    scrape_interval_s: int = 15

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url!r} is not a server's address; give one such as http://127.0.0.1:8000.")
        if parts.path not in ("", "/"):
            raise ConfigError(f"{self.url!r} has a path; give only the server's address, without {parts.path!r}.")
        for path in filter(None, (self.bearer_token_file, self.ca_file)):
            if not path.is_file():
                raise ConfigError(f"there is no file {path}. Check the path.")

    @property
    def address(self) -> str:
        """The host and port in the form that Prometheus needs."""
        parts = urlsplit(self.url)
        return f"{parts.netloc}" if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"

    @property
    def metrics_url(self) -> str:
        return self.url.rstrip("/") + METRICS_PATH


def to_yaml(target: ScrapeTarget, rules: str = RULES_FILE) -> str:
    """Returns the text of prometheus.yml. `rules` is the path of the rules file, absolute or relative to this one."""
    interval = f"{target.scrape_interval_s}s"
    job: dict[str, Any] = {
        "job_name": JOB_NAME,
        "scrape_timeout": f"{min(10, target.scrape_interval_s)}s",
        "metrics_path": METRICS_PATH,
        "scheme": urlsplit(target.url).scheme,
        "static_configs": [{"targets": [target.address]}],
    }
    if target.bearer_token_file is not None:
        job["authorization"] = {"type": "Bearer", "credentials_file": str(target.bearer_token_file.absolute())}
    if target.ca_file is not None:
        job["tls_config"] = {"ca_file": str(target.ca_file.absolute())}
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [rules],
        "scrape_configs": [job],
    }
    text: str = yaml.safe_dump(config, sort_keys=False)
    return (
        "# One target for the whole cluster: the replica that answers returns the metrics of all, each with its\n"
        "# `replica` label. Written by `lorafleet metrics config`. The target is the address that clients use.\n" + text
    )
