"""tools/record.py: statistics by closed forms; a record of three tiny runs; tampered copies."""

import functools
import hashlib
import json
import math
import re
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from test_artifact import forged
from test_house import TOKENS
from test_prepare import documents

from conftest import ROOT, environment, load_tool, read_json, start, write_json

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
SEEDS = (1, 2, 3)


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
    with pytest.raises(R.RecordError):  # no spread
        R.welch([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])


# --------------------------------------------------------------------------------------- the script
def test_a_script_is_read():
    for source, fault in {
        "x = 1\nmodel.eval()\nre.compile('x')\ny = 'a word' * 9\n": "",
        "x = [" + "1," * 99 + "]\n": r"tokens .*\(found 202, expected at most 200\)",
        "x = (\n": "does not compile",
        "run = eval\n": r"\(found eval at line 1,",
        "from importlib import import_module\n": r"\(found importlib at line 1,",
        "x = '" + "QUJD" * 128 + "'\n": "packed data .*512 characters in 1 words at line 1",
        "x = [" + "1," * 257 + "]\n": "packed data .*257 elements at line 1",
    }.items():
        faults = R.Faults()
        R.check_script("s.py", source.encode(), {"script_tokens": 200}, faults)
        assert bool(faults.lines) == bool(fault) and re.search(fault, "\n".join(faults.lines))


def test_the_limit_of_tokens_has_a_date(copy):
    """An older record keeps its size; a track may have no limit."""
    path = copy.parent / "track.json"
    rules = read_json(path) | {"script_tokens": 9}
    script = copy / "train_gpt.py"
    script.write_bytes(script.read_bytes() + b"\n")
    for since, count in (("2027-01-01", 0), ("2020-01-01", 1)):
        write_json(path, {**rules, "script_tokens_since": since})
        found = R.check_folder(copy, copy.parent)
        assert sum("tools/tokens" in line for line in found) == count


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
    new = {"val_nats": nats, "val_loss": nats / tokens, "val_bpb": nats / math.log(2) / size}
    new |= {"val_tokens": tokens, "val_bytes": size, "bytes_per_token": size / tokens}
    new["val_bpb_sliding"] = sliding
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
    claims = read_json(folder / "result.json")["claims"]
    names = [claim["against"] for claim in claims]
    beaten = R.check_beaten(track, names, logs[0], baselines, R.Faults())
    config = (folder / "config.env").read_bytes()
    result = R.summarize(track, folder.name, logs, config, beaten)
    write_json(folder / "result.json", result)
    page = folder / "README.md"
    page.write_text(common.replace_marked(page.read_text(), "result", R.result_text(result)))


def call(place, *words):
    """tools/record.py in a process, on the place's records."""
    script = [ROOT / "tools" / "record.py", "--records", place / "records", *words]
    return start(script, environment(), place)


def artifact(**dtypes):
    """Return an artifact of the present format: a stream of each dtype, of which `codes` are codes."""
    streams = {name: ([2], np.zeros(2, dtype)) for name, dtype in dtypes.items()}
    streams["codes"] += ({"bits": 6},)
    return forged(streams)


def test_integers_that_are_no_codes_are_refused():
    """They could be counts of the text."""
    good = dict(codes="<u2", gain="<f2", A_log="<f4", tables="<u2")
    faults = R.Faults("seed_1.upar")
    for data in (artifact(**good), b"an older format", b"UNDERPAR\4\0\0\0 and so on"):
        R.check_integers(data, faults)
    assert faults.lines == []
    R.check_integers(artifact(**good)[:-1], faults)
    R.check_integers(artifact(**good, pairs="<i4", lengths="|u1"), faults)
    for line, word in zip(faults.lines, ("SHA-256", "pairs", "lengths"), strict=True):
        assert re.match(rf"seed_1.upar: .*\(found .*{word}", line)


def runs_of(place):
    return [place / "runs" / f"run_{seed}" for seed in SEEDS]


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    """Return a folder with a track, three finished runs of 20 steps, and a written record."""
    place = tmp_path_factory.mktemp("record")
    (place / "tiny.env").write_text(CONFIG)
    for seed in SEEDS:  # the config sets DEVICE, as a record's must
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
    write_json(track / "track.json", {**rules, "title": "Tiny", "data": data})
    page = place / "records" / "README.md"
    page.write_text("before\n<!-- records -->\n<!-- /records -->\nafter\n")
    done = call(place, "new", *runs_of(place)[::-1], "--track", "track_tiny", "--name", "First")
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
    names = ["README.md", "config.env", "result.json", "train_gpt.py"]
    names += [f"seed_{seed}.{kind}" for seed in SEEDS for kind in ("txt", "upar")]
    assert sorted(path.name for path in first.iterdir()) == sorted(names)
    assert (first / "train_gpt.py").read_bytes() == (ROOT / "train_gpt.py").read_bytes()
    assert (first / "config.env").read_text() == CONFIG
    result = read_json(first / "result.json")
    text = (first / "README.md").read_text()
    scores = []
    for run, seed, found in zip(runs_of(place), SEEDS, result["seeds"], strict=True):
        own = read_json(run / "result.json")
        assert found["seed"] == seed and {key: own[key] for key in found} == found
        assert (first / f"seed_{seed}.upar").read_bytes() == (run / "model.upar").read_bytes()
        assert (first / f"seed_{seed}.txt").read_bytes() == (run / "log.txt").read_bytes()
        figures = [f"{own[key]:.4f}" for key in ("val_bpb", "val_bpb_sliding", "val_loss")]
        assert f"| {seed} | {' | '.join(figures)} | 20 |" in text
        scores.append(own["val_bpb"])
    spread = 4.302653 * statistics.stdev(scores) / math.sqrt(3)
    assert f"**{statistics.fmean(scores):.4f}**, 95% interval ±{spread:.4f} " in text


def test_the_commands_on_a_good_record(place, first):
    """`table` writes the table, `check` finds no fault."""
    assert "run `table`" in R.update_table(place / "records", write=False)[0]
    assert call(place, "table").returncode == 0
    result = read_json(first / "result.json")
    row = f"| {result['mean']:.4f} ± {result['interval95']:.4f} |  | 3 | [{first.name}]("
    assert row in (place / "records" / "README.md").read_text()
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
    result = read_json(folder / "result.json")
    write_json(folder / "result.json", result | {"mean": result["mean"] - 0.01})


def cut_log(folder):
    path = folder / "seed_1.txt"
    path.write_bytes(path.read_bytes()[:-3000])


def hide_code(folder):
    for path in (folder / "train_gpt.py", *folder.glob("seed_*.txt")):
        change(path, ("\nimport time\n", "\nexec('')\n"))


def swap(folder, words):
    """Replace a text in a file: `name: old -> new`."""
    name, _, rest = words.partition(": ")
    old, _, new = rest.partition(" -> ")
    change(folder / name, (old, new))


# What is done to a copy of the record, and how the fault begins that the check must name.
SWAPS = {
    "seed_1.txt: \nval_bpb:  -> \nval_bpb: 1": "seed_1.txt: val_bpb does not follow",
    "seed_1.txt: \nval_tokens:  -> \nval_tokens: 0 #": "seed_1.txt: its results",
    "seed_1.txt: \nimport time\n -> \nimport bz2\n": "seed_1.txt: its source",
    "seed_1.txt: \ncode_sha256:  -> \ncode_sha256: 0": "seed_1.txt: code_sha256",
    "seed_1.txt:   MATRIX_LR=0.02 -> * MATRIX_LR=0.3": "seed_1.txt: setting MATRIX_LR",
    "config.env: MODEL_DIM=32 -> MODEL_DIM=160": "seed_1.txt: setting MODEL_DIM",
    "seed_1.txt: overlap 0 doc -> overlap 3 doc": "seed_1.txt: overlap",
    "seed_1.txt: \nmanifest_sha256:  -> \nmanifest_sha256: 0": "seed_1.txt: manifest_sha256",
    "seed_1.txt: \ntokenizer_sha256:  -> \ntokenizer_sha256: 0": "seed_1.txt: tokenizer_sha256",
    "seed_1.txt: \nevents: [] -> \nevents: [{'event': 'resume'}]": "seed_1.txt: event .found resume",
    "seed_1.txt: \n---\n -> \nerror: no disk\n---\n": "seed_1.txt: the run ended with an error",
    "seed_1.txt:  CPU, 1 threads ->  CPU, 8 threads": "seed_1.txt: hardware",
    "seed_1.txt: \nsteps: 20\n -> \nsteps: 19\n": "seed_1.txt: tokens .found 5120",
    "seed_1.txt: \nstep:5/20 train -> \nstep:25/20 train": "seed_1.txt: steps beyond the end",
    "seed_1.txt: val_bpb_sliding:  -> val_bpb_sliding: 1": "seed_1.txt: val_bpb_sliding",
    "seed_1.txt: artifact: val_loss -> artifact: test-time training val_loss": "seed_1.txt: val_bpb by",
    "seed_1.txt: \ntotal_bytes:  -> \ntotal_bytes: 1": "seed_1.txt: total_bytes",
    "seed_1.txt: * SEED=1\n -> * SEED=7\n": "seed_1.txt: seed",
    "seed_1.txt: \ntrain_seconds:  -> \ntrain_seconds: 18": "seed_1.txt: over the clock",
    "README.md: | 1 |  -> | 1 | 0": "README.md: line 3",
    "README.md: ## Why\n\nNothing. -> ## Why\n": "README.md: section 'Why'",
}
TAMPERED = {
    cut_log: "seed_1.txt: (not the log|its results)",
    hide_code: r"train_gpt.py: .*\(found exec at line",
    flip_byte: "seed_1.upar: is not the artifact of seed_1.txt",
    lambda folder: (folder / "seed_1.upar").unlink(): "seed_1.upar: no such file",
    miscount_bytes: "seed_1.txt: val_bytes",
    shorten_validation: "seed_1.txt: val_tokens",
    silence_phase: "seed_1.txt: phase swa",
    outgrow: "seed_1.txt: over the cap",
    lambda folder: (folder / "seed_3.txt").unlink(): "files: logs seed_.*found 2",
    repeat_seed: "seed_2.txt and seed_1.txt: have the same artifact_sha256",
    restate_mean: "result.json: mean",
    lambda folder: (folder / "result.json").write_text("[" * 99_999): "result.json: .*Recursion",
    lambda folder: folder.rename(folder.parent / "2026-13-01_First"): "folder: name",
    **{functools.partial(swap, words=words): fault for words, fault in SWAPS.items()},
}


@pytest.mark.parametrize(("tamper", "fault"), TAMPERED.items(), ids=TAMPERED.values())
def test_a_tampered_record_is_named(copy, tamper, fault):
    track = copy.parent
    tamper(copy)
    faults = R.check_folder(next(track.glob("*_First")), track)
    assert [line for line in faults if re.match(fault, line)], faults


def test_a_script_that_hides_code_is_not_run(copy, monkeypatch):
    run = []
    monkeypatch.setattr(R, "resolve_settings", lambda *files: run.append(files) or {})
    R.check_folder(copy, copy.parent)
    assert len(run) == len(SEEDS)
    hide_code(copy)
    R.check_folder(copy, copy.parent)
    assert len(run) == len(SEEDS)


def test_a_forged_score_is_found_by_the_artifact(copy):
    """A log that is rewritten throughout has no other fault."""
    rescore(copy / "seed_2.txt", 0.99)
    rebuild(copy)
    assert R.check_folder(copy, copy.parent) == []
    (fault,) = R.check_artifact_scores(copy, "")
    assert fault.startswith("seed_2.upar: its score is not reproduced (found ")


# ------------------------------------------------------------------------------------------- claims
def test_a_claim_is_tested(claimed):
    """A baseline of an older script may log other versions: not the CPU's, and NumPy's."""
    for path in claimed.glob("baseline_*.txt"):
        cpu = re.search(r"versions:\{.*('cpu': '[^']*')\}", path.read_text())[1]
        change(path, (cpu, "'numpy': '2.4.6', 'cuda': None"))
    rebuild(claimed)
    assert R.check_folder(claimed, claimed.parent) == []
    result = read_json(claimed / "result.json")
    claim = result["claims"][0]
    losses = [seed["val_loss"] for seed in result["seeds"]]
    margin = 0.1 * statistics.fmean(losses)
    assert claim["margin_nats_per_token"] == pytest.approx(margin, rel=1e-9)
    test = R.welch(losses, [1.1 * loss for loss in losses])  # the same on nats
    assert claim["p"] == pytest.approx(test.p, rel=1e-6)
    for path in claimed.glob("baseline_*.txt"):  # as the record's own models: no margin
        shutil.copyfile(claimed / f"seed_{int(path.stem[-2:])}.txt", path)
    rebuild(claimed)
    (line,) = R.check_folder(claimed, claimed.parent)
    assert re.match("claim against 2026-01-01_Old: not significant .found p = 0.5 at ", line)


def test_runs_that_two_records_share_are_one_row(claimed):
    twin = Path(shutil.copytree(claimed, claimed.parent / "2026-01-03_Twin"))
    change(twin / "result.json", (f'"record": "{claimed.name}"', f'"record": "{twin.name}"'))
    machines = f"| new | `{claimed.name[11:]}`, `Twin` |\n| old | `Old` |\n"
    page = f"\n## Machines\n\n| machine | records |\n|---|---|\n{machines}"
    (claimed.parent / "README.md").write_text(page)
    networks, *_ = R.leaderboard(claimed.parent)
    assert networks.count("`Old` run again, on another machine.") == 1


def test_a_record_without_a_machine_is_refused(copy):
    """If the page lists machines. A record that is being made cannot be in the list yet."""
    page = copy.parent / "README.md"
    head = "\n## Machines\n\n| machine | records |\n|---|---|\n"
    page.write_text(head)
    (line,) = R.check_folder(copy, copy.parent)
    assert line.startswith(f"{copy.parent.name}/README.md: machine of the record (found none")
    assert R.check_folder(copy, copy.parent, written=False) == []
    page.write_text(f"{head}| new | `{copy.name[11:]}` |\n")
    assert R.check_folder(copy, copy.parent) == []


BASELINES = {
    "baseline_02.txt:   MUON_WD=0.04 -> * MUON_WD=0.05": "baselines: ",
    "baseline_02.txt: overlap 0 -> overlap 1": "baseline_02.txt: overlap",
    "baseline_01.txt:  CPU, 1 thr ->  CPU, 2 thr": "claim against 2026-01-01_Old: machine",
    'result.json: "2026-01-01_Old" -> "2026-01-02_New"': "result.json: it or its claims",
}


@pytest.mark.parametrize("words", BASELINES)
def test_a_baseline_is_checked_too(claimed, words):
    swap(claimed, words)
    faults = R.check_folder(claimed, claimed.parent)
    assert [line for line in faults if line.startswith(BASELINES[words])], faults


def test_data_of_another_tokenizer_is_the_same_text(copy):
    """A manifest of its own may differ in tokens, not in documents and bytes."""
    track = R.read_track(copy.parent)
    log = R.read_log(copy / "seed_1.txt")
    path = copy / "manifest.json"
    for key, count in (("tokens", 0), ("source_bytes", 1), ("documents", 1)):
        val = {**track.manifest["val"], key: 77}
        write_json(path, {**track.manifest, "val": val})
        log.facts["manifest_sha256"] = R.digest(path.read_bytes())
        faults = R.Faults()
        assert R.find_manifest(copy, log, track, faults)["val"] == val
        assert len(faults.lines) == count


# ---------------------------------------------------------------------------------- new, submission
def copied_runs(place, to):
    return [Path(shutil.copytree(run, to / run.name)) for run in runs_of(place)]


def test_runs_that_differ_are_refused(place, tmp_path):
    runs = copied_runs(place, tmp_path)
    log = runs[1] / "log.txt"
    whole = log.read_text(encoding="utf-8")
    for words, said in {
        "log.txt: \nimport time\n -> \nimport  time\n": "run_2 differs from .*run_1: code ",
        "log.txt:  CPU, 1 threads ->  CPU, 2 threads": "run_2 differs from .*run_1: hardware ",
        "log.txt: \nseed: 2 -> \nseed: 1": "run_2 and .*run_1: have the same seed",
    }.items():
        swap(runs[1], words)
        with pytest.raises(R.RecordError, match=said):
            R.read_runs(R.argparse.Namespace(runs=runs, name="Second"))
        log.write_text(whole, encoding="utf-8")


def test_a_new_record_against_an_old_one(place, copy, tmp_path):
    """With the old one's runs beside it; nothing is written unless it is better."""
    old = Path(shutil.copytree(copy, copy.parent / "2026-01-01_Old"))
    again = copied_runs(place, tmp_path)
    for seed, run in zip(SEEDS, again, strict=True):
        rescore(old / f"seed_{seed}.txt", 1.1)
        shutil.copyfile(old / f"seed_{seed}.txt", run / "log.txt")
    words = ["--records", tmp_path / "records", "new", *runs_of(place), "--track", "track_tiny"]
    words.append("--against")
    done = call(place, *words, old, "--name", "Second", "--baseline", *again)
    assert done.returncode == 0, done.stderr
    (folder,) = copy.parent.glob("*_Second")
    assert len(list(folder.glob("baseline_*.txt"))) == 3
    assert R.check_folder(folder, copy.parent, written=False) == []
    done = call(place, *words, copy, "--name", "Third")
    assert done.returncode == 2 and "_First: not significant (found p = 0.5 " in done.stderr
    done = call(place, *words, old, "--name", "Third", "--baseline", again[0])
    assert done.returncode == 2 and "_Old: runs of it (found 1, " in done.stderr
    assert not list(copy.parent.glob("*_Third")) and not list(copy.parent.glob(".new_*"))


def test_a_submission_is_what_the_runs_left(place):
    runs = runs_of(place)
    words = ["submission", *runs, "--name", "Toy", "--author", "A", "--blurb", "A toy."]
    done = call(place, *words)
    assert done.returncode == 0, done.stderr
    (folder,) = (place / "runs" / "submissions").iterdir()
    names = "README.md config.env submission.json train_gpt.py".split()
    names += [f"train_seed{seed}.log" for seed in SEEDS]
    assert sorted(path.name for path in folder.iterdir()) == names
    script = (ROOT / "train_gpt.py").read_bytes()
    assert (folder / "train_gpt.py").read_bytes() == script
    assert (folder / "train_seed2.log").read_bytes() == (runs[1] / "log.txt").read_bytes()
    results = [read_json(run / "result.json") for run in runs]
    found = read_json(folder / "submission.json")
    expected = dict(author="A", name="Toy", blurb="A toy.", date=folder.name[:10], seeds=[*SEEDS])
    for key in ("val_loss", "val_bpb"):
        expected[key] = statistics.fmean(result[key] for result in results)
    expected["bytes_total"] = max(result["total_bytes"] for result in results)
    expected["bytes_code"] = len(script) + len(CONFIG)
    assert found.items() >= expected.items()
    assert found["seed_results"]["2"]["val_bpb"] == results[1]["val_bpb"]
    assert "\nA toy.\n" in (folder / "README.md").read_text()
    assert call(place, *words).returncode == 2  # it is there


def test_a_track_without_records_is_listed(copy):
    shutil.rmtree(copy)
    assert R.leaderboard(copy.parent) == [
        "Tiny ([track_tiny](track_tiny/README.md)): no record yet."
    ]


def test_the_shipped_tracks_take_the_shipped_script():
    """The tracks have one text, and room for every size that test_house.py allows the script."""
    source = (ROOT / "train_gpt.py").read_bytes()
    texts = []
    for path in sorted((ROOT / "records").glob("*/track.json")):
        track = R.read_track(path.parent)
        faults = R.Faults()
        R.check_script("train_gpt.py", source, track.rules, faults)
        assert faults.lines == []
        assert track.rules["script_tokens"] >= TOKENS["train_gpt.py"]
        texts.append((R.text_facts(track.manifest), track.rules["data"]["val_text_sha256"]))
    assert len(texts) == 2 and texts[0] == texts[1]


def test_the_shipped_records_are_in_the_table():
    assert R.update_table(ROOT / "records", write=False) == []


@pytest.mark.full
def test_every_shipped_record_passes():
    records = R.list_records(ROOT / "records")
    assert len(records) >= 8
    for folder in records:
        assert R.check_folder(folder, folder.parent) == []
