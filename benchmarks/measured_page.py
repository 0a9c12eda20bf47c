"""Writes the tables of docs/measured.md and the figures of its charts from recorded results.

    python benchmarks/measured_page.py [--adopt FOLDER]

The results are the JSON files in docs/charts/results, which are in Git. --adopt first copies to them the files of a
folder that run_gpu.py has written, as far as the page shows them. A table stands between two comments, of which the
first has its name in TABLES. It stays as it is, written by hand, as long as there is no file for it.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmark_results import Case, Results, read_results

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "measured.md"
CHARTS = DOCS / "charts"
RECORDED = CHARTS / "results"
BLOCK = re.compile(r"<!-- figures: (\w+) -->\n(.*?)<!-- end of figures -->", re.DOTALL)
SAMPLING_LABELS = {
    "greedy": "none: greedy",
    "penalties in one row": "repetition, presence and frequency penalties in one row",
    "penalties in all rows": "the three penalties in all rows",
    "1024 biases in all rows": "`logit_bias` with 1,024 entries, `min_tokens` and three stop tokens in all rows",
    "temperature, top_p": "`temperature` and `top_p` in all rows",
    "all fields in all rows": "all of these in all rows",
}

Files = Mapping[str, Results]  # The recorded results by the name of the file.
Bar = tuple[str, str, str]  # Panel, group and series in the CSV file of a chart.


@dataclass(frozen=True, slots=True)
class Table:
    files: tuple[str, ...]  # The results that it shows. The table is written if all of them are there.
    render: Callable[[Files], str]
    prefixes: tuple[str, ...] = ()  # Further files whose names begin so are shown too.

    def shows(self, file: str) -> bool:
        return file in self.files or file.startswith(self.prefixes)


def engine_table(files: Files) -> str:
    ours, vllm = files["engine_e2e"], files["vllm_e2e"]
    rows = []
    for batch in settings_of([ours], "batch"):
        cells = [str(batch)]
        for adapters in (0, 8, 64):
            for results, form in ((ours, ".2f"), (vllm, ".3g")):
                step_ms = results.figure("step_ms", batch=batch, adapters=adapters)
                rate = results.figure("prefill_tokens_per_s", batch=batch, adapters=adapters)
                cells.append(number(step_ms, form) + (f" ({rate / 1e3:.0f}k)" if rate else ""))
        rows.append(cells)
    return table("batch | base | vLLM | 8 adapters | vLLM | 64 slots, up to 64 adapters | vLLM", rows)


def engine_floor_table(files: Files) -> str:
    ours = files["engine_e2e"]
    batches = settings_of([ours], "batch")
    return table(
        f"batch | {' | '.join(map(str, batches))}",
        [
            [label, *(number(ours.figure("floor_ms", batch=batch, adapters=count), ".2f") for batch in batches)]
            for label, count in (("base", 0), ("64 adapters", 64))
        ],
    )


def sampling_table(files: Files) -> str:
    ours = files["sampling"]
    names, batches = settings_of([ours], "case"), settings_of([ours], "batch")
    order = list(SAMPLING_LABELS)
    names.sort(key=lambda name: order.index(str(name)) if name in order else len(order))
    return table(
        f"fields | {' | '.join(f'batch {batch}' for batch in batches)}",
        [
            [SAMPLING_LABELS.get(str(name), str(name))]
            + [number(ours.figure("step_ms", case=name, batch=batch), ".2f") for batch in batches]
            for name in names
        ],
    )


def lora_table(files: Files) -> str:
    ours, peers = files["lora_kernels"], files["lora_peers"]
    rows = []
    for case in settings_of([ours], "case"):
        base, excess = ours.figure("base_ms", case=case), ours.figure("excess_ms", case=case)
        assert base is not None and excess is not None
        is_prefill = str(case).startswith("prefill")
        added = f"{excess:.1f} ({100 * excess / base:.0f} %)" if is_prefill else f"{excess:.2f}"
        floor, peer = ours.figure("floor_ms", case=case), peers.figure("excess_ms", case=case)
        rows.append([str(case), f"{base:.1f}" if is_prefill else f"{base:.2f}", added, number(floor, ".2f")])
        rows[-1].append(number(peer, ".1f" if is_prefill else ".2f"))
    return table("tokens x adapters, rank | base | adapters add | bytes of the adapters | best peer", rows)


def saturation_table(files: Files) -> str:
    rows = []
    for results in (files["saturation"], files["saturation_fp8"]):
        for case in results.cases:
            figures, kv = case.figures, "FP8" if case.settings["kv_cache_dtype"] == "fp8" else "bf16"
            row = [f"{case.settings['streams']}", f"{case.settings['adapters']}", kv]
            row.append(number(figures["tokens_per_s"], ".0f"))
            row.append(pair(figures["ttft_p50_ms"], figures["ttft_p99_ms"], ".0f"))
            row.append(pair(figures["gap_p50_ms"], figures["gap_p99_ms"], ".1f"))
            row += [number(figures["preemptions"], ".0f"), f"{100 * (figures['overlapped'] or 0):.0f} %"]
            rows.append(row)
    heads = "sequences | adapters | KV cache | tokens/s | TTFT p50 / p99, ms | gaps p50 / p99, ms"
    return table(f"{heads} | preemptions | steps overlapped", rows)


def long_context_table(files: Files) -> str:
    ours = files["long_context"]
    contexts, counts = settings_of([ours], "context"), settings_of([ours], "sequences")
    rows = []
    for label, name, kind, form in (
        ("the prompt alone, tokens/s", "prefill_tokens_per_s", "prefill", ".0f"),
        ("amid streams: share of that speed", "relative_speed", "amid streams", ".2f"),
        ("gaps of the streams meanwhile, p50, ms", "gap_p50_ms", "amid streams", ".1f"),
        ("… p99", "gap_p99_ms", "amid streams", ".1f"),
        ("… longest", "gap_max_ms", "amid streams", ".1f"),
        ("gaps before, p50", "gap_before_p50_ms", "amid streams", ".1f"),
    ):
        rows.append([label, *(number(ours.figure(name, context=context, kind=kind), form) for context in contexts)])
    for count in counts:
        steps = (ours.figure("step_ms", context=context, kind="decode", sequences=count) for context in contexts)
        rows.append([f"a decode step of batch {count}, ms", *(number(step, ".2f") for step in steps)])
    return table(f"context | {' | '.join(f'{context:,}' for context in contexts)}", rows)


def side_by_side_table(files: Files) -> str:
    def load_of(case: Case) -> tuple[float, ...]:
        return tuple(float(case.settings.get(name, 0)) for name in ("adapters", "rate", "streams"))

    rows = []
    runs = [results for name, results in files.items() if TABLES["side_by_side"].shows(name)]
    for case in sorted((case for run in runs for case in run.cases), key=load_of):
        settings, figures = case.settings, case.figures
        streams = settings.get("streams")
        load = f"{settings['rate']:g} requests/s" if streams is None else f"{streams} stream{'s' * (streams != 1)}"
        row = [str(settings["server"]), load, str(settings["adapters"]), number(figures["tokens_per_s"], ".0f")]
        row.append(pair(figures["ttft_p50_ms"], figures["ttft_p99_ms"], ".0f"))
        row.append(pair(figures["gap_p50_ms"], figures["gap_p99_ms"], ".1f"))
        row += [number(figures["token_mean_ms"], ".2f"), number(figures["client_cores"], ".2f")]
        rows.append(row)
    heads = "server | load | adapters | tokens/s | TTFT p50 / p99, ms | gaps p50 / p99, ms | ms per token"
    return table(f"{heads} | client's cores", rows)


def fleet_table(files: Files) -> str:
    simulated, rows = [run for name, run in files.items() if name.startswith("simulated_fleet")], []
    for case in (case for name, run in files.items() if name.startswith("fleet") for case in run.cases):
        settings, figures = case.settings, case.figures
        same = {name: settings[name] for name in ("workload", "rule", "replicas", "rate")}
        row = [f"{setting:g}" if isinstance(setting, float) else str(setting) for setting in same.values()]
        row.append(ms_pair(figures["ttft_p50"], figures["ttft_p99"], ".0f"))
        predicted_s = next((found for run in simulated if (found := run.figure("ttft_p99", **same))), None)
        row.append(number(predicted_s and 1e3 * predicted_s, ".0f"))
        worst_s = figures["ttft_worst_adapters"]
        row += [number(worst_s and 1e3 * worst_s, ".0f"), ms_pair(figures["gap_p50"], figures["gap_p99"], ".1f")]
        row += [number(figures[name], ".0f") for name in ("tokens_per_s", "failed", "reads")]
        hits, endless = figures["hit_tokens"], figures["endless_hit_tokens"]
        row.append(f"{100 * (hits or 0.0) / endless:.0f} %" if endless else "")
        row += [pair(figures["front_cores"], figures["haproxy_cores"], ".2f"), number(figures["busiest"], ".2f")]
        rows.append(row)
    heads = (
        "workload | rule | replicas | requests/s and replica | TTFT p50 / p99, ms | predicted p99 | worst adapters' p50"
    )
    heads += " | gaps p50 / p99, ms | tokens/s | failed | adapters read | cached tokens | cores of fronts / HAProxy"
    return table(f"{heads} | busiest / mean", rows)


TABLES = {
    "engine": Table(("engine_e2e", "vllm_e2e"), engine_table),
    "engine_floor": Table(("engine_e2e",), engine_floor_table),
    "sampling": Table(("sampling",), sampling_table),
    "lora_kernels": Table(("lora_kernels", "lora_peers"), lora_table),
    "saturation": Table(("saturation", "saturation_fp8"), saturation_table),
    "long_context": Table(("long_context",), long_context_table),
    "side_by_side": Table(("side_by_side",), side_by_side_table, prefixes=("side_by_side_",)),
    "fleet": Table(("fleet", "simulated_fleet"), fleet_table, prefixes=("fleet_", "simulated_fleet_")),
}
SIMULATED = "simulated_"  # How files begin that need no GPU.
PEERS = {"vllm_e2e", "lora_peers"}  # Files of other programs, which no run writes.


def settings_of(results: Iterable[Results], name: str) -> list[bool | int | float | str]:
    """Returns the distinct values of a setting, in the order of the cases."""
    return list(dict.fromkeys(c.settings[name] for each in results for c in each.cases if name in c.settings))


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def pair(first: float | None, second: float | None, form: str) -> str:
    return "" if first is None or second is None else f"{first:{form}} / {second:{form}}"


def ms_pair(first_s: float | None, second_s: float | None, form: str) -> str:
    return "" if first_s is None or second_s is None else pair(1e3 * first_s, 1e3 * second_s, form)


def table(heads: str, rows: Iterable[Iterable[str]]) -> str:
    names = heads.split(" | ")
    return f"{_line(names)}|{'---|' * len(names)}\n{''.join(map(_line, rows))}"


def _line(cells: Iterable[str]) -> str:
    return f"|{''.join(f' {cell} |' if cell else ' |' for cell in cells)}\n"


def bars(files: Files) -> dict[str, dict[Bar, float]]:
    """Returns the recorded figures of lorafleet's bars by chart."""
    found: dict[str, dict[Bar, float]] = {"step_time": {}, "lora_kernels": {}}
    if "engine_e2e" in files:
        for batch in settings_of([files["engine_e2e"]], "batch"):
            for panel, adapters in (("base model", 0), ("8 adapters", 8), ("64 adapters", 64)):
                step_ms = files["engine_e2e"].figure("step_ms", batch=batch, adapters=adapters)
                if step_ms is not None:
                    found["step_time"][panel, str(batch), "lorafleet"] = step_ms
    if "lora_kernels" in files:
        for case in files["lora_kernels"].cases:
            group, _, panel = str(case.settings["case"]).partition(" r")
            for series, name in (("lorafleet", "excess_ms"), ("bytes alone", "floor_ms")):
                value = case.figures[name]
                if value is not None:
                    found["lora_kernels"][f"rank {panel}", group, series] = value
    return found


def chart_figures(text: str, figures: Mapping[Bar, float]) -> str:
    """Returns the CSV file of a chart with these figures in the bars that it has."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for panel, group, series, value in csv.reader(text.splitlines()):
        new = figures.get((panel, group, series))
        writer.writerow([panel, group, series, value if new is None else f"{round(new, 2):g}"])
    return out.getvalue()


def page(text: str, files: Files) -> str:
    """Returns the page with the tables for which there are files."""

    def block(match: re.Match[str]) -> str:
        shown = TABLES[match[1]]
        if not files.keys() >= set(shown.files):
            return match[0]
        runs = [results for name, results in files.items() if shown.shows(name) and name not in PEERS]
        commands = "".join(f"Command: `{run.command}`, {hardware(run)}.\n\n" for run in runs)
        return f"<!-- figures: {match[1]} -->\n{commands}{shown.render(files)}<!-- end of figures -->"

    return BLOCK.sub(block, text)


def hardware(results: Results) -> str:
    gpus, versions = results.hardware.gpus, results.hardware.versions
    device = gpus[0] if gpus else f"{results.hardware.cpu_cores} CPU cores"
    packages = [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
    return ", ".join([device, *packages, results.date])


def recorded(folder: Path = RECORDED) -> dict[str, Results]:
    return {path.stem: read_results(path) for path in sorted(folder.glob("*.json"))}


def adopt(folder: Path, target: Path = RECORDED) -> list[str]:
    """Copies the results that the page shows. Raises SystemExit if one was measured without a GPU."""
    paths = [
        path
        for path in sorted(folder.glob("*.json"))
        if path.stem not in PEERS and any(shown.shows(path.stem) for shown in TABLES.values())
    ]
    for path in paths:
        if not read_results(path).hardware.gpus and not path.stem.startswith(SIMULATED):
            sys.exit(f"{path} was measured without a GPU: the page has figures of GPUs.")
    for path in paths:
        (target / path.name).write_bytes(path.read_bytes())
    return [path.stem for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adopt", type=Path, metavar="FOLDER", help="a folder that run_gpu.py has written")
    args = parser.parse_args()
    if args.adopt is not None:
        print(f"adopted: {', '.join(adopt(args.adopt)) or 'nothing'}")
    files = recorded()
    PAGE.write_text(page(PAGE.read_text(), files))
    for chart, figures in bars(files).items():
        path = CHARTS / f"{chart}.csv"
        path.write_text(chart_figures(path.read_text(), figures))
    subprocess.run([sys.executable, str(CHARTS / "draw.py")], check=True)
    print("Read `git diff docs` before you commit: the sentences around the tables may no longer be true.")


if __name__ == "__main__":
    main()
