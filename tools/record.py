"""Records: a folder that photographs a result, its check, and the tables of them.

    python tools/record.py new RUN RUN RUN --track track_cpu_3min --name WiderMLP [--against FOLDER] [--baseline RUN…]
    python tools/record.py check [FOLDER…] [--artifact [--data data/django]]
    python tools/record.py table

A record is records/<track>/<YYYY-MM-DD>_<Name>/: README.md, the script exactly as in the logs, config.env, seed_<n>.txt
(the logs), seed_<n>.upar (artifacts under 1 MiB), result.json, made from the logs alone; baseline_<n>.txt: a record
that it claims to beat, run again beside it; manifest.json where its data are another tokenizer's. A track's rules stand
in its track.json. `check` prints a line for every fault, and exits with 1 if there is one.
"""

import argparse
import ast
import functools
import hashlib
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RULE = b"\n" + b"=" * 120 + b"\n"  # below the source, in a log
FREE = (
    "RUN_ID",
    "OUT_DIR",
    "CONFIG",
    "DATA_PATH",
    "TOKENIZER_PATH",
    "SEED",
)  # what a record's command may set
# What is read of the block at a log's end; result.json keeps WHOLE of a record, and of each seed the rest.
WHOLE = "script code_sha256 manifest_sha256 tokenizer_sha256 hardware world_size".split()
KINDS = {
    **dict.fromkeys([*WHOLE, "commit", "artifact_sha256"], str),
    "events": ast.literal_eval,
    **dict.fromkeys(
        "seed steps tokens val_tokens val_bytes artifact_bytes code_bytes total_bytes".split(), int
    ),
    **dict.fromkeys(
        "train_seconds total_seconds val_loss val_nats val_bpb bytes_per_token".split(), float
    ),
}
TEXT = (
    "documents source_bytes decoded_bytes sources_sha256 seed val_frac val_max_bytes".split()
)  # in a manifest
SLIDING = "val_bpb_sliding"  # read where it is there
LEGENDRE = functools.lru_cache(
    np.polynomial.legendre.leggauss
)  # it takes longer than all else in a check
# What may happen to a record's run: a masked step, optional work that the clock left no time for, a full disk. The
# first two are events of scripts before the rewrite.
EVENTS = ("skip", "rewind", "skipped_step", "weights_left_out", "gptq_left_out", "save_failed")
SMALL = 1 << 20  # bytes: artifacts below are committed, and no log is longer
SECTIONS, UNWRITTEN = ("What changed", "Why", "What did not help"), "To be written."
STRANGE = {
    "exec",
    "eval",
    "__import__",
    "builtins",
    "importlib",
    "marshal",
    "runpy",
    "pickle",
}  # ways to hide code
UNREADABLE = (
    ArithmeticError,
    LookupError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
)  # of edited files
KEPT = "PATH HOME TMPDIR LANG LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV OMP_NUM_THREADS CUDA_VISIBLE_DEVICES".split()

# In a clean process: a script's own main, stopped once it has its settings; then, of an artifact, the score.
PROCESS = """
import hashlib, importlib.util, json, sys
from dataclasses import fields
from types import SimpleNamespace

path, way, *artifacts = sys.argv[1:]
spec = importlib.util.spec_from_file_location("record_script", path)
script = sys.modules["record_script"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
sys.argv = [path]  # the script reads its own arguments
load, settings = script.load_settings, []
script.load_settings = lambda *given, **more: settings.append(load(*given, **more)) or sys.exit()
try:
    script.main()
except SystemExit:
    s = settings[0]
found = [{f.name.upper(): str(int(getattr(s, f.name)) if f.type is bool else getattr(s, f.name)) for f in fields(s)}]
if artifacts:
    data, runtime, found, digest = script.open_data(s), script.start_runtime(s.device), [], hashlib.sha256()
    tokens, tokenizer = data.val, data.tokenizer
    for at in range(1, len(tokens), 1 << 20):
        ids = tokens[at : at + (1 << 20)]
        drops = tokenizer.drops_space[ids] & tokenizer.boundary[tokens[at - 1 :][: len(ids)]]
        digest.update(b"".join(tokenizer.pieces[i][drop:] for i, drop in zip(ids.tolist(), drops.tolist())))
for artifact in artifacts:
    header, tensors, _ = script.read_artifact(artifact)
    counts = [script.NGrams] if header["settings"].get("ngram_order") else []  # older scripts have none
    network = script.GPT(SimpleNamespace(**header["settings"]), *counts).to(runtime.device)
    network.load_state_dict(tensors)
    stride = s.eval_stride if way == "val_bpb_sliding" else None
    if hasattr(script, "Scorer"):
        score = script.Scorer(tokenizer, runtime, s.train_seq_len, 4).score(network, tokens, stride)
    else:  # a frozen record
        score = script.score_tokens(network, tokens, tokenizer, runtime, s.train_seq_len, stride or s.train_seq_len, 4)
    found.append({"score": score.bpb, "val_bytes": score.bytes, "val_text_sha256": digest.hexdigest(),
                  "tokenizer_sha256": header["tokenizer_sha256"]})
print(json.dumps(found))
"""


class RecordError(Exception):
    """What cannot be gone on from, in one line."""


@dataclass
class Log:
    """A finished run, by its log.txt alone."""

    name: str
    data: bytes  # the whole file
    source: bytes  # the script's
    settings: dict[str, str]  # as printed
    text: str  # from there to the block at the end
    facts: dict  # of that block
    versions: dict


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wrong(name: str, *rows: tuple) -> list[str]:
    """A line for each of the rows (what, found, expected) that are not equal, or whose fourth entry is false."""
    return [
        f"{name}: {what} (found {found}, expected {expected})"
        for what, found, expected, *holds in rows
        if not (holds[0] if holds else found == expected)
    ]


def read_log(path: Path) -> Log:
    """The log of a run that came to its end. Raises OSError, RecordError."""
    data = path.read_bytes()
    source, _, rest = data.partition(RULE)
    text, _, end = rest.decode("utf-8", errors="replace").rpartition("\n---\n")
    settings = dict(
        re.findall(
            r"^[* ] ([A-Z][A-Z0-9_]*)=(.*)$", text.partition("\nparameters: ")[0], re.MULTILINE
        )
    )
    versions = re.search(r"^commit:.* versions:(\{[^}]*\})", text, re.MULTILINE)
    if not settings or not versions:
        raise RecordError(
            f"{path.name}: not the log of a run that ended (expected source, a line of 120 =, versions, "
            "settings, and results below ---)"
        )
    pairs = dict(line.split(": ", 1) for line in end.splitlines() if ": " in line)
    kinds = KINDS | ({SLIDING: float} if SLIDING in pairs else {})
    try:
        facts, versions = (
            {key: kind(pairs[key]) for key, kind in kinds.items()},
            ast.literal_eval(versions[1]),
        )
    except UNREADABLE as error:
        raise RecordError(
            f"{path.name}: its results cannot be read ({type(error).__name__}: {error})"
        ) from None
    text += "".join(f"\n{line}" for line in end.splitlines() if line.startswith("error: "))
    return Log(path.name, data, source, settings, text, facts, versions)


# --------------------------------------------------------------------------------------------------------- statistics
def student_tail(t: float, df: float) -> float:
    """P(T > t) of Student's distribution: with t = sqrt(df) tan(a) its density is cos(a)**(df - 1) but for a factor;
    by 200 Gauss-Legendre nodes to eight digits and more, from one to hundreds of degrees of freedom."""
    nodes, weights = LEGENDRE(200)
    low = math.atan(t / math.sqrt(df))
    half = (math.pi / 2 - low) / 2
    area = half * float(weights @ np.cos(low + half * (nodes + 1)) ** (df - 1))
    return area * math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)


def half_width(values: list[float]) -> float:
    """Half of the 95% interval of the mean of two values or more (Student), its quantile by bisection."""
    low, high = 0.0, 100.0
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if student_tail(middle, len(values) - 1) > 0.025 else (low, middle)
        )
    return low * statistics.stdev(values) / math.sqrt(len(values))


def welch(new: list[float], old: list[float]) -> tuple[float, float, float]:
    """(t, degrees of freedom, p) of the one-sided test that the mean of `new` is the smaller one (Welch 1947)."""
    parts = [statistics.variance(each) / len(each) for each in (new, old)]
    margin = statistics.fmean(old) - statistics.fmean(new)
    if not sum(parts):
        raise RecordError(
            f"runs of different seeds all score {new[0]} and {old[0]} (expected some spread)"
        )
    df = sum(parts) ** 2 / sum(
        part**2 / (len(each) - 1) for part, each in zip(parts, (new, old), strict=True)
    )
    t = margin / math.sqrt(sum(parts))
    return t, df, student_tail(t, df)


# ------------------------------------------------------------------------------------------------ track, script, pages
def read_track(track: Path) -> tuple[dict, dict]:
    """A track's rules and the manifest of its data. Raises RecordError where they are missing or do not agree."""
    try:
        rules, text = (
            json.loads((track / "track.json").read_bytes()),
            (track / "manifest.json").read_bytes(),
        )
    except (OSError, ValueError):
        raise RecordError(
            f"{track}: no track that can be read (expected track.json and manifest.json)"
        ) from None
    manifest, pinned = json.loads(text), rules["data"]
    if faults := wrong(
        f"{track}/track.json",
        *(
            (f"data.{key}", pinned[key], value)
            for key, value in {
                "manifest_sha256": sha256(text),
                "val_bytes": manifest["val"]["decoded_bytes"],
                "overlap_documents": manifest["overlap_documents"],
            }.items()
        ),
    ):
        raise RecordError(faults[0])
    return rules, manifest


def run_script(
    script: Path, config: Path, way: str = "", artifacts: tuple = (), **settings: str
) -> list[dict]:
    """What PROCESS prints of a script and a config. Raises RecordError with the last line that it left."""
    env = {name: os.environ[name] for name in KEPT if name in os.environ} | settings
    env |= {"CONFIG": str(config.resolve()), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(script.resolve()), way, *artifacts],
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RecordError(
            (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        )
    return json.loads(done.stdout.splitlines()[-1])


@functools.lru_cache
def resolve_settings(name: str, script: bytes, config: bytes) -> dict[str, str]:
    """The settings, as a log prints them, that a script has by its defaults and a config. Raises RecordError."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(script)
        (Path(folder) / "config.env").write_bytes(config)
        return run_script(Path(folder) / name, Path(folder) / "config.env")[0]


def summarize(
    track: str, record: str, score: str, logs: list[Log], config: bytes, old: dict[str, list[Log]]
) -> dict:
    """result.json, by the logs in the order of their seeds; `old`: logs of each record that this one claims to beat."""
    first, values, claims = logs[0].facts, [log.facts[score] for log in logs], []
    for name, runs in old.items():
        before = [log.facts[score] for log in runs]
        t, df, p = welch(
            values, before
        )  # of one text, so p is the same for nats and for bits per byte
        margin = statistics.fmean(before) - statistics.fmean(values)
        nats = (
            margin * math.log(2) * first["val_bytes"] / first["val_tokens"]
        )  # by this record's tokenizer
        claims.append(
            {
                "against": name,
                "logs": [log.name for log in runs],
                "mean": statistics.fmean(before),
                "margin": margin,
                "margin_nats_per_token": nats,
                "t": t,
                "df": df,
                "p": p,
            }
        )
    seeds = [{key: value for key, value in log.facts.items() if key not in WHOLE} for log in logs]
    return {
        "format": 1,
        "track": track,
        "record": record,
        "score": score,
        "mean": statistics.fmean(values),
        "interval95": half_width(values),
        "claims": claims,
        **{key: first[key] for key in WHOLE},
        "config_sha256": sha256(config),
        "versions": logs[0].versions,
        "seeds": seeds,
    }


def find_block(name: str, text: str) -> str:
    """A block of a page, markers included; "" where there is none."""
    return "".join(re.findall(f"<!-- {name} -->.*?<!-- /{name} -->", text, re.DOTALL)[:1])


def table(header: list[str], rows: list[list]) -> str:
    return "\n".join(
        "| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows]
    )


def result_block(result: dict) -> str:
    """The part of a record's README that is made from its result.json: seeds, mean, claims."""
    scores = [key for key in ("val_bpb", SLIDING, "val_loss") if key in result["seeds"][0]]
    rows = [
        [
            seed["seed"],
            *(f"{seed[key]:.4f}" for key in scores),
            seed["steps"],
            f"{seed['train_seconds']:.1f}",
            f"{seed['artifact_bytes']:,}",
            f"{seed['total_bytes']:,}",
        ]
        for seed in result["seeds"]
    ]
    said = [
        table(["seed", *scores, "steps", "train_seconds", "artifact_bytes", "total_bytes"], rows),
        f"Mean `{result['score']}` **{result['mean']:.4f}**, 95% interval ±{result['interval95']:.4f} (Student, "
        f"{len(rows)} seeds). {result['hardware']}, torch {result['versions']['torch']}.",
    ]
    for claim in result["claims"]:
        again = any(name.startswith("baseline_") for name in claim["logs"])
        said.append(
            f"Better than `{claim['against']}` ({claim['mean']:.4f}, {len(claim['logs'])} runs, "
            f"{'made again beside these: baseline_*.txt' if again else 'its own logs'}) by "
            f"{claim['margin']:.4f} bits per byte, {claim['margin_nats_per_token']:.4f} nats per token: "
            f"p = {claim['p']:.2g} (one-sided Welch test, {claim['df']:.1f} degrees of freedom)."
        )
    return "\n".join(["<!-- result -->", "\n\n".join(said), "<!-- /result -->"])


# -------------------------------------------------------------------------------------------------------------- checks
def check_script(name: str, source: bytes, rules: dict) -> list[str]:
    """Faults of a record's script by its text; nothing of it is run."""
    try:
        lines, tree = source.decode("utf-8").splitlines(), ast.parse(source)
    except (SyntaxError, ValueError) as error:
        return [f"{name}: does not compile ({str(error).splitlines()[0]})"]
    wide, strange, packed = max(map(len, lines)), [], []
    for node in ast.walk(tree):
        names = [node.id] if isinstance(node, ast.Name) else []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        strange += [f"{own} at line {node.lineno}" for own in names if own.split(".")[0] in STRANGE]
        text = getattr(node, "value", None)
        if isinstance(text, str | bytes) and len(text) > max(400, 40 * len(text.split())):
            packed.append(
                f"{len(text)} characters in {len(text.split())} words at line {node.lineno}"
            )
        if isinstance(node, ast.List | ast.Tuple | ast.Set) and len(node.elts) > 256:
            packed.append(f"{len(node.elts)} elements at line {node.lineno}")
    return wrong(
        name,
        ("columns", wide, f"at most {rules['script_columns']}", wide <= rules["script_columns"]),
        (
            "runs what cannot be read in it",
            ", ".join(strange),
            f"none of {sorted(STRANGE)}",
            not strange,
        ),
        ("packed data", ", ".join(packed), "text", not packed),
    )


def check_code(log: Log, name: str, script: bytes, config: bytes) -> list[str]:
    """Faults of a log's source, settings and seed, by script and config."""
    theirs, ours = (
        [*text.decode(errors="replace").split("\n"), "the end"] for text in (log.source, script)
    )
    at = next((at for at, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), 0)
    rows = [
        (
            f"its source is not {name}, first at line {at + 1}",
            repr(theirs[at].strip()),
            repr(ours[at].strip()),
            log.source == script,
        ),
        ("script", log.facts["script"], name),
        (f"code_sha256 is not that of {name}", log.facts["code_sha256"], sha256(script)),
        (
            "code_bytes are not those of script and config",
            log.facts["code_bytes"],
            len(script) + len(config),
        ),
        ("seed is not the setting", str(log.facts["seed"]), log.settings.get("SEED")),
    ]
    try:
        expected = resolve_settings(name, script, config)
    except RecordError as error:
        return wrong(log.name, *rows, ("settings", error, f"{name} to take config.env", False))
    return wrong(
        log.name,
        *rows,
        *(
            (
                f"setting {key} is not that of {name} with config.env",
                log.settings.get(key),
                expected.get(key),
            )
            for key in sorted(expected.keys() | log.settings.keys())
            if key not in FREE
        ),
    )


def check_run(log: Log, rules: dict) -> list[str]:
    """Faults of what happened: errors, events, phases, time (choosing and calibration included), hardware, bytes."""
    facts, seconds = log.facts, log.facts["train_seconds"]
    rows = [
        ("the run ended with an error", error, "none", False)
        for error in re.findall(r"^error: (.*)", log.text, re.MULTILINE)
    ]
    rows += [
        ("event", event["event"], f"none but {' '.join(EVENTS)}", event["event"] in EVENTS)
        for event in facts["events"]
    ]
    planned = re.findall(r"^plan: (\w+) from ", log.text, re.MULTILINE)
    ended = dict(re.findall(r"^phase: (\w+) +planned +[\d.]+%, (.*)$", log.text, re.MULTILINE))
    begun = dict(re.findall(r"^phase: (\w+) begins at step (\d+),", log.text, re.MULTILINE))
    rows.append(("phases at the end", [*ended], planned))
    averages = [name for name in ("ema", "swa", "qat") if log.settings.get(name.upper()) == "1"]
    for name in dict.fromkeys([*planned, *averages]):
        on = re.fullmatch(
            r"began at step (\d+)(?: \(.*\))?, on for (\d+) steps",
            said := ended.get(name, "nothing"),
        )
        rows.append(
            (
                f"phase {name} never fired",
                said,
                f"to begin at step {begun.get(name, '?')}, for 1 step or more",
                on and int(on[2]) > 0 and on[1] == begun.get(name),
            )
        )
    clock = re.findall(r"^clock: ([\d.]+) s to train and choose", log.text, re.MULTILINE)
    steps = re.findall(r"^step:(\d+)/\S+ train_loss:.* train_time:(\d+)ms", log.text, re.MULTILINE)
    late = [
        f"step {n} at {ms} ms"
        for n, ms in steps
        if int(n) > facts["steps"] or int(ms) > 1000 * seconds + 1
    ]
    return wrong(
        log.name,
        *rows,
        (
            "over the clock",
            f"{seconds:.3f} s",
            f"at most {rules['seconds']} s",
            seconds <= rules["seconds"],
        ),
        ("train_seconds by the line `clock:`", seconds, clock, [f"{seconds:.1f}"] == clock),
        (
            "steps beyond the end",
            late or "no steps",
            f"up to {facts['steps']} at {seconds:.3f} s",
            steps and not late,
        ),
        (
            "tokens",
            facts["tokens"],
            f"{facts['steps']} x TRAIN_BATCH_TOKENS",
            facts["tokens"] == facts["steps"] * int(log.settings.get("TRAIN_BATCH_TOKENS", 0)),
        ),
        (
            "hardware",
            facts["hardware"],
            rules["hardware"],
            re.fullmatch(rules["hardware"], facts["hardware"]),
        ),
        (
            "total_bytes are not code and artifact",
            facts["total_bytes"],
            facts["code_bytes"] + facts["artifact_bytes"],
        ),
        (
            "over the cap",
            f"{facts['total_bytes']} bytes of code and artifact",
            f"at most {rules['bytes']}",
            facts["total_bytes"] <= rules["bytes"],
        ),
        ("bytes of the log", len(log.data), f"at most {SMALL}", len(log.data) <= SMALL),
    )


def check_score(log: Log, manifest: dict, rules: dict) -> list[str]:
    """Faults of nats, tokens, bytes and bits per byte: among themselves, by the log's lines, by the manifest."""
    facts, val = log.facts, manifest["val"]
    nats, tokens, size = facts["val_nats"], facts["val_tokens"], facts["val_bytes"]
    rows = [
        ("the track's score", "none", rules["score"], rules["score"] in facts),
        ("val_tokens are not all of validation", tokens, val["tokens"] - 1),
        ("val_bytes are not all of validation", size, val["decoded_bytes"]),
        (
            "tokenizer_sha256 is not the manifest's",
            facts["tokenizer_sha256"],
            manifest["tokenizer"]["sha256"],
        ),
        (
            "overlap of training and validation, data",
            re.findall("^data: .*", log.text, re.MULTILINE),
            [
                f"data: {manifest['name']}, train {manifest['train']['tokens']} tokens, val {val['tokens']} tokens, "
                f"{val['decoded_bytes']} bytes, overlap {rules['data']['overlap_documents']} documents"
            ],
        ),
    ]
    follows = {
        "val_loss": nats / tokens,
        "val_bpb": nats / math.log(2) / size,
        "bytes_per_token": size / tokens,
    }
    rows += [
        (
            f"{key} does not follow from nats, tokens and bytes",
            facts[key],
            value,
            math.isclose(facts[key], value, rel_tol=1e-9),
        )
        for key, value in follows.items()
    ]
    line = r"^from the artifact: (|sliding )val_loss:\S+ bpb:(\S+) nats:(\S+) tokens:(\d+) bytes:(\d+) "
    said = {way: own for way, *own in re.findall(line, log.text, re.MULTILINE)}
    for way, key in {"": "val_bpb", "sliding ": SLIDING}.items():
        if key in facts:  # the line has nats to a tenth
            bpb = float(said[way][1]) / math.log(2) / size if way in said else math.nan
            rows.append(
                (
                    f"{key} by the line `from the artifact: {way}val_`",
                    facts[key],
                    said.get(way),
                    abs(bpb - facts[key]) < 0.05 / math.log(2) / size + 1e-9
                    and said[way][2:] == [str(tokens), str(size)]
                    and f"{facts[key]:.4f}" == said[way][0],
                )
            )
    return wrong(log.name, *rows)


def check_artifact(log: Log, path: Path) -> list[str]:
    """Faults of an artifact file: size and SHA-256 counted again. One of 1 MiB or more need not be there."""
    size = log.facts["artifact_bytes"]
    if not path.is_file():
        return wrong(
            path.name, ("no such file", "none", f"the artifact of {size} bytes", size >= SMALL)
        )
    data = path.read_bytes()
    return wrong(
        path.name,
        (f"artifact_bytes of {log.name}", len(data), size),
        (f"is not the artifact of {log.name}, SHA-256", sha256(data), log.facts["artifact_sha256"]),
    )


def find_manifest(folder: Path, log: Log, rules: dict, manifest: dict) -> tuple[dict, list[str]]:
    """The manifest of a record's data, and faults: the track's, or its own of the same text by another tokenizer."""
    sha, path = log.facts["manifest_sha256"], folder / "manifest.json"
    if sha == rules["data"]["manifest_sha256"]:
        return manifest, []
    if not path.is_file() or sha256(path.read_bytes()) != sha:
        return manifest, wrong(
            log.name,
            (
                "manifest_sha256: other data than the track's",
                sha,
                rules["data"]["manifest_sha256"] + ", or that of a manifest.json here",
                False,
            ),
        )
    own = json.loads(path.read_bytes())
    texts = [
        {key: {**of["val"], **(of.get("request") or {})}.get(key) for key in TEXT}
        for of in (own, manifest)
    ]
    return own, wrong(
        path.name,
        ("not the track's validation text", *texts),
        ("overlap_documents", own["overlap_documents"], manifest["overlap_documents"]),
    )


def compare(logs: list[Log]) -> list[str]:
    """What the runs of one record may not differ in, and do; what they must differ in, and do not."""
    first, found = logs[0], []
    for at, log in enumerate(logs[1:], 1):
        rows = [
            ("code", sha256(log.source), sha256(first.source)),
            ("versions", log.versions, first.versions),
        ]
        rows += [
            (f"setting {key}", log.settings.get(key), first.settings.get(key))
            for key in sorted(log.settings.keys() | first.settings.keys())
            if key not in FREE
        ]
        rows += [(key, log.facts[key], first.facts[key]) for key in [*WHOLE[2:], "code_bytes"]]
        found += wrong(f"{log.name} differs from {first.name}", *rows)
        for key in ("seed", "artifact_sha256"):
            found += [
                f"{log.name} and {other.name} have the same {key} (found {log.facts[key]}, expected others)"
                for other in logs[:at]
                if other.facts[key] == log.facts[key]
            ]
    return found


def check_old(
    track: Path, names: list[str], first: Log, baselines: list[Log]
) -> tuple[dict, list[str]]:
    """Name -> logs of each record that one with log `first` claims to beat: the baselines that ran it, or its own."""
    (rules, manifest), old, found, left = read_track(track), {}, [], list(baselines)
    for name in names:
        own = [read_log(path) for path in sorted((track / name).glob("seed_*.txt"))]
        if not own:
            raise RecordError(
                f"{name}: no record of {track.name} (expected one that this one claims to beat)"
            )
        file = own[0].facts["script"]
        script, config = (
            (track / name / file).read_bytes(),
            (track / name / "config.env").read_bytes(),
        )
        again = [
            log
            for log in baselines
            if log.source == script and not check_code(log, file, script, config)
        ]
        left, old[name] = [log for log in left if log not in again], again or own
        own_manifest, _ = find_manifest(track / name, own[0], rules, manifest)
        for log in again:
            found += check_run(log, rules) + check_score(log, own_manifest, rules)
        machines = [(log.facts["hardware"], log.versions) for log in (old[name][0], first)]
        found += compare(old[name]) + wrong(
            f"claim against {name}",
            ("machine; run it again beside these", *machines),
            (
                "runs of it",
                len(old[name]),
                f"at least {rules['seeds']}",
                len(old[name]) >= rules["seeds"],
            ),
        )
    return old, found + wrong(
        "baselines",
        (
            "not of a record that this one claims to beat",
            [log.name for log in left],
            "its script and config",
            not left,
        ),
    )


def check_pages(folder: Path, result: dict, rules: dict, written: bool) -> list[str]:
    """Faults of the claims, of result.json against what follows from the logs, and of README.md against both."""
    found = []
    for claim in result["claims"]:
        found += wrong(
            f"claim against {claim['against']}",
            (
                "not significant",
                f"p = {claim['p']:.4g} at a margin of {claim['margin']:.4f} bits per byte",
                f"p < {rules['p']}",
                claim["margin"] > 0 and claim["p"] < rules["p"],
            ),
        )
    # Another machine's logarithm may round otherwise.
    stored, right = (
        json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"))
        for text in ((folder / "result.json").read_text(), json.dumps(result))
    )
    found += wrong(
        "result.json",
        *(
            (f"{key} is not what the logs say", stored.get(key), right.get(key))
            for key in {**right, **stored}
        ),
    )
    text, right = (
        (folder / "README.md").read_text(encoding="utf-8"),
        result_block(result).splitlines(),
    )
    there = [*find_block("result", text).splitlines(), *[""] * len(right)][: len(right)]
    found += wrong(
        "README.md",
        *(
            (f"line {at} of its table is not by result.json", repr(a), repr(b))
            for at, (a, b) in enumerate(zip(there, right, strict=True), 1)
        ),
    )
    return found + wrong(
        "README.md",
        *(
            (
                f"section {title!r} is not written",
                "nothing",
                "a few words",
                bool(re.search(rf"^## {title}\n+(?!#|{UNWRITTEN})\S", text, re.MULTILINE)),
            )
            for title in SECTIONS
            if written
        ),
    )


def check_folder(folder: Path, track: Path, written: bool = True) -> list[str]:
    """Every fault of a record of a track. `written`: the sections of its README must be written, too."""
    rules, manifest = read_track(track)
    scripts, found, logs = sorted(folder.glob("*.py")), [], []
    if not re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])_[A-Za-z0-9]+", folder.name):
        found += wrong(
            "folder", ("name", folder.name, "YYYY-MM-DD_Name, letters and digits", False)
        )
    missing = [
        name for name in ("README.md", "config.env", "result.json") if not (folder / name).is_file()
    ]
    for path in sorted(folder.glob("seed_*.txt")):
        try:
            logs.append(read_log(path))
            found += wrong(
                path.name, ("seed of the log", f"seed_{logs[-1].facts['seed']}.txt", path.name)
            )
        except RecordError as error:
            found.append(str(error))
    found += wrong(
        "files",
        ("missing", missing, "none", not missing),
        ("scripts", [path.name for path in scripts], "one", len(scripts) == 1),
        ("logs seed_*.txt", len(logs), f"at least {rules['seeds']}", len(logs) >= rules["seeds"]),
    )
    if missing or len(scripts) != 1 or len(logs) < 2:
        return found
    logs.sort(key=lambda log: log.facts["seed"])
    name, script, config = (
        scripts[0].name,
        scripts[0].read_bytes(),
        (folder / "config.env").read_bytes(),
    )
    own_manifest, faults = find_manifest(folder, logs[0], rules, manifest)
    found += check_script(name, script, rules) + compare(logs) + faults
    for log in logs:
        found += check_code(log, name, script, config) + check_artifact(
            log, folder / f"{Path(log.name).stem}.upar"
        )
        try:
            found += check_run(log, rules) + check_score(log, own_manifest, rules)
        except UNREADABLE as error:
            found.append(f"{log.name}: cannot be followed ({type(error).__name__}: {error})")
    try:
        stored = json.loads((folder / "result.json").read_bytes())
        baselines = [read_log(path) for path in sorted(folder.glob("baseline_*.txt"))]
        old, faults = check_old(
            track, [claim["against"] for claim in stored["claims"]], logs[0], baselines
        )
        result = summarize(track.name, folder.name, rules["score"], logs, config, old)
        return [*found, *faults, *check_pages(folder, result, rules, written)]
    except (RecordError, *UNREADABLE) as error:
        return [
            *found,
            f"result.json: it or its claims cannot be followed ({type(error).__name__}: {error})",
        ]


def check_scores(folder: Path, track: Path, data: str) -> list[str]:
    """Faults of the artifacts, scored again by the record's script in a clean process."""
    (rules, _), found, script = read_track(track), [], next(folder.glob("*.py"))
    data, paths = (
        Path(data or ROOT / rules["data"]["path"]).resolve(),
        sorted(folder.glob("seed_*.upar")),
    )
    if not paths:
        return wrong(
            "artifacts",
            ("to score again", "none", "seed_<n>.upar, also where git does not keep them", False),
        )
    try:
        scores = run_script(
            script,
            folder / "config.env",
            rules["score"],
            tuple(map(str, paths)),
            DATA_PATH=str(data),
        )
    except RecordError as error:
        return [f"artifacts: cannot be scored on {data} ({error})"]
    for path, again in zip(paths, scores, strict=True):
        log = read_log(path.with_suffix(".txt"))
        score = log.facts[rules["score"]]
        found += wrong(
            path.name,
            (
                "its score is not reproduced",
                again["score"],
                f"{score} to 1e-6",
                abs(again["score"] - score) <= 1e-6,
            ),
            *((key, again[key], rules["data"][key]) for key in ("val_bytes", "val_text_sha256")),
            ("tokenizer_sha256", again["tokenizer_sha256"], log.facts["tokenizer_sha256"]),
        )
    return found


# ------------------------------------------------------------------------------------------------------------ commands
def folders(records: Path) -> list[Path]:
    """All records."""
    return sorted(
        path
        for track in records.glob("*/track.json")
        for path in track.parent.iterdir()
        if path.is_dir() and not path.name.startswith(".")
    )


def write_tables(records: Path, write: bool) -> list[str]:
    """Brings the tables in records/README.md and README.md up to date, or says which are not; lines of faults."""
    parts, found = [], []
    for track in sorted(path.parent for path in records.glob("*/track.json")):
        rules, rows = read_track(track)[0], []
        own = [folder / "result.json" for folder in folders(records) if folder.parent == track]
        for result in sorted(
            (json.loads(path.read_bytes()) for path in own), key=lambda each: each["mean"]
        ):
            page = track / result["record"] / "README.md"
            changed = re.search(
                r"^## What changed\n+(.+)", page.read_text(encoding="utf-8"), re.MULTILINE
            )
            claims = "; ".join(
                f"{claim['against'][11:]} by {claim['margin']:.4f}, p = {claim['p']:.1g}"
                for claim in result["claims"]
            )
            most = max(seed["total_bytes"] for seed in result["seeds"])
            rows.append(
                [
                    f"{result['mean']:.4f} ± {result['interval95']:.4f}",
                    len(result["seeds"]),
                    f"[{result['record']}](records/{track.name}/{result['record']}/README.md)",
                    changed[1] if changed else "",
                    claims,
                    f"{most:,}",
                ]
            )
        header = ["bits per byte", "seeds", "record", "what changed", "better than", "bytes"]
        parts.append(
            f"{rules['title']} ([{track.name}](records/{track.name}/README.md)):\n\n{table(header, rows)}"
        )
    for page in (records / "README.md", records.parent / "README.md"):
        right = "\n".join(["<!-- records -->", "\n\n".join(parts), "<!-- /records -->"])
        right = right.replace("](records/", "](") if page.parent == records else right
        text = page.read_text(encoding="utf-8")
        there = find_block("records", text)
        if write and there:
            page.write_text(text.replace(there, right), encoding="utf-8")
        elif there != right:
            found += wrong(
                str(page),
                (
                    "<!-- records --> to <!-- /records -->",
                    "an old table" if there else "none",
                    "what `table` writes",
                    False,
                ),
            )
    return found


def new(args: argparse.Namespace) -> Path:
    """Makes a record of finished runs and checks it; its folder. Raises RecordError, OSError."""
    track, against = (
        args.records / args.track,
        [Path(folder).resolve().name for folder in args.against],
    )
    rules, folder = read_track(track)[0], track / f"{time.strftime('%Y-%m-%d')}_{args.name}"
    logs, baselines = (
        [read_log(run / "log.txt") for run in runs] for runs in (args.runs, args.baseline)
    )
    for run, log in zip(args.runs, logs, strict=True):
        log.name = str(run)
    if folder.exists() or not re.fullmatch("[A-Za-z0-9]+", args.name):
        raise RecordError(
            f"--name {args.name}: {folder} exists, or this is not of letters and digits alone"
        )
    if faults := compare(logs):
        raise RecordError(f"{faults[0]}; {len(faults)} in all" if len(faults) > 1 else faults[0])
    if len(logs) < rules["seeds"]:
        raise RecordError(
            f"{len(logs)} runs: a record of {track.name} needs {rules['seeds']} or more"
        )
    config = Path(logs[0].settings["CONFIG"]).read_bytes() if logs[0].settings["CONFIG"] else b""
    with tempfile.TemporaryDirectory(dir=track, prefix=".new_") as place:
        (part := Path(place) / folder.name).mkdir()
        (part / logs[0].facts["script"]).write_bytes(logs[0].source)
        (part / "config.env").write_bytes(config)
        if logs[0].facts["manifest_sha256"] != rules["data"]["manifest_sha256"]:
            shutil.copyfile(
                Path(logs[0].settings["DATA_PATH"]) / "manifest.json", part / "manifest.json"
            )
        for number, log in enumerate(baselines, 1):
            log.name = f"baseline_{number:02d}.txt"
            (part / log.name).write_bytes(log.data)
        for run, log in zip(args.runs, logs, strict=True):
            log.name = f"seed_{log.facts['seed']}.txt"
            (part / log.name).write_bytes(log.data)
            if log.facts["artifact_bytes"] < SMALL:
                shutil.copyfile(run / "model.upar", (part / log.name).with_suffix(".upar"))
        logs.sort(key=lambda log: log.facts["seed"])
        old, _ = check_old(track, against, logs[0], baselines)
        result = summarize(track.name, folder.name, rules["score"], logs, config, old)
        (part / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        again = (
            f"OUT_DIR=../../../runs DATA_PATH=../../../{rules['data']['path']} CONFIG=config.env "
            f"SEED={logs[0].facts['seed']} python {result['script']}"
        )
        parts = [
            f"# {args.name}",
            result_block(result),
            *(f"## {title}\n\n{UNWRITTEN}" for title in SECTIONS),
            f"## Again, in this folder\n\n```bash\n{again}\n```\n",
        ]
        (part / "README.md").write_text("\n\n".join(parts), encoding="utf-8")
        if faults := check_folder(part, track, written=False):
            raise RecordError("nothing was written, it would fail: " + "\n  ".join(faults))
        os.replace(part, folder)
    return folder


def main() -> int:
    """The command line: 0; 1 where a record has faults; 2 where a command cannot be carried out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--records", type=Path, default=ROOT / "records", help="folder of the tracks"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("new", help="a record of finished runs")
    make.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folders of runs of different seeds"
    )
    make.add_argument("--track", required=True)
    make.add_argument("--name", required=True, help="letters and digits")
    make.add_argument(
        "--against", nargs="+", default=[], metavar="FOLDER", help="records that it claims to beat"
    )
    make.add_argument(
        "--baseline",
        nargs="+",
        type=Path,
        default=[],
        metavar="RUN",
        help="those, run again beside it",
    )
    look = commands.add_parser("check", help="a line for every fault of records")
    look.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="records; none: all, and the tables"
    )
    look.add_argument("--artifact", action="store_true", help="score the artifacts again, too")
    look.add_argument(
        "--data", default="", help="where the track's data are (the folder that it names)"
    )
    commands.add_parser("table", help="rewrite the tables in records/README.md and README.md")
    args, faults = parser.parse_args(), []
    try:
        if args.command == "new":
            print(f"{new(args)}: now write the sections of its README.md; then check, and table")
            return 0
        if args.command == "table":
            faults = write_tables(args.records, write=True)
        else:
            for folder in args.folders or folders(args.records):
                own = check_folder(folder.resolve(), folder.resolve().parent)
                if args.artifact and not own:
                    own = check_scores(folder.resolve(), folder.resolve().parent, args.data)
                faults += [f"{folder}: {fault}" for fault in own]
            faults += [] if args.folders or faults else write_tables(args.records, write=False)
    except (OSError, RecordError) as error:
        said = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        sys.stderr.write(f"error: {said}\n")
        return 2
    print("\n".join(faults) or "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
