"""Rate and distortion: bytes of a checkpoint's artifact against what it loses in bits per byte, quantizer by quantizer.

    python tools/rate.py runs/<RUN_ID> --weights ema --write docs/lab/rate.json

The run's own settings, data and tokenizer are used; --data and --tokenizer say where they are now. Every quantizer is
measured at several step widths, rounded to nearest and by GPTQ; bytes are those of the packed file, and those that it
would have with one table a tensor, which is what an entropy coder without contexts does. Then, at equal loss, how much
longer each is than the default with GPTQ.
"""

import argparse
import importlib
import json
import math
import platform
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import zstandard

ROOT = Path(__file__).resolve().parents[1]
WIDER = (1.0, 1.5, 2.2, 3.3)
# name -> what is varied. One scale per tensor is the only quantizer there is; docs/lab.md, 2026-11-21, has the others.
QUANTIZERS = {"one step a tensor": [dict(widen=widen) for widen in WIDER]}
DEFAULT = ("one step a tensor", True)


def load_model(script: ModuleType, args: argparse.Namespace) -> SimpleNamespace:
    """The run's network with the weights asked for, its settings, and data. UserError where one of them is missing."""
    folder, faults = script.first_whole([args.run] if (args.run / "meta.json").exists() else
                                        script.checkpoints(args.run))
    if folder is None:
        raise script.UserError(f"{args.run}: no whole checkpoint; {'; '.join(faults)}")
    meta = json.loads((folder / "meta.json").read_bytes())
    known = {field: value for field, value in meta["settings"].items() if hasattr(script.Settings, field)}
    # Where the run fitted its micro-batches to memory, these are small: nothing is fitted here.
    settings = script.Settings(**known | {
        "data_path": args.data or known["data_path"], "tokenizer_path": args.tokenizer or known["tokenizer_path"],
        "micro_batch_tokens": known["micro_batch_tokens"] or max(known["train_seq_len"], 4096)})
    data, runtime = script.open_data(settings), script.start_runtime(args.device)
    config = script.model_config(settings, data.tokenizer.vocab_size, data.tokenizer.bos_id)
    network = script.GPT(config).to(runtime.device)
    network.load_state_dict(torch.load(folder / "model.pt", map_location=runtime.device, weights_only=True))
    if args.weights != "raw":
        saved = torch.load(folder / "training.pt", map_location="cpu", weights_only=True, mmap=True)
        if not saved.get(args.weights, {}).get("count"):
            raise script.UserError(f"{folder}: it has no {args.weights} weights; --weights raw has those of training")
        for param, value in zip(network.parameters(), saved[args.weights]["values"], strict=True):
            param.data.copy_(value)
    return SimpleNamespace(network=network, settings=settings, config=config, data=data, runtime=runtime,
                           step=meta["step"])


def bytes_alone(script: ModuleType, coded: dict, sizes: dict[str, int]) -> int:
    """Bytes of the file if each tensor had one table of its own: order-0 entropies, and those tables by zstd."""
    symbols = [part.codes.cpu().numpy().view(np.uint8).reshape(-1) for part in coded.values()]
    counts = [np.bincount(each, minlength=256) for each in symbols]
    tables = np.stack([script.rans_table(each) for each in counts]).T.copy().view(np.uint8)
    packed = len(zstandard.ZstdCompressor(level=19).compress(tables.reshape(-1, 2).T.tobytes()))
    rest = sum(sizes.values()) - sum(sizes.get(kind, 0) for kind in ("matrix", "embedding", "coder"))
    return round(rest + packed + sum(script.entropy_bytes(each) for each in counts))


def measure(script: ModuleType, model: SimpleNamespace, args: argparse.Namespace) -> list[dict]:
    """A row for each quantizer, width and way of rounding; the first row is the model as it was trained."""
    tensors, own = model.network.state_dict(), script.quant_table(model.settings)
    batches = script.Batches(model.data, model.settings, model.runtime)
    with script.Hessians(model.network) as taps, torch.no_grad():
        for step in range(args.calibration):
            for ids, _ in batches.micro_batches(model.step + step):
                model.network(ids)
    header = {"settings": vars(model.config), "tokenizer_sha256": model.data.tokenizer.sha256, "meta": {}}

    def score() -> float:
        scorer = script.Scorer(model.data.tokenizer, model.runtime, model.settings.train_seq_len, batches.micro_rows)
        return scorer.score(model.network, model.data.val[: args.tokens + 1]).bpb

    rows = [{"quantizer": "none", "bpb": score()}]
    for name, varied in QUANTIZERS.items():
        for change in varied:
            table = {kind: {**quantizer, **change} for kind, quantizer in own.items()}
            for way, hessians in ((False, {}), (True, taps.sums)):
                coded = script.quantize_all(tensors, table)
                for key in hessians.keys() & coded.keys():
                    part = coded[key]
                    part.codes = script.gptq(tensors[key], part.scale, part.bits, hessians[key])
                data, sizes = script.pack_artifact(tensors, coded, **header)
                with script.decoded(tensors, coded):
                    bpb = score()
                rows.append({"quantizer": name, "gptq": way, **change, "bytes": len(data), "bpb": bpb,
                             "bytes_alone": bytes_alone(script, coded, sizes), "gap": bpb - rows[0]["bpb"]})
                print(f"{name:20s} {'GPTQ   ' if way else 'nearest'} {str(change):16s} {len(data):9d} bytes, a table a "
                      f"tensor {rows[-1]['bytes_alone']:9d}, gap {rows[-1]['gap']:+.5f}", flush=True)
    return rows


def bytes_at(rows: list[dict], name: str, way: bool, key: str, gap: float) -> float:
    """Bytes of a quantizer at a gap: its log bytes against log gap, between two measured points; nan outside."""
    points = sorted((math.log(max(row["gap"], 1e-5)), math.log(row[key])) for row in rows[1:]
                    if (row["quantizer"], row["gptq"]) == (name, way))
    x, y = zip(*points, strict=True)
    return math.exp(np.interp(math.log(gap), x, y)) if x[0] <= math.log(gap) <= x[-1] else math.nan


def main(script: ModuleType) -> int:
    """Measure, print, and write where asked to; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder, or a checkpoint's")
    parser.add_argument("--weights", choices=("raw", "ema", "swa"), default="ema")
    parser.add_argument("--data", default="", help="where the run's shards are now")
    parser.add_argument("--tokenizer", default="", help="where its tokenizer is now")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tokens", type=int, default=131072, help="of validation that are scored")
    parser.add_argument("--calibration", type=int, default=16, help="training batches that GPTQ sees")
    parser.add_argument("--write", type=Path, help="a JSON file for the rows")
    args = parser.parse_args()
    if args.tokens < 1:
        raise script.UserError(f"--tokens {args.tokens}: must be at least 1")
    if args.write and not args.write.absolute().parent.is_dir():
        raise script.UserError(f"--write {args.write}: the folder that it would be in does not exist")
    rows = measure(script, load_model(script, args), args)
    print("\nbytes at equal gap, over those of one step a tensor by GPTQ with tables by row and column:")
    equal = []
    for gap in (0.002, 0.004, 0.008, 0.016, 0.032):
        least = bytes_at(rows, *DEFAULT, "bytes", gap)
        for name, way, key in [(name, way, key) for name in QUANTIZERS for way in (False, True)
                               for key in ("bytes_alone", "bytes")]:
            more = bytes_at(rows, name, way, key, gap) / least - 1
            if not math.isnan(more):
                equal.append({"gap": gap, "quantizer": name, "gptq": way, "tables": key, "more": more})
                print(f"gap {gap:.3f} {name:20s} {'GPTQ   ' if way else 'nearest'} "
                      f"{'contexts' if key == 'bytes' else 'a table a tensor':16s} {more:+.1%}")
    if args.write:
        found = {"command": " ".join(["python", "tools/rate.py", *map(str, sys.argv[1:])]), "torch": torch.__version__,
                 "hardware": platform.machine(), "rows": rows, "equal_gap": equal}
        args.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    train_gpt = importlib.import_module("train_gpt")
    sys.exit(train_gpt.exit_code(lambda: main(train_gpt)))
