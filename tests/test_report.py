"""tools/report.py: what it reads from logs, of real runs and by hand; the page."""

import glob
import html
import json
import math
import re
import shutil
import sys

import pytest
import torch

import quantize as Q
from conftest import POST, ROOT, TINY, Place, load_tool, own_settings, read_json, write_json

pytest.importorskip("matplotlib", reason="tools/report.py draws with matplotlib")
report = load_tool("report")

PRETRAIN = dict(TINY, LAYER_PATTERN="g a", SAVE_EVERY=0, WARMUP_FRAC=0.25, VAL_LOSS_EVERY=5)
PRETRAIN |= dict(SWA=0, EMA=0, ITERATIONS=12)
REWARDS = dict(POST, ITERATIONS=8, SAVE_EVERY=0, WARMUP_FRAC=0.25, VAL_LOSS_EVERY=4)
# A step takes 100 ms, step 4 takes 400; the run was resumed at step 2, and broken off while it
# wrote the line of step 7.
STEP = "data_wait:1.58% step_avg:100.00ms tok_s:640"
LOG = f"""log("step:9/9 train_loss:9 train_time:9ms")
{"=" * 120}
commit:abc+ hardware:1 x <CPU> versions:{{'python': '3.11.7', 'cuda': None}} peak_memory_mib:20.5
  SEED=1337
* RUN_ID=x
* MATRIX_LR=0.5
plan: warmup from 0.0% to 20.0% of the run
plan: warmdown from 50.0% to 100.0% of the run
  TRAIN_BATCH_TOKENS=64
step:1/10 train_loss:5.5000 lr_mul:0.5000 progress:0.1000 train_time:100ms {STEP}
phase: warmup begins at step 1, 10.0% of the run
step:2 val_loss:5.2500 bpb:1.5000 nats:9.0 tokens:8 bytes:6 bytes_per_token:0.7500
step:3/10 train_loss:7.0000 lr_mul:0.9000 progress:0.3000 train_time:300ms {STEP}
step:4/10 val_loss:7.2500 val_bpb:1.9000
step:4/10 train_loss:7.1000 lr_mul:0.9step:3 saved in 3ms
* MATRIX_LR=0.25
event: resume step:2 ranks:1 changed:{{}}
step:3/10 train_loss:nan lr_mul:1.0000 progress:0.3000 train_time:300ms {STEP}
step:4/10 train_loss:-4e-05 lr_mul:1.0000 progress:0.4000 train_time:700ms {STEP}
step:4/10 val_loss:4.2500 val_bpb:1.2500
phase: warmdown begins at step 6, 60.0% of the run
step:6/10 train_loss:4.0000 lr_mul:0.8000 progress:0.6000 train_time:900ms {STEP}
step:7/10 train_loss:3.9000 lr_mul:0.6000 progress:0.7000 data_wait:1.58% train_time:100"""


def read_run(folder):
    (run,) = report.find_runs(str(folder))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_data, letters):
    """Return the folders of a run of train_gpt.py and one of train_grpo.py."""
    place = Place(tmp_path_factory.mktemp("report"), None, {})
    place.run("gpt", DATA_PATH=tiny_data, RUN_ID="gpt", **PRETRAIN)
    given = dict(TRAIN_FILES=letters / "problems.jsonl", INIT_FROM=letters / "policy")
    given |= own_settings("train_grpo", REWARDS)
    place.run("grpo", script="train_grpo", RUN_ID="grpo", **given)
    return {name: place.folder / name / name for name in ("gpt", "grpo")}


@pytest.fixture
def by_hand(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "log.txt").write_text(LOG)
    return tmp_path / "x"


def call_main(monkeypatch, *words):
    """The line that the command line ends with if it does not end well."""
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
    try:
        report.main()
    except SystemExit as error:
        assert re.fullmatch(r"error: [^\n]+", error.code), error.code
        return error.code
    return ""


def values(log, name):
    return [point.value for point in log.series[name]]


# ------------------------------------------------------------------------------------------ reading
def test_a_log_by_hand(by_hand):
    run = read_run(by_hand)
    log = run.log
    assert [point.step for point in log.series["seconds"]] == [1, 3, 4, 6]
    assert values(log, "seconds") == [0.1, 0.3, 0.7, 0.9]
    losses = values(log, "train_loss")
    assert math.isnan(losses.pop(1)) and losses == [5.5, -4e-05, 4.0]
    assert values(log, "held-out bpb") == [1.5, 1.25]
    assert values(log, "tokens") == [64, 192, 256, 384]
    assert log.settings["MATRIX_LR"] == "0.25" and log.changed == {"RUN_ID", "MATRIX_LR"}
    assert log.machine["hardware"] == "1 x <CPU>" and not log.ended
    assert log.events == ["event: resume step:2 ranks:1 changed:{}"]
    assert "no result.json; the last step in its log is 6, 60% of the run" in run.notes[0]
    seconds = report.positions(log, [2, 3, 5, 6, 12], "seconds").tolist()
    assert seconds == pytest.approx([0.2, 0.3, 0.8, 0.9, 1.8])
    assert report.step_times(log) == {1: 100.0, 3: 100.0, 4: 400.0, 6: 100.0}
    spans = {name: (span.begin, span.end) for name, span in report.phase_spans(log).items()}
    assert spans == {"warmup": (0.1, 0.2), "warmdown": (0.6, 0.6)}


def test_a_table_has_scores_and_code_is_none():
    """A line of a traceback may look like one of a table."""
    log = report.Log()
    lines = ["  before", "  loss  2.5000 [nan, nan]", "    before = x[0]"]
    for line in [*lines, "    return [float(a), len(b)]", "    x = y [a, b]"]:
        report.read_line(log, line)
    assert log.columns == ["before"] and [*log.series] == ["held-out loss"]
    assert values(log, "held-out loss") == [2.5]
    assert report.show_score([0.5, None, None]) == "0.500"  # without an interval


def test_the_series_of_real_runs(runs):
    run = read_run(runs["gpt"])
    log = run.log
    assert values(log, "step") == [*range(1, 13)] and log.ended
    assert values(log, "tokens") == [512.0 * step for step in range(1, 13)]
    assert [point.step for point in log.series["held-out bpb"]] == [5, 10, 12]
    assert values(log, "held-out bpb")[-1] == pytest.approx(run.result["val_bpb"], abs=5e-5)
    run = read_run(runs["grpo"])
    points = run.log.series["held-out pass1"]
    assert [point.step for point in points] == [0, 4, 8]
    before = [points[0].value, points[0].low, points[0].high]
    assert before == pytest.approx(run.result["before"]["pass1"], abs=5e-4)
    # Answers to one held-out prompt stand together; equal answers of a group stand once.
    names, *rows = report.sample_rows([run], "held_out")
    assert names[:4] == ["prompt", "wanted", "step", "completion"]
    assert {row[2] for row in rows} == {0, 4, 8}
    prompts = [row[0] for row in rows]
    assert prompts == sorted(prompts) and len(set(prompts)) == 2


def test_metrics_have_every_step_and_old_runs_have_a_log_alone(by_hand):
    numbers = {"train_loss": 5.0, "lr_mul": 1, "progress": 0.1}
    rows = [{"step": step, **numbers, "train_time": 100.0 * step} for step in range(1, 9)]
    rows[4]["train_loss"] = None
    rows.insert(4, {"step": 4, "val_loss": 9.0, "val_bpb": 3.0})
    rows.insert(0, {"step": 0, "held_out/n": 7, "held_out/pass1": 0.25})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (by_hand / "metrics.jsonl").write_text(lines + '{"step": 9, "train_lo')
    log = read_run(by_hand).log
    assert values(log, "step") == [*range(1, 9)] and math.isnan(values(log, "train_loss")[4])
    assert values(log, "seconds") == pytest.approx([step / 10 for step in range(1, 9)])
    assert values(log, "held-out bpb") == [1.5, 1.25]  # those of log.txt
    assert values(log, "held-out pass1") == [0.25] and "held-out n" not in log.series
    for wrong in ("[1]", '{"step": 3, "loss": "x"}', "{", "[" * 9999):
        (by_hand / "metrics.jsonl").write_text(f"{lines}{wrong}\n")
        with pytest.raises(SystemExit, match=r"metrics.jsonl:11: must be a JSON object"):
            read_run(by_hand)


@pytest.mark.parametrize(
    "content", ["[]", "{", "[" * 99999, '{"phases": {"a": 1}}', '{"gain": "x"}']
)
def test_a_result_of_wrong_types_is_one_line(by_hand, monkeypatch, content):
    (by_hand / "result.json").write_text(content)
    assert "result.json: " in call_main(monkeypatch, by_hand)


# ----------------------------------------------------------------------------------------- artifact
def test_bytes_and_errors_are_those_of_the_artifact(runs, tmp_path):
    run = read_run(runs["gpt"])
    report.read_artifact(run, Q)
    assert sum(run.bytes.values()) == run.result["artifact_bytes"] and run.notes == []
    checkpoint = torch.load(runs["gpt"] / "step_000012" / "model.pt", weights_only=True)
    _, tensors, coded = Q.read_artifact(run.artifact)
    name = next(name for name in coded if name.startswith("embed"))
    difference = (tensors[name] - checkpoint[name]).double().norm()
    assert run.errors[name] == pytest.approx((difference / checkpoint[name].double().norm()).item())
    rows = report.stream_rows(run)[1:]
    assert {row[0] for row in rows} == set(tensors)
    assert all(row[5] == f"{8 * row[4] / tensors[row[0]].numel():.2f}" for row in rows)
    copy = tmp_path / "gpt"
    shutil.copytree(runs["gpt"], copy, ignore=shutil.ignore_patterns("step_*"))
    (copy / "model.upar").write_bytes(run.artifact.read_bytes()[:-100])
    run = read_run(copy)
    report.read_artifact(run, Q)
    assert run.bytes == {} and run.notes[0].startswith("artifact: ")


# --------------------------------------------------------------------------------------------- page
def test_the_page_of_two_runs(runs, monkeypatch, tmp_path, capsys):
    name = "a<b>&\"c'$x$"
    copy = shutil.copytree(runs["gpt"], tmp_path / name)
    result = read_json(copy / "result.json")
    write_json(copy / "result.json", {**result, "manifest_sha256": "0" * 64})
    out = tmp_path / "p.html"
    assert call_main(monkeypatch, copy, runs["grpo"], runs["gpt"], "--out", out) == ""
    page = out.read_text(encoding="utf-8")  # it asks for no other file
    assert not re.search(r'\b(src|srcset|href|action|poster)="(?!#|data:)', page)
    assert not re.search(r"@import|url\((?!#)|<script|\bon\w+=|>[^<]*\b(nan|None)\b", page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(set(ids)) == len(ids)
    assert "plots of 3 runs\n" in capsys.readouterr().out
    # Three axes for each of training loss, validation loss, bits per byte; two for reward and pass1;
    # two held-out scores, what varies of the step lines' numbers; schedules, times; bytes, errors.
    numbers = page.count("<svg") - (3 * 3 + 2 * 2 + 2 + 3 * 2 + 2)
    assert 8 <= numbers <= 12
    for text in (
        name,
        "Pretraining",
        "Learning from rewards",
        "Bytes by tensor: gpt",
        "blocks.0.mlp.w_up",
    ):
        assert f">{html.escape(text)}<" in page
    assert ">MATRIX_BITS<" not in page and "cannot be compared" in page  # the former alike in all


def test_errors_are_one_line(by_hand, monkeypatch, tmp_path):
    assert "no such run" in call_main(monkeypatch, tmp_path / "nowhere")
    assert "cannot be written" in call_main(monkeypatch, by_hand, "--out", tmp_path / "no" / "page")
    write_json(tmp_path / "result.json", {"seeds": [{"seed": 3}]})  # a record without its log
    assert "seed_3.txt: no such file" in call_main(monkeypatch, tmp_path)
    log = by_hand / "log.txt"
    for text, said in (
        ("step:1/10 train_loss:5 train_time:100ms step_avg:100ms\n", "no log of these scripts"),
        (LOG[: LOG.index("step:1/10")], "no step is logged"),
    ):
        log.write_text(text)
        assert said in call_main(monkeypatch, by_hand)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were missing
    assert call_main(monkeypatch, by_hand).endswith("pip install matplotlib")


def test_the_example_of_records_names_records_alone():
    pattern = re.search(r"report.py (records/\S+)", report.__doc__)[1]
    names = glob.glob(pattern, root_dir=ROOT)
    assert len(names) >= 8 and all((ROOT / name / "result.json").is_file() for name in names)


# ------------------------------------------------------------------------------------------ samples
def test_hostile_texts_are_escaped_and_broken_lines_counted(by_hand):
    text = "<script>alert(1)</script>\n\x1b[2J" + "9" * 900
    row = dict(step=1, phase="train", prompt="<b>", completion=text, rewards={"a<b": None, "c": 2})
    row |= dict(reward=1.5, advantage=None, finished=False)
    bad = ["{", "[]", json.dumps({**row, "reward": "x"}), json.dumps({**row, "rewards": [1]})]
    # These do not end a line of JSON.
    row["completion"] += "\u2028\u2029\x85"
    lines = [json.dumps(row, ensure_ascii=False), *bad]
    (by_hand / "samples.jsonl").write_text("\n".join(lines), encoding="utf-8")
    run = read_run(by_hand)
    assert [sample["completion"] for sample in run.samples] == [row["completion"]]
    for step in (1, 2, 3):
        run.log.add("kl", step, 0.0)
        run.log.add("entropy", step, float(step))
    run.color = "#2f7ed8"
    page = report.render([run])
    assert "<figcaption>entropy</figcaption>" in page and "<figcaption>kl</figcaption>" not in page
    assert "never changes: kl 0" in page
    assert "<script>" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;\\n\\x1b[2J9999" in page
    assert "[333 characters left out]" in page and "a&lt;b –" in page
    assert "4 lines of samples.jsonl are no samples" in page
