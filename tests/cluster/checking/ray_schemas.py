"""Ray's schemas, imported once: their module uses what pydantic has deprecated."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve.schema  # noqa: F401
