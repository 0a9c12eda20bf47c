"""Provides what the commands share: error handling, and options that several tools have.

Each tool's work is in tools/, which is imported when the tool runs, so that --help does not wait for torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from lorafleet.protocol.errors import InvalidRequest, LorafleetError
from lorafleet.protocol.names import check_adapter_name
from lorafleet.tools.comparison_runner import BASE

if TYPE_CHECKING:
    import torch

    from lorafleet.tools.base_checkpoint import BaseModel

FloatName = Literal["float32", "bfloat16", "float16"]

JSONOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ModelOption = Annotated[Path | None, typer.Option("--model", help="Folder of the base model.")]


@contextmanager
def ending_in_words() -> Iterator[None]:
    """Reports a user's mistake as one line on stderr, and exits with status 1."""
    try:
        yield
    except LorafleetError as error:
        fail(error.message)


def fail(message: str) -> NoReturn:
    """Prints the message as one line on stderr, and exits with status 1."""
    typer.echo(f"lorafleet: {message}", err=True)
    raise typer.Exit(1) from None


def named_adapters(adapters: Sequence[str]) -> dict[str, str]:
    """Returns the paths of --adapters NAME=PATH … by name. Raises InvalidRequest or InvalidAdapterName."""
    named: dict[str, str] = {}
    for text in adapters:
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise InvalidRequest(f"--adapters: {text!r} is not NAME=PATH.")
        check_adapter_name(name, (BASE,))
        if name in named:
            raise InvalidRequest(f"--adapters names {name!r} twice.")
        named[name] = path
    return named


def opened_base(stack: ExitStack, folder: Path | None) -> BaseModel | None:
    from lorafleet.tools.base_checkpoint import BaseModel

    return None if folder is None else stack.enter_context(BaseModel.opened(folder))


def dtype_named(name: FloatName | None) -> torch.dtype | None:
    import torch

    return {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
