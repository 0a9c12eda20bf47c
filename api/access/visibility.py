"""Shows the catalog to one caller: a tenant's own adapters first, then public ones, and nothing of other tenants.

Adapters of other tenants are never looked up, so that neither an answer nor its timing reveals them. The catalog has
full names (protocol/names.py), and clients use bare names. The operator sees all adapters by their full names.
"""

from __future__ import annotations

from typing import Protocol

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.work_threads import CHECKS, in_turn
from lorafleet.api.backend import AdapterCatalog, StorageLimits
from lorafleet.protocol.errors import Forbidden, ModelNotFound
from lorafleet.protocol.lora_request import LoRARequest, turn_group
from lorafleet.protocol.names import (
    OWNED,
    PAST_ALL,
    bare_name,
    check_adapter_name,
    full_name,
    past_names_of,
    tenant_of,
)


class Tenants(Protocol):
    def owner_of_name(self, name: str) -> str | None:
        """Returns the tenant that this public name is reserved for, or None if anyone may use it."""
        ...

    def kept_prefix(self, name: str) -> str:
        """Returns the reserved prefix of a public name, spelled as in the name, or "" if it has none."""
        ...

    def id_of_tenant(self, name: str) -> str:
        """Returns the id of the tenant that has this name now."""
        ...

    def place_of(self, tenant: str, source: str) -> str | None:
        """Returns the tenant's source that a folder or URI lies in: a folder's real path, or the beginning of a URI.

        Returns None if the server must not read it for this tenant. Blocks on the disk.
        """
        ...

    def storage_limits(self, tenant: str | None) -> StorageLimits:
        """Returns the limits for everything that the tenant pushes."""
        ...


class NoTenants:
    """The tenants of a server without keys: there are none."""

    def owner_of_name(self, _: str) -> None:
        return None

    def kept_prefix(self, _: str) -> str:
        return ""

    def id_of_tenant(self, name: str) -> str:
        return name

    def place_of(self, _: str, __: str) -> None:
        return None

    def storage_limits(self, _: str | None) -> StorageLimits:
        return StorageLimits()


class CallersCatalog:
    def __init__(self, catalog: AdapterCatalog, tenants: Tenants, caller: Caller) -> None:
        self._catalog = catalog
        self._tenants = tenants
        self._caller = caller

    def sees(self, full: str) -> bool:
        """Returns whether the caller may use the adapter with this full name."""
        tenant = tenant_of(full)
        if tenant is None:
            tenant = self._tenants.owner_of_name(full)
        return tenant is None or tenant == self._caller.tenant or self._caller.is_operator

    async def listed(self, after: str, limit: int) -> tuple[list[tuple[str, LoRARequest]], bool]:
        """Returns the first adapters after the name `after`, sorted by the caller's names, and whether there are more.

        If a tenant's own adapter and a public one have the same name, the result has the tenant's own.
        """
        if self._caller.is_operator:
            found = {lora.lora_name: lora for lora in await self._catalog.listed(after, PAST_ALL, limit + 1)}
        else:
            found = await self._public(after, limit + 1)
            if self._caller.tenant is not None:
                begin, end = full_name(self._caller.tenant, after), past_names_of(self._caller.tenant)
                own = await self._catalog.listed(begin, end, limit + 1)
                found |= {bare_name(lora.lora_name): lora for lora in own}
        page = sorted(found.items())
        return page[:limit], len(page) > limit

    async def _public(self, after: str, limit: int) -> dict[str, LoRARequest]:
        """Returns public adapters except names reserved for other tenants, which the catalog does not know."""
        found: dict[str, LoRARequest] = {}
        while len(found) < limit:
            page = await self._catalog.listed(after, OWNED, limit)
            found |= {lora.lora_name: lora for lora in page if self.sees(lora.lora_name)}
            if len(page) < limit:
                break
            after = self.past(page[-1].lora_name)
        return found

    def past(self, last: str) -> str:
        """Returns the name after which a list of public names continues, if it has reached `last`.

        All names that another tenant has under one prefix are skipped in one step.
        """
        return last if self.sees(last) else self._tenants.kept_prefix(last) + PAST_ALL

    async def known(self, name: str) -> LoRARequest | None:
        """Returns the adapter, or None if only a resolver might know the name."""
        own = await self._own(name)
        if own is not None or not self._may_ask_for(name):
            return own
        return await self._catalog.known(name)

    async def resolve(self, name: str, key: str | None = None) -> LoRARequest:
        if await self._own(name) is not None:
            return await self._catalog.resolve(full_name(self._caller.tenant, name), key)
        if not self._may_ask_for(name):
            raise ModelNotFound(f"The model `{name}` does not exist.", "model")
        return await self._catalog.resolve(name, key, turn_group(self._caller.tenant, None))

    async def add(self, name: str, path: str, *, load_inplace: bool) -> LoRARequest:
        within = await check_source(self._tenants, self._caller, path)
        limits = self._tenants.storage_limits(self._caller.tenant)
        return await self._catalog.add(
            self.to_change(name), path, load_inplace=load_inplace, limits=limits, within=within
        )

    async def remove(self, name: str) -> None:
        await self._catalog.remove(self.to_change(name))

    def to_change(self, name: str) -> str:
        """Returns the full name of an adapter to change; a tenant may change only its own.

        Raises InvalidAdapterName.
        """
        if self._caller.is_operator:
            return name
        check_adapter_name(name)
        return full_name(self._caller.tenant, name)

    async def _own(self, name: str) -> LoRARequest | None:
        if self._caller.tenant is None or name.startswith(OWNED):
            return None
        return await self._catalog.known(full_name(self._caller.tenant, name))

    def _may_ask_for(self, name: str) -> bool:
        if name.startswith(OWNED):
            return self._caller.is_operator
        return self.sees(name)


async def check_source(tenants: Tenants, caller: Caller, source: str) -> str | None:
    """Checks that the server may read this source for the caller, since a server can read more than a tenant may see.

    Returns the folder that a local source must lie in when it is read, because links may change until then. None
    allows any folder. Raises Forbidden.
    """
    if caller.tenant is None:
        return None
    place = await in_turn(CHECKS, tenants.place_of, caller.tenant, source)
    if place is None:
        raise Forbidden(
            f"Tenant {caller.tenant!r} may not let the server read {source!r}. Upload the adapter's files with "
            "`lorafleet adapters push NAME FOLDER`, or ask the operator to add this location to the tenant's "
            "`sources`."
        )
    return None if "://" in place else place
