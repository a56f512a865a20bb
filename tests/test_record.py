"""tools/record.py: statistics by closed forms; a record of three tiny runs; each of many tampered copies is named."""

import hashlib
import json
import math
import random
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from conftest import environment, load_tool

import test_smoke as smoke

ROOT = Path(__file__).resolve().parents[1]
R = load_tool("record")

CONFIG = """DEVICE=cpu
COMPILE=0
LAYER_PATTERN=g s
MODEL_DIM=32
NUM_HEADS=2
NUM_KV_HEADS=1
TRAIN_SEQ_LEN=32
TRAIN_BATCH_TOKENS=256
HOLDOUT_TOKENS=512
EVAL_STRIDE=16
ITERATIONS=20
MAX_WALLCLOCK_SECONDS=0
RESERVE_SECONDS=0
SAVE_EVERY=0
GPTQ_CALIBRATION_BATCHES=2
"""


# ---------------------------------------------------------------------------------------------------------- statistics
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 7.0, 40.0])
def test_the_tail_of_student_has_closed_forms(t):
    """Closed forms for 1, 2 and 4 degrees of freedom; for many the normal distribution's."""
    x = t * t / 4 / (1 + t * t / 4)
    exact = {1: 0.5 - math.atan(t) / math.pi, 2: 0.5 - t / 2 / math.sqrt(2 + t * t),
             4: 0.5 - 0.375 * t / math.sqrt(1 + t * t / 4) * (1 - x / 3)}
    for df, p in exact.items():
        assert R.student_tail(t, df) == pytest.approx(p, rel=1e-8, abs=1e-14)
        assert R.student_tail(-t, df) == pytest.approx(1 - p, rel=1e-12)
    if t < 5:
        assert R.student_tail(t, 1e5) == pytest.approx(math.erfc(t / math.sqrt(2)) / 2, rel=1e-3)


@pytest.mark.parametrize(("t", "df", "p"), [(6.964557, 2, 0.01), (4.540703, 3, 0.01), (4.302653, 2, 0.025),
                                            (3.746947, 4, 0.01), (3.169273, 10, 0.005), (3.385185, 30, 0.001)])
def test_the_tail_of_student_by_tables(t, df, p):
    assert R.student_tail(t, df) == pytest.approx(p, rel=2e-6)


def test_welch_by_hand():
    """Means 2 and 6, variances 1 and 4, of three: t = 4 / sqrt(5/3), df = (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2)."""
    t, df, p = R.welch([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    assert t == pytest.approx(4 / math.sqrt(5 / 3), rel=1e-14)
    assert df == pytest.approx(50 / 17, rel=1e-14)
    x = np.linspace(t, 4000, 4_000_001)  # a second implementation: the density, summed; its tail is x**-3.9
    density = (1 + x * x / df) ** (-(df + 1) / 2) * math.gamma((df + 1) / 2) / math.gamma(df / 2)
    assert p == pytest.approx(np.trapezoid(density, x) / math.sqrt(df * math.pi), rel=1e-6)
    assert R.welch([4.0, 6.0, 8.0], [1.0, 2.0, 3.0])[2] == pytest.approx(1 - p)
    with pytest.raises(R.RecordError, match="expected some spread"):
        R.welch([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])


def test_the_interval_of_a_mean():
    """The quantile of 2 degrees of freedom is 4.302653 (any table); the deviation of 1, 2, 3 is 1."""
    assert R.half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


# ----------------------------------------------------------------------------------------------------------- the script
@pytest.mark.parametrize(("source", "fault"), [
    ("x = 1\nmodel.eval()\nre.compile('x')\ny = 'a word' * 9\n", ""),
    ("x = 1  # " + "y" * 112 + "\n", "s.py: columns (found 121, expected at most 120)"),
    ("x = (\n", "s.py: does not compile ("),
    ("x = 1\nexec('y = 2')\n", "s.py: runs what cannot be read in it (found exec at line 2, expected none of ["),
    ("run = eval\n", "(found eval at line 1,"),
    ("import marshal as m\n", "(found marshal at line 1,"),
    ("from importlib import import_module\n", "(found importlib at line 1,"),
    ("x = ('" + "'\n'".join(["QUJD" * 12] * 4) + "')\ny = 1\n", ""),  # 192 characters are no blob
    ("x = '" + "QUJD" * 128 + "'\n", "s.py: packed data (found 512 characters in 1 words at line 1, expected text)"),
    ("x = [" + "\n".join(["1," * 25] * 3) + "\n]", ""),
    ("x = [" + "1," * 257 + "]\n", "s.py: packed data (found 257 elements at line 1, expected text)"),
])
def test_a_script_is_read(source, fault):
    found = R.check_script("s.py", source.encode(), {"script_columns": 120})
    assert [line for line in found if fault in line] if fault else found == []


def test_train_gpt_can_be_a_record():
    """The shipped script holds the rules of the shipped track; its page says what track.json and manifest say."""
    track = ROOT / "records" / "track_cpu_3min"
    rules, manifest = R.read_track(track)
    page = (track / "README.md").read_text()
    pinned = [rules["data"]["val_text_sha256"], manifest["tokenizer"]["sha256"], f"{rules['bytes']:,} bytes",
              f"{rules['seconds']} s", f"p < {rules['p']}", f"{rules['script_columns']} columns", f"`{rules['score']}`"]
    for split in ("train", "val"):
        part = manifest[split]
        pinned += [f"{part[key]:,}" for key in ("documents", "tokens", "decoded_bytes")] + [part["shards"][0]["sha256"]]
    assert [words for words in pinned if words not in page] == []
    for hardware, allowed in (("1 x x86_64 CPU, 2 threads", True), ("2 x arm64 CPU, 1 threads", True),
                              ("2 x x86_64 CPU, 2 threads", False), ("1 x x86_64 CPU, 8 threads", False),
                              ("1 x NVIDIA H100 80GB HBM3", False)):
        assert bool(R.re.fullmatch(rules["hardware"], hardware)) == allowed
    assert R.check_script("train_gpt.py", (ROOT / "train_gpt.py").read_bytes(), rules) == []


# ------------------------------------------------------------------------------------------------------- a tiny record
def change(path: Path, *pairs: tuple[str, str]) -> None:
    """Replaces a text, which must be there, by another, in a file."""
    text = path.read_text(encoding="utf-8")
    for old, new in pairs:
        assert old in text, f"{path.name}: {old!r} is not in it"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def fact(path: Path, key: str) -> str:
    """A value at the end of a log, as it is written."""
    return re.findall(rf"^{key}: (.*)$", path.read_text(), re.MULTILINE)[-1]


def rescore(path: Path, factor: float, tokens: int = 0, size: int = 0) -> None:
    """Rewrites a log as if its model had `factor` times the nats (on fewer tokens and bytes), wherever they stand."""
    text, counts = path.read_text(), [int(fact(path, key)) for key in ("val_tokens", "val_bytes")]
    tokens, size = tokens or counts[0], size or counts[1]
    head, end = text.rsplit("\n---\n", 1)
    nats = float(fact(path, "val_nats")) * factor
    sliding = float(fact(path, "val_bpb_sliding")) * factor * counts[1] / size
    new = {"val_nats": nats, "val_loss": nats / tokens, "val_bpb": nats / math.log(2) / size, "val_tokens": tokens,
           "val_bytes": size, "bytes_per_token": size / tokens, "val_bpb_sliding": sliding}
    for key, value in new.items():
        end = re.sub(rf"^{key}: .*$", f"{key}: {value!r}", end, flags=re.MULTILINE)
    for way, bpb, sums in (("", new["val_bpb"], nats), ("sliding ", sliding, sliding * math.log(2) * size)):
        line = (f"from the artifact: {way}val_loss:{sums / tokens:.4f} bpb:{bpb:.4f} nats:{sums:.1f} tokens:{tokens} "
                f"bytes:{size} bytes_per_token:{size / tokens:.4f}")
        head = re.sub(rf"^from the artifact: {way}val_loss:.*$", line, head, flags=re.MULTILINE)
    path.write_text(f"{head}\n---\n{end}")


def rebuild(folder: Path, track: Path) -> None:
    """result.json and the README's table of a record, made again from its logs, as someone who cheats would."""
    logs = sorted((R.read_log(path) for path in folder.glob("seed_*.txt")), key=lambda log: log.facts["seed"])
    baselines = [R.read_log(path) for path in sorted(folder.glob("baseline_*.txt"))]
    names = [claim["against"] for claim in json.loads((folder / "result.json").read_text())["claims"]]
    old, _ = R.check_old(track, names, logs[0], baselines)
    result = R.summarize(track.name, folder.name, "val_bpb", logs, (folder / "config.env").read_bytes(), old)
    (folder / "result.json").write_text(json.dumps(result))
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace(R.find_block("result", text), R.result_block(result)))


def call(place: Path, *words: object) -> subprocess.CompletedProcess:
    """tools/record.py in a process, on the place's records."""
    return smoke.start([ROOT / "tools" / "record.py", "--records", place / "records", *words], environment(), place)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, a track, three finished runs of 20 steps (a few seconds each), and a written record."""
    place, rng = tmp_path_factory.mktemp("record"), random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(60)]
    texts = ["\n".join(" ".join(rng.choices(words, k=9)) for _ in range(8)) for _ in range(140)]
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (place / "tiny.env").write_text(CONFIG)
    env = environment(CONFIG="tiny.env", DATA_PATH="data")
    env.pop("DEVICE")  # the config sets it, as a record's must
    commands = [(["data/prepare.py", "text.jsonl", "--out", "data", "--vocab-size", "320", "--workers", "1"], {})]
    commands += [(["train_gpt.py"], {"RUN_ID": f"run_{seed}", "SEED": str(seed)}) for seed in (1, 2, 3)]
    for (script, *rest), own in commands:
        done = smoke.start([ROOT / script, *rest], {**env, **own}, place)
        assert done.returncode == 0, done.stderr
    track = place / "records" / "track_tiny"
    track.mkdir(parents=True)
    shutil.copyfile(place / "data" / "manifest.json", track / "manifest.json")
    manifest = json.loads((track / "manifest.json").read_text())
    model = sentencepiece.SentencePieceProcessor(model_file=str(place / "data" / "tokenizer.model"))
    ids = np.fromfile(place / "data" / manifest["val"]["shards"][0]["file"], dtype="<u2")[512:]
    documents = [part.tolist() for part in np.split(ids, np.flatnonzero(ids == model.bos_id())) if len(part)]
    text = "".join(model.decode(part[1:]) for part in documents).encode()
    (track / "track.json").write_text(json.dumps({
        "title": "Tiny", "score": "val_bpb", "seconds": 180, "bytes": 1_000_000, "seeds": 3, "p": 0.01,
        "hardware": "1 x .* CPU, 1 threads", "script_columns": 120,
        "data": {"path": str(place / "data"), "manifest_sha256": R.sha256((track / "manifest.json").read_bytes()),
                 "val_bytes": len(text), "val_text_sha256": hashlib.sha256(text).hexdigest(), "overlap_documents": 0}}))
    for page in (place / "README.md", place / "records" / "README.md"):
        page.write_text("before\n<!-- records -->\n<!-- /records -->\nafter\n")
    done = call(place, "new", *(place / "runs" / f"run_{seed}" for seed in (2, 1, 3)), "--track", "track_tiny",
                "--name", "First")
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture(scope="module")
def first(place):
    """That record, its sections written."""
    folder = next((place / "records" / "track_tiny").glob("*_First"))
    change(folder / "README.md", (R.UNWRITTEN, "Nothing."))
    return folder


SCRIPT_FAULTS = {}  # of scripts that were read before: each copy has the same, which takes half a second to walk


@pytest.fixture
def copy(first, tmp_path, monkeypatch):
    """Another copy of it in a track of its own, to be changed."""
    check = R.check_script
    monkeypatch.setattr(R, "check_script", lambda name, source, rules: SCRIPT_FAULTS[source] if source in SCRIPT_FAULTS
                        else SCRIPT_FAULTS.setdefault(source, check(name, source, rules)))
    track = tmp_path / "records" / "track_tiny"
    track.mkdir(parents=True)
    for name in ("track.json", "manifest.json"):
        shutil.copyfile(first.parent / name, track / name)
    return Path(shutil.copytree(first, track / first.name))


@pytest.fixture
def claimed(copy):
    """That record with a claim: against one whose models had 5% more nats, by its logs and by three baselines."""
    old = Path(shutil.copytree(copy, copy.parent / "2026-01-01_Old"))
    for number, path in enumerate(sorted(old.glob("seed_*.txt")), 1):
        rescore(path, 1.05)
        shutil.copyfile(path, copy / f"baseline_{number:02d}.txt")
    change(copy / "result.json", ('"claims": []', '"claims": [{"against": "2026-01-01_Old"}]'))
    rebuild(copy, copy.parent)
    return copy


def test_a_new_record_is_what_the_runs_left(place, first):
    names = {"README.md", "config.env", "result.json", "train_gpt.py"} | {
        f"seed_{seed}.{kind}" for seed in (1, 2, 3) for kind in ("txt", "upar")}
    assert {path.name for path in first.iterdir()} == names
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_First", first.name)
    assert (first / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    assert (first / "config.env").read_text() == CONFIG
    result, scores = json.loads((first / "result.json").read_text()), []
    for seed, found in zip((1, 2, 3), result["seeds"], strict=True):
        own = json.loads((place / "runs" / f"run_{seed}" / "result.json").read_text())
        assert found["seed"] == seed and {key: own[key] for key in found} == found  # all that stands in both
        assert {"val_nats", "val_bpb_sliding", "artifact_sha256", "train_seconds", "total_bytes"} <= found.keys()
        assert (first / f"seed_{seed}.upar").read_bytes() == (place / "runs" / f"run_{seed}/model.upar").read_bytes()
        assert (first / f"seed_{seed}.txt").read_bytes() == (place / "runs" / f"run_{seed}/log.txt").read_bytes()
        scores.append(own["val_bpb"])
        text = (first / "README.md").read_text()
        assert f"| {seed} | {own['val_bpb']:.4f} | {own['val_bpb_sliding']:.4f} | {own['val_loss']:.4f} | 20 |" in text
    assert result["mean"] == statistics.fmean(scores) and result["claims"] == []
    spread = 4.302653 * statistics.stdev(scores) / math.sqrt(3)
    assert result["interval95"] == pytest.approx(spread, rel=1e-6)
    assert f"Mean `val_bpb` **{statistics.fmean(scores):.4f}**, 95% interval ±{spread:.4f} (Student, 3 seeds)." in text
    assert R.check_folder(first, first.parent) == []


# (what is done to a copy of the record, what the check must say of it)
def edit(name: str, *pairs: tuple[str, str]):
    return lambda folder: change(folder / name, *pairs)


def swap_artifacts(folder: Path) -> None:
    one, two = (folder / "seed_1.upar").read_bytes(), (folder / "seed_2.upar").read_bytes()
    (folder / "seed_1.upar").write_bytes(two)
    (folder / "seed_2.upar").write_bytes(one)


def flip_byte(folder: Path) -> None:
    data = bytearray((folder / "seed_3.upar").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "seed_3.upar").write_bytes(data)


def shorten_validation(folder: Path) -> None:
    for path in folder.glob("seed_*.txt"):
        rescore(path, 0.5, int(fact(path, "val_tokens")) // 2, int(fact(path, "val_bytes")) // 2)
    rebuild(folder, folder.parent)


def miscount_bytes(folder: Path) -> None:
    rescore(folder / "seed_2.txt", 1.0, 0, int(fact(folder / "seed_2.txt", "val_bytes")) * 117 // 100)


def claim_more(folder: Path) -> None:
    path = folder / "seed_1.txt"
    change(path, (f"\nval_bpb: {fact(path, 'val_bpb')}", "\nval_bpb: 1.5"))


def overrun(folder: Path) -> None:
    path = folder / "seed_1.txt"
    seconds = fact(path, "train_seconds")
    change(path, (f"\ntrain_seconds: {seconds}", "\ntrain_seconds: 180.25"), (f"\nclock: {float(seconds):.1f} s",
                                                                              "\nclock: 180.2 s"))


def outgrow(folder: Path) -> None:
    for path in folder.glob("seed_*.txt"):
        code = int(fact(path, "code_bytes"))
        change(path, (f"\nartifact_bytes: {fact(path, 'artifact_bytes')}\n", "\nartifact_bytes: 1500000\n"),
               (f"\ntotal_bytes: {fact(path, 'total_bytes')}\n", f"\ntotal_bytes: {code + 1500000}\n"))
        path.with_suffix(".upar").unlink()


def other_manifest(folder: Path) -> None:
    for path in folder.glob("seed_*.txt"):
        change(path, (f"\nmanifest_sha256: {fact(path, 'manifest_sha256')}", f"\nmanifest_sha256: {'ab' * 32}"))


def silence_phase(folder: Path) -> None:
    path = folder / "seed_2.txt"
    line = re.search(r"^phase: swa +planned.*$", path.read_text(), re.MULTILINE)[0]
    change(path, (line, line.split(",")[0] + ", NEVER FIRED"))


def resume(folder: Path) -> None:
    change(folder / "seed_1.txt", ("\nevents: []", "\nevents: [{'event': 'resume', 'step': 7, 'ranks': 1}]"))


def restate_mean(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"mean": result["mean"] - 0.01}))


def restate_table(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    bpb = re.search(r"^\| 1 \| ([\d.]+) \|", text, re.MULTILINE)[1]
    change(folder / "README.md", (f"| 1 | {bpb} |", f"| 1 | {float(bpb) - 0.1:.4f} |"))


def repeat_seed(folder: Path) -> None:
    for kind in ("txt", "upar"):
        shutil.copyfile(folder / f"seed_1.{kind}", folder / f"seed_2.{kind}")


ZLIB = 1 + (ROOT / "train_gpt.py").read_text(encoding="utf-8").splitlines().index("import zlib")  # number of this line


def run_exec(folder: Path) -> None:
    for path in (folder / "train_gpt.py", *folder.glob("seed_*.txt")):
        change(path, ("import zlib\n", "exec('')\n"))  # as many bytes less or more are in code_bytes
    for path in folder.glob("seed_*.txt"):
        sha = R.sha256((folder / "train_gpt.py").read_bytes())
        change(path, (fact(path, "code_sha256"), sha))


TAMPERED = {
    "a log line": (claim_more, r"seed_1\.txt: val_bpb does not follow from nats, tokens and bytes \(found 1\.5, expec"),
    "the source in a log": (edit("seed_3.txt", ("\nimport zlib\n", "\nimport zlib, gzip\n")),
                            rf"seed_3\.txt: its source is not train_gpt\.py, first at line {ZLIB} \(found 'import zlib,"
                            r" gzip', expected 'import zlib'\)"),
    "artifacts swapped": (swap_artifacts, r"seed_1\.upar: is not the artifact of seed_1\.txt, SHA-256 \(found \w+, e"),
    "a byte of an artifact": (flip_byte, r"seed_3\.upar: is not the artifact of seed_3\.txt, SHA-256 \(found"),
    "an artifact removed": (lambda folder: (folder / "seed_1.upar").unlink(),
                            r"seed_1\.upar: no such file \(found none, expected the artifact of \d+ bytes\)"),
    "a byte count": (miscount_bytes, r"seed_2\.txt: val_bytes are not all of validation \(found \d+, expected \d+\)"),
    "short validation": (shorten_validation,
                         r"seed_1\.txt: val_tokens are not all of validation \(found \d+, expected \d+\)"),
    "a phase": (silence_phase, r"seed_2\.txt: phase swa never fired \(found NEVER FIRED, expected to begin at step "),
    "a phase's line": (lambda folder: change(folder / "seed_2.txt", ("phase: ema begins", "phase: begins")),
                       r"seed_2\.txt: phase ema never fired \(found began at step 11"),
    "a setting": (edit("seed_1.txt", ("  MATRIX_LR=0.02", "* MATRIX_LR=0.03")),
                  r"seed_1\.txt: setting MATRIX_LR is not that of train_gpt\.py with config\.env \(found 0\.03, expect"
                  r"ed 0\.02\)"),
    "the config": (edit("config.env", ("MODEL_DIM=32", "MODEL_DIM=160")),
                   r"seed_2\.txt: setting MODEL_DIM is not that of train_gpt\.py with config\.env \(found 32, expecte"),
    "the config's bytes": (edit("config.env", ("MODEL_DIM=32", "MODEL_DIM=160")),
                           r"seed_1\.txt: code_bytes are not those of script and config \(found (\d+), expected"),
    "the clock": (overrun, r"seed_1\.txt: over the clock \(found 180\.250 s, expected at most 180 s\)"),
    "the clock's line": (lambda folder: change(folder / "seed_1.txt", ("\nclock: ", "\nclock: 9")),
                         r"seed_1\.txt: train_seconds by the line `clock:` \(found [\d.]+, expected \['9[\d.]+'\]\)"),
    "the cap": (outgrow, r"seed_1\.txt: over the cap \(found 1\d{6} bytes of code and artifact, expected at most 1000"),
    "the overlap": (edit("seed_1.txt", (" bytes, overlap 0 documents", " bytes, overlap 3 documents")),
                    r"seed_1\.txt: overlap of training and validation, data \(found .*overlap 3 doc.*overlap 0 doc"),
    "result.json": (restate_mean, r"result\.json: mean is not what the logs say \(found [\d.]+, expected [\d.]+\)"),
    "README's table": (restate_table, r"README\.md: line 4 of its table is not by result\.json \(found '\| 1 \| "),
    "README's words": (edit("README.md", ("## Why\n\nNothing.", f"## Why\n\n{R.UNWRITTEN}")),
                       r"README\.md: section 'Why' is not written \(found nothing, expected a few words\)"),
    "a seed missing": (lambda folder: (folder / "seed_3.txt").unlink(),
                       r"files: logs seed_\*\.txt \(found 2, expected at least 3\)"),
    "a seed twice": (repeat_seed, r"seed_2\.txt: seed of the log \(found seed_1\.txt, expected seed_2\.txt\)"),
    "a run twice": (repeat_seed, r"seed_2\.txt and seed_1\.txt have the same artifact_sha256 \(found"),
    "exec": (run_exec, rf"train_gpt\.py: runs what cannot be read in it \(found exec at line {ZLIB}, expected"),
    "other data": (other_manifest, r"seed_1\.txt: manifest_sha256: other data than the track's \(found abab"),
    "another tokenizer": (lambda folder: change(
        folder / "seed_1.txt", (fact(folder / "seed_1.txt", "tokenizer_sha256"), "cd" * 32)),
                          r"seed_1\.txt: tokenizer_sha256 is not the manifest's \(found cdcd"),
    "a resumed run": (resume, r"seed_1\.txt: event \(found resume, expected none but skip rewind skipped_step "
                              r"weights_left_out gptq_left_out save_failed\)"),
    "an error": (lambda folder: (folder / "seed_1.txt").write_text(
        (folder / "seed_1.txt").read_text() + "error: disk is full\n"),
                 r"seed_1\.txt: the run ended with an error \(found disk is full, expected none\)"),
    "other hardware": (lambda folder: change(folder / "seed_3.txt", (" CPU, 1 threads", " CPU, 8 threads")),
                       r"seed_3\.txt: hardware \(found 1 x \S+ CPU, 8 threads, expected 1 x \.\* CPU, 1 threads\)"),
    "steps": (edit("seed_1.txt", ("\nsteps: 20\n", "\nsteps: 19\n")),
              r"seed_1\.txt: tokens \(found 5120, expected 19 x TRAIN_BATCH_TOKENS\)"),
    "a step's line": (edit("seed_1.txt", ("\nstep:5/20 ", "\nstep:25/20 ")),
                      r"seed_1\.txt: steps beyond the end \(found \['step 25 at \d+ ms'\], expected up to 20 at "),
    "the sliding score": (edit("seed_1.txt", ("\nval_bpb_sliding: ", "\nval_bpb_sliding: 1")),
                          r"seed_1\.txt: val_bpb_sliding by the line `from the artifact: sliding val_` \(found 1\d\."),
    "the sum of bytes": (edit("seed_1.txt", ("\ntotal_bytes: ", "\ntotal_bytes: 1")),
                         r"seed_1\.txt: total_bytes are not code and artifact \(found 1\d+, expected \d+\)"),
    "an artifact's bytes": (edit("seed_1.txt", ("\nartifact_bytes: ", "\nartifact_bytes: 1")),
                            r"seed_1\.upar: artifact_bytes of seed_1\.txt \(found \d+, expected 1\d+\)"),
    "the code's hash": (edit("seed_1.txt", ("\ncode_sha256: ", "\ncode_sha256: 00")),
                        r"seed_1\.txt: code_sha256 is not that of train_gpt\.py \(found 00\w+, expected \w+\)"),
    "a plan": (edit("seed_1.txt", ("\nplan: qat from", "\nplan: from")),
               r"seed_1\.txt: phases at the end \(found \[.*'swa', 'qat'\], expected \[.*'swa'\]\)"),
    "a plan and its phase": (lambda folder: (folder / "seed_1.txt").write_text(re.sub(
        r"\n(plan|phase): qat .*", "", (folder / "seed_1.txt").read_text())),
                             r"seed_1\.txt: phase qat never fired \(found nothing, expected to begin at step \?, "),
    "the seed": (edit("seed_1.txt", ("* SEED=1\n", "* SEED=7\n")),
                 r"seed_1\.txt: seed is not the setting \(found 1, expected 7\)"),
    "nonsense": (edit("seed_1.txt", ("\nval_tokens: ", "\nval_tokens: 0 #")),
                 r"seed_1\.txt: its results cannot be read"),
    "nothing scored": (lambda folder: rescore(folder / "seed_1.txt", 1.0, 0, 1) or change(
        folder / "seed_1.txt", ("\nval_bytes: 1\n", "\nval_bytes: 0\n")),
                       r"seed_1\.txt: cannot be followed \(ZeroDiv"),
    "half a log": (lambda folder: (folder / "seed_2.txt").write_bytes((folder / "seed_2.txt").read_bytes()[:-3000]),
                   r"seed_2\.txt: (not the log of a run that ended|its results cannot be read)"),
    "the folder's name": (lambda folder: folder.rename(folder.parent / "2026-13-01_First"),
                          r"folder: name \(found 2026-13-01_First, expected YYYY-MM-DD_Name, letters and digits\)"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_record_is_named(copy, what):
    track, (tamper, fault) = copy.parent, TAMPERED[what]
    tamper(copy)
    folder = copy if copy.exists() else next(track.glob("*_First"))
    found = R.check_folder(folder, track)
    assert [line for line in found if re.match(fault, line)], "\n".join(found) or "nothing was found"


def test_all_faults_are_listed(copy):
    for tamper in (claim_more, flip_byte, restate_table):
        tamper(copy)
    found = "\n".join(R.check_folder(copy, copy.parent))
    assert all(fault in found for fault in ("seed_1.txt: val_bpb does not", "seed_3.upar: is not", "README.md: line 4"))


# ------------------------------------------------------------------------------------------------------------- claims
def test_a_claim_is_tested(claimed):
    track, result = claimed.parent, json.loads((claimed / "result.json").read_text())
    assert R.check_folder(claimed, track) == []
    scores = [seed["val_bpb"] for seed in result["seeds"]]
    claim, mean = result["claims"][0], statistics.fmean(scores)
    assert claim["logs"] == ["baseline_01.txt", "baseline_02.txt", "baseline_03.txt"]
    assert claim["margin"] == pytest.approx(0.05 * mean, rel=1e-9)
    losses = [seed["val_loss"] for seed in result["seeds"]]
    assert claim["margin_nats_per_token"] == pytest.approx(0.05 * statistics.fmean(losses), rel=1e-9)
    assert claim["p"] == pytest.approx(R.welch(losses, [1.05 * loss for loss in losses])[2], rel=1e-6)  # on nats
    assert f"by {claim['margin']:.4f} bits per byte, " in (claimed / "README.md").read_text()
    for path in claimed.glob("baseline_*.txt"):  # as the record's own models: no margin
        shutil.copyfile(claimed / f"seed_{int(path.stem[-2:])}.txt", path)
    rebuild(claimed, track)
    assert R.check_folder(claimed, track) == ["claim against 2026-01-01_Old: not significant (found p = 0.5 at a "
                                              "margin of 0.0000 bits per byte, expected p < 0.01)"]


@pytest.mark.parametrize(("name", "pair", "fault"), [
    ("baseline_02.txt", ("  MUON_WD=0.04", "* MUON_WD=0.05"), "baselines: not of a record that this one claims to beat "
     "(found ['baseline_02.txt'], expected its script and config)"),
    ("baseline_02.txt", ("overlap 0", "overlap 1"), "baseline_02.txt: overlap of training and validation, data ("),
    ("baseline_01.txt", (" CPU, 1 threads", " CPU, 2 threads"), "claim against 2026-01-01_Old: machine; run it again"),
    ("result.json", ('"2026-01-01_Old"', '"2026-01-02_New"'), "result.json: it or its claims cannot be followed ("),
])
def test_a_baseline_is_checked_too(claimed, name, pair, fault):
    change(claimed / name, pair)
    found = R.check_folder(claimed, claimed.parent)
    assert [line for line in found if line.startswith(fault)], "\n".join(found)


def test_data_of_another_tokenizer_is_the_same_text_or_none(copy):
    """A manifest of its own may differ in tokens, not in documents and bytes."""
    rules, manifest = R.read_track(copy.parent)
    log = R.read_log(copy / "seed_1.txt")
    for key, value, fault in (("tokens", 77, ""), ("source_bytes", 5, "not the track's validation text"),
                              ("documents", 2, "not the track's validation text")):
        own = json.loads(json.dumps(manifest))
        own["val"][key] = value
        own["request"]["vocab_size"], own["yardsticks"] = 512, {}
        (copy / "manifest.json").write_text(json.dumps(own))
        log.facts["manifest_sha256"] = R.sha256((copy / "manifest.json").read_bytes())
        found, faults = R.find_manifest(copy, log, rules, manifest)
        assert found["val"]["tokens"] == own["val"]["tokens"]
        assert len(faults) == bool(fault) and fault in "".join(faults)


# ------------------------------------------------------------------------------------------------------- command line
def arguments(place, runs, name):
    return R.argparse.Namespace(records=place / "records", track="track_tiny", name=name, runs=runs, against=[],
                                baseline=[])


@pytest.mark.parametrize(("edits", "said"), [
    ([("\nimport zlib\n", "\nimport  zlib\n")], r"run_2 differs from .*run_1: code \(found \w+, expected \w+\)\n"),
    ([("  MATRIX_LR=0.02", "* MATRIX_LR=0.03")], r"run_2 differs from .*run_1: setting MATRIX_LR \(found 0\.03, expec"),
    ([(" CPU, 1 threads", " CPU, 2 threads")], r"run_2 differs from .*run_1: hardware \(found 1 x \S+ CPU, 2 threads"),
    ([("\nmanifest_sha256: ", "\nmanifest_sha256: 0")], r"run_2 differs from .*run_1: manifest_sha256 \(found 0\w+, "),
    ([("\ncode_bytes: ", "\ncode_bytes: 1")], r"run_2 differs from .*run_1: code_bytes \(found 1\d+, expected \d+\)"),
    ([("\nseed: 2", "\nseed: 1")], r"run_2 and .*run_1 have the same seed \(found 1, expected others\)\n"),
    ([("\n---\n", "\n--\n")], r"log\.txt: not the log of a run that ended"),
])
def test_runs_that_differ_are_refused(place, first, tmp_path, edits, said):
    runs = [Path(shutil.copytree(place / "runs" / f"run_{seed}", tmp_path / f"run_{seed}")) for seed in (1, 2, 3)]
    change(runs[1] / "log.txt", *edits)
    with pytest.raises(R.RecordError, match=said.replace(r"\n", "")):
        R.new(arguments(place, runs, "Second"))


def test_a_new_record_against_an_old_one(place, copy, tmp_path, monkeypatch):
    """With the old one's runs beside it, or by the old one's logs; nothing is written where it is not better."""
    monkeypatch.chdir(place)
    track, old = copy.parent, Path(shutil.copytree(copy, copy.parent / "2026-01-01_Old"))
    runs, again = [place / "runs" / f"run_{seed}" for seed in (1, 2, 3)], []
    for seed in (1, 2, 3):
        rescore(old / f"seed_{seed}.txt", 1.05)
        again.append(tmp_path / f"again_{seed}")
        again[-1].mkdir()
        shutil.copyfile(old / f"seed_{seed}.txt", again[-1] / "log.txt")
        rescore(again[-1] / "log.txt", 1.01)
    for name, baseline, better in (("Second", again, 1.0605), ("Third", [], 1.05)):
        args = arguments(tmp_path, runs, name)
        args.against, args.baseline = [old], baseline
        folder = R.new(args)
        claim = json.loads((folder / "result.json").read_text())["claims"][0]
        scores = [seed["val_bpb"] for seed in json.loads((folder / "result.json").read_text())["seeds"]]
        assert claim["mean"] == pytest.approx(better * statistics.fmean(scores), rel=1e-9)
        assert len(list(folder.glob("baseline_*.txt"))) == len(baseline)
        assert R.check_folder(folder, track, written=False) == []
        assert ("made again beside these" if baseline else "its own logs") in (folder / "README.md").read_text()
    args = arguments(tmp_path, runs, "Fourth")
    args.against = [copy]
    with pytest.raises(R.RecordError, match=r"would fail: claim against .*_First: not significant \(found p = 0\.5 "):
        R.new(args)
    assert not list(track.glob("*_Fourth")) and not list(track.glob(".new_*"))


def test_what_was_set_beside_the_config_is_refused(place, first, tmp_path, monkeypatch):
    """All three runs with a setting that the config does not have: nothing is written, and every fault is said."""
    monkeypatch.chdir(place)
    runs = [Path(shutil.copytree(place / "runs" / f"run_{seed}", tmp_path / f"run_{seed}")) for seed in (1, 2, 3)]
    for run in runs:
        change(run / "log.txt", ("  MATRIX_LR=0.02", "* MATRIX_LR=0.03"))
    with pytest.raises(R.RecordError, match=r"nothing was written, it would fail: seed_1\.txt: setting ") as error:
        R.new(arguments(place, runs, "Second"))
    assert str(error.value).count("setting MATRIX_LR") == 3
    with pytest.raises(R.RecordError, match="2 runs: a record of track_tiny needs 3 or more"):
        R.new(arguments(place, runs[:2], "Second"))
    with pytest.raises(R.RecordError, match="--name No_words: .* exists, or this is not of letters and digits"):
        R.new(arguments(place, runs, "No_words"))
    assert [path.name for path in R.folders(place / "records")] == [first.name]


def test_the_command_line(place, first):
    """Tables are written, all pass, artifacts score the same again in a clean process."""
    found = R.write_tables(place / "records", write=False)
    assert found[1] == (f"{place / 'README.md'}: <!-- records --> to <!-- /records --> (found an old table, expected "
                        "what `table` writes)")
    assert (call(place, "table").returncode, R.write_tables(place / "records", write=False)) == (0, [])
    result = json.loads((first / "result.json").read_text())
    row = (f"| {result['mean']:.4f} ± {result['interval95']:.4f} | 3 | [{first.name}](records/track_tiny/{first.name}/"
           f"README.md) | Nothing. |  | {max(seed['total_bytes'] for seed in result['seeds']):,} |")
    assert row in (place / "README.md").read_text()
    assert row.replace("(records/", "(") in (place / "records" / "README.md").read_text()
    assert (place / "README.md").read_text().startswith("before\n<!-- records -->\nTiny ([track_tiny](records/track_t")
    done = call(place, "check", "--artifact")
    assert (done.returncode, done.stdout) == (0, "no fault\n"), done.stderr + done.stdout


def test_a_forged_score_is_found_by_the_artifact(copy):
    """A log rewritten throughout, with result and README made from it, has no other fault than this."""
    rescore(copy / "seed_2.txt", 0.99)
    rebuild(copy, copy.parent)
    assert R.check_folder(copy, copy.parent) == []
    found = R.check_scores(copy, copy.parent, "")
    assert len(found) == 1
    assert re.match(r"seed_2\.upar: its score is not reproduced \(found [\d.]+, expected [\d.]+ to 1e-6\)", found[0])


@pytest.mark.full
def test_a_race_of_configs_ends_in_a_record(place):
    """docs/choices.md: configs in turn for equal seconds by one command, then a record of the runs of one; as a toy."""
    (place / "wide.env").write_text(CONFIG.replace("MODEL_DIM=32", "MODEL_DIM=64"))
    race = ["tools/arms.py", "arms", "--arms", place / "tiny.env", place / "wide.env", "--data", place / "data",
            "--runs", place / "race", "--out", place / "race.json", "--seconds", "60", "--set",
            "TRAIN_BATCH_TOKENS=512"]
    record = ["tools/record.py", "--records", place / "records", "new", *(place / "race" / f"wide_s{seed}" for seed in
              (1, 2, 3)), "--track", "track_tiny", "--name", "Race"]
    for words in (race, record):
        done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, env=environment(), capture_output=True,
                              text=True)
        assert done.returncode == 0, done.stderr + done.stdout
    arms = json.loads((place / "race.json").read_text())["arms"]
    assert list(arms) == ["tiny", "wide"] and arms["wide"]["parameters"] > 2 * arms["tiny"]["parameters"]
    for arm in arms.values():
        assert 0 < arm["mfu"] < 1 and arm["tokens_per_second"] > 0 and arm["peak_memory_mib"] > 100
    folder = next((place / "records" / "track_tiny").glob("*_Race"))
    scores = [seed["val_bpb"] for seed in json.loads((folder / "result.json").read_text())["seeds"]]
    assert scores == [run["val_bpb"] for run in arms["wide"]["runs"].values()]
    config = (folder / "config.env").read_text()
    assert config.endswith("MAX_WALLCLOCK_SECONDS=60\nEVAL_STRIDE=0\nVAL_LOSS_EVERY=0\nTRAIN_BATCH_TOKENS=512\n")
    shutil.rmtree(folder)  # the other tests know of one record


def test_the_shipped_records_pass():
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "record.py"), "check"], cwd=ROOT, env=environment(),
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "no fault\n"), done.stdout + done.stderr
