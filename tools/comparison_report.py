"""Writes a comparison as one HTML file with tables, plots and answers, or as a table for a terminal. compare.py
measures it.

The file has no scripts and nothing from outside. The models' answers are untrusted: all text is escaped, and the
page's policy forbids it to load anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape

from lorafleet.tools import svg
from lorafleet.tools.compare import Comparison, ModelResult

MAX_PROMPTS_SHOWN = 200

COLUMNS = {
    "identical_answers": ("identical answers", "%", "Share of prompts whose answer has exactly the baseline's tokens."),
    "equal_tokens": (
        "equal tokens",
        "%",
        "Share of the longer answer's tokens that are equal, up to the first difference.",
    ),
    "top1_agreement": (
        "top-1 agreement",
        "%",
        "Share of the baseline's answer tokens at which the most likely token is the same.",
    ),
    "mean_kl": ("mean KL", "", "Mean KL from the baseline's next-token distribution along its answers, in nats."),
    "mean_logprob_change": (
        "logprob change",
        "",
        "Mean absolute change in the logprobs of the baseline's tokens, in nats.",
    ),
    "answer_perplexity": ("answer perplexity", "", "Perplexity of the answers that were given with the prompts."),
    "retention_perplexity": (
        "retention perplexity",
        "",
        "Perplexity of the texts on which a model should not get worse.",
    ),
    "weight_change": (
        "weight change",
        "",
        "Frobenius norm of the difference between the deltas, relative to the baseline's.",
    ),
}

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1a1d21; --dim: #5d6671; --line: #dfe3e8; --panel: #f6f7f9;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #7a6a00; --c5: #3a6fd8; --c6: #8a5a00; --c7: #555; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --fg: #e7eaee; --dim: #9aa5b1; --line: #2d343c;
  --panel: #1c2126; --c0: #56b4e9; --c1: #f0954a; --c2: #35c49a; --c3: #e39cc6; --c4: #e3cf4b; --c5: #8fb0ff;
  --c6: #d9a441; --c7: #b5b5b5; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } p, figcaption { color: var(--dim); }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .7rem; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--dim); font-weight: 600; }
figure { background: var(--panel); border-radius: 8px; margin: 1rem 0; padding: .8rem 1rem; }
figcaption { font-size: .9rem; } svg { display: block; width: 100%; max-width: 640px; }
svg text { fill: var(--fg); font: 12px system-ui, sans-serif; } svg .value { fill: var(--dim); font-size: 11px; }
svg .grid { stroke: var(--line); } svg polyline { fill: none; stroke-width: 2; } svg circle { fill-opacity: .75; }
.key { display: inline-flex; align-items: center; gap: .35rem; margin-right: 1rem; color: var(--fg); }
.key i { border-radius: 2px; display: inline-block; height: .75rem; width: .75rem; }
dl { background: var(--panel); border-radius: 8px; padding: .7rem 1rem; } dt { color: var(--dim); font-size: .85rem; }
dd { margin: 0 0 .5rem; overflow-wrap: anywhere; white-space: pre-wrap; } dd:last-child { margin: 0; }
"""


def to_html(comparison: Comparison, title: str) -> str:
    colours = "\n".join(
        f".s{i} {{ fill: var(--c{i}); }} .l{i} {{ stroke: var(--c{i}); }} "
        f".d{i} {{ fill: var(--c{i}); }} .k{i} {{ background: var(--c{i}); }}"
        for i in range(8)
    )
    others = [model for model in comparison.models if model.name != comparison.baseline]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{len(comparison.prompts)} prompts, greedy answers of at most {comparison.max_tokens} tokens. Baseline: "
        f"<b>{escape(comparison.baseline)}</b>. Distributions are compared over the {comparison.top_k} most likely "
        "tokens of both models. All other tokens count as one, so a KL is never overstated.</p>",
        _table(comparison),
        "<h2>Agreement with the baseline</h2>",
        _figure(
            svg.bars(
                [
                    (
                        model.name,
                        [
                            ("equal tokens", model.numbers()["equal_tokens"]),
                            ("top-1", model.numbers()["top1_agreement"]),
                        ],
                    )
                    for model in others
                ],
                whole=1.0,
                unit="%",
            ),
            "Share of equal tokens in free answers up to the first difference, and share of equal most likely tokens "
            "along the baseline's answers.",
            ["equal tokens", "top-1 agreement"],
        ),
        _figure(
            svg.lines(
                {m.name: _by_place(m) for m in others}, x_name="token of the baseline's answer", y_name="mean KL"
            ),
            "Mean KL in nats at each token of the answer, over the prompts whose answers are that long.",
            [model.name for model in others],
        ),
        _figure(
            svg.dots({m.name: _by_prompt(m) for m in others}, x_name="prompt", y_name="KL"),
            "Mean KL of each prompt, in the order of the prompts below.",
            [model.name for model in others],
        ),
        *_perplexities(comparison),
        "<h2>Answers</h2>",
        *_answers(comparison),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{colours}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def text_table(comparison: Comparison) -> str:
    """Formats the columns that were measured as a table for a terminal."""
    keys = _measured(comparison)
    rows = [["", *(COLUMNS[key][0] for key in keys)]]
    rows += [[model.name, *(_shown(model.numbers()[key], key) for key in keys)] for model in comparison.models]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def _measured(comparison: Comparison) -> list[str]:
    return [key for key in COLUMNS if any(model.numbers()[key] is not None for model in comparison.models)]


def _table(comparison: Comparison) -> str:
    keys = _measured(comparison)
    head = "".join(f'<th title="{escape(COLUMNS[key][2])}">{COLUMNS[key][0]}</th>' for key in keys)
    rows = "".join(
        f"<tr><td>{escape(model.name)}</td>"
        + "".join(f"<td>{_shown(model.numbers()[key], key)}</td>" for key in keys)
        + "</tr>"
        for model in comparison.models
    )
    return f"<table><thead><tr><th>model</th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _shown(value: float | None, key: str) -> str:
    return "–" if value is None else svg.number(value, COLUMNS[key][1])


def _figure(drawing: str, caption: str, names: Sequence[str]) -> str:
    keys = "".join(f'<span class="key"><i class="k{i % 8}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f"<figure>{drawing}<div>{keys}</div><figcaption>{escape(caption)}</figcaption></figure>"


def _by_place(model: ModelResult) -> list[tuple[float, float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for answer in model.answers:
        for i, place in enumerate(answer.places):
            found[i].append(place.kl)
    return [(float(i), sum(kls) / len(kls)) for i, kls in sorted(found.items())]


def _by_prompt(model: ModelResult) -> list[tuple[float, float]]:
    means = [(i, [place.kl for place in answer.places]) for i, answer in enumerate(model.answers, 1)]
    return [(float(i), sum(kls) / len(kls)) for i, kls in means if kls]


def _perplexities(comparison: Comparison) -> list[str]:
    parts = []
    for key in ("answer_perplexity", "retention_perplexity"):
        rows = [(model.name, [(COLUMNS[key][0], model.numbers()[key])]) for model in comparison.models]
        if any(value is not None for _, [(_, value)] in rows):
            parts.append(f"<h2>{COLUMNS[key][0].capitalize()}</h2>")
            parts.append(_figure(svg.bars(rows, whole=None, unit=""), f"{COLUMNS[key][2]} Lower is better.", []))
    return parts


def _answers(comparison: Comparison) -> list[str]:
    parts = []
    for i, prompt in enumerate(comparison.prompts[:MAX_PROMPTS_SHOWN]):
        shown = "".join(
            f"<dt>{escape(model.name)} · {model.answers[i].equal_share:.0%} equal</dt>"
            f"<dd>{escape(model.answers[i].text)}</dd>"
            for model in comparison.models
        )
        parts.append(f"<dl><dt>prompt {i + 1}</dt><dd><b>{escape(prompt)}</b></dd>{shown}</dl>")
    left_out = len(comparison.prompts) - MAX_PROMPTS_SHOWN
    if left_out > 0:
        parts.append(
            f"<p>{left_out} more prompts are included in the numbers above but not shown; --json lists all.</p>"
        )
    return parts
