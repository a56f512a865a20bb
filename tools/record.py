"""Records: make, check and list folders that document a result; write Parameter Golf submissions.

    python tools/record.py new RUN RUN RUN --track track_cpu_3min --name WiderMLP [--against FOLDER]
    python tools/record.py check [FOLDER…] [--artifact [--data data/django]]
    python tools/record.py table
    python tools/record.py submission RUN RUN RUN --name WiderMLP --author A [--blurb TEXT]

A record is records/<track>/<YYYY-MM-DD>_<Name>/: README.md, the script exactly as in the logs,
config.env, seed_<n>.txt (the logs), seed_<n>.upar (artifacts under 1 MiB), result.json, made from
the logs alone; baseline_<n>.txt: a record that it claims to beat, run again beside it; manifest.json
if its data have another tokenizer. The rules of a track are in its track.json. `check` prints a line
for every fault and exits with 1 if there is one. `submission` refuses what `check` would refuse.
"""

import argparse
import ast
import functools
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

from common import (
    ROOT,
    SCRIPT,
    half_width,
    inherited_environment,
    load_script,
    markdown_table,
    replace_marked,
    student_tail,
)
from endings import run_tool
from tokens import count_script

RULE = b"\n" + b"=" * 120 + b"\n"  # below the source, in a log
# Settings that the environment of a record's run may set.
FREE_SETTINGS = ("RUN_ID", "OUT_DIR", "CONFIG", "DATA_PATH", "TOKENIZER_PATH", "SEED")
# Results at the end of a log. The first are the same in all runs of a record.
SHARED_FACTS = "script code_sha256 manifest_sha256 tokenizer_sha256 hardware world_size".split()
FACTS = {
    str: [*SHARED_FACTS, "commit", "artifact_sha256"],
    int: "seed steps tokens val_tokens val_bytes artifact_bytes code_bytes total_bytes".split(),
    float: "train_seconds total_seconds val_loss val_nats val_bpb bytes_per_token".split(),
    ast.literal_eval: ["events"],
}
SLIDING = "val_bpb_sliding"  # in some logs
# Keys of a manifest that identify the validation text.
TEXT_KEYS = (
    "documents source_bytes decoded_bytes sources_sha256 seed val_frac val_max_bytes".split()
)
# Events that a record's run may have: a masked step, optional work that the clock left no time
# for, a full disk, a text learned by heart. The first three are of scripts before the rewrite.
EVENTS = (
    "skip rewind gptq_left_out skipped_step weights_left_out gptq_out_of_time save_failed learned_by_heart"
).split()
# Integers in an artifact that belong to the coder of all codes.
CODER_STREAMS = ("lane_states", "tables", "sizes", "escapes")
MIB = 1 << 20  # artifacts below are committed, and no log is longer
SECTIONS = ("What changed", "Why", "What did not help")
UNWRITTEN = "To be written."
MACHINES = "\n## Machines\n"  # the heading of the list of machines on a track's page
# Names by which a script can hide code.
STRANGE = {"exec", "eval", "__import__", "builtins", "importlib", "marshal", "runpy", "pickle"}
UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
# Rules of Parameter Golf, for a submission without --track. Its 600 s are on 8 H100, and a
# submission on other hardware says which.
GOLF = {
    "title": "Parameter Golf",
    "score": "val_bpb",
    "seconds": 600,
    "bytes": 16_000_000,
    "seeds": 3,
    "p": 0.01,
    "hardware": ".*",
}


class RecordError(Exception):
    """Why a command cannot continue, in one line."""


@dataclass
class Faults:
    """Collected faults, as lines `NAME: WHAT (found FOUND, expected EXPECTED)`."""

    name: str = ""  # of the file or folder that is checked
    lines: list[str] = field(default_factory=list)

    def of(self, name: str) -> "Faults":
        """Return the same collection for another file."""
        return Faults(name, self.lines)

    def add(self, what: str, found: object, expected: object) -> None:
        """Add a fault."""
        self.lines.append(f"{self.name}: {what} (found {found}, expected {expected})")

    def equal(self, what: str, found: object, expected: object) -> None:
        """Add a fault if the two values differ."""
        if found != expected:
            self.add(what, found, expected)

    def require(self, holds: object, what: str, found: object, expected: object) -> None:
        """Add a fault unless `holds`."""
        if not holds:
            self.add(what, found, expected)

    def at_most(self, what: str, found: float, limit: float) -> None:
        """Add a fault if a number is above its limit."""
        self.require(found <= limit, what, found, f"at most {limit}")

    def at_least(self, what: str, found: float, limit: float) -> None:
        """Add a fault if a number is below its limit."""
        self.require(found >= limit, what, found, f"at least {limit}")


@dataclass
class Log:
    """A finished run, as its log describes it."""

    name: str
    data: bytes  # the whole file
    source: bytes  # of the script
    settings: dict[str, str]  # as printed
    text: str  # from the settings to the results
    facts: dict  # the results
    versions: dict

    def find(self, pattern: str) -> list:
        """Return the matches of a pattern in the lines of the text."""
        return re.findall(pattern, self.text, re.MULTILINE)


def digest(data: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    return sha256(data).hexdigest()


def read_facts(lines: list[str]) -> dict:
    """Return the results at the end of a log."""
    pairs = dict(line.split(": ", 1) for line in lines if ": " in line)
    facts = {}
    for kind, keys in FACTS.items():
        facts |= {key: kind(pairs[key]) for key in keys}
    if SLIDING in pairs:
        facts[SLIDING] = float(pairs[SLIDING])
    return facts


def read_log(path: Path) -> Log:
    """Return the log of a finished run. Raises OSError, RecordError."""
    data = path.read_bytes()
    source, _, rest = data.partition(RULE)
    text, _, end = rest.decode("utf-8", errors="replace").rpartition("\n---\n")
    head = text.partition("\nparameters: ")[0]
    settings = dict(re.findall(r"^[* ] ([A-Z][A-Z0-9_]*)=(.*)$", head, re.MULTILINE))
    versions = re.search(r"^commit:.* versions:(\{[^}]*\})", text, re.MULTILINE)
    if not settings or not versions:
        raise RecordError(
            f"{path.name}: not the log of a run that ended (expected source, a line of 120 =, "
            "versions, settings, and results below ---)"
        )
    lines = end.split("\n")
    try:
        facts = read_facts(lines)
        versions = ast.literal_eval(versions[1])
    except UNREADABLE as error:
        reason = f"{type(error).__name__}: {error}"
        raise RecordError(f"{path.name}: its results cannot be read ({reason})") from None
    errors = [f"\n{line}" for line in lines if line.startswith("error: ")]
    return Log(path.name, data, source, settings, text + "".join(errors), facts, versions)


def read_logs(folder: Path, pattern: str) -> list[Log]:
    """Return the logs of a folder in the order of their names."""
    return [read_log(path) for path in sorted(folder.glob(pattern))]


@dataclass
class Welch:
    """A one-sided Welch test (1947) that the mean of new scores is smaller than that of old ones."""

    t: float
    df: float  # degrees of freedom
    p: float


def welch(new: list[float], old: list[float]) -> Welch:
    """Return the test that the mean of `new` is smaller. Raises RecordError without any spread."""
    new_part = statistics.variance(new) / len(new)
    old_part = statistics.variance(old) / len(old)
    total = new_part + old_part
    if not total:
        raise RecordError(
            f"runs of different seeds all score {new[0]} and {old[0]} (expected some spread)"
        )
    df = total**2 / (new_part**2 / (len(new) - 1) + old_part**2 / (len(old) - 1))
    t = (statistics.fmean(old) - statistics.fmean(new)) / math.sqrt(total)
    return Welch(t, df, student_tail(t, df))


# ------------------------------------------------------------------------------------------- track
@dataclass
class Track:
    """A track: its rules (track.json) and the manifest of its data."""

    folder: Path
    rules: dict
    manifest: dict


def read_track(folder: Path) -> Track:
    """Return a track. Raises RecordError if its files are missing or do not agree."""
    try:
        rules = json.loads((folder / "track.json").read_bytes())
        text = (folder / "manifest.json").read_bytes()
        manifest = json.loads(text)
        faults = Faults(f"{folder}/track.json")
        for key, value in pinned_data(text, manifest).items():
            faults.equal(f"data.{key}", rules["data"][key], value)
    except UNREADABLE:
        raise RecordError(
            f"{folder}: no track that can be read (expected track.json and manifest.json)"
        ) from None
    if faults.lines:
        raise RecordError(faults.lines[0])
    return Track(folder, rules, manifest)


def pinned_data(text: bytes, manifest: dict) -> dict:
    """Return what track.json says of the data, from the text of their manifest."""
    return {
        "manifest_sha256": digest(text),
        "val_bytes": counted_bytes(manifest["val"]),
        "overlap_documents": manifest["overlap_documents"],
    }


def counted_bytes(part: dict) -> int:
    """Return the bytes by which a score of a manifest's split divides: at most those of the source."""
    return min(part.get("source_bytes") or part["decoded_bytes"], part["decoded_bytes"])


def make_golf_track(folder: Path, log: Log) -> None:
    """Write a track with the rules of Parameter Golf and the data of a run. Raises RecordError."""
    path = Path(log.settings["DATA_PATH"]) / "manifest.json"
    if not path.is_file():
        raise RecordError(f"{path}: no such file (expected the manifest of the runs' data)")
    text = path.read_bytes()
    data = {"path": str(path.parent), **pinned_data(text, json.loads(text))}
    folder.mkdir()
    (folder / "track.json").write_text(json.dumps({**GOLF, "data": data}))
    (folder / "manifest.json").write_bytes(text)


def run_record_script(script: Path, config: Path, *words: str, **settings: str) -> dict | list:
    """Return what tools/rescore.py prints of a script and a config. Raises RecordError."""
    environ = inherited_environment()
    environ |= {"CONFIG": str(config.resolve()), "PYTHONDONTWRITEBYTECODE": "1", **settings}
    rescore = str(Path(__file__).with_name("rescore.py"))
    command = [sys.executable, rescore, str(script.resolve()), *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RecordError(lines[-1] if lines else f"exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


@functools.lru_cache
def resolve_settings(name: str, script: bytes, config: bytes) -> dict[str, str]:
    """Return the settings, as a log prints them, of a script with a config. Raises RecordError."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / name).write_bytes(script)
        (folder / "config.env").write_bytes(config)
        return run_record_script(folder / name, folder / "config.env")


# ----------------------------------------------------------------------------------------- results
def summarize(
    track: Track, record: str, logs: list[Log], config: bytes, beaten: dict[str, list[Log]]
) -> dict:
    """Return result.json. `beaten` has the logs of each record that this one claims to beat."""
    score = track.rules["score"]
    first = logs[0].facts
    scores = [log.facts[score] for log in logs]
    claims = []
    for name, runs in beaten.items():
        old_scores = [log.facts[score] for log in runs]
        # All scores are of one text, so p is the same for nats and for bits per byte.
        test = welch(scores, old_scores)
        margin = statistics.fmean(old_scores) - statistics.fmean(scores)
        nats = margin * math.log(2) * first["val_bytes"] / first["val_tokens"]
        claims.append(
            {
                "against": name,
                "logs": [log.name for log in runs],
                "mean": statistics.fmean(old_scores),
                "margin": margin,
                "margin_nats_per_token": nats,
                **vars(test),
            }
        )
    seeds = []
    for log in logs:
        seeds.append({key: log.facts[key] for key in log.facts if key not in SHARED_FACTS})
    return {
        "format": 1,
        "track": track.folder.name,
        "record": record,
        "score": score,
        "mean": statistics.fmean(scores),
        "interval95": half_width(scores),
        "claims": claims,
        **{key: first[key] for key in SHARED_FACTS},
        "config_sha256": digest(config),
        "versions": logs[0].versions,
        "seeds": seeds,
    }


def result_text(result: dict) -> str:
    """Return the part of a README that follows from result.json: seeds, mean, claims."""
    scores = [key for key in ("val_bpb", SLIDING, "val_loss") if key in result["seeds"][0]]
    rows = [["seed", *scores, "steps", "train_seconds", "artifact_bytes", "total_bytes"]]
    for seed in result["seeds"]:
        row = [seed["seed"], *(f"{seed[key]:.4f}" for key in scores), seed["steps"]]
        row.append(f"{seed['train_seconds']:.1f}")
        rows.append([*row, f"{seed['artifact_bytes']:,}", f"{seed['total_bytes']:,}"])
    mean = (
        f"Mean `{result['score']}` **{result['mean']:.4f}**, 95% interval "
        f"±{result['interval95']:.4f} (Student, {len(result['seeds'])} seeds). "
        f"{result['hardware']}, torch {result['versions']['torch']}."
    )
    paragraphs = [markdown_table(rows), mean]
    for claim in result["claims"]:
        origin = "its own logs"
        if claim["logs"][0].startswith("baseline_"):
            origin = "made again beside these: baseline_*.txt"
        paragraphs.append(
            f"Better than `{claim['against']}` ({claim['mean']:.4f}, {len(claim['logs'])} runs, "
            f"{origin}) by {claim['margin']:.4f} bits per byte, "
            f"{claim['margin_nats_per_token']:.4f} nats per token: p = {claim['p']:.2g} "
            f"(one-sided Welch test, {claim['df']:.1f} degrees of freedom)."
        )
    return "\n\n".join(paragraphs)


# ------------------------------------------------------------------------------------------ checks
def check_script(name: str, source: bytes, rules: dict, faults: Faults) -> None:
    """Add the faults of a record's script by its text; nothing of it is run."""
    faults = faults.of(name)
    try:
        text = source.decode("utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        faults.lines.append(f"{name}: does not compile ({str(error).splitlines()[0]})")
        return
    strange = []
    packed = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Name):
            names = [node.id]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        for used in names:
            if used.split(".")[0] in STRANGE:
                strange.append(f"{used} at line {node.lineno}")
        value = getattr(node, "value", None)
        if isinstance(value, str | bytes):
            words = len(value.split())
            if len(value) > max(400, 40 * words):
                packed.append(f"{len(value)} characters in {words} words at line {node.lineno}")
        if isinstance(node, ast.List | ast.Tuple | ast.Set) and len(node.elts) > 256:
            packed.append(f"{len(node.elts)} elements at line {node.lineno}")
    limit = rules.get("script_tokens", math.inf)
    faults.at_most("tokens as tools/tokens.py counts", count_script(text), limit)
    allowed = f"none of {sorted(STRANGE)}"
    faults.require(not strange, "runs what cannot be read in it", ", ".join(strange), allowed)
    faults.require(not packed, "packed data", ", ".join(packed), "text")


def check_code(log: Log, name: str, script: bytes, config: bytes, faults: Faults) -> None:
    """Add the faults of a log's source, settings and seed, given script and config."""
    facts = log.facts
    faults = faults.of(log.name)
    faults.equal(f"its source is not {name}, SHA-256", digest(log.source), digest(script))
    faults.equal("script", facts["script"], name)
    faults.equal(f"code_sha256 is not that of {name}", facts["code_sha256"], digest(script))
    size = len(script) + len(config)
    faults.equal("code_bytes are not those of script and config", facts["code_bytes"], size)
    faults.equal("seed is not the setting", str(facts["seed"]), log.settings.get("SEED"))
    try:
        expected = resolve_settings(name, script, config)
    except RecordError as error:
        faults.add("settings", error, f"{name} to take config.env")
        return
    for key in sorted(expected.keys() | log.settings.keys()):
        if key not in FREE_SETTINGS:
            what = (
                f"setting {key} is not that of {name} with config.env, a copy of the run's CONFIG"
            )
            faults.equal(what, log.settings.get(key), expected.get(key))


def check_phases(log: Log, faults: Faults) -> None:
    """Add the faults of a run's phases: each that was planned must have begun and been on."""
    faults = faults.of(log.name)
    planned = list(dict.fromkeys(log.find(r"^plan: (\w+) from ")))
    # The plan is in the log twice, and the second time says what became of it. Logs of before
    # 2026-11-23 have lines of another form at the end.
    ended = dict(log.find(r"^plan: (\w+) from .* of the run, (.*)$"))
    ended |= dict(log.find(r"^phase: (\w+) +planned +[\d.]+%, (.*)$"))
    begun = dict(log.find(r"^phase: (\w+) begins at step (\d+),"))
    faults.equal("phases at the end", list(ended), planned)
    averages = [name for name in ("ema", "swa", "qat") if log.settings.get(name.upper()) == "1"]
    for name in dict.fromkeys([*planned, *averages]):
        summary = ended.get(name, "nothing")
        step = begun.get(name, "?")
        match = re.fullmatch(r"beg[au]n at step (\d+)(?: \(.*\))?, on for (\d+) steps", summary)
        fired = match and int(match[2]) > 0 and match[1] == step
        expected = f"to begin at step {step}, for 1 step or more"
        faults.require(fired, f"phase {name} never fired", summary, expected)


def check_clock(log: Log, rules: dict, faults: Faults) -> None:
    """Add the faults of a run's time, which includes choosing and calibration, and its steps."""
    faults = faults.of(log.name)
    seconds = log.facts["train_seconds"]
    faults.at_most("over the clock, seconds", seconds, rules["seconds"])
    clock = log.find(r"^clock: ([\d.]+) s to train and choose")  # of logs before 2026-11-23
    agrees = clock in ([], [f"{seconds:.1f}"])
    faults.require(agrees, "train_seconds by the line `clock:`", seconds, clock)
    steps = log.find(r"^step:(\d+)/\S+ train_loss:.* train_time:(\d+)ms")
    late = []
    for step, milliseconds in steps:
        if int(step) > log.facts["steps"] or int(milliseconds) > 1000 * seconds + 1:
            late.append(f"step {step} at {milliseconds} ms")
    expected = f"up to {log.facts['steps']} at {seconds:.3f} s"
    in_time = steps and not late
    faults.require(in_time, "steps beyond the end", late or "no steps", expected)


def check_run(log: Log, rules: dict, faults: Faults) -> None:
    """Add the faults of what happened: errors, events, phases, time, hardware, bytes."""
    facts = log.facts
    faults = faults.of(log.name)
    for error in log.find(r"^error: (.*)"):
        faults.add("the run ended with an error", error, "none")
    for event in facts["events"]:
        allowed = event["event"] in EVENTS
        faults.require(allowed, "event", event["event"], f"none but {' '.join(EVENTS)}")
    check_phases(log, faults)
    check_clock(log, rules, faults)
    tokens = facts["steps"] * int(log.settings.get("TRAIN_BATCH_TOKENS", 0))
    expected = f"{facts['steps']} x TRAIN_BATCH_TOKENS"
    faults.require(facts["tokens"] == tokens, "tokens", facts["tokens"], expected)
    hardware = facts["hardware"]
    allowed = re.fullmatch(rules["hardware"], hardware)
    faults.require(allowed, "hardware", hardware, rules["hardware"])
    total = facts["total_bytes"]
    size = facts["code_bytes"] + facts["artifact_bytes"]
    faults.equal("total_bytes are not code and artifact", total, size)
    faults.at_most("over the cap, bytes of code and artifact", total, rules["bytes"])
    faults.at_most("bytes of the log", len(log.data), MIB)


def check_score(log: Log, manifest: dict, rules: dict, faults: Faults) -> None:
    """Add the faults of nats, tokens, bytes and bits per byte, given the data's manifest."""
    facts = log.facts
    val = manifest["val"]
    nats, tokens, size = (facts[key] for key in ("val_nats", "val_tokens", "val_bytes"))
    faults = faults.of(log.name)
    faults.require(rules["score"] in facts, "the track's score", "none", rules["score"])
    faults.equal("val_tokens are not all of validation", tokens, val["tokens"] - 1)
    faults.equal("val_bytes are not all of validation", size, counted_bytes(val))
    tokenizer = manifest["tokenizer"]["sha256"]
    faults.equal("tokenizer_sha256 is not the manifest's", facts["tokenizer_sha256"], tokenizer)
    line = (
        f"data: {manifest['name']}, train {manifest['train']['tokens']} tokens, val "
        f"{val['tokens']} tokens, {val['decoded_bytes']} bytes, overlap "
        f"{rules['data']['overlap_documents']} documents"
    )
    faults.equal("overlap of training and validation, data", log.find("^data: .*"), [line])
    consequences = {
        "val_loss": nats / tokens,
        "val_bpb": nats / math.log(2) / size,
        "bytes_per_token": size / tokens,
    }
    for key, value in consequences.items():
        what = f"{key} does not follow from nats, tokens and bytes"
        faults.require(math.isclose(facts[key], value, rel_tol=1e-9), what, facts[key], value)
    for way, key in {"": "val_bpb", "sliding ": SLIDING}.items():
        if key in facts:
            check_score_line(log, way, key, faults)


def check_score_line(log: Log, way: str, key: str, faults: Faults) -> None:
    """Add a fault unless a score follows from its line in the log, which has nats to a tenth."""
    facts = log.facts
    pattern = (
        rf"^from the artifact: {way}val_loss:\S+ bpb:(\S+) nats:(\S+) tokens:(\d+) bytes:(\d+)"
    )
    lines = log.find(pattern)
    what = f"{key} by the line `from the artifact: {way}val_`"
    if not lines:
        faults.add(what, facts[key], None)
        return
    bpb, nats, tokens, size = lines[-1]
    bits_per_nat = 1 / math.log(2) / facts["val_bytes"]
    error = abs(float(nats) * bits_per_nat - facts[key])
    same_counts = [tokens, size] == [str(facts["val_tokens"]), str(facts["val_bytes"])]
    agrees = same_counts and bpb == f"{facts[key]:.4f}" and error < 0.05 * bits_per_nat + 1e-9
    faults.require(agrees, what, facts[key], [bpb, nats, tokens, size])


def check_artifact(log: Log, path: Path, faults: Faults) -> None:
    """Add the faults of an artifact's size and SHA-256. One of 1 MiB or more may be absent."""
    faults = faults.of(path.name)
    size = log.facts["artifact_bytes"]
    if not path.is_file():
        expected = f"the artifact of {size} bytes"
        faults.require(size >= MIB, "no such file", "none", expected)
        return
    data = path.read_bytes()
    faults.equal(f"artifact_bytes of {log.name}", len(data), size)
    what = f"is not the artifact of {log.name}, SHA-256"
    faults.equal(what, digest(data), log.facts["artifact_sha256"])
    check_integers(data, faults)


def check_integers(data: bytes, faults: Faults) -> None:
    """Add a fault for each integer tensor of an artifact that is no codes of weights.

    It could hold counts of the training text. Artifacts of formats that are too old are left out.
    """
    script = load_script(SCRIPT)
    if int.from_bytes(data[8:12], "little") not in script.READABLE_VERSIONS:
        return
    try:
        header, _ = script.read_streams(data)
    except Exception as error:  # what only claims to be an artifact may raise anything
        faults.add("is no whole artifact", repr(error), f"version {script.ARTIFACT_VERSION}")
        return
    for name, stored in header["streams"].items():
        is_integer = not stored["dtype"].startswith("<f")
        is_code = "bits" in stored or name in CODER_STREAMS
        what = "an integer tensor that is no codes of weights"
        faults.require(is_code or not is_integer, what, name, "codes or floats")


def text_facts(manifest: dict) -> dict:
    """Return what identifies the validation text of a manifest."""
    facts = {**manifest["val"], **(manifest.get("request") or {})}
    return {key: facts.get(key) for key in TEXT_KEYS}


def find_manifest(folder: Path, log: Log, track: Track, faults: Faults) -> dict:
    """Return the manifest of a record's data, and add its faults.

    It is the track's, or the record's own of the same text with another tokenizer.
    """
    expected = track.rules["data"]["manifest_sha256"]
    found = log.facts["manifest_sha256"]
    if found == expected:
        return track.manifest
    path = folder / "manifest.json"
    if not path.is_file() or digest(path.read_bytes()) != found:
        what = "manifest_sha256: other data than the track's"
        faults.of(log.name).add(what, found, f"{expected}, or that of a manifest.json here")
        return track.manifest
    manifest = json.loads(path.read_bytes())
    faults = faults.of(path.name)
    what = "not the track's validation text"
    faults.equal(what, text_facts(manifest), text_facts(track.manifest))
    key = "overlap_documents"
    faults.equal(key, manifest[key], track.manifest[key])
    return manifest


def compare(logs: list[Log], faults: Faults) -> None:
    """Add the differences that runs of one record may not have, and those that they lack."""
    first = logs[0]
    for index, log in enumerate(logs[1:], 1):
        faults = faults.of(f"{log.name} differs from {first.name}")
        faults.equal("code", digest(log.source), digest(first.source))
        faults.equal("versions", log.versions, first.versions)
        for key in sorted(log.settings.keys() | first.settings.keys()):
            if key not in FREE_SETTINGS:
                faults.equal(f"setting {key}", log.settings.get(key), first.settings.get(key))
        for key in [*SHARED_FACTS[2:], "code_bytes"]:
            faults.equal(key, log.facts[key], first.facts[key])
        for other in logs[:index]:
            for key in ("seed", "artifact_sha256"):
                if other.facts[key] == log.facts[key]:
                    pair = faults.of(f"{log.name} and {other.name}")
                    pair.add(f"have the same {key}", log.facts[key], "others")


def check_beaten(
    track: Track, names: list[str], first: Log, baselines: list[Log], faults: Faults
) -> dict[str, list[Log]]:
    """Return the logs of each record that is claimed to be beaten, and add their faults.

    `first` is a log of the claiming record. The logs of a beaten record are those of `baselines`
    that ran its script and config, or else its own.
    """
    rules = track.rules
    beaten = {}
    left = list(baselines)
    for name in names:
        folder = track.folder / name
        logs = read_logs(folder, "seed_*.txt")
        if not logs:
            raise RecordError(
                f"{name}: no record of {track.folder.name} (expected one that this one claims to "
                "beat)"
            )
        script_name = logs[0].facts["script"]
        script = (folder / script_name).read_bytes()
        config = (folder / "config.env").read_bytes()
        manifest = find_manifest(folder, logs[0], track, Faults())
        again = []
        for log in baselines:
            code_faults = Faults()
            check_code(log, script_name, script, config, code_faults)
            if not code_faults.lines:
                again.append(log)
                left.remove(log)
                check_run(log, rules, faults)
                check_score(log, manifest, rules, faults)
        beaten[name] = again or logs
        compare(beaten[name], faults)
        claim = faults.of(f"claim against {name}")
        old = beaten[name][0]
        both = old.versions.keys() & first.versions.keys()  # scripts of other days log others
        machines = []
        for log in (old, first):
            versions = {key: log.versions[key] for key in sorted(both)}
            machines.append((log.facts["hardware"], versions))
        claim.equal("machine; run it again beside these", *machines)
        claim.at_least("runs of it", len(beaten[name]), rules["seeds"])
    names_left = [log.name for log in left]
    what = "not of a record that this one claims to beat"
    faults.of("baselines").require(not left, what, names_left, "its script and config")
    return beaten


def rounded(text: str) -> dict:
    """Return JSON with numbers of nine digits: another machine's logarithm may round otherwise."""
    return json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"))


def check_pages(folder: Path, result: dict, rules: dict, written: bool, faults: Faults) -> None:
    """Add the faults of the claims, of result.json and of README.md.

    `result` is what follows from the logs. `written`: the sections of README.md must be written.
    """
    for claim in result["claims"]:
        found = f"p = {claim['p']:.4g} at a margin of {claim['margin']:.4f} bits per byte"
        significant = claim["margin"] > 0 and claim["p"] < rules["p"]
        own = faults.of(f"claim against {claim['against']}")
        own.require(significant, "not significant", found, f"p < {rules['p']}")
    stored = rounded((folder / "result.json").read_text())
    expected = rounded(json.dumps(result))
    faults = faults.of("result.json")
    for key in {**expected, **stored}:
        faults.equal(f"{key} is not what the logs say", stored.get(key), expected.get(key))
    text = (folder / "README.md").read_text(encoding="utf-8")
    block = re.search("<!-- result -->\n(.*?)\n<!-- /result -->", text, re.DOTALL)
    lines = block[1].splitlines() if block else []
    faults = faults.of("README.md")
    expected_lines = result_text(result).splitlines()
    for number, pair in enumerate(zip_longest(lines, expected_lines, fillvalue=""), 1):
        found, expected = map(repr, pair)
        faults.equal(f"line {number} of its table is not by result.json", found, expected)
    for title in SECTIONS:
        pattern = rf"^## {title}\n+(?!#|{UNWRITTEN})\S"
        if written and not re.search(pattern, text, re.MULTILINE):
            faults.add(f"section {title!r} is not written", "nothing", "a few words")


def read_seed_logs(folder: Path, faults: Faults) -> list[Log]:
    """Return the logs of a record that can be read, in the order of their seeds."""
    logs = []
    for path in sorted(folder.glob("seed_*.txt")):
        try:
            log = read_log(path)
        except RecordError as error:
            faults.lines.append(str(error))
            continue
        logs.append(log)
        name = f"seed_{log.facts['seed']}.txt"
        faults.of(path.name).equal("seed of the log", name, path.name)
    return sorted(logs, key=lambda log: log.facts["seed"])


def check_folder(folder: Path, track_folder: Path, written: bool = True) -> list[str]:
    """Return every fault of a record. `written`: the sections of its README must be written."""
    track = read_track(track_folder)
    faults = Faults("folder")
    date = r"20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
    has_name = re.fullmatch(rf"{date}_[A-Za-z0-9]+", folder.name)
    faults.require(has_name, "name", folder.name, "YYYY-MM-DD_Name, letters and digits")
    logs = read_seed_logs(folder, faults)
    faults = faults.of("files")
    needed = ("README.md", "config.env", "result.json")
    missing = [name for name in needed if not (folder / name).is_file()]
    scripts = sorted(folder.glob("*.py"))
    faults.equal("missing", missing, [])
    faults.require(len(scripts) == 1, "scripts", [path.name for path in scripts], "one")
    faults.at_least("logs seed_*.txt", len(logs), track.rules["seeds"])
    if not missing and len(scripts) == 1 and len(logs) > 1:
        check_runs(folder, track, scripts[0], logs, faults)
        try:
            check_result(folder, track, logs, written, faults)
        except (RecordError, *UNREADABLE) as error:
            reason = f"{type(error).__name__}: {error}"
            line = f"result.json: it or its claims cannot be followed ({reason})"
            faults.lines.append(line)
    if written:
        check_machine(folder.name, track_folder, faults)
    return faults.lines


def check_machine(record: str, track_folder: Path, faults: Faults) -> None:
    """Add a fault if a track's page has a list of machines, and the record is not in it."""
    page = track_folder / "README.md"
    has_list = page.exists() and MACHINES in page.read_text(encoding="utf-8")
    name = record[11:]
    if has_list and name not in read_machines(track_folder):
        expected = f"`{name}` in a row of the table below {MACHINES.strip()!r}"
        faults.of(f"{track_folder.name}/README.md").add("machine of the record", "none", expected)


def check_runs(folder: Path, track: Track, script: Path, logs: list[Log], faults: Faults) -> None:
    """Add the faults of a record's script, logs and artifacts."""
    source = script.read_bytes()
    config = (folder / "config.env").read_bytes()
    rules = dict(track.rules)
    if folder.name < rules.get("script_tokens_since", ""):
        del rules["script_tokens"]  # the record is older than the rule
    script_faults = Faults()
    check_script(script.name, source, rules, script_faults)
    faults.lines += script_faults.lines
    compare(logs, faults)
    manifest = find_manifest(folder, logs[0], track, faults)
    for log in logs:
        if not script_faults.lines:  # check_code runs the script
            check_code(log, script.name, source, config, faults)
        check_artifact(log, folder / f"{Path(log.name).stem}.upar", faults)
        try:
            check_run(log, track.rules, faults)
            check_score(log, manifest, track.rules, faults)
        except UNREADABLE as error:
            reason = f"{type(error).__name__}: {error}"
            faults.lines.append(f"{log.name}: cannot be followed ({reason})")


def check_result(
    folder: Path, track: Track, logs: list[Log], written: bool, faults: Faults
) -> None:
    """Add the faults of a record's claims and pages."""
    stored = json.loads((folder / "result.json").read_bytes())
    names = [claim["against"] for claim in stored["claims"]]
    baselines = read_logs(folder, "baseline_*.txt")
    beaten = check_beaten(track, names, logs[0], baselines, faults)
    config = (folder / "config.env").read_bytes()
    result = summarize(track, folder.name, logs, config, beaten)
    check_pages(folder, result, track.rules, written, faults)


def check_artifact_scores(folder: Path, data: str) -> list[str]:
    """Return the faults of the artifacts, scored again by the record's script."""
    rules = read_track(folder.parent).rules
    data = Path(data or ROOT / rules["data"]["path"]).resolve()
    paths = sorted(folder.glob("seed_*.upar"))
    faults = Faults("artifacts")
    if not paths:
        faults.add("to score again", "none", "seed_<n>.upar, also where git does not keep them")
        return faults.lines
    script = next(folder.glob("*.py"))
    words = [rules["score"], *map(str, paths)]
    try:
        scores = run_record_script(script, folder / "config.env", *words, DATA_PATH=str(data))
    except RecordError as error:
        return [f"artifacts: cannot be scored on {data} ({error})"]
    for path, again in zip(paths, scores, strict=True):
        facts = read_log(path.with_suffix(".txt")).facts
        faults = faults.of(path.name)
        found = again["score"]
        score = facts[rules["score"]]
        same = abs(found - score) <= 1e-6
        faults.require(same, "its score is not reproduced", found, f"{score} to 1e-6")
        for key in ("val_bytes", "val_text_sha256"):
            faults.equal(key, again[key], rules["data"][key])
        faults.equal("tokenizer_sha256", again["tokenizer_sha256"], facts["tokenizer_sha256"])
    return faults.lines


# ---------------------------------------------------------------------------------------- commands
def list_records(records: Path) -> list[Path]:
    """Return the folders of all records."""
    folders = []
    for path in records.glob("*/track.json"):
        for folder in path.parent.iterdir():
            if folder.is_dir() and not folder.name.startswith("."):
                folders.append(folder)
    return sorted(folders)


def read_machines(track: Path) -> dict[str, str]:
    """Return the machine of each record, in the order of the table below `## Machines` of a track's page.

    The logs name the number of cores and not what these can multiply, so a person writes that table.
    """
    page = track / "README.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    section = text.partition(MACHINES)[2].partition("\n## ")[0]
    machines = {}
    for machine, names in re.findall(r"^\| (?!machine )(.+?) \| (.+?) \|$", section, re.MULTILINE):
        for name in names.split(", "):
            machines[name.strip("`")] = machine
    return machines


def rerun_row(claim: dict, result: dict, machine: str) -> list:
    """Return the table's row of a beaten record that was run again beside the record of `result`."""
    name = claim["against"]
    what = f"`{name[11:]}` run again, on another machine."
    link = f"[{name}]({result['track']}/{name}/README.md)"
    return [f"{claim['mean']:.4f}", machine, len(claim["logs"]), link, what, "", ""]


def record_row(track: Path, result: dict, machine: str, reruns: list[str]) -> list:
    """Return the table's row of a record. `reruns` are its scores on other machines, as text."""
    name = result["record"]
    page = (track / name / "README.md").read_text(encoding="utf-8")
    score = f"{result['mean']:.4f} ± {result['interval95']:.4f}"
    changed = re.search(r"^## What changed\n+(.+)", page, re.MULTILINE)
    claims = []
    for claim in result["claims"]:
        claims.append(f"{claim['against'][11:]} by {claim['margin']:.4f}, p = {claim['p']:.1g}")
    return [
        "; ".join([score, *reruns]),
        machine,
        len(result["seeds"]),
        f"[{name}]({track.name}/{name}/README.md)",
        changed[1] if changed else "",
        "; ".join(claims),
        f"{max(seed['total_bytes'] for seed in result['seeds']):,}",
    ]


def has_counts(folder: Path) -> bool:
    """Return whether a record mixes its network with counts of the training text."""
    config = (folder / "config.env").read_text(encoding="utf-8")
    return bool(re.search(r"^NGRAM_ORDER=[1-9]", config, re.MULTILINE))


def leaderboard(track: Path) -> list[str]:
    """Return the tables of a track's records, of networks alone and of those with counts of n-grams.

    They go by machine, and for each machine the best is first. A table without a row is left out.
    A track without records has a line instead. Links begin at records/.
    """
    rules = read_track(track).rules
    machines = read_machines(track)
    results = []
    for folder in list_records(track.parent):
        if folder.parent == track:
            results.append(json.loads((folder / "result.json").read_bytes()))
    link = f"[{track.name}]({track.name}/README.md)"
    if not results:
        return [f"{rules['title']} ({link}): no record yet."]
    rows = []  # (has counts, machine, score, cells)
    reruns = {}  # record -> its scores on other machines
    for result in results:
        machine = machines.get(result["record"][11:], "")
        for claim in result["claims"]:
            name = claim["against"]
            if machines.get(name[11:], "") != machine:
                cells = rerun_row(claim, result, machine)
                row = (has_counts(track / name), machine, claim["mean"], cells)
                if row not in rows:  # several records may share the same runs of it
                    rows.append(row)
                    reruns.setdefault(name, []).append(f"{claim['mean']:.4f} with {machine}")
    for result in results:
        machine = machines.get(result["record"][11:], "")
        cells = record_row(track, result, machine, reruns.get(result["record"], []))
        counts = has_counts(track / result["record"])
        rows.append((counts, machine, result["mean"], cells))
    order = list(dict.fromkeys([*machines.values(), ""]))
    rows.sort(key=lambda row: (order.index(row[1]), row[2]))
    head = ["bits per byte", "machine", "seeds", "record", "what changed", "better than", "bytes"]
    titles = {False: f"{rules['title']} ({link}):", True: "Older records, with counts of n-grams:"}
    tables = []
    for counts, title in titles.items():
        listed = [cells for is_counted, _, _, cells in rows if is_counted == counts]
        if listed:
            tables.append(f"{title}\n\n{markdown_table([head, *listed])}")
    return tables


def update_table(records: Path, write: bool) -> list[str]:
    """Return the fault that the table in records/README.md is old, if so; `write` updates it."""
    tracks = sorted(path.parent for path in records.glob("*/track.json"))
    tables = itertools.chain.from_iterable(map(leaderboard, tracks))
    page = records / "README.md"
    text = page.read_text(encoding="utf-8")
    try:
        new_text = replace_marked(text, "records", "\n\n".join(tables))
    except SystemExit as error:
        raise RecordError(f"{page}: {str(error).removeprefix('error: ')}") from None
    if write:
        page.write_text(new_text, encoding="utf-8")
    elif new_text != text:
        return [f"{page}: <!-- records --> to <!-- /records -->: run `table`"]
    return []


def read_runs(args: argparse.Namespace) -> list[Log]:
    """Return the logs of the runs in the order of their seeds. Raises RecordError if they differ."""
    if not re.fullmatch("[A-Za-z0-9]+", args.name):
        raise RecordError(f"--name {args.name}: must be letters and digits alone")
    logs = []
    for run in args.runs:
        log = read_log(run / "log.txt")
        log.name = str(run)
        logs.append(log)
    faults = Faults()
    compare(logs, faults)
    if faults.lines:
        more = f"; {len(faults.lines)} in all" if len(faults.lines) > 1 else ""
        raise RecordError(faults.lines[0] + more)
    return sorted(logs, key=lambda log: log.facts["seed"])


def refuse(faults: list[str]) -> None:
    """Raise RecordError if a record that is being made has faults."""
    if faults:
        raise RecordError("nothing was written, it would fail: " + "\n  ".join(faults))


def write_record(folder: Path, track: Track, logs: list[Log], args: argparse.Namespace) -> dict:
    """Write a record of runs into a new `folder`; return its result.json.

    Raises RecordError if check_folder finds a fault.
    """
    seeds = track.rules["seeds"]
    if len(logs) < seeds:
        raise RecordError(
            f"{len(logs)} runs: a record of {track.folder.name} needs {seeds} or more"
        )
    folder.mkdir()
    settings = logs[0].settings
    config = Path(settings["CONFIG"]).read_bytes() if settings["CONFIG"] else b""
    (folder / logs[0].facts["script"]).write_bytes(logs[0].source)
    (folder / "config.env").write_bytes(config)
    if logs[0].facts["manifest_sha256"] != track.rules["data"]["manifest_sha256"]:
        manifest = Path(settings["DATA_PATH"]) / "manifest.json"
        shutil.copyfile(manifest, folder / "manifest.json")
    for log in logs:
        run = Path(log.name)
        log.name = f"seed_{log.facts['seed']}.txt"
        (folder / log.name).write_bytes(log.data)
        if log.facts["artifact_bytes"] < MIB:
            shutil.copyfile(run / "model.upar", (folder / log.name).with_suffix(".upar"))
    baselines = []
    for number, run in enumerate(args.baseline, 1):
        log = read_log(run / "log.txt")
        log.name = f"baseline_{number:02d}.txt"
        (folder / log.name).write_bytes(log.data)
        baselines.append(log)
    names = [Path(old).resolve().name for old in args.against]
    faults = Faults()
    beaten = check_beaten(track, names, logs[0], baselines, faults)
    refuse(faults.lines)  # a single run of a beaten record has no variance
    result = summarize(track, folder.name, logs, config, beaten)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    again = (
        f"OUT_DIR=../../../runs DATA_PATH=../../../{track.rules['data']['path']} "
        f"CONFIG=config.env SEED={logs[0].facts['seed']} python {result['script']}"
    )
    table = f"<!-- result -->\n{result_text(result)}\n<!-- /result -->"
    sections = [f"## {title}\n\n{UNWRITTEN}" for title in SECTIONS]
    command = f"## Again, in this folder\n\n```bash\n{again}\n```\n"
    page = "\n\n".join([f"# {args.name}", table, *sections, command])
    (folder / "README.md").write_text(page, encoding="utf-8")
    refuse(check_folder(folder, track.folder, written=False))
    return result


def make_record(args: argparse.Namespace) -> Path:
    """Make a record of finished runs and check it; return its folder."""
    track = read_track(args.records / args.track)
    folder = track.folder / f"{time.strftime('%Y-%m-%d')}_{args.name}"
    if folder.exists():
        raise RecordError(f"--name {args.name}: {folder} exists")
    with tempfile.TemporaryDirectory(dir=track.folder, prefix=".new_") as place:
        part = Path(place) / folder.name
        write_record(part, track, read_runs(args), args)
        os.replace(part, folder)
    return folder


# -------------------------------------------------------------------------------------- submission
def submission_json(result: dict, args: argparse.Namespace) -> dict:
    """Return the keys of a Parameter Golf submission.json: means over seeds, the largest bytes."""
    seeds = result["seeds"]

    def mean(key: str) -> float:
        return statistics.fmean(seed[key] for seed in seeds)

    keys = "val_bpb val_loss artifact_bytes total_bytes steps train_seconds".split()
    seed_results = {}
    for seed in seeds:
        seed_results[str(seed["seed"])] = {key: seed[key] for key in keys}
    return {
        "author": args.author,
        "github_id": args.github_id,
        "name": args.name,
        "blurb": args.blurb,
        "date": time.strftime("%Y-%m-%d"),
        "track": result["track"],
        "val_loss": mean("val_loss"),
        "val_bpb": mean("val_bpb"),
        "val_bpb_std": statistics.stdev(seed["val_bpb"] for seed in seeds),
        "bytes_total": max(seed["total_bytes"] for seed in seeds),
        "bytes_code": max(seed["code_bytes"] for seed in seeds),
        "hardware": result["hardware"],
        "wallclock_seconds": mean("train_seconds"),
        "seeds": [seed["seed"] for seed in seeds],
        "seed_results": seed_results,
    }


def make_submission(args: argparse.Namespace) -> Path:
    """Write a Parameter Golf submission folder of finished runs; return the folder."""
    folder = args.out / f"{time.strftime('%Y-%m-%d')}_{args.name}"
    if folder.exists():
        raise RecordError(f"--name {args.name}: {folder} exists")
    logs = read_runs(args)
    with tempfile.TemporaryDirectory() as place:
        track_folder = args.records / args.track
        if not args.track:
            track_folder = Path(place) / "track_non_record_16mb"
            make_golf_track(track_folder, logs[0])
        record = Path(place) / folder.name
        result = write_record(record, read_track(track_folder), logs, args)
        folder.mkdir(parents=True)
        for name in (result["script"], "config.env"):
            shutil.copyfile(record / name, folder / name)
    for log in logs:
        (folder / f"train_seed{log.facts['seed']}.log").write_bytes(log.data)
    submission = submission_json(result, args)
    text = json.dumps(submission, indent=2) + "\n"
    (folder / "submission.json").write_text(text, encoding="utf-8")
    command = f"SEED={logs[0].facts['seed']} CONFIG=config.env python {result['script']}"
    counts = (
        f"Largest submission: {submission['bytes_total']:,} bytes, of which "
        f"{submission['bytes_code']:,} are code (script and config.env). Scores are of the model "
        "that was read back from the artifact; each validation token is scored once."
    )
    parts = [f"# {args.name}", args.blurb, result_text(result), counts]
    parts.append(f"```bash\n{command}\n```\n")
    page = "\n\n".join(part for part in parts if part)
    (folder / "README.md").write_text(page, encoding="utf-8")
    return folder


# -------------------------------------------------------------------------------------------- main
def check(args: argparse.Namespace) -> list[str]:
    """Return the faults of the given records; of all records and the table if none is given."""
    lines = []
    for folder in args.folders or list_records(args.records):
        path = folder.resolve()
        own = check_folder(path, path.parent)
        if args.artifact and not own:
            own = check_artifact_scores(path, args.data)
        lines += [f"{folder}: {fault}" for fault in own]
    if not args.folders and not lines:
        return update_table(args.records, write=False)
    return lines


def add_run_arguments(parser: argparse.ArgumentParser, track_required: bool) -> None:
    """Add the arguments of a command that reads finished runs."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folders of runs of different seeds"
    )
    parser.add_argument("--track", required=track_required, default="")
    parser.add_argument("--name", required=True, help="letters and digits")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="FOLDER", help="records that it claims to beat"
    )
    parser.add_argument(
        "--baseline",
        nargs="+",
        type=Path,
        default=[],
        metavar="RUN",
        help="runs of those records, made beside these",
    )


def main() -> int:
    """Return 0; 1 if a record has faults; 2 if a command cannot be carried out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--records", type=Path, default=ROOT / "records", help="folder of the tracks"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add_run_arguments(commands.add_parser("new", help="a record of finished runs"), True)
    checker = commands.add_parser("check", help="a line for every fault of records")
    checker.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="none: all, and the table"
    )
    checker.add_argument("--artifact", action="store_true", help="score the artifacts again, too")
    checker.add_argument("--data", default="", help="where the track's data are now")
    commands.add_parser("table", help="rewrite the table in records/README.md")
    golf = commands.add_parser("submission", help="a Parameter Golf submission of finished runs")
    add_run_arguments(golf, False)
    golf.add_argument("--author", required=True)
    golf.add_argument("--github-id", default="")
    golf.add_argument("--blurb", default="", help="what it is, in a sentence")
    golf.add_argument("--out", type=Path, default=Path("runs", "submissions"), help="folder")
    args = parser.parse_args()
    faults = []
    try:
        if args.command == "new":
            folder = make_record(args)
            print(f"{folder}: now write the sections of its README.md; then check, and table")
            return 0
        if args.command == "submission":
            print(f"{make_submission(args)}: written and checked")
            return 0
        if args.command == "table":
            update_table(args.records, write=True)
        else:
            faults = check(args)
    except OSError as error:
        sys.stderr.write(f"error: {error.filename}: {error.strerror}\n")
        return 2
    except RecordError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    run_tool(main)
