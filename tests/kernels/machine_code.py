"""Compiles Triton kernels for an H100 or H200 without a GPU, and looks for a mistake of ptxas in their machine code.

As a program it reads a snippet from its input, which launches kernels with tensors of a CPU. Nothing runs; each launch
only compiles. It prints JSON: a list with [name, reads of registers that nothing has written] of each compiled kernel.
Only a process of its own may do this, since it replaces Triton's driver.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CAPABILITY = 90
# Such as "/*0e70*/  @!UP0 UIADD3 UR14, UP0, UR14, 0x20, URZ ;": the address, the instruction, its operands.
INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z]\w*[\w.]*)\s*(.*?) ;")
REGISTER = re.compile(r"\bUR(\d+)\b")
# wgmma's matrices in shared memory: four registers, two for A and two for B. A may lie in registers of threads instead.
MATRICES = re.compile(r"gdesc\[UR(\d+)\]")


def unwritten_reads(assembly: str) -> list[str]:
    """Returns the instructions that read a uniform register which no instruction above has written.

    Args:
        assembly: A kernel as nvdisasm prints it. The order of its lines stands for the order in which it runs.
    """
    written: set[int] = set()
    found = []
    for line in assembly.splitlines():
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        address, name, operands = match[1], match[2], [part.strip() for part in match[3].split(",")]
        target = re.fullmatch(r"UR(\d+)", operands[0])
        if target is not None:
            operands = operands[1:]
        if not _reads(operands) <= written:
            found.append(f"{address}: {name} {match[3]}")
        if target is not None:
            written |= set(range(int(target[1]), int(target[1]) + _width(name)))
    return found


def _reads(operands: list[str]) -> set[int]:
    """Returns the uniform registers that must be written for an instruction with these operands."""
    found: set[int] = set()
    for i, operand in enumerate(operands):
        matrices = MATRICES.search(operand)
        if matrices is None:
            found |= {int(register) for register in REGISTER.findall(operand)}
        else:
            first = int(matrices[1])
            found |= set(range(first + (0 if i == 1 else 2), first + 4))
    return found


def _width(name: str) -> int:
    """Returns the number of registers that an instruction writes."""
    if ".128" in name:
        return 4
    return 2 if ".64" in name or ".WIDE" in name else 1


def nvdisasm() -> Path | None:
    """Returns the disassembler in Triton's package, or None if it has none."""
    import triton

    path = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / "nvdisasm"
    return path if path.exists() else None


def disassembled(cubin: bytes) -> str:
    program = nvdisasm()
    assert program is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, "-c", file.name], check=True, capture_output=True, text=True).stdout


def reads_of_compiled(snippet: str, cache: Path) -> list[tuple[str, list[str]]]:
    """Returns the name of each kernel that the snippet launches, and the unwritten reads in its machine code.

    Args:
        cache: A folder for what Triton compiles.
    """
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=textwrap.dedent(snippet),
        env={**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return [(name, reads) for name, reads in json.loads(done.stdout)]


class CompilingDriver:
    """Stands for Triton's driver of a GPU of capability 9.0, as far as compiling a kernel asks it."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


def main() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(CompilingDriver())
    compiled: dict[int, Any] = {}
    launch = JITFunction.run

    @functools.wraps(launch)
    def compile_only(kernel: Any, *arguments: Any, warmup: bool, **constants: Any) -> Any:  # noqa: ARG001
        code = launch(kernel, *arguments, warmup=True, **constants)
        compiled[id(code)] = code
        return code

    JITFunction.run = compile_only
    exec(compile(sys.stdin.read(), "<snippet>", "exec"), {"__name__": "__main__"})
    print(json.dumps([(c.metadata.name, unwritten_reads(disassembled(c.asm["cubin"]))) for c in compiled.values()]))


if __name__ == "__main__":
    main()
