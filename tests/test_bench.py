"""tools/bench.py, tools/arms.py and the timed runs of tools/common.py."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt as T
from conftest import ROOT, load_tool, read_json, write_json

common, bench, arms = load_tool("common"), load_tool("bench"), load_tool("arms")
TOKENIZER = {"vocab_size": 1024, "bos_id": 1}


# ---------------------------------------------------------------------------------------------- ops
def op_records(only):
    tiny = {"MODEL_DIM": "32", "NUM_HEADS": "2", "NUM_KV_HEADS": "1", "LAYER_PATTERN": "g a"}
    sizes = dict(shapes=[(1, 40, 2, 8)], chunk=32, rounds=1, codes=20000, models={"tiny": tiny})
    ops = SimpleNamespace(script=T, only=[only], artifact="", **sizes)
    return list(bench.op_records(ops, "cpu"))


@pytest.mark.full
def test_gdn_equals_the_rules_of_transformers():
    pytest.importorskip("transformers", reason="transformers is not installed")
    records = op_records("gdn")
    operations = [record["operation"] for record in records[::2]]
    assert operations == ["GDN, forward", "GDN, forward+backward", "GDN, a token"]
    assert all(record["way"].startswith("transformers ") for record in records[1::2])
    assert all(0 < record["difference"] < 1e-5 for record in records[1::2])


def test_attention_equals_that_of_torch():
    records = op_records("attention")
    assert len(records) == 8 and all(record["difference"] < 1e-5 for record in records[1::2])


def test_muon_makes_the_step_of_torch():
    """Torch's products are bfloat16. Matrices: GDN 4 + 1, attention 3 + 1, MLPs 4."""
    ours, theirs = op_records("muon")
    assert ours["shape"] == "tiny, 13 matrices" and 1e-4 < theirs["difference"] < 0.1


def test_coders_write_the_bytes_of_the_entropy():
    records = op_records("rans")
    torch.manual_seed(0)
    codes = T.quantize(torch.randn(1, 20000), 6, 8.0)[0].numpy()
    counts = np.unique(codes, return_counts=True)[1]
    entropy = -(counts * np.log2(counts / 20000)).sum() / 8
    sizes = {record["way"]: record["bytes"] for record in records}
    assert entropy + 512 <= sizes["rANS"] < 1.001 * entropy + 512 + 8 * 8  # table and lanes
    assert all(entropy < size < 1.2 * entropy for size in sizes.values())


# ------------------------------------------------------------------------------------------ figures
@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # Three steps a stretch; a pause is outvoted.
        ({step: 90 * step + 1000 * (step > 15) for step in range(1, 31)}, 90.0),
        ({1: 10, 2: 30, 3: 50}, 20.0),  # shorter than a stretch
        # Four slow steps have a line each, the 150 after them two: the median is of the many.
        ({1: 900, 2: 1800, 3: 2700, 4: 3600, 5: 4500, 80: 12000, 155: 19500}, 100.0),
        ({1: 10, 2: 20}, float("nan")),
    ],
)
def test_step_time_is_the_median(times, expected):
    lines = [f"step:{step}/? train_loss:3 train_time:{ms}ms\n" for step, ms in times.items()]
    assert common.step_ms("".join(lines)) == pytest.approx(expected, rel=0.01, nan_ok=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_pattern": "g g s1 s1"},
        {"layer_pattern": "A1 A2 A1 A2"},
        {"layer_pattern": "g a", "mlp": "swiglu"},
        {"layer_pattern": "a", "mlp": "bio_soft", "tie_embeddings": False},
        {"layer_pattern": "g g", "bigram_vocab_size": 64, "positions": "learned"},
    ],
    ids=str,
)
def test_flops_by_hand(changes):
    """6 for each weight of a product that a token meets, and the terms of attention and GDN.

    In front of a window GDN's first product has 3 rows of zeros, which the convolution reaches.
    """
    shape = dict(model_dim=32, num_heads=2, num_kv_heads=1, train_seq_len=64, attn_window=16)
    network = T.GPT(T.model_config(T.Settings(**shape, **changes), 48, 1))

    def weights(module, recurse=True):
        named = module.named_parameters(recurse=recurse)
        return sum(w.numel() for name, w in named if name.split(".")[-1].startswith(("w_", "ab")))

    used = network.embed.numel() + weights(network, recurse=False)
    used += sum(weights(block) + weights(mixer) for block, mixer in network.layers)
    used += sum(3 / 64 * mixer.w_qkvg.numel() for mixer in network.mixers if hasattr(mixer, "conv"))
    state = 0.0
    for word in network.config.layers.lower().split():
        keys = {"a": 65 / 2, "s": (16 * 17 / 2 + 48 * 16) / 64}.get(word[0])
        state += 12 * 32 * keys if keys else 18 * 2 * 16**2
    assert bench.flops_per_token(network, 64).total() == pytest.approx(6 * used + state)


def arm_run(score):
    """A run of configs/cpu.env, without optimizer state; a text is why it failed."""
    if isinstance(score, str):
        return {"failed": score}
    settings = vars(T.load_settings(T.Settings, {"CONFIG": f"{ROOT}/configs/cpu.env"}))
    speed = dict(tokens_per_second=4000, step_ms=25.0, peak_memory_mib=512)
    counts = dict(tokens=5000, steps=5, parameters=793688)
    return {**speed, **counts, "val_bpb": score, "settings": settings}


def arm_runs(*scores):
    return {seed: arm_run(score) for seed, score in enumerate(scores, 1)}


def test_an_arm_is_compared_seed_by_seed():
    """The seeds differ more than the arms. 4.3027: Student's t for 2 degrees of freedom."""
    first = arm_runs(2.0, 2.2, 2.4)
    better = arms.summarize(arm_runs(1.9, 2.11, 2.29), first)
    spread = 4.3027 / 3**0.5
    expected = dict(half_width=spread * 0.195, difference=-0.1, difference_half_width=spread * 0.01)
    found = {name: better[name] for name in expected}
    assert found == pytest.approx(expected, rel=1e-2) and better["verdict"] == "wins"
    assert better["share"] == pytest.approx(-0.1 / 2.2)
    assert arms.summarize(arm_runs(2.1, 2.31, 2.49), first)["verdict"] == "loses"
    assert arms.summarize(arm_runs(2.1, 2.1, 2.4), first)["verdict"] == "tie"
    part = arms.summarize(arm_runs(1.9, "killed", 2.29), first)
    assert (part["val_bpb"], part["difference"]) == pytest.approx((2.095, -0.105))
    assert arms.summarize(arm_runs("x", "y", "z"), first) == {}


# --------------------------------------------------------------------------------------------- runs
# Stands in for train_gpt.py: counts its calls, writes what it was given, fails when told to.
STAND_IN = """
import json, os, sys
from pathlib import Path
place = Path(os.environ["OUT_DIR"]) / os.environ["RUN_ID"]
place.mkdir(parents=True)
with open(place.parent / "calls", "a") as file:
    file.write(place.name + "\\n")
names = ("SEED", "TASK", "WIDTH", "CONFIG", "OMP_NUM_THREADS", "RANK")
seen = {name: os.environ.get(name) for name in names}
result = {"seen": seen, "tokens": 3000, "steps": 3, "params": {"total": 10}}
if os.environ.get("SEED") == "5":
    import torch
    (place / "step_000003").mkdir()
    state = {"w": {"momentum": torch.zeros(20)}}
    torch.save({"optimizers": state}, place / "step_000003" / "training.pt")
(place / "result.json").write_text(json.dumps(result))
lines = [f"step:{i}/3 train_loss:1 train_time:{250 * i}ms\\n" for i in range(3)]
(place / "log.txt").write_text("".join(lines))
if os.environ.get("TASK"):
    sys.exit("first line\\n" + os.environ["TASK"])
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run_script of settings in a repository in `tmp_path`, whose train_gpt.py is the stand-in."""
    path = tmp_path / "train_gpt.py"
    path.write_text(STAND_IN)
    (tmp_path / "c.env").write_text("A=1\n")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    settings = SimpleNamespace(__dataclass_fields__={"seed": 1, "task": "", "width": 0})
    facts = dict(Settings=settings, sha256_file=T.sha256_file, __file__=str(path))

    def call(config="", threads=0, **settings):
        place = tmp_path / "runs" / "one"
        return common.run_script(SimpleNamespace(**facts), place, config, settings, threads)

    return call


def test_a_run_sees_its_settings_and_no_exported_ones(run, monkeypatch):
    for name, value in {"WIDTH": "9", "RANK": "3", "CONFIG": "other.env"}.items():
        monkeypatch.setenv(name, value)
    result = run("c.env", 3, SEED="5")
    expected = {"SEED": "5", "CONFIG": "c.env", "OMP_NUM_THREADS": "3"}
    assert result["seen"] == {"TASK": None, "WIDTH": None, "RANK": None} | expected
    assert (result["step_ms"], result["tokens_per_second"]) == (250.0, 4000.0)
    assert (result["parameters"], result["state_bytes_per_parameter"]) == (10, 8.0)
    assert "WIDHT" in run(WIDHT="1")["failed"] and "no.env" in run("no.env")["failed"]


def test_a_finished_run_is_kept_and_a_failed_one_repeated(run, tmp_path):
    assert run(TASK="error: no") == {"failed": "error: no"}  # though it wrote a result
    first = run(SEED="5")
    assert run(SEED="5") == first
    assert (tmp_path / "runs" / "calls").read_text() == "one\none\n"
    with pytest.raises(SystemExit, match="other settings"):
        run(SEED="6")
    (tmp_path / "train_gpt.py").write_text(STAND_IN + "# another\n")
    with pytest.raises(SystemExit, match="other code"):
        run(SEED="5")


# ----------------------------------------------------------------------------------------- commands
def test_arms_have_equal_parameters_and_right_settings(tmp_path, capsys):
    """680,137 outside embeddings. A changed copy of the script is an arm, too, of any size."""
    arms.check_arms("configs/cpu.env", arms.read_arms([]), TOKENIZER)
    assert capsys.readouterr().out.startswith("arm cpu: 680,137 parameters")
    for settings, name in (({"MODEL_DIM": "240"}, "5%"), ({"NUM_LAYER": "4"}, "NUM_LAYER")):
        write_json(tmp_path / "arms.json", {"a": {}, "b": settings})
        found = arms.read_arms([str(tmp_path / "arms.json")])
        with pytest.raises(SystemExit, match=f"arm b: .*{name}"):
            arms.check_arms("configs/cpu.env", found, TOKENIZER)
    with pytest.raises(SystemExit, match="'x' is no arm"):
        arms.read_arms(["x"])
    mine = str(tmp_path / "mine.py")
    Path(mine).write_text((ROOT / "train_gpt.py").read_text())
    found = arms.read_arms([mine, "configs/cpu.env"])
    assert [arms.script_of(arm).__file__ for arm in found.values()] == [mine, T.__file__]
    arms.check_arms("configs/cpu.env", found, TOKENIZER)
    with pytest.raises(SystemExit, match="none.py"):
        arms.script_of(arms.read_arms(["none.py"])["none"])


def test_common_settings_replace_those_of_an_arms_config(tmp_path):
    """Each name is once in the file that a run reads: `--arms a.env b.env --seconds 7 --set SEED=3`."""
    common_settings = {"MAX_WALLCLOCK_SECONDS": "7", "SEED": "3"}
    lines = "# its head\nMODEL_DIM=64\nMAX_WALLCLOCK_SECONDS = 180\nexport SEED=1\n"
    (tmp_path / "a.env").write_text(lines)
    found = {"a": {"CONFIG": str(tmp_path / "a.env")}, "b": {"MLP": "gelu"}}
    paths = arms.write_configs(found, tmp_path / "runs", common_settings)
    assert list(paths) == ["a"]
    given = T.read_config(arms.ROOT / paths["a"])
    assert given == {"MODEL_DIM": "64", **common_settings}


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Calls a tool with a command line and a stub for runs: (exit code, out, err, runs)."""
    for tool in (common, bench, arms):
        monkeypatch.setattr(tool, "ROOT", tmp_path)
    manifest = {"name": "text", "tokenizer": TOKENIZER}
    for tool in (common, arms):
        monkeypatch.setattr(tool, "open_data", lambda script, path: ("data/x", manifest))
    monkeypatch.setattr(arms, "library_memory", lambda: 300.0)
    monkeypatch.setattr(bench, "matmul_peak", lambda device, dtype=None: 1e11)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/cpu.env").write_text((ROOT / "configs/cpu.env").read_text())
    monkeypatch.chdir(tmp_path)
    about = {"hardware": "1 x CPU", "versions": {}, "dtype": "float32"}

    def call(tool, line, stub):
        made = {}

        def run(script, place, config, settings, threads=0):
            made[place.name] = settings
            return {**about, **stub(place.name)}

        monkeypatch.setattr(tool, "run_script", run)
        monkeypatch.setattr(sys, "argv", [f"{tool.__name__}.py", *line.split(), "--out", "o.json"])
        with pytest.raises(SystemExit) as ended:
            tool.main()
        return ended.value.code, *capsys.readouterr(), made

    return call


def test_arms_go_by_seed_and_are_judged(command, tmp_path):
    given = {"a": {}, "b": {"MLP": "gelu"}, "c": {"SCALAR_LR": 0.01}}
    write_json(tmp_path / "arms.json", given)
    scores = {"a_s1": 2.0, "b_s1": 1.9, "c_s1": 2.1, "a_s2": 2.2, "b_s2": 2.1, "c_s2": "killed"}
    words = "arms --arms arms.json --seeds 2 --seconds"
    error, _, _, made = command(arms, f"{words} 2", scores.get)  # before any run
    assert error.startswith("error: arm a: RESERVE_SECONDS=3.0") and not made
    code, out, err, made = command(arms, f"{words} 70", lambda name: arm_run(scores[name]))
    assert list(made) == list(scores)
    given = dict(DATA_PATH="data/x", MAX_WALLCLOCK_SECONDS="70", MLP="gelu", SEED="1")
    assert made["b_s1"].items() >= given.items()
    mfu = 4000 * bench.run_flops(T, arm_run(2.0), TOKENIZER) / 1e11
    speed = f"793,688 | 5,000 | 5 | 4,000 | {mfu:.1%} | 512"
    for row in (
        f"| a | {speed} | 2.1000 ± 1.2706 |  |  |",
        f"| b | {speed} | 2.0000 ± 1.2706 | -0.1000 ± 0.0000 (-4.8%) | wins |",
        f"| c | {speed} | 2.1000 ± inf | +0.1000 ± inf (+5.0%) | tie |",
    ):
        assert row in out
    assert code == 1 and err.endswith("failed: c, seed 2: killed\n")
    saved = read_json(tmp_path / "o.json")["arms"]["c"]
    assert saved["runs"]["2"] == {"failed": "killed"}
    assert saved["half_width"] is None  # JSON has no infinity


def test_train_states_the_share_of_the_peak(command):
    """Step times of several configs are compared round by round."""
    steps = {"a_0": 10.0, "b_0": 11.0, "a_1": 20.0, "b_1": 26.0, "a_2": 14.0, "b_2": 14.0}
    words = "train a.env b.env --rounds 3 --seconds 2"
    done = command(bench, words, lambda name: {**arm_run(2.0), "step_ms": steps[name]})
    assert done[0] == 0 and {row["MAX_WALLCLOCK_SECONDS"] for row in done[3].values()} == {"7"}
    flops = bench.run_flops(T, arm_run(2.0), TOKENIZER)
    share = f"{flops / 1e6:.2f} | {4000 * flops / 1e11:.1%} of 100 GFLOP/s"
    for start in ("| a.env | 4,000 | 14.0 | 1.000", "| b.env | 4,000 | 14.0 | 1.100"):
        assert f"{start} | 512 | 793,688 | {share} |" in done[1]
    code, _, err, _ = command(bench, "train bad.env --seconds 2", lambda name: arm_run("error: x"))
    assert (code, err) == (1, "failed: bad.env: error: x\n")


@pytest.mark.full
def test_rl_prints_speeds_and_their_ratio(monkeypatch, tmp_path, capsys):
    """Toy sizes, both generators and the policy as they are."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    words = f"rl --layers 1 --dim 64 --rounds 1 --batch 2 --new 5 --out {tmp_path / 'o.json'}"
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0
    saved = read_json(tmp_path / "o.json")
    plain, compiled, theirs, *others = (row[0] for row in saved["tokens_per_second"].values())
    assert list(saved["ratios"].values()) == [plain / theirs, compiled / theirs]
    rollout, update = others
    assert 0 < update < 10 * rollout  # no answer is left out
    assert f"ours {plain / theirs:.2f}, ours, compiled" in capsys.readouterr().out
