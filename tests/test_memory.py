"""tools/experiments/memory.py: counted bytes against those that a run allocates, tables."""

import itertools

import pytest
import torch

from conftest import ROOT, load_script, load_tool

memory = load_tool("experiments/memory")
ALONE = (0, 1, torch.device("cpu"), False)
TINY = {
    "Qwen3.5": dict(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=224,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        vocab_size=2000,
    ),
    "Llama": dict(
        num_hidden_layers=3,
        hidden_size=96,
        intermediate_size=192,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        vocab_size=1000,
    ),
}
LIKE = {"Qwen3.5": "Qwen3.5-0.8B", "Llama": "Llama-3.2-1B"}
RL = "MAX_NEW_TOKENS=64 PROMPTS_PER_STEP=4 GROUP_SIZE=4 MICRO_BATCH_TOKENS=1024"
CASES = [
    ("Qwen3.5", "train_grpo", f"{RL} KL_BETA=0.1 QAT=0 LORA_RANK=4"),
    ("Llama", "train_grpo", f"{RL} OPTIMIZER=muon EMA=0 ACTIVATION_CHECKPOINTING=1"),
    ("Qwen3.5", "train_sft", "TRAIN_SEQ_LEN=256 MICRO_BATCH_TOKENS=1024 OPTIMIZER=adamw8bit"),
    ("Llama", "train_dpo", "TRAIN_SEQ_LEN=512 MICRO_BATCH_TOKENS=2048 OPTIMIZER=lion QAT=0"),
]
long = [pytest.param(*case, marks=pytest.mark.full) for case in CASES[1:]]
cases = pytest.mark.parametrize(("model", "script", "given"), [CASES[0], *long])


def plan(model, script, given):
    """Return a script, the config of a tiny network of a model's layout, and settings."""
    module = load_script(ROOT / f"{script}.py")
    published = memory.MODELS[LIKE[model]] | TINY[model]
    return module, memory.network_config(module, published), memory.read_settings(module, given)


def allocated(action):
    """Return the most bytes that the operators of an action held at a time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        action()
    events = profiler.profiler.kineto_results.events()
    held = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(held))


@cases
def test_counted_bytes_are_those_that_a_run_allocates(model, script, given):
    module, config, settings = plan(model, script, given)
    with memory.fake_tensors():
        counted = memory.count(module, config, settings, 192, torch.float32)

    network = memory.make_network(module, config, settings, torch.float32)
    params = module.trained_parameters(network, settings)
    optimizers = module.make_optimizers(params, settings, module.Runtime(*ALONE))
    parts = module.OptimizerState(optimizers, params)
    length = memory.row_length(settings, 192)

    def step():
        memory.train(module, network, optimizers, settings, length)

    step()
    trained = [param for param in network.parameters() if param.requires_grad]
    state = [w for tensors in parts.state_dict().values() for w in tensors.values()]
    weights = [*network.parameters(), *network.buffers()]
    averages = [module.Average(trained) for name in ("ema", "swa") if getattr(settings, name)]
    for average in averages:
        average.update(0.0)
    exact = {
        "weights": weights,
        "gradients": [param.grad for param in trained],
        "optimizer": state,
        "averages": [value for average in averages for value in average.values],
        "reference": trained if getattr(settings, "kl_beta", 0) else [],
    }
    for name, tensors in exact.items():
        assert counted[name] == sum(tensor.nbytes for tensor in tensors), name
    assert counted["step"] == pytest.approx(allocated(step), rel=0.1)
    if script == "train_grpo":
        sampled = allocated(lambda: memory.sample(module, network, settings, 192))
        assert counted["sampling"] == pytest.approx(sampled, rel=0.1)
    else:
        assert counted["sampling"] == 0
