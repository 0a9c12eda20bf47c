"""Lets the pages of allowed sites read answers in a browser (CORS). The sites may change while the server runs."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send


class CrossOrigin:
    """The middleware that answers browsers by the sites which are allowed now.

    Args:
        allowed: Returns the origins of these sites; "*" stands for all.
    """

    def __init__(self, app: ASGIApp, allowed: Callable[[], tuple[str, ...]]) -> None:
        self._app = app
        self._allowed = allowed
        self._known: tuple[str, ...] = ()
        self._layer = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        allowed = self._allowed()
        if allowed != self._known:
            self._known, self._layer = allowed, self._layer_for(allowed)
        await self._layer(scope, receive, send)

    def _layer_for(self, allowed: tuple[str, ...]) -> ASGIApp:
        if not allowed:
            return self._app
        return CORSMiddleware(self._app, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"])
