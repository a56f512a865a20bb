"""tools/report.py: what it reads from the logs of real runs and of one worked by hand; the page; a real browser."""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import environment, load_tool

import quantize as Q
import test_smoke as smoke

pytest.importorskip("matplotlib", reason="tools/report.py draws with matplotlib, which is not installed")
ROOT = Path(__file__).resolve().parents[1]
report = load_tool("report")

BOTH = dict(MODEL_DIM=32, NUM_HEADS=2, LAYER_PATTERN="g a", MAX_WALLCLOCK_SECONDS=0, RESERVE_SECONDS=0,
            SAVE_EVERY=0, WARMUP_FRAC=0.25, WARMDOWN_FRAC=0.5)
PRETRAIN = dict(BOTH, COMPILE=0, NUM_KV_HEADS=1, TRAIN_SEQ_LEN=32, TRAIN_BATCH_TOKENS=256, SWA=0, EMA=0,
                EVAL_STRIDE=0, HOLDOUT_TOKENS=512, ITERATIONS=12, VAL_LOSS_EVERY=5, GPTQ_CALIBRATION_BATCHES=1)
REWARDS = dict(BOTH, ITERATIONS=8, TASK="sort", SFT_STEPS=2, PROMPTS_PER_STEP=4, GROUP_SIZE=4, MINI_BATCHES=2,
               MAX_NEW_TOKENS=6, EVAL_PROMPTS=8, EVAL_SAMPLES=2, VAL_LOSS_EVERY=4)
PHASES = dict(warmup=(0, 0.25), warmdown=(0.5, 1), ema=(0.5, 1), swa=(0.9, 1), qat=(0.85, 1))
RULE = "=" * 120
# A step takes 100 ms, step 4 takes 400; it was resumed at step 2, and broken off while it wrote the line of step 7.
LOG = f'''log("step:9/9 train_loss:9 train_time:9ms")
{RULE}
commit:abc+ hardware:1 x <CPU> versions:{{'python': '3.11.7', 'cuda': None}} peak_memory_mib:20.5
  SEED=1337
* RUN_ID=x
* MATRIX_LR=0.5
plan: warmup from 0.0% to 20.0% of the run
plan: warmdown from 50.0% to 100.0% of the run
batch: 64 tokens a step = 1 ranks x 1 micro-steps x 2 windows x 32 tokens
step:1/10 train_loss:5.5000 lr_mul:0.5000 progress:0.1000 data_wait:1.58% train_time:100ms step_avg:100.00ms tok_s:640
phase: warmup begins at step 1, 10.0% of the run
step:2 val_loss:5.2500 bpb:1.5000 nats:9.0 tokens:8 bytes:6 bytes_per_token:0.7500 mlp_active:0.5 mlp_small:0.1
step:3/10 train_loss:7.0000 lr_mul:0.9000 progress:0.3000 data_wait:1.58% train_time:300ms step_avg:100.00ms tok_s:640
step:4 val_loss:7.2500 bpb:1.9000 nats:9.0 tokens:8 bytes:6 bytes_per_token:0.7500 mlp_active:0.5 mlp_small:0.1
step:4/10 train_loss:7.1000 lr_mul:0.9step:3 saved in 3ms
* MATRIX_LR=0.25
event: resume step:2 ranks:1 changed:{{}}
step:3/10 train_loss:nan lr_mul:1.0000 progress:0.3000 data_wait:1.58% train_time:300ms step_avg:100.00ms tok_s:640
step:4/10 train_loss:-4e-05 lr_mul:1.0000 progress:0.4000 data_wait:1% train_time:700ms step_avg:175.00ms tok_s:640
step:4 val_loss:4.2500 bpb:1.2500 nats:9.0 tokens:8 bytes:6 bytes_per_token:0.7500 mlp_active:0.5 mlp_small:0.1
phase: warmdown begins at step 6, 60.0% of the run
step:6/10 train_loss:4.0000 lr_mul:0.8000 progress:0.6000 data_wait:1.58% train_time:900ms step_avg:150.00ms tok_s:640
step:7/10 train_loss:3.9000 lr_mul:0.6000 progress:0.7000 data_wait:1.58% train_time:100'''


def read_run(folder: Path) -> SimpleNamespace:
    (found,) = report.find_runs(str(folder))
    return report.read_run(*found)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Folders of a run of train_gpt.py and one of train_grpo.py, by steps."""
    folder = tmp_path_factory.mktemp("report")
    lines = [f"{at * 7919 % 100003:05d} and {at * 104729 % 99991:05d}." for at in range(2000)]
    text = "\n".join(json.dumps({"text": "\n".join(lines[at : at + 20])}) for at in range(0, len(lines), 20))
    (folder / "text.jsonl").write_text(text)

    def call(script: str, *words: object, **settings: object) -> None:
        done = smoke.start([ROOT / script, *words], environment(**settings))
        assert done.returncode == 0, done.stdout[-800:] + done.stderr[-2000:]

    call("data/prepare.py", folder / "text.jsonl", "--out", folder / "data", "--tokenizer", "bytes", "--workers", 1)
    call("train_gpt.py", OUT_DIR=folder / "runs", RUN_ID="gpt", DATA_PATH=folder / "data", **PRETRAIN)
    call("train_grpo.py", OUT_DIR=folder / "runs", RUN_ID="grpo", **REWARDS)
    return {name: folder / "runs" / name for name in ("gpt", "grpo")}


@pytest.fixture
def copy(runs, tmp_path):
    """Function: a copy of a run's folder, by name, under another."""

    def made(name: str, other: str, *without: str) -> Path:
        return Path(shutil.copytree(runs[name], tmp_path / other, ignore=shutil.ignore_patterns(*without)))

    return made


@pytest.fixture
def by_hand(tmp_path) -> Path:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "log.txt").write_text(LOG)
    return tmp_path / "x"


def call_main(monkeypatch, *words: object) -> str | None:
    """The line that the command line ends with, where it does not end well."""
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
    try:
        report.main()
    except SystemExit as error:
        assert isinstance(error.code, str) and re.fullmatch(r"error: [^\n]+", error.code), error.code
        return error.code
    return None


def after_rule(path: Path) -> str:
    return (path / "log.txt").read_text(encoding="utf-8").partition(RULE + "\n")[2]


def column(log, name: str) -> list[float]:
    return [point[1] for point in log.series[name]]


# ------------------------------------------------------------------------------------------------------------ reading
def test_a_log_by_hand(by_hand):
    run = read_run(by_hand)
    log = run.log
    assert log.series["seconds"] == [[1, *[0.1] * 3], [3, *[0.3] * 3], [4, *[0.7] * 3], [6, *[0.9] * 3]]
    assert log.series["train_loss"][0] == [1, 5.5, 5.5, 5.5] and math.isnan(log.series["train_loss"][1][1])
    assert log.series["train_loss"][2:] == [[4, *[-4e-05] * 3], [6, *[4.0] * 3]]
    assert log.series["lr_mul"] == [[1, *[0.5] * 3], [3, *[1.0] * 3], [4, *[1.0] * 3], [6, *[0.8] * 3]]
    assert log.series["held-out bpb"] == [[2, *[1.5] * 3], [4, *[1.25] * 3]]
    assert log.series["held-out val_loss"] == [[2, *[5.25] * 3], [4, *[4.25] * 3]]
    assert log.series["tokens"] == [[1, *[64.0] * 3], [3, *[192.0] * 3], [4, *[256.0] * 3], [6, *[384.0] * 3]]
    assert log.settings == {"SEED": "1337", "RUN_ID": "x", "MATRIX_LR": "0.25"}
    assert log.changed == {"RUN_ID", "MATRIX_LR"}
    assert log.machine == {"commit": "abc+", "hardware": "1 x <CPU>", "versions": {"python": "3.11.7", "cuda": None}}
    assert (log.last, log.batch, log.ended, log.weights) == (6, 64, False, "")
    assert log.events == ["event: resume step:2 ranks:1 changed:{}"]
    assert run.family == "train_loss" and run.notes == [
        "has not ended, or ended early: no result.json; the last step in its log is 6, 60% of the run"]


def test_steps_lie_on_the_axes(by_hand):
    log = read_run(by_hand).log
    assert report.along(log, [2, 3, 5, 6, 12], "seconds").tolist() == pytest.approx([0.2, 0.3, 0.8, 0.9, 1.8])
    assert report.along(log, [0, 5, 12], "tokens").tolist() == pytest.approx([0, 320, 768])
    assert report.along(log, [0, 5, 12], "step").tolist() == pytest.approx([0, 5, 12])


def test_step_times_and_those_that_stand_out(by_hand):
    times, median, slow = report.step_times(read_run(by_hand).log)
    assert times == [(1, 100.0), (3, 100.0), (4, 400.0), (6, 100.0)] and median == 100.0 and slow == [(4, 400.0)]


def test_phases_are_shaded_where_they_were_on(by_hand, runs):
    assert report.spans(read_run(by_hand).log) == {"warmup": (0.1, 0.2), "warmdown": (0.6, 0.6)}
    # one of 12 steps: a phase begins with the first whose progress is beyond its share; the log has a digit after %
    own = report.spans(read_run(runs["gpt"]).log)
    assert own == {"warmup": (0.083, 0.25), "warmdown": (0.583, 1.0), "qat": (0.917, 1.0)}
    assert set(report.spans(read_run(runs["grpo"]).log)) == set(PHASES)


def test_the_series_of_a_real_run(runs):
    run = read_run(runs["gpt"])
    log, text, result = run.log, after_rule(runs["gpt"]), json.loads((runs["gpt"] / "result.json").read_text())
    lines = re.findall(r"^step:(\d+)/12 train_loss:(\S+) lr_mul:(\S+) progress:(\S+) .*train_time:(\d+)ms", text, re.M)
    steps = [int(line[0]) for line in lines]
    # the first five steps have a line each, later ones every ten seconds
    assert steps[:5] == [1, 2, 3, 4, 5] and steps == column(log, "step")
    assert column(log, "train_loss") == [float(line[1]) for line in lines]
    assert column(log, "seconds") == [int(line[4]) / 1000 for line in lines]
    shares = [step / 12 for step in steps]
    assert column(log, "progress") == pytest.approx(shares, abs=5e-5)
    rates = [min(1, share / 0.25, (1 - share) / 0.5) for share in shares]
    assert column(log, "lr_mul") == pytest.approx(rates, abs=5e-5)
    assert column(log, "tokens") == [256.0 * step for step in steps]
    assert [point[0] for point in log.series["held-out bpb"]] == [5, 10, 12] and log.ended
    assert log.series["held-out bpb"][-1][1] == pytest.approx(result["val_bpb"], abs=5e-5)
    assert log.series["held-out val_loss"][-1][1] == pytest.approx(result["val_loss"], abs=5e-5)
    assert run.result == result and run.notes == [] and log.weights == "raw" == result["weights"]
    assert log.changed & set(PRETRAIN) == set(PRETRAIN) - {"WARMDOWN_FRAC"}  # whose default it is


def test_the_series_of_a_run_that_learns_from_rewards(runs):
    run = read_run(runs["grpo"])
    log, result = run.log, run.result
    steps = [int(step) for step in column(log, "step")]
    assert steps[:5] == [1, 2, 3, 4, 5] and run.family == "reward"
    total, before = 0.0, 0
    for step, length, tokens in zip(steps, column(log, "length"), column(log, "tokens"), strict=True):
        total += 16 * length * (step - before)
        before = step
        assert tokens == pytest.approx(total)
    text = after_rule(runs["grpo"])
    for name in ("reward", "kl", "entropy", "clip_active", "clip_outside", "length"):
        assert column(log, name) == [float(value) for value in re.findall(rf"^step:\d+/.* {name}:(\S+)", text, re.M)]
    for name in ("greedy", "pass1", "pass2"):
        points = log.series[f"held-out {name}"]
        assert [point[0] for point in points] == [0, 4, 8]
        assert points[0][1:] == result["before"][name] and points[-1][1:] == result["after"][name]


def test_a_log_that_a_crash_cut_short(runs, copy):
    place = copy("gpt", "cut", "result.json", "model.upar", "step_*")
    text = (place / "log.txt").read_text(encoding="utf-8")
    end = text.index("train_time", text.rindex("step:4/12"))
    (place / "log.txt").write_text(text[: end + len("train_time:1")], encoding="utf-8")
    run = read_run(place)
    assert column(run.log, "step") == [1, 2, 3] and not run.log.ended and run.log.last == 3
    assert report.spans(run.log) == {"warmup": pytest.approx((0.083, 0.25))}
    assert report.facts(run)["steps"] == 3 and report.facts(run)["phase warmup"] == "began at 8.3%"


def test_the_facts(runs):
    run = read_run(runs["gpt"])
    found, result = report.facts(run), run.result
    for name in ("val_bpb", "artifact_bytes", "steps", "tokens", "hardware", "seed"):
        assert found[name] == result[name]
    assert found["bpb_before_quantization"] == result["before_quantization"]["val_bpb"]
    assert found["parameters"] == result["params"]["total"]
    assert found["tokens_per_second"] == pytest.approx(column(run.log, "tokens")[-1] / column(run.log, "seconds")[-1])
    assert found["phase warmdown"] == "planned 50.0%, from step 7 for 6 steps"
    assert found["versions"].startswith(f"python {sys.version.split()[0]} torch {torch.__version__}")
    assert report.show([0.5, 0.25, 0.75]) == "0.5 [0.25, 0.75]" and report.show([0.5] * 3) == "0.5"
    assert [report.show(value) for value in (None, 1234567, 12345.6, 1.763934, 0.000123456, "a", 1337)] == [
        "–", "1,234,567", "12,346", "1.7639", "0.0001235", "a", "1337"]
    assert report.show("0123456789ab" * 3 + "cdef+") == "0123456789ab+"  # a commit


# ----------------------------------------------------------------------------------------------------------- artifact
@pytest.mark.parametrize("name", ["gpt", "grpo"])
def test_bytes_by_class_are_the_artifact(runs, name):
    run = read_run(runs[name])
    report.read_artifact(run, Q)
    assert sum(run.bytes.values()) == (runs[name] / "model.upar").stat().st_size == run.result["artifact_bytes"]
    assert run.bytes == run.result["bytes_by_class"] and set(run.bytes) == set(report.PARTS)


def test_errors_by_layer_are_those_of_the_weights(runs):
    run = read_run(runs["gpt"])
    report.read_artifact(run, Q)
    was = torch.load(runs["gpt"] / "step_000012" / "model.pt", weights_only=True)
    _, found, coded = Q.read_artifact(runs["gpt"] / "model.upar")

    def error(*starts: str) -> float:
        names = [name for name in coded if name.startswith(starts)]
        one, other = (torch.cat([tensors[name].flatten().double() for name in names]) for tensors in (was, found))
        return ((one - other).norm() / one.norm()).item()

    assert run.errors == pytest.approx({"embed": error("embed"), "layer 0": error("mixers.0.", "blocks.0."),
                                        "layer 1": error("mixers.1.", "blocks.1.")}, rel=1e-9)
    assert all(0.001 < error < 0.2 for error in run.errors.values())


def test_what_cannot_be_compared_is_a_note(runs, copy):
    run = read_run(copy("gpt", "bare", "step_*"))
    report.read_artifact(run, Q)
    assert run.errors == {} and sum(run.bytes.values()) == run.result["artifact_bytes"]
    assert len(run.notes) == 1 and run.notes[0].startswith("no quantization error")
    run = read_run(copy("gpt", "older"))
    run.log.last = 11  # as if the checkpoint were of another step than the artifact
    report.read_artifact(run, Q)
    assert run.errors == {} and "step_000012 is not of step 11" in run.notes[0]
    path = copy("gpt", "damaged") / "model.upar"
    path.write_bytes(path.read_bytes()[:-100])
    run = read_run(path.parent)
    report.read_artifact(run, Q)
    assert run.bytes == {} and re.match(r"artifact: .*(is damaged|SHA-256)", run.notes[0])


# --------------------------------------------------------------------------------------------------------------- page
class Page(HTMLParser):
    """Tags, attributes, texts by tag, and whatever would ask for another file."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.ids, self.asked, self.texts, self.captions, self.open = [], [], [], [], [], []
        self.feed(text)
        self.close()
        self.asked += re.findall(r"@import[^;]*|url\((?!#)[^)]*\)", text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"):
                self.asked += [] if value.startswith(("#", "data:")) else [value]
            assert not name.startswith("on"), (tag, name)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "link", "br"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)
        if "figcaption" in self.open:
            self.captions.append(data)


def page_of(monkeypatch, capsys, out: Path, *runs: Path) -> Page:
    """The page of these runs, made by the command line, which must say where it is and how large."""
    assert call_main(monkeypatch, *runs, "--out", out) is None
    text = out.read_text(encoding="utf-8")
    plots = text.count("<svg")
    said = f"{out}: {out.stat().st_size} bytes, {plots} plots of {len(runs)} run{'s' * (len(runs) > 1)}\n"
    assert capsys.readouterr().out == said
    page = Page(text)
    assert page.asked == [] and page.open == [] and "script" not in page.tags
    assert len(set(page.ids)) == len(page.ids)
    assert page.tags.count("svg") == plots == len(page.captions)
    assert not re.search(r"\bnan\b|None", " ".join(page.texts))
    return page


# three axes for each of training loss, validation loss, bits per byte; schedule, step time, bytes, errors
GPT = 3 * 3 + 2 + 2
# three axes for reward and pass1; two more held-out scores; the other numbers of a step's line; the same four
GRPO = 3 * 2 + 2 + len("reward_std zero_variance length finished truncated loss entropy clip_active clip_outside "
                       "log_ratio kl grad_norm".split()) + 4


def test_the_page_of_one_run_and_of_several(runs, monkeypatch, capsys, tmp_path):
    page = page_of(monkeypatch, capsys, tmp_path / "one.html", runs["gpt"])
    assert page.tags.count("svg") == GPT
    assert page.captions[:9:3] == ["train_loss, nats", "held-out val_loss, nats", "held-out bpb"]
    for words in ("Pretraining", "gpt: learning-rate multiplier and phases", "MODEL_DIM", "val_bpb", "warmdown",
                  "planned 50.0%, from step 7 for 6 steps"):
        assert any(words in text for text in page.texts), words
    page = page_of(monkeypatch, capsys, tmp_path / "other.html", runs["grpo"])
    assert page.tags.count("svg") == GRPO and "Learning from rewards" in page.texts
    page = page_of(monkeypatch, capsys, tmp_path / "both.html", runs["gpt"], runs["grpo"])
    assert page.tags.count("svg") == GPT + GRPO - 2  # bytes and errors of both are in one plot
    assert "MODEL_DIM" not in page.texts and "TRAIN_BATCH_TOKENS" in page.texts  # the one is alike in both


def test_a_page_of_what_broke_off(by_hand, monkeypatch, capsys):
    page = page_of(monkeypatch, capsys, by_hand / "report.html", by_hand)
    assert page.tags.count("svg") == GPT - 2 and "Artifact" not in page.texts
    assert any("has not ended, or ended early" in text for text in page.texts)


def test_without_out_the_page_lies_in_the_first_run(by_hand, monkeypatch, capsys):
    assert call_main(monkeypatch, by_hand) is None
    assert (by_hand / "report.html").is_file() and str(by_hand / "report.html") in capsys.readouterr().out


def test_names_are_escaped(runs, copy, monkeypatch, capsys, tmp_path):
    name = "a<b>&\"c'$x$"
    page = page_of(monkeypatch, capsys, tmp_path / "p.html", copy("gpt", name), copy("gpt", "d<script>"))
    assert {name, "d<script>", f"{name}: learning-rate multiplier and phases"} <= set(page.texts)
    assert "b" not in page.tags and "script" not in page.tags


def test_settings_in_which_runs_differ(by_hand, tmp_path):
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "log.txt").write_text(LOG.replace("  SEED=1337", "* SEED=3"))
    runs = [read_run(by_hand), read_run(tmp_path / "y")]
    assert report.settings(runs[:1]) == [{"MATRIX_LR": "0.25"}]
    assert report.settings(runs) == [{"SEED": "1337"}, {"SEED": "3"}]


def test_other_validation_data_is_said(runs, copy, monkeypatch, capsys, tmp_path):
    other, words = copy("gpt", "other"), "cannot be compared"
    assert not any(words in text for text in page_of(monkeypatch, capsys, tmp_path / "a", runs["gpt"], other).texts)
    result = json.loads((other / "result.json").read_text())
    (other / "result.json").write_text(json.dumps({**result, "manifest_sha256": "0" * 64}))
    assert any(words in text for text in page_of(monkeypatch, capsys, tmp_path / "b", runs["gpt"], other).texts)


def test_errors_are_one_line(by_hand, monkeypatch, tmp_path):
    assert "nowhere: no such run" in call_main(monkeypatch, tmp_path / "nowhere")
    assert "no log.txt" in call_main(monkeypatch, tmp_path)
    assert "cannot be written" in call_main(monkeypatch, by_hand, "--out", tmp_path / "no" / "page.html")
    log = by_hand / "log.txt"
    log.write_text("step:1/10 train_loss:5 train_time:100ms step_avg:100ms\n")  # modded-nanogpt's, say
    assert "no log of these scripts" in call_main(monkeypatch, by_hand)
    log.write_text(LOG[: LOG.index("step:1/10")])
    assert "no step is logged" in call_main(monkeypatch, by_hand)
    log.write_text(LOG.replace("train_loss", "other"))
    assert "no log of a training script" in call_main(monkeypatch, by_hand)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were missing
    assert call_main(monkeypatch, by_hand).endswith("pip install matplotlib")


# ------------------------------------------------------------------------------------------------------------ browser
def find_browser() -> str | None:
    """A Chromium: one that is installed, or playwright's."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
    playwright = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    found = [path for name in ("chrome", "headless_shell") for path in playwright.glob(f"chromium*/*/{name}")]
    return next(filter(None, map(shutil.which, names)), str(found[0]) if found else None)


class Tab:
    """A page in headless Chromium, spoken to by the DevTools protocol through pipes."""

    def __init__(self, path: str, folder: Path):
        (child_in, self.to), (self.back, child_out) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (child_in, child_out)]  # not 3 and 4: the browser's
        words = [path, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
                 "--no-first-run", f"--user-data-dir={folder}", "about:blank"]
        shell = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self.process = subprocess.Popen(["bash", "-c", shell, "bash", *words], pass_fds=ends, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)
        for end in (child_in, child_out, *ends):
            os.close(end)
        self.number, self.text, self.events, self.session = 0, b"", [], {}
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def message(self) -> dict:
        while b"\0" not in self.text:
            part = os.read(self.back, 1 << 16)
            assert part, "the browser has ended"
            self.text += part
        first, _, self.text = self.text.partition(b"\0")
        return json.loads(first)

    def ask(self, method: str, **params: object) -> dict:
        self.number += 1
        order = {"id": self.number, "method": method, "params": params, **self.session}
        os.write(self.to, json.dumps(order).encode() + b"\0")
        while (answer := self.message()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Show a file in a window of this width, and wait until it is there."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.ask("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.message())

    def find(self, expression: str):
        """The value of an expression of JavaScript."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"]["value"]

    def faults(self) -> list[dict]:
        """What stands in the console as an error or warning, and files that were asked for and did not come."""
        console = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [event for event in self.events if event["method"] in console
                or event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] != "verbose"]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.ask("Browser.close")
        self.process.wait(20)
        os.close(self.to)
        os.close(self.back)


@pytest.mark.full
@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed (chromium, google-chrome or playwright's)")
def test_in_a_browser(runs, monkeypatch, capsys, tmp_path):
    page_of(monkeypatch, capsys, tmp_path / "page.html", runs["gpt"], runs["grpo"])
    tab, begin = Tab(find_browser(), tmp_path / "browser"), time.monotonic()
    try:
        backs = set()
        for width, scheme in ((390, "light"), (1600, "dark")):
            tab.open(tmp_path / "page.html", width, scheme)
            sizes = tab.find("""[...document.querySelectorAll("figure svg")].map(svg => { const box =
                svg.getBoundingClientRect(); return [box.width, box.height, 10 * svg.getScreenCTM().a] })""")
            assert len(sizes) == GPT + GRPO - 2
            for wide, high, letters in sizes:  # letters of the axes are readable
                assert min(300, width) <= wide <= min(width, 720) and high > 100 and letters >= 9, (wide, high, letters)
            assert tab.find("document.documentElement.scrollWidth") == width  # what is wider scrolls in its box
            boxes = tab.find("""[...document.querySelectorAll(".scroll")].map(
                box => [box.clientWidth, box.scrollWidth])""")
            assert len(boxes) == 3 and all(box[0] <= width for box in boxes)
            backs.add(tab.find("getComputedStyle(document.body).backgroundColor"))
            assert tab.faults() == []
        assert backs == {"rgb(255, 255, 255)", "rgb(20, 23, 26)"} and time.monotonic() - begin < 60
    finally:
        tab.close()


@pytest.mark.full
@pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed (chromium, google-chrome or playwright's)")
def test_the_records_in_a_browser(monkeypatch, capsys, tmp_path):
    """The page of all records: a schedule and step times of each seed, curves of all, bytes; an empty console."""
    records = sorted(path.parent for path in report.ROOT.glob("records/*/*/result.json"))
    seeds = sum(len(json.loads((folder / "result.json").read_bytes())["seeds"]) for folder in records)
    assert len(records) >= 4 and seeds >= 12
    assert call_main(monkeypatch, *records, "--out", tmp_path / "page.html") is None
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"plots of {seeds} runs\n" in capsys.readouterr().out
    assert all(f"{folder.name.partition('_')[2]} seed 1" in page for folder in records)
    tab = Tab(find_browser(), tmp_path / "browser")
    try:
        for width in (390, 1600):
            tab.open(tmp_path / "page.html", width, "light")
            drawn = tab.find("""[...document.querySelectorAll("figure svg")].filter(svg =>
                svg.querySelectorAll("path").length > 10 && svg.getBoundingClientRect().height > 100).length""")
            assert drawn == page.count("<svg") > 2 * seeds
            assert tab.find("document.documentElement.scrollWidth") == width
            assert tab.faults() == []
    finally:
        tab.close()
