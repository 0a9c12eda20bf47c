"""Imports Ray's schemas before any other test module does."""

from tests.cluster.checking import ray_schemas  # noqa: F401
