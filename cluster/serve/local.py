"""Implements the command `lorafleet serve`: it runs the application on a private Ray, and leaves no process behind."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import httpx
from rich.console import Console

from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.patience import patient_start, wait_for_proxies_patiently
from lorafleet.cluster.proxy.exposure import check_exposure
from lorafleet.cluster.proxy.tls import TLSFiles
from lorafleet.cluster.serve import serve_environment
from lorafleet.cluster.serve.child_processes import adopt_orphans, end_descendants, reap_adopted
from lorafleet.cluster.serve.resources import check_gpus, replica_bundles
from lorafleet.cluster.serve.start_progress import StartProgress
from lorafleet.protocol.errors import ConfigError, LorafleetError
from lorafleet.resolvers.private_files import keep_private

APP_NAME, REPLICAS = "lorafleet", "EngineReplica"
OBJECT_STORE_BYTES = 128 << 20  # No large object passes through the store.
UNAUTHORIZED = 401
HTTP_S = 300.0  # Seconds that HTTP may take to answer once the replicas are up.
POLL_S = 0.2
RAY_IS_LATE = "timed out during startup"
RAY_STARTS_S = (60, 120, 240)  # Seconds that Ray's raylet has to register, in each attempt.
OTHER_PROCESSES = 6  # Ray's and Serve's Python processes besides those of the replicas, approximately.
AGAIN_S = 1.0  # Seconds after which ServerStopped is raised once more.

console = Console(highlight=False, soft_wrap=True)


class ServerStopped(BaseException):
    """Raised when SIGINT or SIGTERM arrives."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The address and TLS settings that clients connect to."""

    host: str
    port: int
    tls: TLSFiles | None
    direct_streaming: bool  # Through HAProxy; otherwise through Serve's own proxy.

    def __post_init__(self) -> None:
        if self.tls is not None and self.tls.ca_certs is not None and not self.direct_streaming:
            raise ConfigError(
                f"ssl_ca_certs={self.tls.ca_certs!r}: Serve's own proxy cannot require certificates of clients. Leave "
                "out ssl_ca_certs, or leave out --no-direct-streaming."
            )

    @property
    def url(self) -> str:
        """The URL for a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http{'' if self.tls is None else 's'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def http_options(self) -> dict[str, Any]:
        """The http_options for Serve. With direct streaming only HAProxy listens on `host`: see open_ingress()."""
        if self.direct_streaming:
            return {"host": "127.0.0.1", "port": self.port}
        files = {} if self.tls is None else {"ssl_certfile": self.tls.cert, "ssl_keyfile": self.tls.key}
        return {"host": self.host, "port": self.port, **files}


def serve_locally(args: AppArgs, listener: Listener) -> NoReturn:
    """Serves until SIGINT or SIGTERM arrives, then ends the process. Raises ConfigError before anything is started
    if the address cannot be used. Later errors are printed, and the exit status is 1.

    Restarts as the same process when Ray's raylet or GCS has ended, since all serving processes end with them.
    """
    _check_address(listener)
    keep_private()  # Ray and all its processes inherit it.
    adopt_orphans()
    run_dir = tempfile.mkdtemp(prefix="lf-", dir="/tmp")
    environment = dict(os.environ)
    status = 0
    try:
        _catch_signals()
        os.environ["LORAFLEET_RUN_DIR"] = run_dir  # The replicas create their sockets there.
        serve_environment.prepare(run_dir, direct_streaming=listener.direct_streaming)
        check_exposure(listener.host, args)
        if listener.direct_streaming:
            needs_key = args.api_keys is not None
            serve_environment.open_ingress(run_dir, listener.host, listener.tls, needs_key=needs_key)
        _start(args, listener, run_dir)
        _announce(args, listener)
        _serve_until_stopped(args, listener, run_dir)
        _begin_anew(environment, run_dir)
    except ServerStopped:
        console.print("stopping")
    except LorafleetError as error:
        console.print(f"lorafleet: {error.message}", markup=False, style="red")
        status = 1
    except Exception:  # _exit would end the process before the error is printed.
        console.print_exception()
        status = 1
    finally:
        _ignore_signals()
        _exit(status, run_dir)


def _serve_until_stopped(args: AppArgs, listener: Listener, run_dir: str) -> None:
    """Returns when Ray has ended. When a signal arrives, raises ServerStopped once the requests in progress have been
    answered, or args.drain_timeout seconds later, or at the next signal."""
    try:
        reap_adopted(until=_ray_has_ended)
        return
    except ServerStopped:
        _ignore_signals()
    _catch_signals()
    asyncio.run(_finish(args, listener, run_dir))
    # Ray's core would write that the calls to Serve which are still open have failed.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    raise ServerStopped


async def _finish(args: AppArgs, listener: Listener, run_dir: str) -> None:
    from ray import serve

    from lorafleet.cluster.ending.closing import close_ingress
    from lorafleet.cluster.ending.finishing import ask_replicas_to_finish, finish_requests

    handle = serve.get_deployment_handle(REPLICAS, APP_NAME)
    left = await finish_requests(
        lambda: close_ingress(run_dir) if listener.direct_streaming else 0,
        lambda: ask_replicas_to_finish(handle),
        _ray_has_ended,
        args.drain_timeout,
        lambda num: console.print(
            f"finishing {num} request{'s' if num > 1 else ''}, for at most {args.drain_timeout:.0f} s; "
            "a second signal ends at once"
        ),
    )
    if left:
        console.print(f"{left} request{'s are' if left > 1 else ' is'} cut off")


def _check_address(listener: Listener) -> None:
    family = socket.AF_INET6 if ":" in listener.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listener.host, listener.port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listener.host}:{listener.port}: {error.strerror}. Choose another --port or --host."
            ) from None


def _start(args: AppArgs, listener: Listener, run_dir: str) -> None:
    console.print("starting Ray")
    from ray import serve  # These modules read the environment when they are imported.

    from lorafleet.cluster.directory.directory_actor import DirectoryPlace
    from lorafleet.cluster.serve.app import build, node_gpus

    start_ray(ray_cpus(args))
    _catch_signals()  # ray.init has installed its own handlers.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if args.device == "cuda":
        check_gpus(args, node_gpus())  # No other node will join.
    console.print(f"starting {args.num_replicas} replica{'s' if args.num_replicas > 1 else ''} of {args.model}")
    wait_for_proxies_patiently()
    serve.start(http_options=listener.http_options)
    target = serve.RunTarget(build(args), name=APP_NAME, route_prefix="/")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    _wait_for_replicas(DirectoryPlace(APP_NAME, **args.directory_place()).actor_name)
    console.print("starting HTTP")
    with _own_client(listener, run_dir) as client:
        _wait_for_http(args, client)


def ray_cpus(args: AppArgs) -> int:
    """Returns the number of CPUs that Ray is told of, at least those that the replicas reserve and one for all others.

    Ray starts as many Python processes ahead, and as many at a time. So there should be one for each process of the
    server, but not one for each core of a large machine, which would delay the replicas.
    """
    bundles = replica_bundles(args, "cpu")
    reserved = math.ceil(args.most_replicas * sum(bundle["CPU"] for bundle in bundles)) + 1
    num_processes = args.most_replicas * len(bundles) + OTHER_PROCESSES
    return max(reserved, min(os.cpu_count() or 1, num_processes))


def start_ray(num_cpus: int) -> None:
    """Starts Ray, and tries again if its raylet has ended, or was late. Raises ConfigError after the last of
    RAY_STARTS_S."""
    import ray

    from lorafleet.cluster.serve.ray_agents import keep_agents

    keep_agents()
    last = RAY_STARTS_S[-1]
    for wait_s in RAY_STARTS_S:
        try:
            with patient_start(wait_s, lambda text: console.print(text)):
                ray.init(
                    address="local",
                    include_dashboard=False,
                    num_cpus=num_cpus,
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            return
        except Exception as error:  # Ray has no class of its own for this error.
            if RAY_IS_LATE not in str(error):
                raise
            end_descendants()
            if wait_s == last:
                raise ConfigError(
                    f"Ray's raylet did not start in {len(RAY_STARTS_S)} attempts of up to {last} s: this machine is "
                    "too busy, or the raylet ends at once. See the logs in /tmp/ray/session_latest/logs. Ray reports: "
                    f"{error}"
                ) from None
            console.print(f"Ray's raylet ended, or did not register within {wait_s} s; starting Ray again")


def _wait_for_replicas(directory: str) -> None:
    """Prints the replicas' progress until the application runs. Raises ConfigError with a replica's own message if
    it fails."""
    from lorafleet.cluster.directory.directory_actor import read_progress
    from lorafleet.cluster.proxy.ingress import application_status

    num_read = 0
    with StartProgress(console) as progress:
        while True:
            status, message = application_status(APP_NAME)
            steps = read_progress(directory, num_read)
            num_read += len(steps)
            for step in steps:
                if step.failed:
                    raise ConfigError(step.text)
                progress.line(step.replica_id, step.text)
            if status == "RUNNING":
                return
            if status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise ConfigError(message.strip().splitlines()[-1])
            time.sleep(POLL_S)


def _own_client(listener: Listener, run_dir: str) -> httpx.Client:
    """Returns an HTTP client for this server. With direct streaming it uses the ingress's Unix socket, which has no
    TLS, since TLS may require a certificate of clients. Otherwise it trusts this server's certificate, for any host
    name."""
    if listener.direct_streaming:
        transport = httpx.HTTPTransport(uds=serve_environment.ingress_socket(run_dir))
        return httpx.Client(transport=transport, base_url="http://localhost", timeout=HTTP_S, trust_env=False)
    verify = True if listener.tls is None else listener.tls.own_context()
    return httpx.Client(base_url=listener.url, timeout=HTTP_S, trust_env=False, verify=verify)


def _wait_for_http(args: AppArgs, client: httpx.Client) -> None:
    """Waits until one token has come the whole way, since HAProxy learns of new replicas only after they are up.
    Raises ConfigError after HTTP_S seconds."""
    body = {"model": args.base_names[0], "prompt": "a", "max_tokens": 1}
    deadline = time.monotonic() + HTTP_S
    while True:
        try:
            answer = client.post("/v1/completions", json=body)
            if answer.is_success or answer.status_code == UNAUTHORIZED:  # A replica that requires a key has answered.
                return
            cause = f"{answer.status_code} {answer.text[:500]}"
        except httpx.HTTPError as error:
            cause = str(error)
        if time.monotonic() > deadline:
            raise ConfigError(f"the replicas are up, but HTTP did not answer within {HTTP_S:.0f} s: {cause}")
        time.sleep(POLL_S)


def _announce(args: AppArgs, listener: Listener) -> None:
    names = [module.name for module in args.lora_modules]
    console.print(f"ready: {listener.url}")
    console.print(f"console: {listener.url}/console")
    console.print(f"base model: {', '.join(args.base_names)}")
    console.print(f"adapters: {', '.join(names) or 'none'}")
    if listener.host in ("0.0.0.0", "::"):
        console.print(f"{listener.host} is open to the network")
    model = names[0] if names else args.base_names[0]
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "What colour is a lime?"}}]}}'
    key = "" if args.api_keys is None else "-H 'authorization: Bearer KEY' "
    console.print("try:")
    console.print(
        f"  curl {listener.url}/v1/chat/completions {key}-H 'content-type: application/json' -d '{body}'", markup=False
    )
    console.print("Ctrl-C finishes what has begun and stops everything; a second one stops at once")


def _exit(status: int, run_dir: str) -> NoReturn:
    """Ends every process started from here, then this one. Skips Ray's own exit handlers, which would wait for those
    processes.

    Serve's shutdown would take about ten seconds and drain nothing, since it kills HAProxy first. _finish() drains.
    """
    _leave_nothing(run_dir)
    console.print("stopped")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _ray_has_ended() -> bool:
    """Returns whether Ray's raylet or its GCS has ended. One minute after the GCS ends, Ray would end this process."""
    from ray._private import ray_constants, worker

    needed = (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
    node: Any = worker._global_node  # ray.init has set it; Ray does not annotate it.
    return any(kind in needed for kind, _ in node.dead_processes())


def _begin_anew(environment: dict[str, str], run_dir: str) -> NoReturn:
    """Replaces this process by a new run of its command, in the environment that it was started with. A signal that
    arrives meanwhile ends it for good."""
    console.print("Ray has ended, and all serving processes with it; restarting", style="red")
    _leave_nothing(run_dir)
    sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _leave_nothing(run_dir: str) -> None:
    end_descendants()
    shutil.rmtree(run_dir, ignore_errors=True)


def _catch_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise_stopped)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_stopped(_number: int, _frame: FrameType | None) -> NoReturn:
    """Raises ServerStopped, and again every AGAIN_S until the cleanup begins: the first one may rise in a destructor
    or in a callback of Ray's, from where it does not reach serve_locally()."""
    _ignore_signals()  # A second signal must not interrupt the cleanup.
    signal.signal(signal.SIGALRM, _raise_stopped)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    raise ServerStopped
