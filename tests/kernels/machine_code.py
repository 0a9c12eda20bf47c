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
UNIFORM = re.compile(r"\bUR(\d+)\b")
OF_THREADS = re.compile(r"\bR\d+\b")
PRODUCT = re.compile(r"HGMMA\.64x(\d+)x")
WITHOUT_TARGET = ("ST", "RED")  # Stores' first operand is an address or a value.
STACK_POINTER = "R1"
# wgmma's matrices in shared memory: four registers, two for A and two for B. A may lie in registers of threads instead.
MATRICES = re.compile(r"gdesc\[UR(\d+)\]")


def unwritten_reads(assembly: str) -> list[str]:
    """Returns the instructions that read a register which no instruction above has written: uniform registers, and
    registers of threads if the instruction adds the upper halves of 64-bit numbers.

    Compilers read other registers of threads before they write them on purpose, such as to set some of their bits.

    Args:
        assembly: A kernel as nvdisasm prints it. The order of its lines stands for the order in which it runs.
    """
    written = {STACK_POINTER}
    found = []
    for line in assembly.splitlines():
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        address, name, operands = match[1], match[2], [part.strip() for part in match[3].split(",")]
        target = None if name.startswith(WITHOUT_TARGET) else re.fullmatch(r"(U?R)(\d+)", operands[0])
        if target is not None:
            operands = operands[1:]
        if not _reads(name, operands) <= written:
            found.append(f"{address}: {name} {match[3]}")
        if target is not None:
            first = int(target[2])
            written |= {f"{target[1]}{number}" for number in range(first, first + _width(name))}
    return found


def _reads(name: str, operands: list[str]) -> set[str]:
    """Returns the registers that must be written for an instruction with these operands, which follow its target."""
    found: set[str] = set()
    for i, operand in enumerate(operands):
        matrices = MATRICES.search(operand)
        if matrices is not None:
            first = int(matrices[1])
            found |= {f"UR{number}" for number in range(first + (0 if i == 0 else 2), first + 4)}
        else:
            found |= {f"UR{number}" for number in UNIFORM.findall(operand)}
        if name.endswith(".X"):
            found |= set(OF_THREADS.findall(operand))
    return found


def _width(name: str) -> int:
    """Returns the number of registers that an instruction writes, or more."""
    if product := PRODUCT.match(name):
        return int(product[1]) // 2
    if ".128" in name or "MMA" in name or name.startswith("LDSM"):
        return 4
    return 2 if ".64" in name or ".WIDE" in name else 1


def nvidia_program(name: str) -> Path | None:
    """Returns one of NVIDIA's programs in Triton's package, or None if it has none of that name."""
    import triton

    path = Path(triton.__file__).with_name("backends") / "nvidia" / "bin" / name
    return path if path.exists() else None


def nvdisasm() -> Path | None:
    """Returns the disassembler in Triton's package, or None if it has none."""
    return nvidia_program("nvdisasm")


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
