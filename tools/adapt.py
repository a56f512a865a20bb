"""Score a finished run of train_gpt.py with test-time training, beside its plain score.

    python tools/adapt.py runs/NAME
    python tools/adapt.py runs/NAME --rank 16 --documents 20
    torchrun --standalone --nproc_per_node=8 tools/adapt.py runs/NAME

The network is read back from model.upar and scores the run's validation data: each document with new
LoRA adapters, which learn from what was scored before (see score_adapted), and the same windows
without adapters. The scores are added to result.json and metrics.jsonl, and what is there stays as it
is. log.txt is not touched, because records are made from it alone. With --documents only the first
documents are scored, and nothing is written. docs/scoring.md has more.
"""

import argparse
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from common import SCRIPT, load_script
from endings import run_tool
from torch import Tensor
from torch.overrides import TorchFunctionMode

CHUNK_SIZE = 64  # tokens of a document between two steps of its adapters
LORA_LR = 0.004  # of AdamW; 0.002 gained less, 0.01 lost (docs/lab.md)
BETAS = (0.9, 0.99)
# Tokens of a forward by default. Code that is not compiled takes more memory than in training.
FORWARD_TOKENS = {"cpu": 2048, "cuda": 65536}
PROGRESS_SECONDS = 10.0  # between lines that say how far scoring is


# -------------------------------------------------------------------------------------- adaptation
class RowAdapters(TorchFunctionMode):
    """LoRA (arXiv 2106.09685) with adapters of its own for each row of a batch.

    Inside `with`, a product of x (rows, T, K) with one of the weights W (N, K) is x W^T + x A B for
    A (rows, K, rank) and B (rows, rank, N). Every row starts with the same random A, and with
    zeros for B, which leave the network's outputs as they are.
    """

    def __init__(self, weights: list[Tensor], rows: int, rank: int) -> None:
        super().__init__()
        self.pairs = {}  # id of a weight -> its A and B
        generator = torch.Generator().manual_seed(0)
        for weight in weights:
            width_out, width_in = weight.shape
            dtype = torch.promote_types(weight.dtype, torch.float32)
            a = torch.randn(width_in, rank, generator=generator) * width_in**-0.5
            a = a.to(weight.device, dtype).repeat(rows, 1, 1)
            b = torch.zeros(rows, rank, width_out, dtype=dtype, device=weight.device)
            self.pairs[id(weight)] = a.requires_grad_(), b.requires_grad_()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Return what func returns, with the adapters' part if it is a product with a weight."""
        output = func(*args, **(kwargs or {}))
        if func is F.linear and id(args[1]) in self.pairs:
            a, b = self.pairs[id(args[1])]
            x = args[0]
            output = output + x @ a.to(x.dtype) @ b.to(x.dtype)
        return output


def chunk_windows(
    tokens: np.ndarray, begin: np.ndarray, end: np.ndarray, seq_len: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and targets (rows, T <= seq_len) of documents; `begin` and `end` are (rows, 1).

    The last CHUNK_SIZE columns are new in each window; columns before them were new in earlier
    ones. Behind the end of a document its last token is repeated, and targets are -1.
    """
    chunk = min(CHUNK_SIZE, seq_len)
    for stop in range(chunk, (end - begin).max() + chunk, chunk):
        positions = begin + np.arange(max(0, stop - seq_len), stop)
        inside = np.minimum(positions, end - 1)
        targets = np.where(positions < end, tokens[inside + 1], -1)
        yield torch.from_numpy(tokens[inside]), torch.from_numpy(targets)


def score_adapted(script: ModuleType, scorer, network: torch.nn.Module, text, rank: int) -> list:
    """Return the Score of test-time training, and that of the same windows without it.

    Each document has new LoRA adapters of this rank. A chunk of its tokens is scored, with up to
    TRAIN_SEQ_LEN tokens of the document as its window. Only then the adapters take one step of AdamW,
    on the window's loss, and the next chunk follows. So no score depends on its own token or on a
    later one, and every token is scored once, by a distribution over all tokens: the conditions of
    Parameter Golf (issue 1017; pull requests 77 and 1530). From this call on the network's weights
    get no gradients.

    scorer: a Scorer of the script; a forward has scorer.rows documents.
    """
    runtime = scorer.runtime
    device = runtime.device
    network.requires_grad_(False)
    classes = script.parameters_by_class(dict(network.named_parameters()))
    weights = [*classes["matrix"], network.embed if network.head is None else network.head]
    if network.dtype:
        for weight in weights:  # linear would cast them to copies, which no adapter knows
            weight.data = weight.data.to(network.dtype)
    begin, end = script.document_spans(text, scorer.bos_id)
    order = np.argsort(begin - end, kind="stable")[:, None]  # longest first: batches of one length
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    last_line = time.monotonic()
    for at in range(runtime.rank * scorer.rows, len(order), runtime.world_size * scorer.rows):
        batch = order[at : at + scorer.rows]
        adapters = RowAdapters(weights, len(batch), rank)
        params = itertools.chain(*adapters.pairs.values())
        optimizer = torch.optim.AdamW(params, lr=LORA_LR, betas=BETAS, weight_decay=0.0)
        for ids, targets in chunk_windows(text.tokens, begin[batch], end[batch], scorer.seq_len):
            if scorer.log and time.monotonic() - last_line >= PROGRESS_SECONDS:
                scorer.log(f"test-time training: {at:,} of {len(order):,} documents")
                last_line = time.monotonic()
            borders = script.document_borders(ids, scorer.bos_id, device)
            inputs = (ids.to(device), targets.to(device), *borders)
            with torch.no_grad():
                plain = network(*inputs)
            with adapters:
                losses = network(*inputs)
            counted = torch.stack([losses.detach(), plain, targets.to(device) >= 0])
            sums += counted[..., -CHUNK_SIZE:].double().sum((1, 2))
            losses.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    *nats, count = runtime.sum(sums).tolist()
    assert count == len(text.tokens) - 1, (
        f"scored {count:.0f} of {len(text.tokens) - 1} predictions"
    )
    return [script.Score(one, int(count), text.bytes) for one in nats]


# ---------------------------------------------------------------------------------------- of a run
def read_result(script: ModuleType, folder: Path) -> dict:
    """Return result.json of a finished run. Raises UserError if its artifact is another one."""
    try:
        result = json.loads((folder / "result.json").read_bytes())
        sha256 = script.sha256_file(folder / "model.upar")
        is_pretraining = "manifest_sha256" in result
    except (OSError, ValueError):
        is_pretraining = False
    if not is_pretraining:
        raise script.UserError(
            f"{folder}: must be a finished run of train_gpt.py, with result.json and model.upar"
        )
    if sha256 != result["artifact_sha256"]:
        raise script.UserError(f"{folder}: result.json is of another artifact than model.upar")
    return result


def run_settings(script: ModuleType, stored: dict, args: argparse.Namespace):
    """Return the settings of a run, with the data and the device of the command line if it has any."""
    known = stored.keys() & script.Settings.__dataclass_fields__
    values = {name: stored[name] for name in known}
    if args.data:
        values["data_path"] = args.data
    if args.device:
        values["device"] = args.device
    return script.Settings(**values)


def first_documents(script: ModuleType, data, count: int):
    """Return the EvalText of the first documents of a Dataset's validation; 0: of all of them."""
    tokens = data.val.tokens
    begins = np.flatnonzero(tokens == data.tokenizer.bos_id)
    if not 0 < count < len(begins):
        return data.val
    part = tokens[: begins[count] + 1]  # a document's last prediction is of the BOS behind it
    share = data.tokenizer.count_bytes(part) / data.tokenizer.count_bytes(tokens)
    return script.EvalText(part, round(share * data.val.bytes))


def add_scores(script: ModuleType, folder: Path, result: dict, scores: dict) -> None:
    """Add scores to metrics.jsonl and result.json of a run, in place of earlier ones."""
    metrics = folder / "metrics.jsonl"
    lines = [
        line
        for line in metrics.read_text(encoding="utf-8").splitlines()
        if "val_bpb_ttt" not in json.loads(line)  # an earlier score, of another rank maybe
    ]
    lines.append(json.dumps({"step": result["steps"], **scores}))
    script.replace_file(metrics, ("\n".join(lines) + "\n").encode())
    content = json.dumps({**result, **scores}, indent=1) + "\n"
    script.replace_file(folder / "result.json", content.encode())


def adapt(script: ModuleType, args: argparse.Namespace) -> int:
    """Score a run's artifact and write the scores; return the exit code. Raises UserError."""
    for name in os.environ:
        if name.startswith("TTT_") or name in ("DEVICE", "DATA_PATH"):
            raise script.UserError(
                f"{name}: tools/adapt.py does not read it; unset it (--help lists the options)"
            )
    folder = args.run
    result = read_result(script, folder)
    if not (args.documents or os.access(folder, os.W_OK)):
        raise script.UserError(f"{folder}: cannot be written to; the scores would be lost")
    settings = run_settings(script, result["settings"], args)
    runtime = script.start_runtime(settings.device)
    device = runtime.device
    script.keep_memory()

    def log(line: str) -> None:
        if runtime.rank == 0:
            print(line, flush=True)

    if not Path(settings.data_path.partition(":")[0]).is_dir():
        raise script.UserError(
            f"{settings.data_path}: the run's data are not there; --data names their folder"
        )
    data = script.open_data(settings, runtime.rank)
    if data.manifest_sha256 != result["manifest_sha256"]:
        raise script.UserError(
            f"{settings.data_path}: must be the data of the run; its manifest.json is another one"
        )
    text = first_documents(script, data, args.documents)
    log(f"test-time training of {folder}, adapters of rank {args.rank}")
    network = script.read_network(script.read_stored("artifact", str(folder))).to(device)
    if device.type == "cuda":  # on a CPU it stays in float32, as in the run's own score
        network.dtype = script.activation_dtype(settings.dtype, device)
    script.choose_kernels(settings.kernels, network, runtime, log)
    rows = args.rows or max(1, FORWARD_TOKENS[device.type] // settings.train_seq_len)
    scorer = script.Scorer(data.tokenizer.bos_id, runtime, settings.train_seq_len, rows, log)
    begin = time.perf_counter()
    adapted, plain = score_adapted(script, scorer, network, text, args.rank)
    seconds = time.perf_counter() - begin
    log(f"from the artifact: test-time training val_{adapted} seconds:{seconds:.1f}")
    log(f"from the artifact: the same windows without it val_{plain}")
    runtime.leave()
    if not math.isfinite(adapted.nats + plain.nats):
        raise FloatingPointError("a score is not finite; nothing was written")
    if adapted.nats > plain.nats:
        log("warning: the adapters made the score worse; try a lower --rank")
    if args.documents:
        log("nothing was written, because --documents was given")
    elif runtime.rank == 0:
        scores = {
            "val_loss_ttt": adapted.loss,
            "val_bpb_ttt": adapted.bpb,
            "val_bpb_ttt_off": plain.bpb,
            "ttt_seconds": seconds,
            "ttt_lora_rank": args.rank,
        }
        add_scores(script, folder, result, scores)
        log(f"written: {folder}/result.json")
    return 0


def whole_number(text: str) -> int:
    """Return a number from 1 that is written as text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1")
    return int(text)


def main(arguments: list[str]) -> int:
    """Score the run of a command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run")
    parser.add_argument(
        "--rank",
        metavar="N",
        type=whole_number,
        default=8,
        help="rank of the adapters (default: 8)",
    )
    parser.add_argument(
        "--documents",
        metavar="N",
        type=whole_number,
        default=0,
        help="score only the first N documents, and write nothing",
    )
    parser.add_argument(
        "--rows",
        metavar="N",
        type=whole_number,
        default=0,
        help="documents that are scored side by side; fewer take less memory",
    )
    parser.add_argument("--data", default="", help="folder of the run's data, if they were moved")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], help="default: the device of the run"
    )
    parser.add_argument(
        "--script",
        type=Path,
        default=SCRIPT,
        help="the copy of train_gpt.py that trained the run, if it was changed",
    )
    args = parser.parse_args(arguments)
    if not args.script.is_file() or b"def choose_kernels" not in args.script.read_bytes():
        parser.error(f"--script {args.script}: must be a copy of train_gpt.py")
    script = load_script(args.script)
    return script.exit_code(functools.partial(adapt, script, args))


if __name__ == "__main__":
    run_tool(main, sys.argv[1:])
