"""tools/record.py: statistics by closed forms; a record of three tiny runs; tampered copies."""

import hashlib
import json
import math
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from test_prepare import documents

import train_gpt as T
from conftest import ROOT, environment, load_tool, start

common, R = load_tool("common"), load_tool("record")

CONFIG = """DEVICE=cpu
COMPILE=0
LAYER_PATTERN=g s
MODEL_DIM=32
NUM_HEADS=2
NUM_KV_HEADS=1
TRAIN_SEQ_LEN=32
TRAIN_BATCH_TOKENS=256
EVAL_STRIDE=16
ITERATIONS=20
MAX_WALLCLOCK_SECONDS=0
RESERVE_SECONDS=0
SAVE_EVERY=0
"""


# --------------------------------------------------------------------------------------- statistics
def test_welch_by_hand():
    """Means 2 and 6, variances 1 and 4, of three: t = 4 / sqrt(5/3)."""
    test = R.welch([1.0, 2.0, 3.0], [4.0, 6.0, 8.0])
    assert (test.t, test.df) == pytest.approx((4 / math.sqrt(5 / 3), 50 / 17), rel=1e-14)
    assert test.p == common.student_tail(test.t, test.df)
    closed_form = 0.5 - 2.5 / 2 / math.sqrt(2 + 2.5**2)  # of 2 degrees of freedom
    assert common.student_tail(2.5, 2) == pytest.approx(closed_form, rel=1e-9)
    assert common.student_tail(3.385185, 30) == pytest.approx(0.001, rel=2e-6)  # any table
    assert common.half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    with pytest.raises(R.RecordError, match="expected some spread"):
        R.welch([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])


# --------------------------------------------------------------------------------------- the script
@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("x = 1\nmodel.eval()\nre.compile('x')\ny = 'a word' * 9\n", ""),
        ("x = [" + "1," * 99 + "]\n", "tools/tokens.py counts (found 202, expected at most 200)"),
        ("x = (\n", "does not compile ("),
        ("run = eval\n", "runs what cannot be read in it (found eval at line 1,"),
        ("from importlib import import_module\n", "(found importlib at line 1,"),
        ("x = '" + "QUJD" * 128 + "'\n", "packed data (found 512 characters in 1 words at line 1"),
        ("x = [" + "1," * 257 + "]\n", "packed data (found 257 elements at line 1, expected text)"),
    ],
)
def test_a_script_is_read(source, fault):
    faults = R.Faults()
    limit = 200 if fault.startswith("tools") else 1000
    R.check_script("s.py", source.encode(), {"script_tokens": limit}, faults)
    found = faults.lines
    assert [line for line in found if fault in line] if fault else found == []


def test_the_limit_of_tokens_has_a_date(copy):
    """An older record keeps its size; a track may have no limit."""
    path = copy.parent / "track.json"
    rules = json.loads(path.read_text()) | {"script_tokens": 9}
    for since, faults in (("2027-01-01", []), ("2020-01-01", ["tokens"])):
        path.write_text(json.dumps({**rules, "script_tokens_since": since}))
        script = copy / "train_gpt.py"
        script.write_bytes(script.read_bytes() + b"\n")
        found = [line.split()[1] for line in R.check_folder(copy, copy.parent) if "tools/" in line]
        assert found == faults


# ------------------------------------------------------------------------------------ a tiny record
def change(path, *pairs):
    """Replace a text in a file, where it must be."""
    text = path.read_text(encoding="utf-8")
    for old, new in pairs:
        assert old in text, f"{path.name}: {old!r} is not in it"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def fact(path, key):
    """A value at the end of a log, as it is written."""
    return re.findall(rf"^{key}: (.*)$", path.read_text(), re.MULTILINE)[-1]


def rescore(path, factor, tokens=0, size=0):
    """Rewrite a log as if its model had `factor` times the nats, on so many tokens and bytes."""
    old_size = int(fact(path, "val_bytes"))
    tokens = tokens or int(fact(path, "val_tokens"))
    size = size or old_size
    head, end = path.read_text().rsplit("\n---\n", 1)
    nats = float(fact(path, "val_nats")) * factor
    sliding = float(fact(path, "val_bpb_sliding")) * factor * old_size / size
    new = {
        "val_nats": nats,
        "val_loss": nats / tokens,
        "val_bpb": nats / math.log(2) / size,
        "val_tokens": tokens,
        "val_bytes": size,
        "bytes_per_token": size / tokens,
        "val_bpb_sliding": sliding,
    }
    for key, value in new.items():
        end = re.sub(rf"^{key}: .*$", f"{key}: {value!r}", end, flags=re.MULTILINE)
    for way, bpb in (("", new["val_bpb"]), ("sliding ", sliding)):
        nats = bpb * math.log(2) * size
        line = (
            f"from the artifact: {way}val_loss:{nats / tokens:.4f} bpb:{bpb:.4f} nats:{nats:.1f} "
            f"tokens:{tokens} bytes:{size} bytes_per_token:{size / tokens:.4f}"
        )
        head = re.sub(rf"^from the artifact: {way}val_loss:.*$", line, head, flags=re.MULTILINE)
    path.write_text(f"{head}\n---\n{end}")


def rebuild(folder):
    """Make result.json and the README's table again from the logs, as someone who cheats would."""
    track = R.read_track(folder.parent)
    logs = R.read_seed_logs(folder, R.Faults())
    baselines = R.read_logs(folder, "baseline_*.txt")
    claims = json.loads((folder / "result.json").read_text())["claims"]
    names = [claim["against"] for claim in claims]
    beaten = R.check_beaten(track, names, logs[0], baselines, R.Faults())
    config = (folder / "config.env").read_bytes()
    result = R.summarize(track, folder.name, logs, config, beaten)
    (folder / "result.json").write_text(json.dumps(result))
    page = folder / "README.md"
    page.write_text(common.replace_marked(page.read_text(), "result", R.result_text(result)))


def call(place, *words):
    """tools/record.py in a process, on the place's records."""
    script = [ROOT / "tools" / "record.py", "--records", place / "records", *words]
    return start(script, environment(), place)


def artifact(**dtypes):
    """Return an artifact of the present format: a stream of each dtype, of which `codes` are codes."""
    streams = {}
    payloads = b""
    for name, dtype in dtypes.items():
        payload = T.ARTIFACT_ZSTD.compress(np.zeros(2, dtype).tobytes())
        streams[name] = {"shape": [2], "dtype": dtype, "length": len(payload)}
        payloads += payload
    streams["codes"]["bits"] = 6
    header = {"settings": {}, "meta": {}, "tokenizer_sha256": "", "streams": streams}
    frame = T.ARTIFACT_ZSTD.compress(json.dumps(header).encode())
    prefix = T.ARTIFACT_PREFIX.pack(T.ARTIFACT_MAGIC, T.ARTIFACT_VERSION, len(frame))
    data = prefix + frame + payloads
    return data + hashlib.sha256(data).digest()


def test_integers_that_are_no_codes_are_refused():
    """They could be counts of the text."""
    good = dict(codes="<u2", gain="<f2", A_log="<f4", tables="<u2")
    faults = R.Faults("seed_1.upar")
    R.check_integers(artifact(**good), faults)
    R.check_integers(b"an older format", faults)
    R.check_integers(b"UNDERPAR\4\0\0\0 and so on", faults)
    assert faults.lines == []
    R.check_integers(artifact(**good)[:-1], faults)
    (line,) = faults.lines
    assert "is no whole artifact (found ArtifactError('damaged: the SHA-256 is wrong')" in line
    faults.lines.clear()
    R.check_integers(artifact(**good, pairs="<i4", lengths="|u1"), faults)
    said = "seed_1.upar: an integer tensor that is no codes of weights (found {}, expected codes or floats)"
    assert faults.lines == [said.format(name) for name in ("pairs", "lengths")]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    """Return a folder with a track, three finished runs of 20 steps, and a written record."""
    place = tmp_path_factory.mktemp("record")
    (place / "tiny.env").write_text(CONFIG)
    for seed in ("1", "2", "3"):  # the config sets DEVICE, as a record's must
        settings = dict(CONFIG="tiny.env", RUN_ID=f"run_{seed}", SEED=seed, DEVICE=None)
        environ = environment(DATA_PATH=tiny_data, **settings)
        done = start([ROOT / "train_gpt.py"], environ, place)
        assert done.returncode == 0, done.stderr
    track = place / "records" / "track_tiny"
    track.mkdir(parents=True)
    shutil.copyfile(tiny_data / "manifest.json", track / "manifest.json")
    text = (track / "manifest.json").read_bytes()
    manifest = json.loads(text)
    val_text = b"".join(documents(tiny_data, "val"))
    data = R.pinned_data(text, manifest)
    data |= {"path": str(tiny_data), "val_text_sha256": hashlib.sha256(val_text).hexdigest()}
    rules = {**R.GOLF, "seconds": 180, "bytes": 1_000_000, "hardware": "1 x .* CPU, 1 threads"}
    (track / "track.json").write_text(json.dumps({**rules, "title": "Tiny", "data": data}))
    page = place / "records" / "README.md"
    page.write_text("before\n<!-- records -->\n<!-- /records -->\nafter\n")
    runs = [place / "runs" / f"run_{seed}" for seed in (2, 1, 3)]
    done = call(place, "new", *runs, "--track", "track_tiny", "--name", "First")
    assert done.returncode == 0, done.stderr
    change(next(track.glob("*_First")) / "README.md", (R.UNWRITTEN, "Nothing."))
    return place


@pytest.fixture(scope="module")
def first(place):
    """That record."""
    return next((place / "records" / "track_tiny").glob("*_First"))


@pytest.fixture
def copy(first, tmp_path, monkeypatch):
    """Another copy of it in a track of its own, to be changed."""
    track = tmp_path / "records" / "track_tiny"
    track.mkdir(parents=True)
    for name in ("track.json", "manifest.json"):
        shutil.copyfile(first.parent / name, track / name)
    check_script = R.check_script

    def check_another_script(name, source, rules, faults):  # train_gpt.py takes half a second
        if source != (ROOT / "train_gpt.py").read_bytes():
            check_script(name, source, rules, faults)

    monkeypatch.setattr(R, "check_script", check_another_script)
    return Path(shutil.copytree(first, track / first.name))


@pytest.fixture
def claimed(copy):
    """That record with a claim against one whose models had 10% more nats, run again."""
    old = Path(shutil.copytree(copy, copy.parent / "2026-01-01_Old"))
    for number, path in enumerate(sorted(old.glob("seed_*.txt")), 1):
        rescore(path, 1.1)
        shutil.copyfile(path, copy / f"baseline_{number:02d}.txt")
    claims = '"claims": [{"against": "2026-01-01_Old"}]'
    change(copy / "result.json", ('"claims": []', claims))
    rebuild(copy)
    return copy


def test_a_new_record_is_what_the_runs_left(place, first):
    names = {"README.md", "config.env", "result.json", "train_gpt.py"}
    for seed in (1, 2, 3):
        names |= {f"seed_{seed}.txt", f"seed_{seed}.upar"}
    assert {path.name for path in first.iterdir()} == names
    assert (first / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    assert (first / "config.env").read_text() == CONFIG
    result = json.loads((first / "result.json").read_text())
    text = (first / "README.md").read_text()
    scores = []
    for seed, found in zip((1, 2, 3), result["seeds"], strict=True):
        run = place / "runs" / f"run_{seed}"
        own = json.loads((run / "result.json").read_text())
        assert found["seed"] == seed and {key: own[key] for key in found} == found
        assert (first / f"seed_{seed}.upar").read_bytes() == (run / "model.upar").read_bytes()
        assert (first / f"seed_{seed}.txt").read_bytes() == (run / "log.txt").read_bytes()
        figures = [f"{own[key]:.4f}" for key in ("val_bpb", "val_bpb_sliding", "val_loss")]
        assert f"| {seed} | {' | '.join(figures)} | 20 |" in text
        scores.append(own["val_bpb"])
    spread = 4.302653 * statistics.stdev(scores) / math.sqrt(3)
    mean = f"**{statistics.fmean(scores):.4f}**, 95% interval ±{spread:.4f} (Student, 3 seeds)."
    assert f"Mean `val_bpb` {mean}" in text
    assert R.check_folder(first, first.parent) == []


def test_the_commands_on_a_good_record(place, first):
    """`table` writes the table, `check` finds no fault."""
    page = place / "records" / "README.md"
    faults = R.update_table(place / "records", write=False)
    assert faults == [f"{page}: <!-- records --> to <!-- /records -->: run `table`"]
    assert call(place, "table").returncode == 0
    result = json.loads((first / "result.json").read_text())
    size = max(seed["total_bytes"] for seed in result["seeds"])
    row = (
        f"| {result['mean']:.4f} ± {result['interval95']:.4f} |  | 3 | [{first.name}]("
        f"track_tiny/{first.name}/README.md) | Nothing. |  | {size:,} |"
    )
    assert row in page.read_text()
    done = call(place, "check")
    assert (done.returncode, done.stdout) == (0, "no fault\n"), done.stderr + done.stdout


# ------------------------------------------------------------------------------------------- faults
def shorten_validation(folder):
    for path in folder.glob("seed_*.txt"):
        rescore(path, 0.5, int(fact(path, "val_tokens")) // 2, int(fact(path, "val_bytes")) // 2)
    rebuild(folder)


def miscount_bytes(folder):
    path = folder / "seed_1.txt"
    rescore(path, 1.0, 0, int(fact(path, "val_bytes")) * 117 // 100)


def overrun(folder):
    path = folder / "seed_1.txt"
    seconds = fact(path, "train_seconds")
    change(path, (f"\ntrain_seconds: {seconds}", "\ntrain_seconds: 180.25"))


def outgrow(folder):
    path = folder / "seed_1.txt"
    total = int(fact(path, "code_bytes")) + 1_500_000
    change(path, (f"artifact_bytes: {fact(path, 'artifact_bytes')}", "artifact_bytes: 1500000"))
    change(path, (f"total_bytes: {fact(path, 'total_bytes')}", f"total_bytes: {total}"))
    path.with_suffix(".upar").unlink()


def flip_byte(folder):
    data = bytearray((folder / "seed_1.upar").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "seed_1.upar").write_bytes(data)


def silence_phase(folder):
    path = folder / "seed_1.txt"
    line = re.search(r"^plan: swa from .*, begun at .*$", path.read_text(), re.MULTILINE)[0]
    change(path, (line, line.split(", begun")[0] + ", not yet begun"))


def repeat_seed(folder):
    for kind in ("txt", "upar"):
        shutil.copyfile(folder / f"seed_1.{kind}", folder / f"seed_2.{kind}")


def restate_mean(folder):
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"mean": result["mean"] - 0.01}))


def cut_log(folder):
    path = folder / "seed_1.txt"
    path.write_bytes(path.read_bytes()[:-3000])


def hide_code(folder):
    for path in (folder / "train_gpt.py", *folder.glob("seed_*.txt")):
        change(path, ("\nimport time\n", "\nexec('')\n"))


def edit(name, old, new):
    """Replaces a text in a file of a record."""
    return lambda folder: change(folder / name, (old, new))


LOG = "seed_1.txt"
RESUMED = "\nevents: [{'event': 'resume', 'step': 7, 'ranks': 1}]"
# What is done to a copy of the record, and what the check must say of it.
TAMPERED = [
    (edit(LOG, "\nval_bpb: ", "\nval_bpb: 1"), f"{LOG}: val_bpb does not follow from nats, tok"),
    (edit(LOG, "\nval_tokens: ", "\nval_tokens: 0 #"), f"{LOG}: its results cannot be read"),
    (cut_log, f"{LOG}: (not the log of a run that ended|its results cannot be read)"),
    (
        edit(LOG, "\nimport time\n", "\nimport bz2\n"),
        f"{LOG}: its source is not train_gpt.py, SHA-",
    ),
    (edit(LOG, "\ncode_sha256: ", "\ncode_sha256: 0"), f"{LOG}: code_sha256 is not that of train_"),
    (hide_code, r"train_gpt.py: runs what cannot be read in it \(found exec at line \d+, expected"),
    (
        flip_byte,
        r"seed_1.upar: is not the artifact of seed_1.txt, SHA-256 \(found \w+, expected \w",
    ),
    (lambda folder: (folder / "seed_1.upar").unlink(), "seed_1.upar: no such file .found none, ex"),
    (miscount_bytes, f"{LOG}: val_bytes are not all of validation"),
    (shorten_validation, f"{LOG}: val_tokens are not all of validation"),
    (
        silence_phase,
        f"{LOG}: phase swa never fired .found not yet begun, expected to begin at step ",
    ),
    (edit(LOG, "  MATRIX_LR=0.02", "* MATRIX_LR=0.3"), f"{LOG}: setting MATRIX_LR is not that of"),
    (edit("config.env", "MODEL_DIM=32", "MODEL_DIM=160"), f"{LOG}: setting MODEL_DIM is not that"),
    (overrun, f"{LOG}: over the clock, seconds .found 180.25, expected at most 180"),
    (
        outgrow,
        f"{LOG}: over the cap, bytes of code and artifact .found 1.*, expected at most 1000000",
    ),
    (edit(LOG, "overlap 0 doc", "overlap 3 doc"), f"{LOG}: overlap of training and validation, da"),
    (
        edit(LOG, "\nmanifest_sha256: ", "\nmanifest_sha256: 0"),
        f"{LOG}: manifest_sha256: other data",
    ),
    (edit(LOG, "\ntokenizer_sha256: ", "\ntokenizer_sha256: 0"), f"{LOG}: tokenizer_sha256 is not"),
    (
        edit(LOG, "\nevents: []", RESUMED),
        f"{LOG}: event .found resume, expected none but skip rewi",
    ),
    (
        edit(LOG, "\n---\n", "\nerror: no disk\n---\n"),
        f"{LOG}: the run ended with an error .found no",
    ),
    (edit(LOG, " CPU, 1 threads", " CPU, 8 threads"), f"{LOG}: hardware .found 1 x .* CPU, 8 thr"),
    (edit(LOG, "\nsteps: 20\n", "\nsteps: 19\n"), f"{LOG}: tokens .found 5120, expected 19 x TRAI"),
    (edit(LOG, "\nstep:5/20 train", "\nstep:25/20 train"), f"{LOG}: steps beyond the end"),
    (edit(LOG, "val_bpb_sliding: ", "val_bpb_sliding: 1"), f"{LOG}: val_bpb_sliding by the line"),
    (edit(LOG, "\ntotal_bytes: ", "\ntotal_bytes: 1"), f"{LOG}: total_bytes are not code and arti"),
    (edit(LOG, "* SEED=1\n", "* SEED=7\n"), f"{LOG}: seed is not the setting .found 1, expected 7"),
    (lambda folder: (folder / "seed_3.txt").unlink(), "files: logs seed_.*found 2, expected at le"),
    (repeat_seed, "seed_2.txt: seed of the log .found seed_1.txt, expected seed_2.txt"),
    (repeat_seed, "seed_2.txt and seed_1.txt: have the same artifact_sha256 .found"),
    (restate_mean, "result.json: mean is not what the logs say"),
    (
        lambda folder: (folder / "result.json").write_text("[" * 99_999),
        "result.json: it or its claims cannot be followed .RecursionError",
    ),
    (edit("README.md", "| 1 | ", "| 1 | 0"), "README.md: line 3 of its table is not by result.jso"),
    (edit("README.md", "## Why\n\nNothing.", "## Why\n"), "README.md: section 'Why' is not writt"),
    (
        lambda folder: folder.rename(folder.parent / "2026-13-01_First"),
        "folder: name .found 2026-1",
    ),
]


@pytest.mark.parametrize(("tamper", "fault"), TAMPERED, ids=[fault for _, fault in TAMPERED])
def test_a_tampered_record_is_named(copy, tamper, fault):
    track = copy.parent
    tamper(copy)
    faults = R.check_folder(next(track.glob("*_First")), track)
    assert [line for line in faults if re.match(fault, line)], faults


def test_a_forged_score_is_found_by_the_artifact(copy):
    """A log that is rewritten throughout has no other fault."""
    rescore(copy / "seed_2.txt", 0.99)
    rebuild(copy)
    assert R.check_folder(copy, copy.parent) == []
    (fault,) = R.check_artifact_scores(copy, "")
    assert fault.startswith("seed_2.upar: its score is not reproduced (found ")


# ------------------------------------------------------------------------------------------- claims
def test_a_claim_is_tested(claimed):
    assert R.check_folder(claimed, claimed.parent) == []
    result = json.loads((claimed / "result.json").read_text())
    claim = result["claims"][0]
    losses = [seed["val_loss"] for seed in result["seeds"]]
    margin = 0.1 * statistics.fmean(losses)
    assert claim["margin_nats_per_token"] == pytest.approx(margin, rel=1e-9)
    test = R.welch(losses, [1.1 * loss for loss in losses])  # the same on nats
    assert claim["p"] == pytest.approx(test.p, rel=1e-6)
    for path in claimed.glob("baseline_*.txt"):  # as the record's own models: no margin
        shutil.copyfile(claimed / f"seed_{int(path.stem[-2:])}.txt", path)
    rebuild(claimed)
    assert R.check_folder(claimed, claimed.parent) == [
        "claim against 2026-01-01_Old: not significant (found p = 0.5 at a margin of 0.0000 bits "
        "per byte, expected p < 0.01)"
    ]


def test_runs_that_two_records_share_are_one_row(claimed):
    twin = Path(shutil.copytree(claimed, claimed.parent / "2026-01-03_Twin"))
    change(twin / "result.json", (f'"record": "{claimed.name}"', f'"record": "{twin.name}"'))
    machines = f"| new | `{claimed.name[11:]}`, `Twin` |\n| old | `Old` |\n"
    page = f"\n## Machines\n\n| machine | records |\n|---|---|\n{machines}"
    (claimed.parent / "README.md").write_text(page)
    networks, *_ = R.leaderboard(claimed.parent)
    assert networks.count("`Old` run again, on another machine.") == 1


def test_a_baseline_of_an_older_script_may_log_more_versions(claimed):
    for path in claimed.glob("baseline_*.txt"):
        text = path.read_text(encoding="utf-8")
        torch_version = re.search(r"versions:\{.*('torch': '[^']*')\}", text)[1]
        change(path, (f"{torch_version}}}", f"{torch_version}, 'numpy': '2.4.6', 'cuda': None}}"))
    rebuild(claimed)
    assert R.check_folder(claimed, claimed.parent) == []


@pytest.mark.parametrize(
    ("name", "pair", "fault"),
    [
        ("baseline_02.txt", ("  MUON_WD=0.04", "* MUON_WD=0.05"), "baselines: not of a record tha"),
        ("baseline_02.txt", ("overlap 0", "overlap 1"), "baseline_02.txt: overlap of training and"),
        ("baseline_01.txt", (" CPU, 1 thr", " CPU, 2 thr"), "claim against 2026-01-01_Old: machin"),
        ("result.json", ('"2026-01-01_Old"', '"2026-01-02_New"'), "result.json: it or its claims"),
    ],
)
def test_a_baseline_is_checked_too(claimed, name, pair, fault):
    change(claimed / name, pair)
    faults = R.check_folder(claimed, claimed.parent)
    assert [line for line in faults if line.startswith(fault)], faults


def test_data_of_another_tokenizer_is_the_same_text(copy):
    """A manifest of its own may differ in tokens, not in documents and bytes."""
    track = R.read_track(copy.parent)
    log = R.read_log(copy / LOG)
    for key, faulty in (("tokens", False), ("source_bytes", True), ("documents", True)):
        own = json.loads(json.dumps(track.manifest))
        own["val"][key] = 77
        (copy / "manifest.json").write_text(json.dumps(own))
        log.facts["manifest_sha256"] = R.digest((copy / "manifest.json").read_bytes())
        faults = R.Faults()
        assert R.find_manifest(copy, log, track, faults)["val"] == own["val"]
        assert bool(faults.lines) == faulty


# ---------------------------------------------------------------------------------- new, submission
def copied_runs(place, to):
    runs = place / "runs"
    names = ("run_1", "run_2", "run_3")
    return [Path(shutil.copytree(runs / name, to / name)) for name in names]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\nimport time\n", "\nimport  time\n", "run_2 differs from .*run_1: code "),
        ("  MATRIX_LR=0.02", "* MATRIX_LR=0.03", "run_2 differs from .*run_1: setting MATRIX_LR "),
        (" CPU, 1 threads", " CPU, 2 threads", "run_2 differs from .*run_1: hardware "),
        ("\nseed: 2", "\nseed: 1", "run_2 and .*run_1: have the same seed"),
        ("\n---\n", "\n--\n", "log.txt: not the log of a run that ended"),
    ],
)
def test_runs_that_differ_are_refused(place, tmp_path, old, new, said):
    runs = copied_runs(place, tmp_path)
    change(runs[1] / "log.txt", (old, new))
    with pytest.raises(R.RecordError, match=said):
        R.read_runs(R.argparse.Namespace(runs=runs, name="Second"))


def test_a_new_record_against_an_old_one(place, copy, tmp_path):
    """With the old one's runs beside it; nothing is written unless it is better."""
    old = Path(shutil.copytree(copy, copy.parent / "2026-01-01_Old"))
    again = copied_runs(place, tmp_path)
    for seed, run in enumerate(again, 1):
        rescore(old / f"seed_{seed}.txt", 1.1)
        shutil.copyfile(old / f"seed_{seed}.txt", run / "log.txt")
    runs = [place / "runs" / f"run_{seed}" for seed in (1, 2, 3)]
    words = ["--records", tmp_path / "records", "new", *runs, "--track", "track_tiny", "--against"]
    done = call(place, *words, old, "--name", "Second", "--baseline", *again)
    assert done.returncode == 0, done.stderr
    (folder,) = copy.parent.glob("*_Second")
    assert len(list(folder.glob("baseline_*.txt"))) == 3
    assert R.check_folder(folder, copy.parent, written=False) == []
    done = call(place, *words, copy, "--name", "Third")
    assert done.returncode == 2 and "_First: not significant (found p = 0.5 " in done.stderr
    assert not list(copy.parent.glob("*_Third")) and not list(copy.parent.glob(".new_*"))


def test_a_submission_is_what_the_runs_left(place):
    runs = [place / "runs" / f"run_{seed}" for seed in (1, 2, 3)]
    words = ["--author", "A", "--blurb", "A toy.", "--github-id", "a"]
    done = call(place, "submission", *runs, "--name", "Toy", *words)
    assert done.returncode == 0, done.stderr
    (folder,) = (place / "runs" / "submissions").iterdir()
    assert done.stdout == f"runs/submissions/{folder.name}: written and checked\n"
    names = "README.md config.env submission.json train_gpt.py".split()
    logs = [f"train_seed{seed}.log" for seed in (1, 2, 3)]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, *logs])
    assert (folder / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    assert (folder / logs[1]).read_bytes() == (runs[1] / "log.txt").read_bytes()
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    found = json.loads((folder / "submission.json").read_text())
    for key in ("val_loss", "val_bpb"):
        assert found[key] == statistics.fmean(result[key] for result in results)
    assert found["bytes_total"] == max(result["total_bytes"] for result in results)
    assert found["bytes_code"] == len((ROOT / "train_gpt.py").read_bytes()) + len(CONFIG)
    assert found.items() >= dict(author="A", github_id="a", name="Toy", blurb="A toy.").items()
    assert found["date"] == folder.name[:10] and found["seeds"] == [1, 2, 3]
    assert found["seed_results"]["2"]["val_bpb"] == results[1]["val_bpb"]
    assert "\nA toy.\n" in (folder / "README.md").read_text()
    again = call(place, "submission", *runs, "--name", "Toy", *words)
    assert again.returncode == 2 and again.stderr.endswith(f"{folder.name} exists\n")


def test_the_shipped_records_pass():
    """And the shipped script can be a record of the shipped track."""
    faults = R.Faults()
    track = R.read_track(ROOT / "records" / "track_cpu_3min")
    source = (ROOT / "train_gpt.py").read_bytes()
    R.check_script("train_gpt.py", source, track.rules, faults)
    assert faults.lines == []
    records = R.list_records(ROOT / "records")
    assert len(records) >= 8 and R.update_table(ROOT / "records", write=False) == []
    assert R.check_folder(records[0], track.folder) == []


@pytest.mark.full
def test_every_shipped_record_passes():
    for folder in R.list_records(ROOT / "records"):
        assert R.check_folder(folder, folder.parent) == []
