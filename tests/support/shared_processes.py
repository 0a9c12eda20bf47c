"""Decides which of pytest's processes runs which test files, and in which order: see tests/README.md."""

from __future__ import annotations

import functools
import re

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Groups of tests that start a Ray, in the order in which they are begun: the longest first. Files whose servers belong
# to one test or one module are in own_server.
RAY_GROUPS = ("shared_server", "two_ranks", "own_server", "three_nodes", "one_replica", "tenants")
GROUP_MARK = r'^(?:pytestmark = |    |@)pytest\.mark\.xdist_group\("(\w+)"\)'


class FilesTogether(LoadScopeScheduling):
    """Keeps a file's tests in one process, as they share its fixtures; its `xdist_group` joins it with other files.

    xdist's own loadgroup writes the group into the test's id, which pytest 9.2 does not accept: each test would be
    scheduled separately, and every process would start every server.

    One process at a time runs tests that start a Ray, from the beginning on, while the others compute: servers wait a
    lot, and start slowly beside each other. Only when nothing else is left does a second process start servers too.
    """

    def _split_scope(self, nodeid: str) -> str:
        return self._group(nodeid.partition("::")[0])

    @functools.cached_property
    def _group(self) -> functools._lru_cache_wrapper[str]:
        @functools.cache
        def group(file: str) -> str:
            found = re.search(GROUP_MARK, (self.config.rootpath / file).read_text(), re.MULTILINE)
            return found[1] if found else file

        return group

    def _assign_work_unit(self, node: WorkerController) -> None:
        rays = [group for group in RAY_GROUPS if group in self.workqueue]
        others = (group for group in self.workqueue if group not in RAY_GROUPS)
        chosen = next(others, None) if not rays or self._another_has_a_ray(node) else rays[0]
        if chosen is not None:
            self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _another_has_a_ray(self, node: WorkerController) -> bool:
        assigned = (units for other, units in self.assigned_work.items() if other is not node)
        return any(not all(units[group].values()) for units in assigned for group in RAY_GROUPS if group in units)
