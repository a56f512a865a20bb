"""One HTML page of runs, ended, still going or broken off: curves, schedule, step time, bytes, errors, settings.

    python tools/report.py runs/RUN_ID                       # writes runs/RUN_ID/report.html
    python tools/report.py runs/a runs/b --out both.html     # together: curves in one plot, settings that differ
    python tools/report.py records/track_cpu_3min/* --out records.html

A RUN is a run's folder, its name in runs/, or a record's folder, which holds a run of each seed; without --out the page
lies in the first one. Every number is of the log, result.json, the artifact or, for its error, the checkpoint of the
last step; what a run has not is left out and said.
Whatever number a script adds to the lines of its steps is drawn too. The page is one file. Needs matplotlib.
"""

import argparse
import ast
import contextlib
import html
import importlib.util
import io
import itertools
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
AXES = {"seconds": "seconds of training", "tokens": "tokens", "step": "steps"}
# A number in the lines of a script's steps -> heading, and what is drawn over all AXES; the rest is drawn over steps.
FAMILIES = {
    "train_loss": ("Pretraining", ("train_loss", "held-out val_loss", "held-out bpb")),
    "reward": ("Learning from rewards", ("reward", "held-out pass1")),
    "margin": ("Learning from pairs", ("loss", "held-out loss", "held-out accuracy")),
    "targets": ("Supervised fine-tuning", ("loss", "held-out loss", "held-out accuracy")),
}
NOT_DRAWN = set(
    "step seconds tokens lr_mul progress train_time step_avg tok_s train_tok_s gen_tok_s data_wait epoch "
    "passes targets sampler_gap bad".split()
)
UNITS = {
    "train_loss": "nats",
    "held-out val_loss": "nats",
    "clip_active": "share of tokens",
    "length": "tokens",
}
FIGURES = """script task objective val_bpb val_bpb_sliding val_bpb_stateful bpb_before_quantization val_loss bigram_bpb
    trigram_bpb zstd22_bpb xz_bpb artifact_bytes code_bytes total_bytes parameters steps tokens samples pairs
    tokens_per_second median_step_ms train_seconds total_seconds peak_memory_mib weights init_from seed hardware
    versions commit code_sha256 manifest_sha256 data_sha256""".split()  # names of result.json, or made of it
OUTLIER = 1.5  # medians: a stretch of steps that takes longer is marked
COLORS = "#2f7ed8 #e0731d #2ca25f #d6455d #8e6bd8 #a0703c #d85aa8 #1aa3b8 #9a9a1f #7a8793".split()
PARTS = "matrix embedding control coder header".split()  # of an artifact, see quantize.py
PAIR = re.compile(r"(?:^| )(\w+):(-?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))(?:ms|%)?(?= |$)")
TEXT = "#010203"  # becomes the page's own colour
STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "grid.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}
CSS = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2126; --soft: #5c6670; --line: #8885; --card: #f4f6f8 }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e6e9ec; --soft: #a2abb4; --card: #1d2226 } }
* { box-sizing: border-box } h1 { font-size: 1.6rem; margin: 24px 0 8px } h2 { font-size: 1.25rem; margin-top: 40px }
body { margin: auto; max-width: 1680px; padding: 0 clamp(12px, 2vw, 32px) 48px; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
p { margin: 6px 0; max-width: 90ch; color: var(--soft) } svg text { font-family: inherit !important }
ul { display: flex; gap: 2px 16px; list-style: none; margin: 0; padding: 0 6px 8px; font-size: .85rem; flex-wrap: wrap }
.runs { position: sticky; top: 0; z-index: 2; flex-wrap: nowrap; overflow-x: auto; padding: 8px 0; font-size: 1rem;
  background: var(--back); border-bottom: 1px solid var(--line); white-space: nowrap }
i { display: inline-block; width: 14px; height: 10px; margin-right: 6px; border-radius: 2px; background: var(--c) }
.plots { display: grid; gap: 12px; margin: 9px 0; grid-template-columns: repeat(auto-fit, minmax(min(100%,21em), 1fr)) }
figure { margin: 0; padding: 10px 10px 4px; background: var(--card); border-radius: 8px; min-width: 0; max-width: 45em }
figcaption { padding: 0 6px 4px } svg { display: block; width: 100%; height: auto }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%; border: 1px solid var(--line); border-radius: 8px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: break-word }
td { padding: 5px 12px; min-width: 14ch; max-width: 34ch; vertical-align: top; border-bottom: 1px solid var(--line) }
tr:last-child td { border-bottom: 0 } tr:first-child { font-weight: 600 } figure, table { font-size: .92rem }
td:first-child { position: sticky; left: 0; background: var(--back); color: var(--soft) }
"""


def read_log(path: Path) -> SimpleNamespace:
    """What a log says, of a run in any state; of steps that were made again after a resume, the last time counts.

    series: name -> [step, value, low, high] (without an interval all equal), of the numbers in the lines of steps and,
    as "held-out NAME", of scores, whose last is the artifact's if the run has `ended`; settings: NAME -> text;
    `changed`: those not the default; begun, planned: phase -> progress, its start, its end; weights: which were chosen;
    last: the last step logged or saved; batch: tokens or samples a step. SystemExit: not such a log, or without steps.
    """
    _, rule, text = path.read_text(encoding="utf-8", errors="replace").partition(
        "\n" + "=" * 120 + "\n"
    )
    if not rule:
        raise SystemExit(
            f"error: {path}: no log of these scripts, which has 120 '=' in a line after the source"
        )
    log = SimpleNamespace(
        series=defaultdict(list),
        settings={},
        changed=set(),
        begun={},
        planned={},
        machine={},
        events=[],
        weights="",
        last=0,
        batch=0,
        ended=False,
    )

    def add(step: int, values: dict | str, kind: str = "held-out ") -> None:
        if isinstance(values, str):  # a dict as the log has it
            values = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", values))
        for name, value in values.items():
            if (
                isinstance(value, float) or isinstance(value, list) and None not in value
            ):  # else a count
                points = log.series[kind + name]
                while points and points[-1][0] >= step:
                    points.pop()
                points.append([step, *(value if isinstance(value, list) else [value] * 3)])

    for line in text.split("\n")[:-1]:  # what follows the last newline was cut short
        values = {name: float(value) for name, value in PAIR.findall(line)}
        if "val_bpb" in values:
            values["bpb"] = values["val_bpb"]  # older logs say bpb
        scores = {name: values[name] for name in ("val_loss", "bpb") if name in values}
        if (found := re.match(r"step:(\d+)/", line)) and "train_time" in values and not scores:
            log.last = int(found[1])
            values = {
                name: value
                for name, value in values.items()
                if not re.fullmatch(r"clip_\w+_\d+", name)
            }
            add(
                log.last,
                {**values, "step": float(log.last), "seconds": values["train_time"] / 1000},
                "",
            )
        elif found := re.match(r"step:(\d+)(?:/\S+)? (?:saved|val_loss|held_out ({.*})$)", line):
            log.last = max(log.last, int(found[1]))
            add(int(found[1]), found[2] or scores)
        elif found := re.match(r"step:(\d+)/\S+ held_out/", line):
            log.last = max(log.last, int(found[1]))
            means = re.findall(r"held_out/(\w+):(\S+)", line)
            add(int(found[1]), {name: float(mean) for name, mean in means if name != "n"})
        elif (
            found := re.match("before: ({.*})$", line)
        ) and not log.last:  # a resumed run says it again
            add(0, found[1])
        elif line.startswith(("after: {", "from the artifact: val_loss:")):
            log.ended = True
            add(log.last, scores or line[7:])
        elif found := re.match(r"([* ]) ([A-Z][A-Z0-9_]*)=(.*)", line):
            log.settings[found[2]] = found[3]
            log.changed = log.changed | {found[2]} if found[1] == "*" else log.changed - {found[2]}
        elif found := re.match(r"plan: (\w+) from \S+% to (\S+)% of", line):
            log.planned[found[1]] = float(found[2]) / 100
        elif found := re.match(r"phase: (\w+) begins at step \d+, (\S+)% of", line):
            log.begun[found[1]] = float(found[2]) / 100
        elif found := re.match(r"weights: (\w+) chosen", line):
            log.weights = found[1]
        elif found := re.match(
            r"batch: (?:(\d+) tokens a step|a step is (\d+) prompts x (\d+) samples)", line
        ):
            log.batch = int(found[1] or int(found[2]) * int(found[3]))
        elif found := re.match(
            r"commit:(\S+) hardware:(.*) versions:({.*}) peak_memory_mib:", line
        ):
            log.machine = {
                "commit": found[1],
                "hardware": found[2],
                "versions": ast.literal_eval(found[3]),
            }
        elif line.startswith(("event: ", "error: ")):
            log.events.append(line)
    log.series = dict(log.series)
    if "seconds" not in log.series:
        raise SystemExit(f"error: {path}: no step is logged, so there is nothing to draw")
    return log


def find_runs(name: str) -> list[tuple[Path, Path, dict]]:
    """Log, artifact and result ({}: none) of a run, by folder or name, or of each seed of a record. SystemExit."""
    folder = next((path for path in (Path(name), Path("runs", name)) if path.is_dir()), None)
    if folder is None:
        raise SystemExit(
            f"error: {name}: no such run; must be a run's folder, its name in runs/, or a record's folder"
        )
    path = folder / "result.json"
    result = json.loads(path.read_bytes()) if path.is_file() else {}
    if (folder / "log.txt").is_file():
        return [(folder / "log.txt", folder / "model.upar", result)]
    seeds = [(folder / f"seed_{own['seed']}", {**result, **own}) for own in result.get("seeds", [])]
    if not seeds:
        raise SystemExit(
            f"error: {folder}: no log.txt in it; must be the folder of a run, runs/<RUN_ID>, or a record"
        )
    return [(path.with_suffix(".txt"), path.with_suffix(".upar"), own) for path, own in seeds]


def read_run(path: Path, artifact: Path, result: dict) -> SimpleNamespace:
    """A run: folder, artifact (its path), log (see read_log), result, notes; and read_artifact's. SystemExit."""
    log, folder = read_log(path), path.parent
    name = folder.resolve().name
    if path.stem != "log":  # a record's: <date>_<Name>, seed_<n>
        name = f"{name.partition('_')[2]} {path.stem.replace('_', ' ')}"
    family = next(
        (key for key in FAMILIES if {key, "lr_mul", "progress"} <= log.series.keys()), None
    )
    if family is None:
        raise SystemExit(
            f"error: {folder}: no log of a training script: has not lr_mul, progress and one of "
            + ", ".join(FAMILIES)
        )
    each = result["tokens"] / result["steps"] if family == "targets" and result else log.batch
    if each and family != "margin":  # train_dpo.py does not say how many
        steps, lengths = np.array(
            [point[:2] for point in log.series["length" if family == "reward" else "step"]]
        ).T
        # of samples the mean length is that of the logged step, for those since the one before too
        tokens = np.cumsum(
            np.diff(steps, prepend=0) * each * (lengths if family == "reward" else 1)
        )
        log.series["tokens"] = [
            [step, *[total] * 3] for step, total in zip(steps, tokens.tolist(), strict=True)
        ]
    last = f"the last step in its log is {log.last}, {log.series['progress'][-1][1]:.0%} of the run"
    notes = [] if result else [f"has not ended, or ended early: no result.json; {last}"]
    return SimpleNamespace(
        name=name,
        folder=folder,
        artifact=artifact,
        log=log,
        result=result,
        family=family,
        notes=notes,
        bytes={},
        errors={},
    )


def along(log: SimpleNamespace, steps: list[int], axis: str) -> np.ndarray:
    """Where the ends of steps lie on an axis: in straight lines between logged steps, after the last at its mean."""
    x, y = zip((0, 0), *(point[:2] for point in log.series[axis]), strict=True)
    return np.interp(steps, [*x, 1e6 * x[-1]], [*y, 1e6 * y[-1]])


def spans(log: SimpleNamespace) -> dict[str, tuple[float, float]]:
    """Phase -> the shares of the run between which it was on, as far as the log goes."""
    last = 1.0 if log.ended else log.series["progress"][-1][1]
    return {
        name: (begin, max(begin, min(log.planned.get(name, 1.0), last)))
        for name, begin in log.begun.items()
    }


def step_times(
    log: SimpleNamespace,
) -> tuple[list[tuple[int, float]], float, list[tuple[int, float]]]:
    """(step, milliseconds a step since the logged step before), their median, and those of over OUTLIER medians."""
    pairs = itertools.pairwise([[0, 0.0], *log.series["train_time"]])
    times = [(b[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in pairs]
    median = statistics.median(time for _, time in times)
    return times, median, [pair for pair in times if pair[1] > OUTLIER * median]


def read_artifact(run: SimpleNamespace, Q: ModuleType) -> None:
    """Fill `bytes`, by part of the file, and `errors`, by layer; what cannot be is a note. Q: quantize.py."""
    path = run.artifact
    try:
        source = Q.read_weights(str(path))
    except (Q.UserError, Q.ArtifactError) as fault:
        run.notes.append(f"artifact: {fault}")
        return
    sums = Counter()
    for record in source.header["streams"]:
        sums[record["class"]] += record["length"]
    sums["header"] = path.stat().st_size - sums.total()
    run.bytes, layers = dict(sums), defaultdict(list)
    for name in source.coded:
        found = re.match(r"(?:mixers|blocks)\.(\d+)\.", name)
        layers[f"layer {found[1]}" if found else name].append(name)
    if path.name != "model.upar":  # a record's, which has no checkpoints
        return
    try:
        model = Q.read_weights(str(run.folder), run.log.weights or "raw")
        model.tensors = {
            name: own for name, own in model.tensors.items() if name in source.tensors
        }  # without a critic
        Q.match_tensors(model, source)
        Q.require(model.run["steps"] == run.log.last, f"{model.path} is not of step {run.log.last}")
    except (Q.UserError, Q.ArtifactError) as fault:
        run.notes.append(
            f"no quantization error, for the weights from before it are not at hand: {fault}"
        )
        return
    for layer, names in layers.items():
        pair = (
            SimpleNamespace(path=each.path, tensors={name: each.tensors[name] for name in names})
            for each in (model, source)
        )
        run.errors[layer] = Q.distances(*pair)[-1][2]


def show(value: object) -> str:
    """A value as text: numbers short, an interval after its mean, what is missing as a dash."""
    if isinstance(value, list) and len(value) == 3:
        return show(value[0]) + (
            f" [{show(value[1])}, {show(value[2])}]" if value[1] != value[2] else ""
        )
    if isinstance(value, float):
        return (
            f"{value:,.0f}"
            if abs(value) >= 1e4
            else f"{value:.4g}"
            if abs(value) < 1
            else f"{value:.5g}"
        )
    if type(value) is int and value >= 10000:
        return f"{value:,}"
    return (
        "–" if value is None else re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b", r"\1", str(value))
    )  # hashes


def table(runs: list[SimpleNamespace], columns: list[dict]) -> str:
    """HTML of dicts, one a run, side by side in a box in which they scroll; what none of them has is no row."""
    rows = [
        [name, *(column.get(name) for column in columns)]
        for name in dict.fromkeys(itertools.chain(*columns))
    ]
    lines = [
        ["", *(run.name for run in runs)],
        *(row for row in rows if any(cell is not None for cell in row[1:])),
    ]
    cells = (("".join(f"<td>{html.escape(show(cell))}</td>" for cell in line)) for line in lines)
    return f'<div class="scroll"><table>{"".join(f"<tr>{each}</tr>" for each in cells)}</table></div>\n'


def key(colors: dict[str, str], kind: str = "key") -> str:
    """HTML of what the colours mean."""
    items = (
        f'<li><i style="--c:{color}"></i>{html.escape(name)}</li>' for name, color in colors.items()
    )
    return f'<ul class="{kind}">{"".join(items)}</ul>\n'


@contextlib.contextmanager
def plot(
    page: list[str], title: str, xlabel: str, colors: dict[str, str] | None = None
) -> Iterator:
    """Axes of matplotlib to draw on; then the figure, with a key to `colors`, is in the page as SVG."""
    import matplotlib.figure
    import matplotlib.ticker

    with matplotlib.rc_context(
        {**STYLE, "svg.hashsalt": f"{len(page)} {title}"}
    ):  # so an id stands once in the page
        figure = matplotlib.figure.Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = figure.add_subplot(xlabel=xlabel)
        axes.locator_params(axis="x", nbins=6)
        if xlabel in ("tokens", "bytes"):
            axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        yield axes
        figure.savefig(
            out := io.StringIO(),
            format="svg",
            transparent=True,
            metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")),
        )
    svg = out.getvalue()[out.getvalue().index("<svg") :].replace(TEXT, "currentColor")
    svg = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", svg)  # group ids repeat from figure to figure
    page.append(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}{key(colors or {})}</figure>\n"
    )


def draw_series(page: list[str], runs: list[SimpleNamespace], name: str, axis: str) -> None:
    """One series of all runs; where a run has ended, a diamond for its artifact."""
    with plot(page, f"{name}, {UNITS[name]}" if name in UNITS else name, AXES[axis]) as axes:
        late = []  # what comes after the first tenth, in which a loss falls from where it starts
        for run in runs:
            if name in run.log.series and axis in run.log.series:
                steps, value, low, high = zip(*run.log.series[name], strict=True)
                x = along(run.log, steps, axis)
                axes.plot(
                    x, value, color=run.color, linewidth=1.6, marker="." if len(x) < 60 else ""
                )
                if low != high:
                    axes.fill_between(x, low, high, color=run.color, alpha=0.15, linewidth=0)
                if name.startswith("held-out ") and run.log.ended:
                    axes.plot(x[-1], value[-1], color=run.color, marker="D")
                late += [
                    y
                    for at, *ys in zip(x, low, high, strict=True)
                    for y in ys
                    if at > x[-1] / 10 and y - y == 0
                ]
        axes.set_xlim(left=0)
        if name.endswith("loss") and len(late) >= 20:
            room = 0.05 * (max(late) - min(late)) + 1e-6
            axes.set_ylim(min(late) - room, max(late) + room)


def draw_run(page: list[str], run: SimpleNamespace) -> None:
    """Multiplier of the learning rate over the run with its phases, and the milliseconds of its steps."""
    phases = spans(run.log)
    colors = dict(zip(phases, COLORS, strict=False))
    progress, rates = (
        [point[1] for point in run.log.series[name]] for name in ("progress", "lr_mul")
    )
    with plot(
        page, f"{run.name}: learning-rate multiplier and phases", "share of the run, %", colors
    ) as axes:
        axes.plot(
            [100 * each for each in progress],
            rates,
            color=TEXT,
            marker="." if len(rates) < 60 else "",
        )
        for at, (name, span) in enumerate(phases.items()):
            axes.axvspan(
                *(100 * each for each in span), color=colors[name], alpha=0.13, linewidth=1
            )
            axes.plot(
                [100 * each for each in span],
                [1.08 + 0.06 * at] * 2,
                color=colors[name],
                linewidth=4,
            )
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    times, median, slow = step_times(run.log)
    title = f"{run.name}: step time, ms; median {median:.4g}; {len(slow)} of {len(times)} over {OUTLIER} medians"
    with plot(page, title, AXES["step"]) as axes:
        axes.plot(
            *zip(*times, strict=True),
            color=run.color,
            linewidth=1,
            marker="." if len(times) < 60 else "",
        )
        axes.axhline(median, color=TEXT, linewidth=1, linestyle="--")
        axes.plot([step for step, _ in slow], [time for _, time in slow], "o", color="#d62728")
        axes.set_ylim(bottom=0)


def draw_artifacts(page: list[str], runs: list[SimpleNamespace]) -> None:
    """What the artifacts' bytes are, and how far their weights are from those of training."""
    colors = dict(zip(PARTS, COLORS, strict=False))
    page.append('<h2>Artifact</h2>\n<div class="plots">')
    with plot(
        page, "Bytes of the artifact by tensor class and part of the file", "bytes", colors
    ) as axes:
        axes.figure.set_figheight(max(1.5, 0.8 + 0.3 * len(runs)))
        for at, run in enumerate(runs):
            ends = np.cumsum([0, *(run.bytes.get(part, 0) for part in PARTS)])
            axes.barh([at] * len(PARTS), np.diff(ends), 0.6, ends[:-1], color=list(colors.values()))
        axes.set_yticks(
            range(len(runs)),
            [run.name if len(run.name) <= 16 else f"{run.name[:15]}…" for run in runs],
        )
        axes.set_ylim(len(runs) - 0.4, -0.6)
    if any(run.errors for run in runs):
        title = "Error of quantized weights by layer: ‖artifact − checkpoint‖ / ‖checkpoint‖"
        with plot(page, title, "") as axes:
            for run in runs:
                axes.plot(
                    list(run.errors),
                    list(run.errors.values()),
                    color=run.color,
                    marker="o",
                    markersize=4,
                )
            axes.tick_params(
                axis="x", rotation=90 if max(len(run.errors) for run in runs) > 6 else 0
            )
            axes.set_ylim(bottom=0)
    page.append("</div>\n")
    page.append(
        table(
            runs,
            [
                {
                    part: f"{size:,} ({size / sum(run.bytes.values()):.1%})"
                    for part, size in (*run.bytes.items(), ("all", sum(run.bytes.values())))
                }
                for run in runs
            ],
        )
    )


def facts(run: SimpleNamespace) -> dict[str, object]:
    """Rows of the table of results, label -> value; of a run that has not ended what its log says."""
    log, last = run.log, {name: points[-1][1] for name, points in run.log.series.items()}
    found = {"steps": log.last, "train_seconds": last["seconds"], "tokens": last.get("tokens")}
    found |= {**log.machine, **run.result}
    found |= {
        "bpb_before_quantization": found.get("before_quantization", {}).get("val_bpb"),
        "parameters": found.get("params", {}).get("total"),
        "median_step_ms": step_times(log)[1],
        "tokens_per_second": last["tokens"] / last["seconds"] if "tokens" in last else None,
        "versions": " ".join(
            f"{name} {each}" for name, each in found.get("versions", {}).items() if each
        ),
    }
    rows = {name: found.get(name) for name in FIGURES}
    for name, points in log.series.items():
        if name.startswith("held-out "):
            rows[name] = " → ".join(show(score) for _, *score in (points[:1] + points[1:][-1:]))
    for name, begin in log.begun.items():
        phase = found.get("phases", {}).get(name)
        if phase is None:
            rows[f"phase {name}"] = f"began at {begin:.1%}"
        else:
            planned = (
                phase["planned"] if "planned" in phase else phase["begin"]
            )  # older results have "planned"
            rows[f"phase {name}"] = (
                f"planned {planned:.1%}, from step {phase['start_step']} for {phase['steps']} steps"
            )
    return {**rows, "events": "; ".join(log.events) or None}


def settings(runs: list[SimpleNamespace]) -> list[dict[str, str]]:
    """Of each run the settings that are not the default in all; of several runs those in which they differ."""
    names = sorted(
        set().union(*(run.log.changed for run in runs)) - {"RUN_ID", "OUT_DIR", "RESUME", "CONFIG"}
    )
    differ = [
        name
        for name in names
        if len(runs) == 1 or len({run.log.settings.get(name) for run in runs}) > 1
    ]
    return [{name: run.log.settings.get(name) for name in differ} for run in runs]


def render(runs: list[SimpleNamespace]) -> str:
    """The page."""
    title = html.escape(
        ", ".join(run.name for run in runs) if len(runs) < 6 else f"{len(runs)} runs"
    )
    page = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head><body>\n<h1>{title}</h1>\n"
    ]
    page += [f"<p>{html.escape(f'{run.name}: {note}')}</p>\n" for run in runs for note in run.notes]
    if len({run.result["manifest_sha256"] for run in runs if "manifest_sha256" in run.result}) > 1:
        page.append(
            "<p>The validation data of these runs differ: their bits per byte cannot be compared.</p>\n"
        )
    page.append(
        key({run.name: run.color for run in runs}, "runs")
        + "<p>Diamonds: the model that was read back from the artifact. Bands: 95% intervals.</p>\n"
    )
    page.append("<h2>Results</h2>\n" + table(runs, [facts(run) for run in runs]))
    for family, (heading, chief) in FAMILIES.items():
        own = [run for run in runs if run.family == family]
        rest = dict.fromkeys(
            name for run in own for name in run.log.series if name not in {*chief, *NOT_DRAWN}
        )
        page.append(f"<h2>{heading}</h2>\n" if own else "")
        for names, axes in (*(((name,), AXES) for name in chief), (rest, ("step",))):
            pairs = [
                (name, axis)
                for name in names
                for axis in axes
                if any(name in run.log.series and axis in run.log.series for run in own)
            ]
            page.append('<div class="plots">' if pairs else "")
            for name, axis in pairs:
                draw_series(page, own, name, axis)
            page.append("</div>\n" if pairs else "")
    page.append('<h2>Schedule and step time</h2>\n<div class="plots">')
    for run in runs:
        draw_run(page, run)
    page.append(
        "</div>\n<p>Step times are means of the steps from one logged line to the next.</p>\n"
    )
    if held := [run for run in runs if run.bytes]:
        draw_artifacts(page, held)
    page.append(
        f"<h2>Settings {'in which the runs differ' if len(runs) > 1 else 'that are not the default'}</h2>\n"
    )
    return "".join([*page, table(runs, settings(runs)), "</body></html>\n"])


def main() -> None:
    """Write the page; its path and size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a run, its name in runs/, or a record"
    )
    parser.add_argument(
        "--out", type=Path, help="the page; else report.html in the first run's folder"
    )
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit(
            "error: matplotlib, which draws the plots, is not installed: pip install matplotlib"
        )
    runs = [read_run(*found) for name in dict.fromkeys(args.runs) for found in find_runs(name)]
    names = Counter(run.name for run in runs)
    for number, run in enumerate(runs):
        run.name, run.color = (
            run.name if names[run.name] == 1 else str(run.folder),
            COLORS[number % len(COLORS)],
        )
        if run.artifact.is_file():
            sys.path.insert(0, str(ROOT))
            read_artifact(run, importlib.import_module("quantize"))
    page, out = render(runs), args.out or runs[0].folder / "report.html"
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"error: {out}: cannot be written: {error.strerror}") from None
    print(
        f"{out}: {out.stat().st_size} bytes, {page.count('<svg')} plots of {len(runs)} run{'s' * (len(runs) > 1)}"
    )


if __name__ == "__main__":
    main()
