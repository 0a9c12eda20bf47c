"""Measures the cost of loading adapters: host memory to slot, disk to first token, and the effect on other streams.

    python benchmarks/adapter_loading.py [--ranks 16 64] [--streams 1 8 64] [--json FILE]
    python benchmarks/adapter_loading.py --cpu [--ranks 16] [--threads 1 4 8]

The model is an 8B Llama shape with random weights in bf16, with adapters on all seven projections.

- Activation is the time until a slot may be used, and how much of that time the engine loop itself is blocked.
- Streams are decoding sequences over four adapters. Their gap is the time from one step's tokens to the next step's:
  alone, with another adapter put into a slot every 100 ms, and with another adapter read from disk every 250 ms.
- Disk is the time from requesting an adapter that no tier holds to the first token of a prompt of 16 tokens, while
  nothing else runs. For "cold", the kernel first drops the file from its page cache, which only works on real disks.
  The process has digested the contents of "known" rows before, and not those of "new" rows.

With --cpu, no GPU is needed: only the phases of a load are measured, from the request to host memory that is reused,
with each number of reading threads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import count, cycle
from pathlib import Path

import msgspec
import torch

from engine_driver import settle
from engine_e2e import CONFIG
from lorafleet.protocol.adapter_formats.adapter_files import TICK_S
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.store import AdapterStore
from lorafleet.workers.adapters.base_layout import BaseLayout
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.parallel_reading import ParallelReader
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.engine import Engine
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.startup import build_engine
from lorafleet.workers.tp.group import TPGroup
from random_llama import write_adapters

SLOTS, STREAM_ADAPTERS = 8, 4
# Adapters that stay in host memory, and adapters that are read from disk again and again.
NUM_RESIDENT, NUM_FRESH = 12, 3
STEPS = 800
ACTIVATE_EVERY_S, LOAD_EVERY_S = 0.1, 0.25
DISK_REPEATS, CPU_REPEATS = 5, 12
WEIGHTS = "adapter_model.safetensors"
PROMPT = 512


class Bench:
    """Drives the engine as the worker's loop does: it sleeps only when every request waits for an adapter."""

    def __init__(self, folder: Path, max_rank: int, cpu_loras: int, streams: int) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        self._awake = threading.Event()
        self.engine: Engine = build_engine(
            EngineConfig(
                model=str(folder),
                device="cuda",
                load_format="dummy",
                kv_cache_tokens=200_000,
                max_num_seqs=streams,
                max_num_batched_tokens=8192,
                max_num_mixed_tokens=8192,  # All streams start at once.
                max_gap_ms=10_000,
                enable_prefix_caching=False,
                lora=LoRAConfig(max_loras=SLOTS, max_gpu_loras=SLOTS, max_lora_rank=max_rank, max_cpu_loras=cpu_loras),
            ),
            wake=self._awake.set,
        )
        settle(self.engine)
        assert self.engine.loras is not None
        self.loras = self.engine.loras
        self._ids = iter(range(1 << 30))

    def step(self) -> int:
        """Runs one step and returns the number of tokens that it produced."""
        outputs = self.engine.step()
        if self.engine.stalled:
            self._awake.wait(0.001)
            self._awake.clear()
        return sum(len(output.token_ids) for output in outputs)

    def load(self, path: Path) -> LoRARequest:
        asked = LoRARequest(path.name, 1, str(path))
        future: Future[AdapterInfo] = self.engine.load_adapter(asked)
        while not future.done():
            self.step()
        return msgspec.structs.replace(asked, digest=future.result().digest)

    def submit(self, length: int, max_tokens: int, lora: LoRARequest | None) -> None:
        prompt = torch.randint(10, 128000, (length,)).tolist()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request_id = str(next(self._ids))
        self.engine.add(EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, lora=lora))

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Activation:
    rank: int
    megabytes: float
    ready_ms: float
    worst_ready_ms: float
    loop_ms: float
    worst_loop_ms: float


def measure_activation(bench: Bench, rank: int, adapters: list[LoRARequest]) -> Activation:
    """Times moves from host memory to a slot. Each adapter replaces the one that has been unused for longest."""
    ready: list[float] = []
    loop: list[float] = []
    size = 0
    for lora, _ in zip(cycle(adapters), range(6 * SLOTS), strict=False):
        torch.cuda.synchronize()
        before = time.perf_counter()
        bench.loras.prefetch([lora])
        returned = time.perf_counter()
        slot = bench.loras.slots.find(lora.digest)
        assert slot is not None and slot.adapter is not None
        while not slot.is_ready:
            pass
        ready.append((time.perf_counter() - before) * 1e3)
        loop.append((returned - before) * 1e3)
        size = slot.adapter.block.numel()
    ready, loop = ready[SLOTS:], loop[SLOTS:]  # The first round fills empty slots.
    return Activation(rank, size / 1e6, statistics.median(ready), max(ready), statistics.median(loop), max(loop))


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times between one step's tokens and the next step's."""

    streams: int
    beside: str
    rank: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    p99_over_alone: float
    events: int


def measure_gaps(
    bench: Bench, streams: int, held: list[LoRARequest], every_s: float, event: Callable[[], None]
) -> tuple[float, float, float, int]:
    """Returns the 50th and 99th percentiles, the longest gap, and the number of events."""
    for i in range(streams):
        bench.submit(PROMPT, STEPS + 80, held[i % len(held)])
    while bench.step() < streams:
        pass
    for _ in range(30):
        bench.step()
    gaps: list[float] = []
    events = 0
    last = due = time.perf_counter()
    while len(gaps) < STEPS:
        if time.perf_counter() >= due:
            event()
            events += 1
            due += every_s
        assert bench.step() == streams
        now = time.perf_counter()
        gaps.append((now - last) * 1e3)
        last = now
    bench.drain()
    gaps.sort()
    return statistics.median(gaps), gaps[-1 - STEPS // 100], gaps[-1], events


def measure_streams(
    bench: Bench, streams: int, rank: int, resident: list[LoRARequest], fresh: list[Path]
) -> list[Gaps]:
    held, others = resident[:STREAM_ADAPTERS], cycle(resident[STREAM_ADAPTERS:])
    paths = cycle(fresh)
    loaded: list[Future[AdapterInfo]] = []

    def activate() -> None:
        bench.loras.prefetch([next(others)])

    def load() -> None:
        while loaded and loaded[0].done():
            bench.loras.drop(loaded.pop(0).result().digest)
        path = next(paths)
        loaded.append(bench.engine.load_adapter(LoRARequest(path.name, 1, str(path))))

    rows: list[Gaps] = []
    kinds = (
        ("alone", 1e9, lambda: None),
        ("activating", ACTIVATE_EVERY_S, activate),
        ("disk loads", LOAD_EVERY_S, load),
    )
    for beside, every_s, event in kinds:
        p50, p99, most, events = measure_gaps(bench, streams, held, every_s, event)
        alone = rows[0].p99_ms if rows else p99
        rows.append(Gaps(streams, beside, rank, p50, p99, most, p99 / alone, events))
    while not all(future.done() for future in loaded):
        bench.step()
    for future in loaded:
        bench.loras.drop(future.result().digest)
    return rows


@dataclass(frozen=True, slots=True)
class FromDisk:
    """Median times of loading an adapter from disk until its first token."""

    rank: int
    cache: str
    content: str
    read_ms: float  # Time to read the values, and to look for NaN and infinity.
    check_ms: float
    pack_ms: float
    digest_ms: float  # Time to wait for the digest after packing.
    load_ms: float  # Time until the loop has the adapter in host memory; it includes the times above.
    slot_ms: float  # Time of the copy to the GPU.
    step_ms: float  # Time from the end of the copy to the first token.
    total_ms: float
    worst_ms: float


def measure_disk(bench: Bench, rank: int, path: Path, cold: bool, new: bool) -> FromDisk:
    rows: list[list[float]] = []
    for _ in range(DISK_REPEATS + 1):
        prepare(path / WEIGHTS, cold, new)
        started = time.perf_counter()
        lora = bench.load(path)
        loaded = time.perf_counter()
        bench.submit(16, 1, lora)
        bench.step()  # This step starts the copy.
        slot = bench.loras.slots.find(lora.digest)
        assert slot is not None and slot.adapter is not None
        while not slot.is_ready:
            bench.step()
        ready = time.perf_counter()
        while not bench.step():
            pass
        done = time.perf_counter()
        times = slot.adapter.times
        marks = [loaded - started, ready - loaded, done - ready, done - started]
        rows.append([1e3 * t for t in (times.read_s, times.check_s, times.pack_s, times.digest_s, *marks)])
        bench.drain()
        bench.loras.drop(lora.digest)
    # The first repeat only warms up.
    medians = [statistics.median(column) for column in zip(*rows[1:], strict=True)]
    worst = max(row[-1] for row in rows[1:])
    return FromDisk(rank, "cold" if cold else "warm", "new" if new else "known", *medians, worst)


def prepare(path: Path, cold: bool, new: bool) -> None:
    """Changes the file's last value if its content should be new, and drops it from the page cache for "cold"."""
    with path.open("rb+") as file:
        if new:
            file.seek(-2, os.SEEK_END)
            file.write(bytes([next(_new_bytes) % 256]))
        os.fsync(file.fileno())  # The kernel can drop only pages that have been written to disk.
        if cold:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(2 * TICK_S)  # A file that was just written would be waited for.


_new_bytes = count()


def measure_on_cpu(folder: Path, rank: int, num_threads: int, path: Path) -> None:
    """Prints the phases of loads without a GPU."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config, lora_config = read_model_config(folder), LoRAConfig(max_loras=1, max_lora_rank=rank)
    model = DecoderModel(config, TPGroup(), torch.bfloat16, torch.device("meta"))
    slots = LoRAModelManager(model, lora_config, torch.bfloat16, torch.device("cpu"))
    store, reader = AdapterStore(SourcesConfig()), ParallelReader(num_threads)
    base = Base(BaseLayout.of(config))
    loader = AdapterLoader(base, lora_config, slots, torch.bfloat16, torch.device("cpu"), store, reader)
    memory = torch.zeros((path / WEIGHTS).stat().st_size * 2, dtype=torch.uint8)
    loader._allocate = lambda size: memory[:size]  # as pinned memory is reused on a GPU
    for cold, new in ((False, True), (False, False), (True, False)):
        rows = []
        for _ in range(CPU_REPEATS):
            prepare(path / WEIGHTS, cold, new)
            started, cpu_started = time.perf_counter(), time.process_time()
            times = loader.submit(LoRARequest(path.name, 1, str(path))).result().times
            load_s = time.perf_counter() - started
            phases = (times.read_s, times.check_s, times.pack_s, times.digest_s, time.process_time() - cpu_started)
            rows.append([1e3 * t for t in (load_s, *phases)])
        load, read, check, pack, digest, cpu = min(rows)
        print(
            f"rank {rank}, {num_threads} threads, {'cold' if cold else 'warm'}, {'new' if new else 'known'}: fastest "
            f"load of {CPU_REPEATS} {load:.1f} (read {read:.1f}, check {check:.1f}, pack {pack:.1f}, digest waited for "
            f"{digest:.1f}), median {statistics.median(row[0] for row in rows):.1f}, processor time {cpu:.1f} ms",
            flush=True,
        )
    loader.stop()


def measure_digest(path: Path) -> None:
    data = (path / WEIGHTS).read_bytes()
    started = time.perf_counter()
    hashlib.sha256(data).digest()
    print(f"digest alone: {(time.perf_counter() - started) * 1e3:.1f} ms for {len(data) / 1e6:.0f} MB")


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 4, 8])
    args = parser.parse_args()
    if args.cpu:
        with tempfile.TemporaryDirectory() as folder:
            for rank in args.ranks:
                write_adapters(Path(folder, f"rank{rank}"), CONFIG, 1, rank)
                path = Path(folder, f"rank{rank}", "a0")
                measure_digest(path)
                for num_threads in args.threads:
                    measure_on_cpu(Path(folder), rank, num_threads, path)
        return
    results: dict[str, list[dict[str, object]]] = {"activation": [], "streams": [], "disk": []}
    with tempfile.TemporaryDirectory() as folder:
        cpu_loras = 2 * SLOTS
        bench = Bench(Path(folder), max(args.ranks), cpu_loras, max(args.streams))
        print(torch.cuda.get_device_name())
        for rank in args.ranks:
            parent = Path(folder, f"rank{rank}")
            write_adapters(parent, CONFIG, NUM_RESIDENT + NUM_FRESH, rank)
            paths = [parent / f"a{i}" for i in range(NUM_RESIDENT + NUM_FRESH)]
            resident = [bench.load(path) for path in paths[:NUM_RESIDENT]]
            a = measure_activation(bench, rank, resident)
            results["activation"].append(asdict(a))
            print(
                f"rank {rank}, {a.megabytes:.0f} MB: ready in {a.ready_ms:.2f} ms (worst {a.worst_ready_ms:.2f}), "
                f"the loop held up {a.loop_ms:.2f} ms (worst {a.worst_loop_ms:.2f})",
                flush=True,
            )
            for streams in args.streams:
                for g in measure_streams(bench, streams, rank, resident, paths[NUM_RESIDENT:]):
                    results["streams"].append(asdict(g))
                    print(
                        f"{streams:3} streams, {g.beside:10}: p50 {g.p50_ms:6.2f}  p99 {g.p99_ms:6.2f}  "
                        f"max {g.max_ms:6.2f} ms  p99 {g.p99_over_alone:.2f} x  ({g.events})",
                        flush=True,
                    )
            for cold, new in ((False, False), (True, False), (False, True)):
                d = measure_disk(bench, rank, paths[-1], cold, new)
                results["disk"].append(asdict(d))
                print(
                    f"disk, {d.cache}, {d.content}: load {d.load_ms:.1f} (read {d.read_ms:.1f}, check "
                    f"{d.check_ms:.1f}, pack {d.pack_ms:.1f}, digest waited for {d.digest_ms:.1f}), "
                    f"slot {d.slot_ms:.1f}, step {d.step_ms:.1f}, in all {d.total_ms:.1f} "
                    f"ms (worst {d.worst_ms:.1f})",
                    flush=True,
                )
            for lora in resident:
                bench.loras.drop(lora.digest)
        bench.engine.close()
    if args.json:
        args.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), **results}, indent=1))


if __name__ == "__main__":
    main()
