"""tools/experiments/memory.py: bytes counted by hand, bytes of real tensors, what it prints and
refuses.
"""

import json

import pytest

import train_gpt as T
from conftest import environment, load_tool, start

memory = load_tool("experiments/memory")

# One attention layer: an embedding of 32 x 64; matrices of 128 x 64 (queries, keys, values), 64 x
# 64, 128 x 64 and
# 64 x 128; a gain for each of two heads. The layout of ARCH_MODE=llama has no other weights.
TINY = dict(
    arch_mode="llama",
    layer_pattern="a",
    num_layers=1,
    model_dim=64,
    num_heads=2,
    num_kv_heads=1,
    mlp="relu2",
    mlp_mult=2.0,
    norm="rms",
    qk_gain_init=4.0,
    vocab_size=32,
)
EMBEDDING, MATRICES, GAIN = 32 * 64, (8192, 4096, 8192, 8192), 2
POLICY = EMBEDDING + sum(MATRICES) + GAIN
ADAPTERS = (2 * 128, 2 * 64) * 3 + (2 * 64, 2 * 64)  # of rank 2: w_qkv, w_up and w_down; w_o
ADAPTER = sum(ADAPTERS)


def eight(size):
    """State of a tensor under 8-bit AdamW: two codes a weight, two scales for 256, a counter."""
    return -(-size // 256) * (2 * 256 + 2 * 4) + 4


# AdamW has two moments and a counter a tensor; adapters have it under Muon too.
STATE = {
    "adamw": 8 * POLICY + 4 * 6,
    "adamw8bit": sum(map(eight, (EMBEDDING, *MATRICES))) + 8 * GAIN + 4,
    "muon": 4 * sum(MATRICES) + 8 * (EMBEDDING + GAIN) + 4 * 2,
}
HEAD = 8 * 64 + 4  # state of a value head


@pytest.mark.parametrize("optimizer", STATE)
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_by_hand(optimizer, tied):
    rows = memory.measure(T.Settings(**TINY, tie_embeddings=tied), [optimizer], rank=2)
    found = {row["method"]: [row[part] for part in memory.PARTS] for row in rows}
    policy, own = POLICY, STATE[optimizer]
    if (
        not tied
    ):  # the policy has an output head as large as the embedding, a critic of its own none
        policy += EMBEDDING
        own += eight(EMBEDDING) if optimizer == "adamw8bit" else 8 * EMBEDDING + 4
    adapters = sum(map(eight, ADAPTERS)) if optimizer == "adamw8bit" else 8 * ADAPTER + 4 * 8
    both = [4 * (policy + POLICY + 64)] * 2 + [own + STATE[optimizer] + HEAD]
    valued, adapter = (
        [4 * (policy + 64)] * 2 + [own + HEAD],
        4 * (policy + ADAPTER) + 4 * 4,
    )  # four scales
    assert found == {
        "PPO, own critic, reference": [*both, 4 * policy],
        "PPO, own critic": [*both, 0],
        "PPO, value head, reference": [*valued, 4 * policy],
        "PPO, value head": [*valued, 0],
        "GRPO or GSPO, reference": [4 * policy, 4 * policy, own, 4 * policy],
        "GRPO or GSPO": [4 * policy, 4 * policy, own, 0],
        "LoRA PPO, value head, base": [
            adapter + 4 * 64,
            4 * (ADAPTER + 64),
            adapters + HEAD,
            4 * 4,
        ],
        "LoRA GRPO or GSPO, frozen copy": [adapter, 4 * ADAPTER, adapters, 4 * ADAPTER],
        "LoRA GRPO or GSPO, base": [adapter, 4 * ADAPTER, adapters, 4 * 4],
    }
    totals = {row["method"]: row["total"] for row in rows}
    assert totals == {method: sum(parts) for method, parts in found.items()}
    for row in rows:
        assert row["of_own_critic"] == row["total"] / totals["PPO, own critic, reference"]


def test_the_command(tmp_path):
    lines = [f"{name.upper()}={value}\n" for name, value in TINY.items()]
    (tmp_path / "tiny.env").write_text("".join(lines))
    words = f"--optimizers adamw --config {tmp_path}/tiny.env --out {tmp_path}/out.json --set"
    done = start([memory.__file__, *words.split(), "VOCAB_SIZE=64"], environment())
    policy = POLICY + 32 * 64
    said = f"{policy:,} parameters, 64 tokens, float32 everywhere, LoRA rank 8\n"
    assert done.stdout.startswith(said), done.stderr
    assert "\nadamw: 44.5% with a reference and 55.6% without, " in done.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    weights = {row["method"]: row["weights"] for row in rows}
    assert weights["GRPO or GSPO"] == 4 * policy
