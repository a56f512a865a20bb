"""Write one HTML page of runs: results, curves, schedule, step time, artifact, settings.

    python tools/report.py runs/RUN_ID                       # writes runs/RUN_ID/report.html
    python tools/report.py runs/a runs/b --out both.html     # together: curves in one plot, settings that differ
    python tools/report.py records/track_cpu_3min/*/ --out records.html

A RUN is a run's folder, its name in runs/, or the folder of a record, which has a run for each seed.
Runs may have ended, be in progress or have been interrupted. Without --out the page is written into
the first one. All numbers come from metrics.jsonl, which has every step, the log (alone for runs
without that file), result.json, the artifact and, for quantization errors, the last checkpoint; the
page says what is missing. Every number of a step is drawn unless it never changes. Of runs with
samples.jsonl the page has a table of answers from the first to the last step, with their rewards.
The page is one file without outside resources. Needs matplotlib.
"""

import argparse
import ast
import contextlib
import html
import importlib.util
import io
import itertools
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
from common import ROOT, load_script
from endings import run_tool

AXES = {"seconds": "seconds of training", "tokens": "tokens", "step": "steps"}
SAMPLE_COLUMNS = "prompt wanted step run completion ended reward".split() + [
    "by function",
    "advantage",
]
SAMPLE_STEPS = 5  # of those with answers in samples.jsonl, whose answers the page has


@dataclass
class Family:
    """A kind of training."""

    heading: str
    main_series: tuple[str, ...]  # drawn over all AXES; other numbers are drawn over steps
    first_series: tuple[str, ...] = ()  # how the names begin of those that are drawn before others


# The number in a script's step lines that identifies the kind of training -> that kind.
FAMILIES = {
    "train_loss": Family("Pretraining", ("train_loss", "held-out val_loss", "held-out bpb")),
    "reward": Family(
        "Learning from rewards",
        ("reward", "held-out pass1"),
        ("rewards/", "held-out rewards/", "length", "finished", "entropy"),
    ),
    "margin": Family("Learning from pairs", ("loss", "held-out loss", "held-out accuracy")),
    "targets": Family("Supervised fine-tuning", ("loss", "held-out loss", "held-out accuracy")),
}
NOT_DRAWN = set(
    "step seconds tokens lr_mul progress train_time step_avg tok_s train_tok_s gen_tok_s data_wait "
    "epoch passes targets sampler_gap bad".split()
)
UNITS = {
    "train_loss": "nats",
    "held-out val_loss": "nats",
    "clip_active": "share of tokens",
    "length": "tokens",
}
# Rows of the table of results: names in result.json, or made from it.
RESULTS = (
    "script task objective val_bpb val_bpb_sliding val_bpb_stateful val_bpb_ttt val_bpb_ttt_off "
    "bpb_before_quantization val_loss bigram_bpb trigram_bpb zstd22_bpb xz_bpb artifact_bytes code_bytes "
    "total_bytes parameters steps tokens samples pairs tokens_per_second median_step_ms train_seconds "
    "total_seconds peak_memory_mib weights init_from seed hardware versions commit code_sha256 "
    "manifest_sha256 data_sha256"
).split()
OUTLIER = 1.5  # a stretch of steps that takes longer than this many medians is marked
COLORS = "#2f7ed8 #e0731d #2ca25f #d6455d #8e6bd8 #a0703c #d85aa8 #1aa3b8 #9a9a1f #7a8793".split()
PARTS = "matrix embedding control coder header".split()  # of an artifact, see quantize.py
SCORE = r"-?\d+\.\d+|nan"  # in the table of scores
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
    **dict.fromkeys(("grid.color", "axes.edgecolor", "axes.labelcolor", "text.color"), TEXT),
    **dict.fromkeys(("xtick.color", "ytick.color"), TEXT),
}
CSS = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2126; --soft: #5c6670; --line: #8885; --card: #f4f6f8 }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e6e9ec; --soft: #a2abb4; --card: #1d2226 } }
* { box-sizing: border-box } h1 { font-size: 1.6rem; margin: 24px 0 8px } h2 { font-size: 1.25rem; margin-top: 40px }
h3 { font-size: 1rem; margin: 18px 0 6px }
body { margin: auto; max-width: 1680px; padding: 0 clamp(12px, 2vw, 32px) 48px; background: var(--back);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
p { margin: 6px 0; max-width: 90ch; color: var(--soft) } svg text { font-family: inherit !important }
ul { display: flex; gap: 2px 16px; list-style: none; margin: 0; padding: 0 6px 8px; font-size: .85rem; flex-wrap: wrap }
.texts td { max-width: 60ch }
.runs { position: sticky; top: 0; z-index: 2; flex-wrap: nowrap; overflow-x: auto; padding: 8px 0; font-size: 1rem;
  background: var(--back); border-bottom: 1px solid var(--line); white-space: nowrap }
i { display: inline-block; width: 14px; height: 10px; margin-right: 6px; border-radius: 2px; background: var(--c) }
.plots { display: grid; gap: 12px; margin: 9px 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%,21em), 1fr)) }
figure { margin: 0; padding: 10px 10px 4px; background: var(--card); border-radius: 8px; min-width: 0; max-width: 45em }
figcaption { padding: 0 6px 4px } svg { display: block; width: 100%; height: auto }
.scroll { overflow-x: auto; width: fit-content; max-width: 100%; border: 1px solid var(--line); border-radius: 8px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: break-word }
td { padding: 5px 12px; min-width: 14ch; max-width: 34ch; vertical-align: top; border-bottom: 1px solid var(--line) }
tr:last-child td { border-bottom: 0 } tr:first-child { font-weight: 600 } figure, table { font-size: .92rem }
details { margin: 9px 0 } summary { cursor: pointer; color: var(--soft) }
td:first-child { position: sticky; left: 0; background: var(--back); color: var(--soft) }
"""


@dataclass
class Point:
    """A number at a step, with an interval if there is one (otherwise low = value = high)."""

    step: int
    value: float
    low: float
    high: float


@dataclass
class Log:
    """What a log says of a run in any state. Of steps made again after a resume the last counts."""

    series: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    settings: dict[str, str] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)  # settings that are not the default
    planned: dict[str, float] = field(default_factory=dict)  # phase -> progress at its end
    begun: dict[str, float] = field(default_factory=dict)  # phase -> progress at its start
    machine: dict = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    last: int = 0  # the last step that is logged or saved
    batch: int = 0  # tokens of a step
    columns: list[str] = field(default_factory=list)  # of the table of scores
    ended: bool = False  # then the last held-out scores are the artifact's
    train_seconds: float = 0.0  # on the clock at the end, 0 if the run has not ended

    def add(self, name: str, step: int, value: float | list[float]) -> None:
        """Add a number, or [mean, low, high], in place of those of this and later steps."""
        points = self.series[name]
        while points and points[-1].step >= step:
            points.pop()
        interval = value if isinstance(value, list) else [value] * 3
        points.append(Point(step, *interval))

    def add_scores(self, step: int, text: str) -> None:
        """Add held-out scores, a dictionary as the log prints it. Counts and nan are left out."""
        scores = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", text))
        for name, score in scores.items():
            is_interval = isinstance(score, list) and None not in score
            if is_interval or isinstance(score, float):
                self.add(f"held-out {name}", step, score)

    def read_table(self, line: str) -> None:
        """Add held-out scores of a line of the table: titles, or a name and means with intervals."""
        name, *titles = line.split()
        if name == "before":
            self.columns = [name, *titles]
            return
        scores = re.findall(rf"({SCORE}) \[({SCORE}), ({SCORE})\]", line)
        cells = dict(zip(self.columns, scores, strict=False))
        if "before" in cells and not self.last:  # a resumed run prints it again
            self.add(f"held-out {name}", 0, list(map(float, cells["before"])))
        if "after" in cells:
            self.ended = True
            self.add(f"held-out {name}", self.last, list(map(float, cells["after"])))


@dataclass
class Run:
    """A run that is drawn."""

    name: str
    folder: Path
    artifact: Path
    log: Log
    result: dict  # {} if the run has not ended
    family: str
    color: str = ""
    notes: list[str] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=dict)  # of the artifact by part
    streams: list[dict] = field(default_factory=list)  # of the artifact, one per tensor
    errors: dict[str, float] = field(default_factory=dict)  # of quantization by layer
    samples: list[dict] = field(default_factory=list)  # rows of samples.jsonl


# ------------------------------------------------------------------------------------------ reading
def add_numbers(log: Log, step: int, numbers: dict[str, float]) -> bool:
    """Add the numbers of a step, trained or scored; return whether it was one of these."""
    if "val_bpb" in numbers:
        numbers["bpb"] = numbers["val_bpb"]  # logs before the rewrite say bpb
    held_out = [name for name in numbers if name.startswith("held_out/")]
    if "val_loss" in numbers:
        log.add("held-out val_loss", step, numbers["val_loss"])
        log.add("held-out bpb", step, numbers["bpb"])
    elif "train_time" in numbers:
        for name, value in numbers.items():
            if not re.fullmatch(r"clip_\w+_\d+", name):  # those of a mini-batch
                log.add(name, step, value)
        log.add("step", step, float(step))
        log.add("seconds", step, numbers["train_time"] / 1000)
    for name in held_out:
        if name != "held_out/n":
            log.add(name.replace("held_out/", "held-out "), step, numbers[name])
    return bool(held_out) or "val_loss" in numbers or "train_time" in numbers


def read_step_line(log: Log, step: int, line: str) -> None:
    """Read a line that begins with step:N."""
    numbers = {name: float(value) for name, value in PAIR.findall(line)}
    held_out = re.findall(r"(held_out/\w+):(\S+)", line)
    numbers |= {name: float(value) for name, value in held_out}
    if add_numbers(log, step, numbers) and "train_time" in numbers:
        log.last = step  # a resumed run may log earlier steps again
    elif numbers or " saved" in line:  # else a line that was cut short
        log.last = max(log.last, step)


def read_metrics(log: Log, path: Path) -> None:
    """Add the numbers of metrics.jsonl to those of a log. Raises SystemExit for another file.

    It has every step. The log alone has the intervals of scores.
    """
    from_lines = log.series
    log.series = defaultdict(list)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines[:-1], 1):  # the rest was cut short
        try:
            numbers = json.loads(line)
            step = numbers.pop("step")
            values = {
                name: math.nan if value is None else float(value) for name, value in numbers.items()
            }
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise SystemExit(
                f"error: {path}:{number}: must be a JSON object of a step and numbers: {error!r:.99}"
            ) from None
        add_numbers(log, step, values)
        log.last = step
    for name, points in from_lines.items():
        steps = {point.step: point for point in points}
        for point in log.series[name]:
            if point.step not in steps or not name.startswith("held-out "):
                steps[point.step] = point
        log.series[name] = [steps[step] for step in sorted(steps)]


def read_line(log: Log, line: str) -> None:
    """Read a line of a log."""
    if match := re.match(r"step:(\d+)[ /]", line):
        read_step_line(log, int(match[1]), line)
    elif re.match(rf" +(before[\w ]*$|\w+ .*({SCORE}) \[)", line):
        log.read_table(line)
    elif match := re.match(r"before: ({.*})$", line):
        if not log.last:  # a resumed run prints it again
            log.add_scores(0, match[1])
    elif match := re.match(r"after: ({.*})$", line):
        log.ended = True
        log.add_scores(log.last, match[1])
    elif match := re.match(r"from the artifact: val_loss:(\S+) bpb:(\S+)", line):
        log.ended = True
        log.add("held-out val_loss", log.last, float(match[1]))
        log.add("held-out bpb", log.last, float(match[2]))
    elif match := re.match(r"([* ]) ([A-Z][A-Z0-9_]*)=(.*)", line):
        mark, name, value = match.groups()
        log.settings[name] = value
        log.changed.discard(name)
        if mark == "*":
            log.changed.add(name)
        if name == "TRAIN_BATCH_TOKENS":
            log.batch = int(value)
    elif match := re.match(r"plan: (\w+) from \S+% to (\S+)% of", line):
        log.planned[match[1]] = float(match[2]) / 100
    elif match := re.match(r"phase: (\w+) begins at step \d+, (\S+)% of", line):
        log.begun[match[1]] = float(match[2]) / 100
    elif match := re.match(r"commit:(\S+) hardware:(.*) versions:({.*}) peak_memory_mib:", line):
        versions = ast.literal_eval(match[3])
        log.machine = {"commit": match[1], "hardware": match[2], "versions": versions}
    elif match := re.match(r"train_seconds: (\S+)", line):
        log.train_seconds = float(match[1])
    elif line.startswith(("event: ", "error: ")):
        log.events.append(line)


def read_log(path: Path) -> Log:
    """Return what a log says. Raises SystemExit if it is no such log, or without steps."""
    text = path.read_text(encoding="utf-8", errors="replace")
    _, rule, text = text.partition("\n" + "=" * 120 + "\n")
    if not rule:
        raise SystemExit(
            f"error: {path}: no log of these scripts, which has a line of 120 '=' after the source"
        )
    log = Log()
    for line in text.split("\n")[:-1]:  # what follows the last newline was cut short
        read_line(log, line)
    metrics = path.with_name("metrics.jsonl")
    if path.name == "log.txt" and metrics.is_file():
        read_metrics(log, metrics)
    if "seconds" not in log.series:
        raise SystemExit(f"error: {path}: no step is logged, so there is nothing to draw")
    return log


def read_result(path: Path) -> dict:
    """Return result.json of a run or a record. Raises SystemExit for what no script writes."""
    try:
        result = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"error: {path}: no JSON: {error}") from None
    if not isinstance(result, dict):
        raise SystemExit(f"error: {path}: must be a JSON object, not {result!r:.60}")
    kinds = {
        **dict.fromkeys(("before", "after", "gain", "phases", "params"), dict),
        **dict.fromkeys(("tokens", "train_seconds", "total_seconds"), int | float),
        "before_quantization": dict,
        "steps": int,
        "seeds": list,
    }
    for key, kind in kinds.items():
        if key in result and not isinstance(result[key], kind):
            raise SystemExit(f"error: {path}: was changed: its {key!r} is {result[key]!r:.60}")
    parts = [*result.get("phases", {}).values(), *result.get("seeds", [])]
    if not all(isinstance(part, dict) for part in parts):
        raise SystemExit(f"error: {path}: was changed: a phase or a seed is no object")
    return result


def find_runs(name: str) -> list[Run]:
    """Return a run, by folder or name, or the run of each seed of a record. Raises SystemExit."""
    folder = next((path for path in (Path(name), Path("runs", name)) if path.is_dir()), None)
    if folder is None:
        raise SystemExit(
            f"error: {name}: no such run; must be a run's folder, its name in runs/, or a record's "
            "folder"
        )
    path = folder / "result.json"
    result = read_result(path) if path.is_file() else {}
    if (folder / "log.txt").is_file():
        return [read_run(folder / "log.txt", folder / "model.upar", result)]
    runs = []
    for seed in result.get("seeds", []):
        path = folder / f"seed_{seed['seed']}.txt"
        if not path.is_file():
            raise SystemExit(f"error: {path}: no such file; must be a log that result.json names")
        runs.append(read_run(path, path.with_suffix(".upar"), {**result, **seed}))
    if not runs:
        raise SystemExit(
            f"error: {folder}: no log.txt in it; must be the folder of a run, runs/<RUN_ID>, or a "
            "record"
        )
    return runs


def read_run(path: Path, artifact: Path, result: dict) -> Run:
    """Return a run by its log, the path of its artifact and its result. Raises SystemExit."""
    log = read_log(path)
    folder = path.parent
    name = folder.resolve().name
    if path.stem != "log":  # a record's: <date>_<Name>, seed_<n>
        name = f"{name.partition('_')[2]} {path.stem.replace('_', ' ')}"
    families = [key for key in FAMILIES if {key, "lr_mul", "progress"} <= log.series.keys()]
    if not families:
        raise SystemExit(
            f"error: {folder}: no log of a training script, which has lr_mul, progress and one of "
            + ", ".join(FAMILIES)
        )
    run = Run(name, folder, artifact, log, result, families[0])
    read_samples(run)
    if run.family == "train_loss" and log.batch:
        for step in [int(point.value) for point in log.series["step"]]:
            log.add("tokens", step, float(step * log.batch))
    if not result:
        progress = log.series["progress"][-1].value
        run.notes.append(
            "has not ended, or ended early: no result.json; the last step in its log is "
            f"{log.last}, {progress:.0%} of the run"
        )
    return run


def positions(log: Log, steps: list[int], axis: str) -> np.ndarray:
    """Return where the ends of steps are on an axis: on straight lines between logged steps.

    Without metrics.jsonl, a run has its first five steps and then one every ten seconds. A run that
    has ended ends where its clock stopped, which includes choosing weights; of others the steps
    after the last known one take its mean.
    """
    x = [0.0]
    y = [0.0]
    for point in log.series[axis]:
        x.append(point.step)
        y.append(point.value)
    if axis == "seconds" and log.ended and log.train_seconds and log.last > x[-1]:
        x.append(log.last)
        y.append(log.train_seconds)
    return np.interp(steps, [*x, 1e6 * x[-1]], [*y, 1e6 * y[-1]])


@dataclass
class Span:
    """The part of a run in which a phase was on, as shares of the run."""

    begin: float
    end: float


def phase_spans(log: Log) -> dict[str, Span]:
    """Return when each phase was on, as far as the log goes."""
    last = 1.0 if log.ended else log.series["progress"][-1].value
    spans = {}
    for name, begin in log.begun.items():
        end = min(log.planned.get(name, 1.0), last)
        spans[name] = Span(begin, max(begin, end))
    return spans


def step_times(log: Log) -> dict[int, float]:
    """Return the mean milliseconds per step since the logged step before, by step."""
    times = {}
    points = [Point(0, 0.0, 0.0, 0.0), *log.series["train_time"]]
    for previous, point in itertools.pairwise(points):
        times[point.step] = (point.value - previous.value) / (point.step - previous.step)
    return times


def read_artifact(run: Run, quantize: ModuleType) -> None:
    """Read bytes, streams and errors of a run's artifact; what is impossible becomes a note."""
    try:
        artifact = quantize.read_weights(str(run.artifact))
    except (quantize.UserError, quantize.ArtifactError) as error:
        run.notes.append(f"artifact: {error}")
        return
    for name, stream in artifact.header["streams"].items():
        kind = "coder"
        if name in artifact.tensors:
            kind = quantize.tensor_class(name, artifact.tensors[name])
        run.streams.append({"name": name, "class": kind, **stream})
    sizes = Counter()
    for stream in run.streams:
        sizes[stream["class"]] += stream["length"]
    sizes["header"] = run.artifact.stat().st_size - sizes.total()
    run.bytes = dict(sizes)
    if run.artifact.name != "model.upar":  # a record's, which has no checkpoints
        return
    try:
        model = quantize.read_weights(str(run.folder))
        tensors = model.tensors
        model.tensors = {name: tensors[name] for name in tensors if name in artifact.tensors}
        quantize.match_tensors(model, artifact)
        is_last = model.run["steps"] == run.log.last
        quantize.require(is_last, f"{model.path} is not of step {run.log.last}")
    except (quantize.UserError, quantize.ArtifactError) as error:
        run.notes.append(f"no quantization errors, because the checkpoint is missing: {error}")
        return
    sums = defaultdict(lambda: np.zeros(2))  # layer -> squared norms of difference and weights
    for name in artifact.coded:
        match = re.match(r"(?:mixers|blocks)\.(\d+)\.", name)
        weights = model.tensors[name].double()
        difference = artifact.tensors[name].double() - weights
        layer = f"layer {match[1]}" if match else name
        sums[layer] += [difference.square().sum().item(), weights.square().sum().item()]
    run.errors = {layer: math.sqrt(error / norm) for layer, (error, norm) in sums.items()}


def read_samples(run: Run) -> None:
    """Read samples.jsonl of a run; a note counts lines that are no such rows."""
    path = run.folder / "samples.jsonl"
    faults = 0
    if run.artifact.name == "model.upar" and path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in io.StringIO(text):  # splitlines would cut at U+2028, too
            try:
                row = json.loads(line)
                row["rewards"] = dict(row.get("rewards", {}))
                row["reward"] = float(row.get("reward", 0.0))
                row["step"] = int(row["step"])
                row |= {name: str(row[name]) for name in ("phase", "prompt", "completion")}
                run.samples.append(row)
            except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
                faults += 1
    if faults:
        run.notes.append(f"{faults} lines of samples.jsonl are no samples, and are left out")


# ------------------------------------------------------------------------------------------- tables
def show(value: object) -> str:
    """Return a value as text: numbers short, hashes cut, a dash for None."""
    if isinstance(value, float):
        if abs(value) >= 1e4:
            return f"{value:,.0f}"
        return f"{value:.4g}" if abs(value) < 1 else f"{value:.5g}"
    if type(value) is int and value >= 10000:
        return f"{value:,}"
    if value is None:
        return "–"
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b", r"\1", str(value))


def show_score(score: object) -> str:
    """Return a score with three digits, and its 95% interval in brackets."""
    if not isinstance(score, list):
        return f"{score:.3f}" if isinstance(score, float) else show(score)
    mean, low, high = ("–" if value is None else f"{value:.3f}" for value in score)
    return mean if low == high else f"{mean} [{low}, {high}]"


def html_table(rows: list[list], kind: str = "") -> str:
    """Return an HTML table in a box in which it scrolls. The first row is its head; kind: for CSS."""
    lines = []
    for row in rows:
        cells = [f"<td>{html.escape(show(cell))}</td>" for cell in row]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll {kind}"><table>{"".join(lines)}</table></div>\n'


def runs_table(runs: list[Run], columns: list[dict]) -> str:
    """Return an HTML table of dictionaries, one per run; rows without any value are left out."""
    rows = [["", *(run.name for run in runs)]]
    for name in dict.fromkeys(itertools.chain(*columns)):
        values = [column.get(name) for column in columns]
        if any(value is not None for value in values):
            rows.append([name, *values])
    return html_table(rows)


def result_rows(run: Run) -> dict[str, object]:
    """Return the rows of the table of results; for a run that has not ended, what its log says."""
    log = run.log
    last = {name: points[-1].value for name, points in log.series.items()}
    values = {
        "steps": log.last,
        "train_seconds": last["seconds"],
        "tokens": last.get("tokens"),
        **log.machine,
        **run.result,
    }
    values["bpb_before_quantization"] = values.get("before_quantization", {}).get("val_bpb")
    values["parameters"] = values.get("params", {}).get("total")
    values["median_step_ms"] = statistics.median(step_times(log).values())
    if "tokens" in last:
        values["tokens_per_second"] = last["tokens"] / last["seconds"]
    versions = values.get("versions", {})
    values["versions"] = " ".join(f"{name} {text}" for name, text in versions.items() if text)
    rows = {name: values.get(name) for name in RESULTS}
    for name, points in log.series.items():
        if name.startswith("held-out ") and not run.result.get("before"):
            ends = points if len(points) == 1 else [points[0], points[-1]]
            rows[name] = " → ".join(show(point.value) for point in ends)
    rows["events"] = "; ".join(log.events) or None
    return rows


def gain_rows(runs: list[Run]) -> list[list]:
    """Return the rows of the scores of post-training runs: before, after, the gain, and of the artifact."""
    columns = {}  # title -> name of a score -> its value
    for run in runs:
        for name in ("before", "after", "gain", "packed"):
            if run.result.get("before") and run.result.get(name):
                title = f"{run.name}: {name}" if len(runs) > 1 else name
                columns[title] = run.result[name]
    rows = [["95% intervals", *columns]]
    for name in dict.fromkeys(itertools.chain(*columns.values())):
        scores = [column.get(name) for column in columns.values()]
        if any(isinstance(score, float | list) for score in scores):  # else a count
            rows.append([name, *map(show_score, scores)])
    return rows


def shown_text(text: str) -> str:
    """Return a text in quotes, control characters escaped; of a long one its two ends."""
    if len(text) <= 600:
        return repr(text)
    return f"{text[:400]!r} [{len(text) - 600} characters left out] {text[-200:]!r}"


def chosen_samples(samples: list[dict]) -> list[dict]:
    """Return the best and the worst answer to two prompts of some steps, from the first to the last."""
    steps = sorted({row["step"] for row in samples})
    places = np.linspace(0, len(steps) - 1, min(SAMPLE_STEPS, len(steps)))
    chosen = []
    for place in places.round().astype(int):
        groups = defaultdict(list)
        for row in samples:
            if row["step"] == steps[place]:
                groups[row["prompt"]].append(row)
        for group in [*groups.values()][:2]:
            group.sort(key=lambda row: -row["reward"])
            chosen += {row["completion"]: row for row in (group[0], group[-1])}.values()
    return chosen


def sample_rows(runs: list[Run], phase: str) -> list[list]:
    """Return the rows of the table of a phase's samples, without columns that would be empty.

    Held-out prompts are the same at each scoring, so all answers to one are together.
    """
    rows = []
    for run in runs:
        of_phase = [row for row in run.samples if row["phase"] == phase]
        for row in chosen_samples(of_phase):
            cells = {"step": row["step"], "run": run.name}
            cells |= {name: shown_text(row[name]) for name in ("prompt", "completion")}
            cells["ended"] = "yes" if row.get("finished") else "no"
            if row.get("answer") is not None:
                cells["wanted"] = shown_text(str(row["answer"]))
            if row["rewards"]:
                cells["reward"] = row["reward"]
            if len(row["rewards"]) > 1:
                parts = [f"{name} {show(value)}" for name, value in row["rewards"].items()]
                cells["by function"] = ", ".join(parts)
            if row.get("advantage") is not None:
                cells["advantage"] = row["advantage"]
            rows.append(cells)
    if phase == "held_out":
        rows.sort(key=lambda row: (row["prompt"], row["step"]))
    filled = set().union(*rows)
    names = [name for name in SAMPLE_COLUMNS if name in filled]
    if len(runs) == 1:
        names.remove("run")
    table = [names]
    for row in rows:
        table.append([row.get(name) for name in names])
    return table


def is_constant(runs: list[Run], name: str) -> bool:
    """Return whether a series has one value in all steps of all runs."""
    values = set()
    count = 0
    for run in runs:
        points = run.log.series.get(name, [])
        count += len(points)
        values |= {str(point.value) for point in points}
    return count > len(runs) and len(values) == 1


def stream_rows(run: Run) -> list[list]:
    """Return the rows of the artifact's tensors, the largest first."""
    rows = [["tensor", "class", "weights", "stored as", "bytes", "bits per weight"]]
    for stream in sorted(run.streams, key=lambda stream: -stream["length"]):
        if stream["class"] == "coder":
            continue
        weights = math.prod(stream["shape"])
        bits = 8 * stream["length"] / max(1, weights)
        coder = f"{stream['bits']}-bit rANS" if "bits" in stream else stream["dtype"]
        rows.append(
            [stream["name"], stream["class"], weights, coder, stream["length"], f"{bits:.2f}"]
        )
    return rows


def changed_settings(runs: list[Run]) -> list[dict[str, str]]:
    """Return the settings of each run that differ between runs; of one run those it changed."""
    names = set().union(*(run.log.changed for run in runs))
    names -= {"RUN_ID", "OUT_DIR", "RESUME", "CONFIG"}
    shown = []
    for name in sorted(names):
        values = {run.log.settings.get(name) for run in runs}
        if len(runs) == 1 or len(values) > 1:
            shown.append(name)
    columns = []
    for run in runs:
        columns.append({name: run.log.settings.get(name) for name in shown})
    return columns


# -------------------------------------------------------------------------------------------- plots
def color_key(colors: dict[str, str], kind: str = "key") -> str:
    """Return an HTML list of what the colours mean."""
    items = []
    for name, color in colors.items():
        items.append(f'<li><i style="--c:{color}"></i>{html.escape(name)}</li>')
    return f'<ul class="{kind}">{"".join(items)}</ul>\n'


@contextlib.contextmanager
def plot(
    page: list[str], title: str, xlabel: str, colors: dict[str, str] | None = None
) -> Iterator:
    """Give matplotlib axes to draw on; then add the figure to the page as SVG, with a key."""
    import matplotlib.figure
    import matplotlib.ticker

    # The salt makes the ids in a figure unlike those in other figures of the page.
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"{len(page)} {title}"}):
        figure = matplotlib.figure.Figure(figsize=(4.6, 2.9), layout="constrained")
        axes = figure.add_subplot(xlabel=xlabel)
        axes.locator_params(axis="x", nbins=6)
        if xlabel in ("tokens", "bytes"):
            axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
        yield axes
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(TEXT, "currentColor")
    svg = re.sub(r'<g id="[^"]*"(/?)>', r"<g\1>", svg)  # group ids repeat from figure to figure
    caption = f"<figcaption>{html.escape(title)}</figcaption>"
    page.append(f"<figure>{caption}{svg}{color_key(colors or {})}</figure>\n")


def line_marker(points: list) -> str:
    """Return the marker of a line: a dot at each of few points."""
    return "." if len(points) < 60 else ""


def draw_series(page: list[str], runs: list[Run], name: str, axis: str) -> None:
    """Draw one series of all runs, with a diamond for the artifact of a run that has ended."""
    title = f"{name}, {UNITS[name]}" if name in UNITS else name
    late = []  # what comes after the first tenth, in which a loss falls from where it starts
    with plot(page, title, AXES[axis]) as axes:
        for run in runs:
            if name not in run.log.series or axis not in run.log.series:
                continue
            points = run.log.series[name]
            x = positions(run.log, [point.step for point in points], axis)
            values = [point.value for point in points]
            low = [point.low for point in points]
            high = [point.high for point in points]
            axes.plot(x, values, color=run.color, linewidth=1.6, marker=line_marker(points))
            if low != high:
                axes.fill_between(x, low, high, color=run.color, alpha=0.15, linewidth=0)
            if name.startswith("held-out ") and run.log.ended:
                axes.plot(x[-1], values[-1], color=run.color, marker="D", clip_on=False)
            for at, point in zip(x, points, strict=True):
                if at > x[-1] / 10 and math.isfinite(point.low + point.high):
                    late += [point.low, point.high]
        axes.set_xlim(left=0)
        if name.endswith("loss") and len(late) >= 20:
            room = 0.05 * (max(late) - min(late)) + 1e-6
            axes.set_ylim(min(late) - room, max(late) + room)


def draw_schedule(page: list[str], run: Run) -> None:
    """Draw the learning-rate multiplier over the run, with its phases."""
    spans = phase_spans(run.log)
    colors = dict(zip(spans, COLORS, strict=False))
    title = f"{run.name}: learning-rate multiplier and phases"
    progress = [100 * point.value for point in run.log.series["progress"]]
    rates = [point.value for point in run.log.series["lr_mul"]]
    with plot(page, title, "share of the run, %", colors) as axes:
        axes.plot(progress, rates, color=TEXT, marker=line_marker(rates))
        for row, (name, span) in enumerate(spans.items()):
            ends = (100 * span.begin, 100 * span.end)
            axes.axvspan(*ends, color=colors[name], alpha=0.13, linewidth=1)
            axes.plot(ends, [1.08 + 0.06 * row] * 2, color=colors[name], linewidth=4)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])


def draw_step_times(page: list[str], run: Run) -> None:
    """Draw the milliseconds of the steps, and mark those that stand out."""
    times = step_times(run.log)
    median = statistics.median(times.values())
    slow = {step: time for step, time in times.items() if time > OUTLIER * median}
    counts = f"{len(slow)} of {len(times)} over {OUTLIER} medians"
    title = f"{run.name}: step time, ms; median {median:.4g}; {counts}"
    with plot(page, title, AXES["step"]) as axes:
        marker = line_marker(times)
        axes.plot(list(times), list(times.values()), color=run.color, linewidth=1, marker=marker)
        axes.axhline(median, color=TEXT, linewidth=1, linestyle="--")
        axes.plot(list(slow), list(slow.values()), "o", color="#d62728")
        axes.set_ylim(bottom=0)


def draw_artifacts(page: list[str], runs: list[Run]) -> None:
    """Show the bytes of the artifacts by part and tensor, and the errors of their weights."""
    colors = dict(zip(PARTS, COLORS, strict=False))
    page.append('<h2>Artifact</h2>\n<div class="plots">')
    title = "Bytes of the artifact by tensor class and part of the file"
    with plot(page, title, "bytes", colors) as axes:
        axes.figure.set_figheight(max(1.5, 0.8 + 0.3 * len(runs)))
        for row, run in enumerate(runs):
            left = 0
            for part in PARTS:
                size = run.bytes.get(part, 0)
                axes.barh(row, size, 0.6, left, color=colors[part])
                left += size
        labels = [run.name if len(run.name) <= 16 else f"{run.name[:15]}…" for run in runs]
        axes.set_yticks(range(len(runs)), labels)
        axes.set_ylim(len(runs) - 0.4, -0.6)
    if any(run.errors for run in runs):
        title = "Error of quantized weights by layer: ‖artifact − checkpoint‖ / ‖checkpoint‖"
        with plot(page, title, "") as axes:
            for run in runs:
                errors = list(run.errors.values())
                axes.plot(list(run.errors), errors, color=run.color, marker="o", markersize=4)
            many = max(len(run.errors) for run in runs) > 6
            axes.tick_params(axis="x", rotation=90 if many else 0)
            axes.set_ylim(bottom=0)
    page.append("</div>\n")
    columns = []
    for run in runs:
        total = sum(run.bytes.values())
        sizes = {**run.bytes, "all": total}
        columns.append({part: f"{size:,} ({size / total:.1%})" for part, size in sizes.items()})
    page.append(runs_table(runs, columns))
    for run in runs:
        state = " open" if len(runs) == 1 else ""
        summary = f"<summary>Bytes by tensor: {html.escape(run.name)}</summary>"
        page.append(f"<details{state}>{summary}\n{html_table(stream_rows(run))}</details>\n")


def draw_family(page: list[str], runs: list[Run], family: Family) -> None:
    """Show scores and samples of the runs of one kind of training, and draw their series."""
    page.append(f"<h2>{family.heading}</h2>\n")
    if any(run.result.get("before") for run in runs):
        page.append(f"<h3>Held-out scores</h3>\n{html_table(gain_rows(runs))}")
    samples = itertools.chain(*(run.samples for run in runs))
    for phase in sorted({row["phase"] for row in samples}):
        rows = html_table(sample_rows(runs, phase), "texts")
        page.append(f"<h3>Samples: {html.escape(phase.replace('_', ' '))}</h3>\n{rows}")
    others = {}
    for run in runs:
        others |= dict.fromkeys(run.log.series)
    others = [name for name in others if name not in {*family.main_series, *NOT_DRAWN}]
    constant = [name for name in others if is_constant(runs, name)]
    others = [name for name in others if name not in constant]
    others.sort(key=lambda name: not name.startswith(family.first_series))
    groups = [([name], AXES) for name in family.main_series]
    for names, axes in [*groups, (others, ["step"])]:
        page.append('<div class="plots">')
        for name, axis in itertools.product(names, axes):
            if any({name, axis} <= run.log.series.keys() for run in runs):
                draw_series(page, runs, name, axis)
        page.append("</div>\n")
    values = []
    for name in constant:
        point = next(run.log.series[name][0] for run in runs if run.log.series.get(name))
        values.append(f"{name} {show(point.value)}")
    if values:
        page.append(
            f"<p>Not drawn, because it never changes: {html.escape(', '.join(values))}</p>\n"
        )


def render(runs: list[Run]) -> str:
    """Return the page."""
    names = ", ".join(run.name for run in runs) if len(runs) < 6 else f"{len(runs)} runs"
    title = html.escape(names)
    page = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head><body>\n<h1>{title}</h1>\n"
    ]
    for run in runs:
        page += [f"<p>{html.escape(f'{run.name}: {note}')}</p>\n" for note in run.notes]
    if len({run.result.get("manifest_sha256") for run in runs} - {None}) > 1:
        page.append(
            "<p>The validation data of these runs differ: their bits per byte cannot be "
            "compared.</p>\n"
        )
    page.append(color_key({run.name: run.color for run in runs}, "runs"))
    page.append("<h2>Results</h2>\n" + runs_table(runs, [result_rows(run) for run in runs]))
    for key, family in FAMILIES.items():
        members = [run for run in runs if run.family == key]
        if members:
            draw_family(page, members, family)
    page.append(
        "<p>Diamonds: the end of a run, of train_gpt.py the model read back from the artifact. "
        "Bands: 95% intervals.</p>\n"
    )
    page.append('<h2>Schedule and step time</h2>\n<div class="plots">')
    for run in runs:
        draw_schedule(page, run)
        draw_step_times(page, run)
    page.append("</div>\n<p>Step times are means from one known step to the next.</p>\n")
    packed = [run for run in runs if run.bytes]
    if packed:
        draw_artifacts(page, packed)
    which = "in which the runs differ" if len(runs) > 1 else "that are not the default"
    page.append(f"<h2>Settings {which}</h2>\n")
    page.append(runs_table(runs, changed_settings(runs)) + "</body></html>\n")
    return "".join(page)


def main() -> None:
    """Write the page; print its path and size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a run, its name in runs/, or a record"
    )
    parser.add_argument("--out", type=Path, help="the page; else report.html in the first run")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("error: the plots need matplotlib: pip install matplotlib")
    runs = []
    for name in dict.fromkeys(args.runs):
        runs += find_runs(name)
    names = Counter(run.name for run in runs)
    for run, color in zip(runs, itertools.cycle(COLORS), strict=False):
        run.color = color
        if names[run.name] > 1:
            run.name = str(run.folder)
        if run.artifact.is_file():
            read_artifact(run, load_script(ROOT / "quantize.py"))
    out = args.out or runs[0].folder / "report.html"
    page = render(runs)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"error: {out}: cannot be written: {error.strerror}") from None
    plots = page.count("<svg")
    plural = "s" if len(runs) > 1 else ""
    print(f"{out}: {out.stat().st_size} bytes, {plots} plots of {len(runs)} run{plural}")


if __name__ == "__main__":
    run_tool(main)
