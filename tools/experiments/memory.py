"""Count the GPU memory of post-training published models: what fits on a card.

    python tools/experiments/memory.py                          totals of all MODELS and PLANS
    python tools/experiments/memory.py --model Qwen3.5-0.8B     the parts of one model's totals
    python tools/experiments/memory.py --model Qwen3.5-0.8B --script train_grpo --set LORA_RANK=16

Nothing runs on a GPU, and nothing is allocated. A script's own network, optimizers, forward,
backward, update and Decoder run at full size on fake tensors, which have shapes and no memory, and
the bytes of all tensors that live at the same time are added up. Where a script chooses by the
device, the branch of CUDA is taken: bfloat16, chunks of 64 tokens, PyTorch's memory-efficient
attention. Left out are what no tensor shows: the CUDA context (about 0.5 GiB), workspaces of
kernels and fragmentation; and the end of a run, which holds no more than a step.

Every row of a batch is full: a window of TRAIN_SEQ_LEN tokens, or a prompt of --prompt tokens and
an answer of MAX_NEW_TOKENS. Where there are two numbers, the second is with ACTIVATION_CHECKPOINTING=1.
"""

import argparse
import contextlib
import math
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tools/

from common import ROOT, load_script, markdown_table, parse_set

aten = torch.ops.aten
GIB = 2**30

# The shapes are those of the models' config.json, as public repositories repeat them.
MODELS = {
    "Qwen3.5-0.8B": dict(
        architectures=["Qwen3_5ForCausalLM"],
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
    ),
    "Qwen3-0.6B": dict(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "R1-Distill-Qwen-1.5B": dict(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
    "Llama-3.2-1B": dict(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
}
# What all counts have: rows of 1,024 tokens, or of --prompt and 512, and four or six in a forward.
WINDOW = "TRAIN_SEQ_LEN=1024 MICRO_BATCH_TOKENS=4096"
ANSWERS = "MAX_NEW_TOKENS=512 MICRO_BATCH_TOKENS=4608 PROMPTS_PER_STEP=32 GROUP_SIZE=8"
BASES = {
    "train_sft": WINDOW,
    "train_dpo": WINDOW,
    "train_ppo": ANSWERS,
    "train_grpo": ANSWERS,
    "train_gspo": ANSWERS,
}
PLAIN = "EMA=0 SWA=0 QAT=0"
# Scripts and their settings beside BASES. A step of train_dpo holds what one of train_sft does, and
# of train_gspo what one of train_grpo does.
PLANS = [
    ("train_sft", ""),
    ("train_sft", PLAIN),
    ("train_sft", f"{PLAIN} OPTIMIZER=adamw8bit"),
    ("train_sft", f"{PLAIN} OPTIMIZER=lion"),
    ("train_sft", f"{PLAIN} OPTIMIZER=muon"),
    ("train_sft", f"{PLAIN} LORA_RANK=16"),
    ("train_grpo", PLAIN),
    ("train_grpo", f"{PLAIN} KL_BETA=0.02 LORA_RANK=16"),
    ("train_ppo", PLAIN),
]
PARTS = "weights gradients optimizer averages reference step sampling".split()


# --------------------------------------------------------------------------------- live tensors
# Operators that may have a mask, the gradient's too.
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# It changes its inputs alone. Fake tensors do not know it, and would run it on real ones.
ADAMW = aten._fused_adamw_.tensor_lr


class LiveBytes(TorchDispatchMode):
    """Adds up the bytes of the tensors that operators make: those that live, and the most so far.

    The size of what a mask selects is not known to fake tensors. All masks here select all.
    """

    def __init__(self):
        super().__init__()
        self.live = set()  # addresses of storages
        self.now = 0
        self.peak = 0

    def free(self, address: int, size: int) -> None:
        """Forget a storage."""
        self.live.remove(address)
        self.now -= size

    def take(self, tensor: Tensor) -> None:
        """Count the storage of a tensor once."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.live:
            return
        self.live.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        """Run an operator and count what it returns."""
        is_masked = operator in INDEXING and getattr(args[1][0], "dtype", None) == torch.bool
        if is_masked and operator is aten.index.Tensor:
            x, (mask,) = args
            outputs = x.new_empty(mask.numel(), *x.shape[mask.ndim :])
        elif is_masked:
            outputs = args[0]
        elif operator is aten.masked_scatter_backward.default:
            outputs = args[0].new_empty(args[2])
        elif operator is ADAMW:
            outputs = None
        else:
            outputs = operator(*args, **(kwargs or {}))
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                self.take(output)
        return outputs


def fake_tensors() -> FakeTensorMode:
    """Return a context in which tensors have no memory; an operator that needs some is an error."""
    return FakeTensorMode(allow_fallback_kernels=False)


def nbytes(tensors) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


# ------------------------------------------------------------------------ what differs on CUDA
def efficient_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return what masked_attention returns, by the operators that CUDA runs."""
    rows = q.reshape(*k.shape[:2], -1, q.size(3))
    mask = mask.repeat(1, q.size(1) // k.size(1), 1)[:, None]
    bias = torch.where(mask, 0.0, torch.tensor(-math.inf, dtype=q.dtype))
    bias = bias.expand(-1, k.size(1), -1, -1)
    o, *_ = aten._scaled_dot_product_efficient_attention(rows, k, v, bias, True)
    return o.reshape(q.shape)


@contextlib.contextmanager
def as_on_cuda(script: ModuleType):
    """Inside, a script takes the branches of CUDA, though its tensors are on a CPU."""
    gdn_chunk = script.gdn_chunk

    def chunks(*inputs, chunk=0):
        """Return what gdn_chunk returns: training gives a chunk, generation does not."""
        return gdn_chunk(*inputs, chunk=64 if chunk else 32)

    with (
        mock.patch.object(script, "masked_attention", efficient_attention),
        mock.patch.object(script, "gdn_chunk", chunks),
    ):
        yield


# ---------------------------------------------------------------------------------------- counts
@dataclass
class Batch:
    """Rows of token_logps, of which every token is a target."""

    ids: Tensor
    doc: Tensor
    targets: Tensor
    mask: Tensor


def full_batch(rows: int, length: int) -> Batch:
    """Return `rows` rows of `length` tokens."""
    ids = torch.zeros(rows, length, dtype=torch.long)
    return Batch(ids, ids.clone(), ids.clone(), torch.ones(rows, length, dtype=torch.bool))


def make_network(script: ModuleType, config, settings, dtype) -> nn.Module:
    """Return a network as a script trains it, its adapters if any, with activations in a dtype."""
    network = script.GPT(config)
    network.dtype = dtype
    network.activation_checkpointing = settings.activation_checkpointing
    # For CUDA alone `adapt` narrows what is not trained.
    script.adapt(network, settings, torch.device("cuda" if dtype == torch.bfloat16 else "cpu"))
    return network


def row_length(settings, prompt: int) -> int:
    """Return the tokens of a row of a training batch."""
    if hasattr(settings, "max_new_tokens"):
        return prompt + settings.max_new_tokens
    return settings.train_seq_len


def train(script: ModuleType, network: nn.Module, optimizers, settings, length: int) -> None:
    """Take a step of one micro-batch, as the scripts do."""
    trained = [param for param in network.parameters() if param.requires_grad]
    rows = max(1, settings.micro_batch_tokens // length)
    table = script.quant_table(settings.matrix_bits)
    context = script.quantized(network, table) if settings.qat else contextlib.nullcontext()
    with context:
        logps = script.token_logps(network, full_batch(rows, length))
        logps.sum().backward()
    alone = script.Runtime(0, 1, torch.device("cpu"), False)
    grads = [param.grad for param in trained]
    script.reduce_gradients(grads, alone, settings.grad_clip_norm, torch.zeros(1))
    script.step_optimizers(optimizers, 1.0, torch.tensor(True))


@torch.no_grad()
def sample(script: ModuleType, network: nn.Module, settings, prompt: int) -> None:
    """Read the prompts of a step, and draw the last token of their answers."""
    with torch.backends.mkldnn.flags(enabled=False):  # a GPU has no packed copies of weights
        decoder = script.Decoder(network, [[0] * prompt] * settings.prompts_per_step)
    count = settings.prompts_per_step * settings.group_size
    rows = [row // settings.group_size for row in range(count)]
    decoder.take(rows)
    for _ in range(math.ceil(settings.max_new_tokens / decoder.room) - 1):
        decoder.grow()
    with parametrize.cached():
        decoder.logits = decoder.read(torch.zeros(len(rows), 1, dtype=torch.long))
        script.draw(decoder.logits, 1.0, torch.zeros(len(rows), dtype=torch.float64))


@contextlib.contextmanager
def extra_bytes(live: LiveBytes, parts: dict[str, int], name: str):
    """Inside, count what is made beside what lives already, at its peak, as a part."""
    held = live.now
    live.peak = held
    yield
    parts[name] = live.peak - held


def count(
    script: ModuleType, config, settings, prompt: int, dtype=torch.bfloat16
) -> dict[str, int]:
    """Return the bytes of each of PARTS for a script's training of a network of a config.

    `step` and `sampling` are what forward, backward and update, and what generation need beside
    the other parts, at their peaks. dtype: of activations.
    """
    parts = dict.fromkeys(PARTS, 0)
    with LiveBytes() as live:
        network = make_network(script, config, settings, dtype)
        alone = script.Runtime(0, 1, torch.device("cpu"), False)
        params = script.trained_parameters(network, settings)
        optimizers = script.make_optimizers(params, settings, alone)
        state = script.OptimizerState(optimizers, params)
        length = row_length(settings, prompt)
        train(script, network, optimizers, settings, length)  # makes the optimizers' state
        with extra_bytes(live, parts, "step"):
            train(script, network, optimizers, settings, length)
        if hasattr(settings, "max_new_tokens"):
            with extra_bytes(live, parts, "sampling"):
                sample(script, network, settings, prompt)
    trained = nbytes(params.values())
    parts["weights"] = nbytes(network.parameters()) + nbytes(network.buffers())
    parts["gradients"] = nbytes(param.grad for param in params.values())
    for tensors in state.state_dict().values():
        parts["optimizer"] += nbytes(tensors.values())
    parts["averages"] = (settings.ema + settings.swa) * trained
    if getattr(settings, "kl_beta", 0):
        parts["reference"] = trained  # it shares what is not trained
    return parts


def total(parts: dict[str, int]) -> int:
    """Return the most bytes at a time: a step and sampling do not happen at once."""
    held = sum(parts[name] for name in PARTS[:5])
    return held + max(parts["step"], parts["sampling"])


# ---------------------------------------------------------------------------------------- tables
def network_config(script: ModuleType, published: dict):
    """Return the config of the network that convert.py makes of a model's config.json."""
    return script.GPTConfig(**load_script(ROOT / "convert.py").hf_shape(published))


def read_settings(script: ModuleType, text: str):
    """Return the settings of a script for NAME=VALUE words. Raises SystemExit."""
    try:
        return script.load_settings(script.Settings, dict(map(parse_set, text.split())))
    except script.UserError as error:
        raise SystemExit(f"error: {error}") from None


def count_plan(model: str, name: str, text: str, prompt: int) -> list[dict[str, int]]:
    """Return the bytes of a published model's training by part: as it is, and with checkpointing.

    Raises SystemExit.
    """
    script = load_script(ROOT / f"{name}.py")
    config = network_config(script, MODELS[model])
    found = []
    for recompute in "01":
        given = f"{BASES[name]} ACTIVATION_CHECKPOINTING={recompute} {text}"
        with fake_tensors(), as_on_cuda(script):
            found.append(count(script, config, read_settings(script, given), prompt))
    return found


def in_gib(sizes) -> str:
    """Return bytes in GiB, with commas between."""
    return ", ".join(f"{size / GIB:.1f}" for size in sizes)


def totals_row(name: str, text: str, prompt: int) -> list[str]:
    """Return the totals of all models."""
    cells = [in_gib(map(total, count_plan(model, name, text, prompt))) for model in MODELS]
    return [name, text, *cells]


def parts_row(model: str, name: str, text: str, prompt: int) -> list[str]:
    """Return the parts of a model's total, which differ in `step` alone."""
    plain, recomputed = count_plan(model, name, text, prompt)
    cells = [in_gib([size]) for size in plain.values()]
    cells[PARTS.index("step")] = in_gib([plain["step"], recomputed["step"]])
    return [name, text, *cells, in_gib([total(plain), total(recomputed)])]


def main() -> int:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, help="show the parts of one model's totals")
    parser.add_argument("--script", choices=BASES)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="its settings")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt (256)")
    args = parser.parse_args()
    plans = [(args.script, " ".join(args.set))] if args.script else PLANS
    head = [*PARTS, "total"] if args.model else MODELS
    print(markdown_table([["script", "settings", *head]]), flush=True)
    for name, text in plans:
        if args.model:
            row = parts_row(args.model, name, text, args.prompt)
        else:
            row = totals_row(name, text, args.prompt)
        print("| " + " | ".join(row) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
