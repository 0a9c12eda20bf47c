"""Edits the configuration that Ray Serve has written for HAProxy. Serve's template has no setting for any of this.

- Unprotected pages listen on the loopback interface. The ingress listens where clients are, with TLS.
- Each client has bounds on time, headers and connections, so that it cannot take what others need.
- Without a router, HAProxy chooses a replica by itself. A request whose answer has not begun is sent to another
  replica once, if it is safe to repeat.
- If every replica is too busy to answer its health checks in time, or there is none, requests wait for one instead of
  being rejected (waiting_room.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lorafleet.api.answer.elsewhere import MEANT_HEADER, RETRY_HEADER, RETRY_STATUS
from lorafleet.cluster.proxy.haproxy_answers import HEADERS_TOO_LARGE, MAX_HEADER_BYTES
from lorafleet.cluster.proxy.waiting_room import WaitingRoom

EDITED = "# edited by lorafleet\n"
REPEATABLE_PATHS = (  # POST requests that change nothing, so that two replicas may try to answer one.
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/classify",
    "/pooling",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/generate",
    "/inference/v1/generate",
    "/v1/chat/completions/render",
    "/tokenize",
    "/detokenize",
)
HEADERS_S = 10  # Seconds for a client to send its request's headers.
BODY_S = 30  # Seconds for the beginning of its body, which the router sees and which can be sent again.
CLIENT_S = 60  # Seconds without progress while a client sends the rest of a body or reads an answer.
CONNECTIONS_PER_CLIENT = 1024  # HAProxy accepts 4096 in all.
WAIT_FOR_SILENT_S = 15  # While all replicas are silent, each gets requests until it has been silent this long.
STREAM_S = 86_400  # A HAProxy that was replaced by a reload has so long to finish its streams. Serve's is 120 s.
PATIENT = "-patient"  # Suffix of the name of the backend that is used then.


class NotServesTemplate(Exception):
    """Raised if a line to edit does not occur exactly once, since the result might leave something open."""


@dataclass(frozen=True, slots=True)
class Ingress:
    """The settings of the edited configuration. None keeps what Serve has written."""

    host: str | None = None
    socket: str | None = None  # Path of a further socket, without TLS.
    pem: str | None = None  # Path of certificate and key in one file.
    client_ca: str | None = None  # Path of the CAs; clients must show a certificate of one of them.
    keep_log: bool = False  # Otherwise requests are not logged, and no UDP socket is opened for logs.
    needs_key: bool = False  # Whether only clients that send a key have their bodies read.
    connections_per_client: int = CONNECTIONS_PER_CLIENT  # Open connections from one address.
    headers_s: int = HEADERS_S
    client_s: int = CLIENT_S
    body_s: int = BODY_S
    wait_for_silent_s: int = WAIT_FOR_SILENT_S
    waiting: WaitingRoom = field(default_factory=WaitingRoom)
    error_files: Mapping[int, str] = field(default_factory=dict)  # HAProxy's responses, by the status of its error.

    @property
    def _tls(self) -> str:
        if self.pem is None:
            return ""
        client = f" ca-file {self.client_ca} verify required" if self.client_ca is not None else ""
        return f" ssl crt {self.pem} ssl-min-ver TLSv1.2 alpn http/1.1{client}"

    def bind(self, host: str, port: str) -> str:
        chosen = self.host or host
        lines = [f"    bind {f'[{chosen}]' if ':' in chosen else chosen}:{port}{self._tls}"]
        if self.socket is not None:
            lines.append(f"    bind unix@{self.socket} mode 600")
        return "\n".join(lines)


def edit(config: str, ingress: Ingress) -> str:
    """Returns the edited configuration. Returns an edited one as it is. Raises NotServesTemplate."""
    if config.startswith(EDITED):
        return config
    config = _edit_listeners(config, ingress)
    config = _edit_clients(config, ingress)
    config = _edit_start(_edit_replicas(_edit_errors(config, ingress.error_files)))
    config = _add_patient_backends(config, ingress.wait_for_silent_s)
    return EDITED + ingress.waiting.add_to(config, twin=PATIENT, condition=" has_key" if ingress.needs_key else "")


def _edit_listeners(config: str, ingress: Ingress) -> str:
    config = _replace(
        config, r"^frontend prometheus\n    bind \S*:(\d+)$", r"frontend prometheus\n    bind 127.0.0.1:\1"
    )
    config = _replace(config, r"^listen stats\n  bind \S*:(\d+)$", r"listen stats\n  bind 127.0.0.1:\1")
    config = _replace(config, r"^(    stats socket \S+ mode) \d+ ", r"\1 600 ")
    if not ingress.keep_log:
        config = _replace(config, r"^    log \S+ local0 info\n", "")
    pattern = r"^frontend http_frontend\n    bind (\S+):(\d+)$"
    found = re.search(pattern, config, re.MULTILINE)
    bind = ingress.bind(found[1], found[2]) if found is not None else ""
    frontend = f"frontend http_frontend\n{bind}{_bounds_of_clients(ingress)}"
    return _replace(config, pattern, lambda _: frontend)


def _bounds_of_clients(ingress: Ingress) -> str:
    return f"""
    stick-table type ipv6 size 100k expire 10m store conn_cur
    tcp-request connection track-sc0 src
    tcp-request connection reject if {{ sc_conn_cur(0) gt {ingress.connections_per_client} }}
    acl large_headers req.hdrs,length gt {MAX_HEADER_BYTES}
    http-request return {HEADERS_TOO_LARGE.rule()} if large_headers
    acl repeatable method GET HEAD OPTIONS
    acl repeatable path {" ".join(REPEATABLE_PATHS)}
    acl has_key req.hdr(authorization) -m found
    acl has_key req.hdr(x-api-key) -m found
    http-request disable-l7-retry unless repeatable
    http-response set-status 503 if {{ status {RETRY_STATUS} }} {{ res.hdr({MEANT_HEADER}) 503 }}
    http-response set-status 429 if {{ status {RETRY_STATUS} }} {{ res.hdr({MEANT_HEADER}) 429 }}
    http-response del-header {MEANT_HEADER}"""


def _edit_clients(config: str, ingress: Ingress) -> str:
    config = _replace(
        config, r"^(    timeout) client \d+s$", rf"\1 client {ingress.client_s}s\n\1 http-request {ingress.headers_s}s"
    )
    config = _replace(config, r"^(    hard-stop-after) \d+s$", rf"\1 {STREAM_S}s")
    routed = " repeatable has_key !onward" if ingress.needs_key else " repeatable !onward"
    if not re.search(r"^    http-request lua\.", config, re.MULTILINE):  # There are no replicas yet.
        return config
    config = _replace(
        config, r"^(    http-request wait-for-body time) \d+s (if METH_POST .*)$", rf"\1 {ingress.body_s}s \2{routed}"
    )
    return _replace(config, r"^(    http-request lua\.\w+ if METH_POST .*)$", rf"\1{routed}")


def _edit_errors(config: str, error_files: Mapping[int, str]) -> str:
    serves_own = "|".join(map(str, error_files))
    config = re.sub(rf"^    errorfile (?:{serves_own}) .*\n", "", config, flags=re.MULTILINE)
    lines = "".join(f"\n    errorfile {status} {path}" for status, path in error_files.items())
    return _replace(config, r"^(defaults\n    mode http)$", rf"\1{lines}")


def _edit_replicas(config: str) -> str:
    config = _replace(
        config, r"^    retry-on .*$", f"    retry-on conn-failure empty-response {RETRY_STATUS}\n    retries 1"
    )
    # A replica that is silent for 2 s gets no new requests while another one answers: 0.5 s until the first check,
    # twice 0.6 s for its answer, and 0.1 s between the two checks.
    config = _replace(config, r"^(defaults\n    mode http)$", r"\1\n    timeout check 600ms")
    config = re.sub(
        r"^    default-server .*$",
        "    default-server inter 500ms fastinter 100ms downinter 250ms fall 2 rise 2 check",
        config,
        flags=re.MULTILINE,
    )
    # If a connection that was used before breaks, HAProxy closes the client's connection without an answer.
    config = re.sub(
        r"^(    # Enable HTTP connection reuse for better performance\n)    http-reuse always$",
        "    http-reuse never\n    option http-server-close",
        config,
        flags=re.MULTILINE,
    )
    # Serve's own proxy would let a request wait for a replica without a bound. HAProxy reports that there is none.
    config = re.sub(r"^    server .* backup\n", "", config, flags=re.MULTILINE)
    config = _replace(
        config,
        r"^(    # Static routing based on path prefixes .*)$",
        rf"    http-request del-header {RETRY_HEADER}\n"
        rf"    http-request set-header {RETRY_HEADER} %[uuid()] if repeatable\n\1",
    )
    # If the router has not chosen, HAProxy does. Serve's 503 and its route through its own proxy are removed.
    failed = r"\{ var\(txn\.ingress_request_router_failed\) -m (?:found|str \"unknown_replica_id\") \}"
    return re.sub(rf"^    (?:http-request return|use_backend|use-server) .*{failed}.*\n", "", config, flags=re.M)


def _edit_start(config: str) -> str:
    """Removes Serve's 404 while Serve has not named an application yet: it would say that there is none. HAProxy's
    own 503 is true."""
    if re.search(r"^    use_backend ", config, re.MULTILINE):
        return config
    return _replace(config, r"^(backend default_backend)\n    http-request return status 404 .*$", r"\1")


def _add_patient_backends(config: str, silent_s: int) -> str:
    """Adds a twin of each backend with health checks, for when no server of that backend is up: either all are so
    busy that they answer too late, or one rejects a check and the others are busy. In the twin, a server is down as
    soon as it rejects a check or a connection. If it does not answer at all, it is down only after silent_s seconds."""
    checked = re.compile(r"^backend (\S+)\n((?: .*\n)* +option httpchk .*\n(?: .*(?:\n|\Z))*)", re.MULTILINE)
    for backend in checked.finditer(config):
        name, body = backend[1], backend[2].rstrip("\n")
        patient = re.sub(
            r"^    default-server .*$",
            f"    timeout check {silent_s}s\n    default-server inter 800ms fastinter 100ms fall 1 rise 1 check",
            body,
            flags=re.MULTILINE,
        )
        use = f"    use_backend {name}{PATIENT} if is_{name} {{ nbsrv({name}) eq 0 }}"
        first = re.compile(rf"^    use_backend {name}(?:-via-ingress-request-router)? ", re.MULTILINE)
        config = first.sub(rf"{use}\n\g<0>", config, count=1)
        config = f"{config.rstrip()}\nbackend {name}{PATIENT}\n{patient}\n"
    return config


def _replace(config: str, pattern: str, by: str | Callable[[re.Match[str]], str]) -> str:
    config, count = re.subn(pattern, by, config, flags=re.MULTILINE)
    if count != 1:
        raise NotServesTemplate(f"{pattern!r} occurs in Serve's configuration of HAProxy {count} times, not once.")
    return config


def edit_lua(template: str, serves: str) -> str:
    """Returns our own Lua program with the tables of Serve's program. Raises NotServesTemplate."""
    for table in ("ROUTERS", "REPLICA_TARGETS"):
        found = re.findall(rf"^local {table} = (\{{.*?^\}})$", serves, re.MULTILINE | re.DOTALL)
        if len(found) != 1:
            raise NotServesTemplate(f"{table} occurs in Serve's program for HAProxy {len(found)} times, not once.")
        template = template.replace(f"@{table}@", found[0])
    return template
