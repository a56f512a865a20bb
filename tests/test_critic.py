"""tools/experiments/critic.py: bytes counted by hand, what it prints."""

import pytest

import train_gpt as T
from conftest import load_tool

critic = load_tool("experiments/critic")

# One attention layer: an embedding of 32 x 64; matrices of 128 x 64 (queries, keys, values), 64 x
# 64, 128 x 64 and 64 x 128; a gain for each of two heads. The layout of ARCH_MODE=llama has no other weights.
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
ADAPTER = 3 * 2 * (128 + 64) + 2 * (64 + 64)  # of rank 2: w_qkv, w_up and w_down; w_o
SCALES = 4 * 4  # of the four adapters
# AdamW has two moments and a counter a tensor; adapters have it under Muon too.
STATE = {
    "adamw": 8 * POLICY + 4 * 6,
    "muon": 4 * sum(MATRICES) + 8 * (EMBEDDING + GAIN) + 4 * 2,
}
HEAD = 8 * 64 + 4  # state of a value head


@pytest.mark.parametrize(("optimizer", "tied"), [("adamw", True), ("muon", False)])
def test_bytes_by_hand(optimizer, tied):
    rows = critic.measure(T.Settings(**TINY, tie_embeddings=tied), [optimizer], rank=2)
    untied = 0 if tied else EMBEDDING  # the policy's output head; a critic has none
    policy = 4 * (POLICY + untied)
    state = STATE[optimizer] + (8 * EMBEDDING + 4 if untied else 0)
    value_network = 4 * (POLICY + 64)
    ppo = [policy + value_network, policy + value_network, state + STATE[optimizer] + HEAD]
    adapters = 8 * ADAPTER + 4 * 8
    lora = [policy + 4 * ADAPTER + SCALES, 4 * ADAPTER, adapters]
    lora_critic = [value_network + 4 * ADAPTER + SCALES, 4 * (ADAPTER + 64), adapters + HEAD]
    lora_ppo = [one + two for one, two in zip(lora, lora_critic, strict=True)]
    expected = {
        "PPO, reference": [*ppo, policy],
        "PPO": [*ppo, 0],
        "GRPO or GSPO, reference": [policy, policy, state, policy],
        "GRPO or GSPO": [policy, policy, state, 0],
        "LoRA PPO, reference": [*lora_ppo, 4 * ADAPTER],
        "LoRA PPO": [*lora_ppo, 0],
        "LoRA GRPO or GSPO, reference": [*lora, 4 * ADAPTER],
        "LoRA GRPO or GSPO": [*lora, 0],
    }
    assert {row["method"]: [row[part] for part in critic.PARTS] for row in rows} == expected
    for row in rows:
        assert row["total"] == sum(expected[row["method"]])
        ppo = "LoRA PPO, reference" if "LoRA" in row["method"] else "PPO, reference"
        assert row["of_ppo"] == row["total"] / sum(expected[ppo])
