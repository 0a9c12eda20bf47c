"""Defines the `lorafleet` command. The options of `serve` are the fields of AppArgs, so that YAML and command line
agree. The other commands are in the other files of this folder."""

from __future__ import annotations

import inspect
import os
import sys
import types
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.markup import escape

import lorafleet
from lorafleet.cluster.cli.cli_adapters import adapters
from lorafleet.cluster.cli.cli_batch import run_batch
from lorafleet.cluster.cli.cli_compare import compare
from lorafleet.cluster.cli.cli_config import config
from lorafleet.cluster.cli.cli_convert import convert
from lorafleet.cluster.cli.cli_inspect import inspect as inspect_adapter
from lorafleet.cluster.cli.cli_keys import keys
from lorafleet.cluster.cli.cli_merge import merge
from lorafleet.cluster.cli.cli_metrics import metrics
from lorafleet.cluster.cli.cli_quality import quality
from lorafleet.cluster.cli.cli_quantize import quantize
from lorafleet.cluster.cli.cli_tools import ending_in_words
from lorafleet.cluster.cli.cli_train_draft import train_draft
from lorafleet.cluster.cli.cli_usage import usage
from lorafleet.cluster.config import ALIASES, AppArgs, keys_from, parse_args
from lorafleet.cluster.proxy.tls import TLSFiles, tls_files
from lorafleet.cluster.serve.start_checks import check_paths
from lorafleet.protocol.engine_config import EngineOptions, SpeculativeConfig
from lorafleet.protocol.kv_events_config import KVEventsConfig
from lorafleet.protocol.lora_config import LoRAOptions
from lorafleet.protocol.options import Option, options_of
from lorafleet.protocol.sources import HTTPConfig, HubConfig, S3Config

JSON_OPTIONS = (S3Config, HTTPConfig, HubConfig, KVEventsConfig, SpeculativeConfig)
# Several values may follow one of these flags, as with vLLM.
SEVERAL_VALUES = (
    *("--lora-modules", "--lora-paths", "--served-model-name", "--lora-resolvers", "--push-hosts"),
    *("--merge", "--weights", "--adapters"),
)
# Panels of the help text in their order, by the first field in each.
PANELS = {
    "model": "Model",
    "device": "Engine",
    "enable_lora": "Adapters",
    "num_replicas": "Cluster",
    "admin_key": "Access, records and traces",
    "metrics_lora_info": "Routers of other programs",
}
# The order within a panel. Each key is an option of the engine or of adapters. The help shows it, and the options
# declared after it up to the next key, before the option of AppArgs that is its value.
SHOWN_BEFORE = {
    "model": "served_model_name",
    "device": "enable_lora",
    "max_loras": "fill_cpu_loras",
    "lora_dtype": "allow_runtime_lora_updating",
    "on_lora_load_failure": "allow_runtime_lora_updating",
    "tensor_parallel_size": "num_cpus",
}

# The demo's model and adapters, which the package has as data.
DEMO = Path(lorafleet.__file__).parent / "demo"

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 opens it to the network.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="TCP port to listen on.")]

app = typer.Typer(help="Serve one base model and many LoRA adapters.", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lorafleet {lorafleet.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Makes `serve` remain a subcommand, and has the options of the program itself."""


def _serve(
    host: Host = "127.0.0.1",
    port: Port = 8000,
    direct_streaming: Annotated[
        bool, typer.Option(help="Send tokens from replicas through HAProxy; off: through Serve's own, slower proxy.")
    ] = True,
    ssl_certfile: Annotated[
        str | None, typer.Option(help="PEM file with the server's certificate chain: HTTPS instead of HTTP.")
    ] = None,
    ssl_keyfile: Annotated[
        str | None, typer.Option(help="PEM file with the certificate's private key, without a password.")
    ] = None,
    ssl_ca_certs: Annotated[
        str | None, typer.Option(help="PEM file of issuers. Clients must show a certificate of one of them.")
    ] = None,
    **options: Any,
) -> None:
    """Starts a local Ray, the replicas and the HTTP server. Ctrl-C stops them all."""
    with ending_in_words():
        given = {name: value for name, value in options.items() if value not in (None, [])}
        args = parse_args(keys_from(os.environ) | given)
        args.engine_config()
        check_paths(args)
        _run(args, host, port, tls_files(ssl_certfile, ssl_keyfile, ssl_ca_certs), direct_streaming)


def _demo(host: Host = "127.0.0.1", port: Port = 8000) -> None:
    """Serves the bundled demo: a tiny model with three adapters, on a GPU if there is one. Ctrl-C stops it."""
    with ending_in_words():
        args = parse_args(
            keys_from(os.environ)
            | {
                "model": str(DEMO / "model"),
                "served_model_name": "demo",
                "lora_modules": [f"{folder.name}={folder}" for folder in sorted((DEMO / "adapters").iterdir())],
                "allow_runtime_lora_updating": True,
            }
        )
        _run(args, host, port, None, True)


def _run(args: AppArgs, host: str, port: int, tls: TLSFiles | None, direct_streaming: bool) -> None:
    """Serves until the process is told to stop."""
    from lorafleet.cluster.serve.local import Listener, serve_locally  # Here, so that --help is fast.

    host = "127.0.0.1" if host == "localhost" else host
    serve_locally(args, Listener(host, port, tls, direct_streaming))


def _option(name: str, field: FieldInfo, panel: str, *, is_required: bool) -> inspect.Parameter:
    flags = [
        f"--{option.replace('_', '-')}" for option in (name, *(a for a, target in ALIASES.items() if target == name))
    ]
    kind = _plain_type(field.annotation)
    if kind is bool:
        flags = [f"{flags[0]}/--no-{flags[0][2:]}"]
    default = ... if is_required else None
    annotation: Any = Annotated[
        kind if is_required else kind | None,
        typer.Option(*flags, help=_help(name, field), show_default=False, rich_help_panel=panel),
    ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _help(name: str, field: FieldInfo) -> str:
    """Returns the description with the default, for a help text in which brackets would be markup."""
    described = next((entry.description for entry in field.metadata if isinstance(entry, Option)), field.description)
    assert described is not None
    if field.is_required() or field.default in (None, []):
        return escape(described)
    default = field.default
    if isinstance(default, bool):
        default = name.replace("_", "-") if default else f"no-{name.replace('_', '-')}"
    return escape(f"{described} [default: {default}]")


def _plain_type(annotation: Any) -> Any:
    """Returns a type that typer understands. `int | None` becomes int, Annotated its inner type, an option
    in JSON str, and a list or tuple list[float] or list[str]."""
    if typing.get_origin(annotation) is Annotated:
        return _plain_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _plain_type(next(member for member in typing.get_args(annotation) if member is not type(None)))
    if typing.get_origin(annotation) in (list, tuple):
        return list[float] if typing.get_args(annotation)[0] is float else list[str]
    return str if annotation in JSON_OPTIONS else annotation


def _names_in_order() -> Iterator[str]:
    """Yields the names of the options as the help shows them."""
    inherited = {*options_of(EngineOptions), *options_of(LoRAOptions)}
    groups: defaultdict[str, list[str]] = defaultdict(list)
    place = ""
    for name in AppArgs.model_fields:
        if name in inherited:
            place = SHOWN_BEFORE.get(name, place)
            groups[place].append(name)
        else:
            yield from (*groups[name], name)


def _with_options(function: Any, *, needs_model: bool = True) -> Any:
    """Returns the function with one more keyword option for each field of AppArgs."""
    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    panel = ""
    by_panel: defaultdict[str, list[inspect.Parameter]] = defaultdict(list)
    for name in _names_in_order():
        panel = PANELS.get(name, panel)
        field = AppArgs.model_fields[name]
        option = _option(name, field, panel, is_required=needs_model and field.is_required())
        by_panel[panel].append(option)
    options = [option for panel in PANELS.values() for option in by_panel[panel]]
    ordered = (*options, *own) if needs_model else (*own, *options)
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in ordered]
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


app.add_typer(adapters, name="adapters")
app.add_typer(keys, name="keys")
app.add_typer(config, name="config")
app.add_typer(metrics, name="metrics")
app.add_typer(quality, name="quality")
app.command("serve")(_with_options(_serve))
app.command("demo")(_demo)
app.command("run-batch")(_with_options(run_batch, needs_model=False))
app.command("inspect")(inspect_adapter)
app.command("convert")(convert)
app.command("merge")(merge)
app.command("quantize")(quantize)
app.command("compare")(compare)
app.command("train-draft")(train_draft)
app.command("usage")(usage)


def spread_values(arguments: list[str]) -> list[str]:
    """Turns `--lora-modules a=x b=y` into `--lora-modules a=x --lora-modules b=y`."""
    spread: list[str] = []
    flag, values = "", 0
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            flag, values = (argument if argument in SEVERAL_VALUES else ""), 0
        elif flag:
            values += 1
            if values > 1:
                spread.append(flag)
        spread.append(argument)
    return spread


def _is_number(text: str) -> bool:
    """Returns whether the text is a number, since a negative weight is not a flag."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def main() -> None:
    app(spread_values(sys.argv[1:]))
