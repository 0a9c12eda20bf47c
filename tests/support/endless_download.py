"""A download from a device whose step never ends."""

from __future__ import annotations

from lorafleet.workers.device.host_copy import Download


class EndlessDownload(Download):
    """Waits as it does on a GPU whose step never ends, for as long as its check allows."""

    def wait(self) -> None:
        assert self._check is not None
        self._check()
