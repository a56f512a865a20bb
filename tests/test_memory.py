"""tools/memory.py: bytes counted by hand, bytes of real tensors, what it prints and refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import environment, load_tool

import sample as S
import train_gpt as T

ROOT = Path(__file__).resolve().parents[1]
memory = load_tool("memory")

# One attention layer: an embedding of 32 x 64; matrices of 128 x 64 (queries, keys, values), 64 x 64, 128 x 64 and
# 64 x 128; a gain for each of two heads. The layout of ARCH_MODE=llama has no other weights.
TINY = dict(arch_mode="llama", layer_pattern="a", num_layers=1, model_dim=64, num_heads=2, num_kv_heads=1, mlp="relu2",
            mlp_mult=2.0, norm="rms", qk_gain_init=4.0, vocab_size=32)
EMBEDDING, MATRICES, GAIN = 32 * 64, (8192, 4096, 8192, 8192), 2
POLICY = EMBEDDING + sum(MATRICES) + GAIN
ADAPTERS = (2 * 128, 2 * 64) * 3 + (2 * 64, 2 * 64)  # of rank 2, two tensors each: w_qkv, w_up and w_down; w_o
ADAPTER = sum(ADAPTERS)


def eight(size: int) -> int:
    """State of a tensor under 8-bit AdamW: in each block of 256 two codes a weight and two scales, and a counter."""
    return -(-size // 256) * (2 * 256 + 2 * 4) + 4


# AdamW has two moments and a counter a tensor; adapters have it under Muon too.
STATE = {"adamw": 8 * POLICY + 4 * 6, "adamw8bit": sum(map(eight, (EMBEDDING, *MATRICES))) + 8 * GAIN + 4,
         "muon": 4 * sum(MATRICES) + 8 * (EMBEDDING + GAIN) + 4 * 2}
HEAD = 8 * 64 + 4  # state of a value head


@pytest.mark.parametrize("optimizer", STATE)
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_by_hand(optimizer, tied):
    rows = memory.measure(T.Settings(**TINY, tie_embeddings=tied), [optimizer], rank=2)
    found = {row["method"]: [row[part] for part in memory.PARTS] for row in rows}
    policy, own = POLICY, STATE[optimizer]
    if not tied:  # the policy has an output head as large as the embedding, a critic of its own has none
        policy += EMBEDDING
        own += eight(EMBEDDING) if optimizer == "adamw8bit" else 8 * EMBEDDING + 4
    adapters = sum(map(eight, ADAPTERS)) if optimizer == "adamw8bit" else 8 * ADAPTER + 4 * 8
    both = [4 * (policy + POLICY + 64)] * 2 + [own + STATE[optimizer] + HEAD]
    valued, adapter = [4 * (policy + 64)] * 2 + [own + HEAD], 4 * (policy + ADAPTER) + 4 * 4  # four scales
    assert found == {
        "PPO, own critic, reference": [*both, 4 * policy], "PPO, own critic": [*both, 0],
        "PPO, value head, reference": [*valued, 4 * policy], "PPO, value head": [*valued, 0],
        "GRPO or GSPO, reference": [4 * policy, 4 * policy, own, 4 * policy],
        "GRPO or GSPO": [4 * policy, 4 * policy, own, 0],
        "LoRA PPO, value head, base": [adapter + 4 * 64, 4 * (ADAPTER + 64), adapters + HEAD, 4 * 4],
        "LoRA GRPO or GSPO, frozen copy": [adapter, 4 * ADAPTER, adapters, 4 * ADAPTER],
        "LoRA GRPO or GSPO, base": [adapter, 4 * ADAPTER, adapters, 4 * 4],
    }
    totals = {row["method"]: row["total"] for row in rows}
    assert totals == {method: sum(parts) for method, parts in found.items()}
    for row in rows:
        lora, reference = row["method"].startswith("LoRA"), row["reference"] > 0
        head = "LoRA PPO, value head, base" if lora else "PPO, value head" + ", reference" * reference
        assert row["of_own_critic"] == row["total"] / totals["PPO, own critic, reference"]
        assert row["of_value_head"] == row["total"] / totals[head]


@pytest.mark.parametrize("optimizer", ["adamw8bit", *(pytest.param(name, marks=pytest.mark.full) for name in
                                                      ("adamw", "muon"))])
def test_bytes_of_real_tensors(optimizer):
    settings = T.Settings(layer_pattern="g s1 A2 s1 A2", model_dim=64, num_heads=4, num_kv_heads=2, vocab_size=64,
                          optimizer=optimizer)
    rows = {row["method"]: row for row in memory.measure(settings, [optimizer], rank=3)}
    for method, lora in (("GRPO or GSPO", False), ("LoRA GRPO or GSPO, frozen copy", True)):
        net = T.GPT(T.model_config(settings, 64, 1))
        if lora:
            S.freeze_model(S.setup_lora_adapter(net, 3))
        runtime = T.Runtime(0, 1, torch.device("cpu"), False)
        optimizers = T.Optimizers(net, settings.optimizer, T.pretraining_rates(settings), runtime)
        net(torch.ones(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)).mean().backward()
        optimizers.step(1.0, 0.9, torch.tensor(False))
        state = [t for own in optimizers.state_dict().values() for t in own.values()]
        grads = [param.grad for param in net.parameters() if param.grad is not None]
        kept = S.reference_policy(net, frozen=True).args[1] if lora else []
        assert [rows[method][part] for part in memory.PARTS] == [
            sum(t.untyped_storage().nbytes() for t in own) for own in (net.state_dict().values(), grads, state, kept)]


@pytest.mark.full
def test_what_is_saved_at_the_default_settings():
    """Of 36 bytes a weight (16 for each of two trained networks, 4 for the reference) 20 or 16 stay."""
    rows = {row["method"]: row for row in memory.measure(T.Settings(), ["adamw"])}
    assert rows["GRPO or GSPO, reference"]["of_own_critic"] == pytest.approx(20 / 36, abs=1e-4)
    assert rows["GRPO or GSPO"]["of_own_critic"] == pytest.approx(16 / 36, abs=1e-4)
    for method in ("GRPO or GSPO, reference", "GRPO or GSPO", "LoRA GRPO or GSPO, base"):
        assert 0.9999 < rows[method]["of_value_head"] < 1


@pytest.fixture
def run(monkeypatch, capsys):
    """Function: a command line of tools/memory.py in this process; exit code, output and what stands on stderr."""

    def start(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["memory.py", *map(str, words)])
        return (S.exit_code(memory.main), *capsys.readouterr())

    return start


def test_the_command(run, tmp_path):
    lines = [f"{name.upper()}={value}\n" for name, value in TINY.items()]
    (tmp_path / "tiny.env").write_text("".join(lines))
    code, out, _ = run("--config", tmp_path / "tiny.env", "--set", "VOCAB_SIZE=64", "MLP=swiglu", "--optimizers",
                       "adamw", "--rank", 4, "--out", tmp_path / "out.json")
    assert code == 0
    policy = 4 * (64 * 64 + 8192 + 4096 + 16384 + 8192 + 2)
    assert out.startswith(f"{policy // 4:,} parameters, 64 tokens, float32 everywhere, LoRA rank 4\n")
    written = json.loads((tmp_path / "out.json").read_text())
    rows = {row["method"]: row for row in written["rows"]}
    assert rows["GRPO or GSPO"]["weights"] == policy and written["parameters"] == policy // 4
    row, line = rows["GRPO or GSPO, reference"], re.search("\nGRPO or GSPO, reference (.*)", out)[1]
    shares = [f"{row[key]:.1%}" for key in ("of_own_critic", "of_value_head")]
    assert line.split() == [f"{row[key]:,}" for key in (*memory.PARTS, "total")] + shares
    assert re.search(r"\nadamw: 44\.\d% with a reference and 55\.\d% without, if PPO has a reference and a critic of "
                     r"its own; 0\.\d% if .* value head on the policy, 0\.\d% if both train adapters alone\n$", out)


def test_the_command_line_itself():
    done = subprocess.run([sys.executable, ROOT / "tools/memory.py", "--set", "LAYERS=3"], env=environment(),
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: --set LAYERS: no setting of train_gpt.py\n")


@pytest.mark.parametrize(("words", "said"), [
    (["--set", "MODEL_DIM=x"], "MODEL_DIM='x': must be a whole number from 16 to 65536"),
    (["--set", "MODEL_DIM=500"], "MODEL_DIM=500: must be a multiple of 2 x NUM_HEADS = 16"),
    (["--config", "none.env"], "CONFIG='none.env': no such file"),
    (["--rank", "600"], "LORA_RANK=600: must be from 1 to 512, the smaller side of blocks.0.mlp.w_down")])
def test_mistakes_are_one_line(run, words, said):
    assert run("--optimizers", "adamw", *words) == (2, "", f"error: {said}\n")
