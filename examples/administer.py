"""Administers an adapter from Python: pushes two versions, tries a canary, rolls back and removes it.

The server needs an admin key.

    export LORAFLEET_ADMIN_KEY=…        # The server's key.
    python examples/administer.py demo/adapters/shout demo/adapters/pirate
"""

import sys

from lorafleet import AdminClient
from lorafleet.client.client_errors import APIStatusError

first, second = sys.argv[1:]
with AdminClient() as client:  # It reads LORAFLEET_URL and LORAFLEET_ADMIN_KEY.
    client.push("canary", first)
    pushed = client.push("canary", second, activate=False, metadata={"why": "to be tried"})
    print("versions:", [version.number for version in pushed.versions])
    print("split:", client.alias("canary", {1: 0.9, 2: 0.1}).aliases["canary"].split)
    print("back:", client.rollback("canary").aliases["canary"].split)
    print("all:", [adapter.id for adapter in client.list()])
    client.remove("canary")
    try:
        client.show("canary")
    except APIStatusError as error:
        print("gone:", error.status_code, error.message)
