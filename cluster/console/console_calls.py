"""The console's calls to the directory; see cluster/directory/directory_calls.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from lorafleet.cluster.console.view import AdapterView, DirectoryView, Viewer, ViewQuery

if TYPE_CHECKING:
    from lorafleet.cluster.console.directory_view import DirectoryWindow

Answer = TypeVar("Answer")


class ConsoleCall(msgspec.Struct, Generic[Answer], frozen=True):
    """A call that is made through Ray, and answered once the catalogue is loaded. The type in brackets is that of the
    answer."""

    async def answered_by(self, window: DirectoryWindow) -> Answer:
        raise NotImplementedError


class ViewCall(ConsoleCall[DirectoryView], frozen=True):
    """Returns a page of the console; see DirectoryWindow.view."""

    query: ViewQuery
    viewer: Viewer

    async def answered_by(self, window: DirectoryWindow) -> DirectoryView:
        return await window.view(self.query, self.viewer)


class ViewAdapterCall(ConsoleCall[AdapterView | None], frozen=True):
    """Returns one adapter; see DirectoryWindow.adapter."""

    name: str
    viewer: Viewer

    async def answered_by(self, window: DirectoryWindow) -> AdapterView | None:
        return window.adapter(self.name, self.viewer)
