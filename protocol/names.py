"""The rules for adapter names from every origin: a request, the command line, a catalogue, a folder.

A name consists of segments separated by "/", as in "org/adapter". Each segment is made of ASCII letters, digits and
"._-@", and begins with a letter, a digit or "_". So a name can never leave a folder, be hidden, be an option of a
command line, or look like another name. ":" is reserved for "base:adapter", "+" for mixing adapters, "=" and "," for
lists on the command line.

An adapter that belongs to a tenant has the prefix "~tenant/" wherever the names of all tenants meet: in the
catalogue, in logs and metrics. No client can request a name with this prefix: each client uses the bare names of its
own adapters.

The prefix has the tenant's id, not its name, because the operator may give a name to another tenant later. The id of
the first holder of a name is the name itself, and that of the second is "name@2". No name has an "@", so an id is never
given again.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from lorafleet.protocol.errors import InvalidAdapterName
from lorafleet.protocol.strict_json import shown

MAX_NAME_CHARS = 256
OWNED = "~"  # Sorts after every name without a tenant.
PAST_ALL = "\x7f"  # Sorts after every full name.

MAX_HOLDER = 10**6  # Largest number of a holder of a tenant's name.

_TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_TENANT_ID = re.compile(rf"{_TENANT.pattern}(?:@(?!1$)[1-9][0-9]{{0,6}})?")
_FULL = re.compile(rf"{OWNED}([a-z0-9][a-z0-9_-]{{0,63}}(?:@[0-9]{{1,7}})?)/([A-Za-z0-9_][A-Za-z0-9._@/-]*)")
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@-]*")


def check_adapter_name(name: str, base_names: Collection[str] = ()) -> None:
    """Raises InvalidAdapterName if the name is not allowed. `base_names` are the names under which the base model is
    served."""
    if not name:
        raise InvalidAdapterName("the adapter's name is empty.", "lora_name")
    if len(name) > MAX_NAME_CHARS:
        raise InvalidAdapterName(
            f"the adapter's name has {len(name)} characters; at most {MAX_NAME_CHARS} are allowed.", "lora_name"
        )
    if not all(_SEGMENT.fullmatch(segment) for segment in name.split("/")):
        raise InvalidAdapterName(f"the adapter's name {shown(name)} {_fault(name)}", "lora_name")
    if name in base_names:
        raise InvalidAdapterName(
            f"the adapter's name {shown(name)} is the base model's own. Choose another.", "lora_name"
        )


def check_full_name(name: str, base_names: Collection[str] = ()) -> None:
    """Checks the name of an adapter that may belong to a tenant. Raises InvalidAdapterName."""
    tenant = tenant_of(name)
    if tenant is not None:
        check_tenant_id(tenant)
    check_adapter_name(bare_name(name), base_names)


def check_tenant(tenant: str) -> None:
    if not _TENANT.fullmatch(tenant):
        raise InvalidAdapterName(
            f"the tenant's name {shown(tenant)} must have 1 to 64 lower-case letters, digits, '_' or '-', and must "
            "begin with a letter or a digit.",
            "tenant",
        )


def check_tenant_id(tenant: str) -> None:
    """Checks what tenant_id() makes. Raises InvalidAdapterName."""
    if not _TENANT_ID.fullmatch(tenant):
        raise InvalidAdapterName(
            f"the tenant {shown(tenant)} must be a tenant's name, or a name and the number of its holder such as "
            "'acme@2'.",
            "tenant",
        )


def tenant_id(name: str, holder: int) -> str:
    """Returns the identity of the tenant that is the holder number `holder`, from 1, of a tenant's name."""
    return name if holder == 1 else f"{name}@{holder}"


def full_name(tenant: str | None, name: str) -> str:
    return name if tenant is None else f"{OWNED}{tenant}/{name}"


def past_names_of(tenant: str) -> str:
    """Returns a text that sorts after all full names of the tenant, and before everything that follows them."""
    return f"{OWNED}{tenant}{chr(ord('/') + 1)}"


def tenant_of(full: str) -> str | None:
    return full[1:].partition("/")[0] if full.startswith(OWNED) else None


def bare_name(full: str) -> str:
    return full.partition("/")[2] if full.startswith(OWNED) else full


def in_the_words_of(tenant: str | None, text: str) -> str:
    """Rewrites the full names in a message for a caller of that tenant: its own adapters get their bare names, and
    those of other tenants are hidden."""
    return _FULL.sub(lambda found: found[2] if found[1] == tenant else "(not yours)", text)


def _fault(name: str) -> str:
    segments = name.split("/")
    if name.startswith("/"):
        return "is an absolute path; give the name of an adapter, without a leading '/'."
    if any(segment in ("", ".", "..") for segment in segments):
        return "has an empty, '.' or '..' path part."
    if any(ord(c) < 32 or ord(c) == 127 for c in name):
        return "has a control character."
    if any(segment.startswith(".") for segment in segments):
        return "is hidden (one of its parts begins with '.')."
    return "may have only ASCII letters, digits and '._-@', in parts that begin with a letter, a digit or '_'."
