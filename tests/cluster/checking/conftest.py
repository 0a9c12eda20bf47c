"""Ray's schemas before anything else."""

from tests.cluster.checking import ray_schemas  # noqa: F401
