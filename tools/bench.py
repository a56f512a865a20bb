"""Measurements on this machine: of functions, of generation and its training, of a run (tools/arms.py: of choices), and
of one GPU (tools/gpu.py). What is compared runs in turn in one process, on CUDA by the times of events.

train and cost start train_gpt.py with settings in its environment and read its result.json and log.txt. Settings that
the shell exports are not passed on: `--set NAME=VALUE` is. Step time is the median over the run, tokens/s is the batch
over that time. Without --data the text is Python's own standard library, with little of it for validation.
"""

import argparse
import functools
import importlib
import inspect
import json
import lzma
import math
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train_gpt.py"  # the file that is measured
BENCH_DATA = "data/bench"  # made at the first use
# What is compared with, as pip takes it: transformers' rule became 1.2 to 1.7 times faster from 4.57 to this version.
LIBRARIES = {"transformers": "transformers==5.23.0", "fla": "flash-linear-attention", "brotli": "brotli==1.2.1",
             "constriction": "constriction==0.5.0"}
SHAPES = [(4, 512, 8, 64), (4, 2048, 8, 64), (16, 256, 4, 32)]  # (B, T, H, D)
# Settings of the models whose matrices Muon takes a step with.
MODELS_OF_OPS = {"configs/cpu.env": {"CONFIG": str(ROOT / "configs" / "cpu.env")},
                 "512 wide, g a g a": {"LAYER_PATTERN": "g a g a"}}


# === shared: runs ===
# Environment variables that a run gets from the shell. Settings are not among them: they would override the config.
PASSED_ON = re.compile(r"PATH|HOME|TMPDIR|LANG|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CC|CXX|"
                       r"(OMP|MKL|CUDA|NCCL|TORCHINDUCTOR|TRITON)_\w+")


def load_script(path: Path) -> ModuleType:
    """Import a script of this repository by its path."""
    sys.path.insert(0, str(path.parent))
    return importlib.import_module(path.stem)


def setting_names(script: ModuleType) -> set[str]:
    """The names that train_gpt.py reads from its environment, CONFIG aside."""
    return {name.upper() for name in script.Settings.__dataclass_fields__}


def run_script(script: ModuleType, place: Path, config: str, settings: dict[str, str], threads: int = 0,
               words: Sequence[str] = ()) -> dict:
    """Make a run in the folder `place` unless it stands there finished: its result and speed, or {"failed": why}.

    `config` is a CONFIG file seen from the repository, or ""; `words` go to Python in place of the script. Raises
    SystemExit where the folder holds a finished run of other settings, config or code.
    """
    unknown = sorted(set(settings) - setting_names(script))
    if unknown:  # train_gpt.py would not look at them: two arms would be one
        return {"failed": f"{', '.join(unknown)}: no setting of {SCRIPT.name}"}
    if config and not (ROOT / config).is_file():
        return {"failed": f"CONFIG={config!r}: no such file"}
    asked = {"settings": settings, "config": (ROOT / config).read_text(encoding="utf-8") if config else "",
             "code": script.sha256_file(SCRIPT)}
    done = place / "bench.json"  # written after a run that ended well
    if not done.is_file():
        if place.exists():  # it failed or was broken off
            shutil.rmtree(place)
        environ = {name: value for name, value in os.environ.items() if PASSED_ON.fullmatch(name)}
        environ |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        environ |= {**settings, "CONFIG": config, "OUT_DIR": str(place.parent), "RUN_ID": place.name}
        print(f"run: {place}", flush=True)
        ended = subprocess.run([sys.executable, *(words or [str(SCRIPT)])], cwd=ROOT, env=environ,
                               capture_output=True, text=True)
        if ended.returncode:
            said = ended.stderr.strip().splitlines()
            return {"failed": said[-1] if said else f"exit code {ended.returncode}, nothing on stderr"}
        done.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")
    found = json.loads(done.read_text(encoding="utf-8"))
    different = [key for key in asked if found[key] != asked[key]]
    if different:
        raise SystemExit(f"error: {place} was made with other {' and '.join(different)}; name another folder: --runs")
    result = json.loads((place / "result.json").read_text(encoding="utf-8"))
    milliseconds = step_ms((place / "log.txt").read_text(encoding="utf-8"))
    if math.isnan(milliseconds):
        return {"failed": f"{result['steps']} steps are too few to time; use more --seconds"}
    result["parameters"], result["step_ms"] = result["params"]["total"], milliseconds
    result["tokens_per_second"] = 1000 * result["tokens"] / result["steps"] / milliseconds
    result["state_bytes_per_parameter"] = result["optimizer_state_bytes"] / result["parameters"]
    return result


def step_ms(log: str) -> float:
    """Return the milliseconds of a step: the median over steps, NaN if fewer than three steps are logged.

    The log has whole milliseconds, so steps are taken together until a stretch lasts 200 ms. A run logs its first five
    steps and then a step every ten seconds, so every step of a stretch counts, with the stretch's mean.
    """
    logged = re.finditer(r"^step:(\d+)/\S+ train_loss:.* train_time:(\d+)ms", log, re.MULTILINE)
    points = [(int(line[1]), int(line[2])) for line in logged]
    if len(points) < 3:
        return math.nan
    stretches, (step, ms) = [], points[0]
    for next_step, next_ms in points[1:]:
        if next_ms - ms >= 200 or (next_step == points[-1][0] and not stretches):
            count = next_step - step
            stretches += [(next_ms - ms) / count] * count
            step, ms = next_step, next_ms
    return statistics.median(stretches)


def figures(run: dict) -> dict:
    """What a JSON document keeps of a run."""
    keys = ("failed", "parameters", "steps", "tokens", "step_ms", "tokens_per_second", "peak_memory_mib",
            "optimizer_state_bytes", "state_bytes_per_parameter", "train_seconds", "val_bpb", "events")
    return {key: run[key] for key in keys if key in run}


def open_data(script: ModuleType, path: str) -> tuple[str, dict]:
    """(DATA_PATH, manifest) of --data, made first where none is named. Raises SystemExit where there is no data."""
    if not path and not (ROOT / BENCH_DATA / "manifest.json").is_file():
        command = ["data/prepare.py", "--out", BENCH_DATA, "--val-max-bytes", "40000"]
        print(f"data: python {shlex.join(command)}", flush=True)
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    path = str(Path(path).resolve()) if path else BENCH_DATA
    try:
        return path, script.load_manifest(ROOT / path)
    except script.UserError as error:
        raise SystemExit(f"error: {error}") from None


def replace_between(text: str, tag: str, body: str) -> str:
    """`text` with `body` between <!-- tag --> and <!-- /tag -->. Raises SystemExit unless both stand in it once."""
    parts = re.split(f"<!-- (/?){tag} -->", text)
    if parts[1::2] != ["", "/"]:
        raise SystemExit(f"error: the page must have <!-- {tag} --> and then <!-- /{tag} -->, once each")
    return f"{parts[0]}<!-- {tag} -->\n{body}\n<!-- /{tag} -->{parts[-1]}"


def short_run(script: ModuleType, args: argparse.Namespace, **more: str) -> tuple[dict[str, str], dict]:
    """Settings of a run of --seconds without validation, `more` and --set above them; the manifest of its data."""
    data, manifest = open_data(script, args.data)
    return {"DATA_PATH": data, "MAX_WALLCLOCK_SECONDS": f"{args.seconds + 5:g}", "RESERVE_SECONDS": "5",
            "ITERATIONS": "0", "WARMDOWN_ITERS": "0", "VAL_LOSS_EVERY": "0", "EVAL_STRIDE": "0",
            **more, **dict(args.set)}, manifest


def publish(args: argparse.Namespace, path: str, runs: list[tuple[str, dict]], rows: list[list[str]], notes: str, /,
            **body) -> list[str]:
    """Print a Markdown table of `rows` (the first is its head), command, date, machine and notes. Returns failures.

    `body` goes with command, date and machine into a JSON file: --out, or `path` with the date put in.
    """
    first, info = next((run for _, run in runs if "failed" not in run), {}), Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.is_file() else []
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", f"tools/{Path(__file__).name}", *sys.argv[1:]]),
        "cpu": names[0] if names else platform.processor(), "cores": os.cpu_count(),
        **{key: first.get(key) for key in ("hardware", "versions", "commit", "code_sha256", "manifest_sha256")},
    }
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in [rows[0], ["---"] * len(rows[0]), *rows[1:]])
    text = (f"{table}\n\n`{about['command']}`, {about['date']}, {about['cores']} cores of {about['cpu']}, a run on "
            f"{about['hardware']}, torch {torch.__version__}. {notes}")
    print(text)
    out, page = ROOT / (args.out or path.format(date=about["date"])), ROOT / "docs" / "choices.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    given = {"seconds": args.seconds, "set": dict(args.set)} if "seconds" in args else {}
    content = json.dumps({**about, **given, **body}, indent=1)
    out.write_text(content.replace(": Infinity", ": null") + "\n", encoding="utf-8")  # JSON has no infinity
    print(f"written: {out}")
    if args.write_docs:
        page.write_text(replace_between(page.read_text(encoding="utf-8"), args.command, text), encoding="utf-8")
    return [f"{name}: {run['failed']}" for name, run in runs if "failed" in run]


def parse_set(text: str) -> tuple[str, str]:
    """NAME and VALUE of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def add_run_command(commands, name: str, text: str, function: Callable, seconds: float,
                    runs: str) -> argparse.ArgumentParser:
    """A command of `commands`, argparse's subparsers, that starts runs of some seconds in a folder."""
    parser = commands.add_parser(name, help=text)
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of training, each run ({seconds:g})")
    parser.add_argument("--data", default="", help=f"data folder ({BENCH_DATA}, made if missing)")
    parser.add_argument("--set", type=parse_set, action="append", default=[], metavar="NAME=VALUE",
                        help="a setting of every run; may be repeated")
    parser.add_argument("--runs", default=runs, help=f"folder for the runs ({runs})")
    parser.add_argument("--out", default="", help="the JSON file")
    parser.set_defaults(run=function, write_docs=False)
    return parser


def run_command(parser: argparse.ArgumentParser) -> None:
    """Do what the command line says; failures go to stderr, and the exit code is 1 if there are any."""
    args = parser.parse_args()
    failures = args.run(args) or []
    sys.stderr.writelines(f"failed: {failure}\n" for failure in failures)
    sys.exit(1 if failures else 0)
# === end: runs ===


# -------------------------------------------------------------------------------------------------------------- ops
def parse_shape(text: str) -> tuple[int, int, int, int]:
    """B, T, H, D from text such as 4x512x8x64."""
    if not re.fullmatch(r"0*[1-9]\d*(x0*[1-9]\d*){3}", text):
        raise argparse.ArgumentTypeError(f"shape is {text!r}; it must be BxTxHxD, such as 4x512x8x64")
    return tuple(map(int, text.split("x")))


def load_library(name: str) -> ModuleType | None:
    """A library to compare with; None where it is missing, which one line says."""
    try:
        library = importlib.import_module(name)
    except ImportError:
        print(f"{name} is missing and not measured: pip install {LIBRARIES[name]}", flush=True)
        return None
    if name == "transformers":
        library.utils.logging.set_verbosity_error()
    wanted, found = LIBRARIES[name].partition("==")[2], getattr(library, "__version__", "")
    if wanted and found and found != wanted:
        print(f"note: {name} is {found}; the project's figures name {wanted}")
    return library


def mark(cuda: bool):
    """This moment, for `between`: perf_counter's, on CUDA an event among the work that was asked for."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first, last) -> float:
    """Seconds from one mark to a later one; on CUDA this waits for the later one."""
    if isinstance(first, float):
        return last - first
    last.synchronize()
    return first.elapsed_time(last) / 1000


def in_turn(ways: dict[str, Callable], rounds: int, cuda: bool, stretch: float = 0.01) -> dict[str, list[float]]:
    """Seconds that a call of each takes, by round: all ways in turn, each for as many calls as fill `stretch` seconds.

    How many those are is found by one call before the rounds; what must warm up should have been called already.
    """
    def run(name: str, count: int) -> float:
        begin = mark(cuda)
        for _ in range(count):
            ways[name]()
        return between(begin, mark(cuda)) / count

    counts = {name: max(1, math.ceil(stretch / max(run(name, 1), 1e-7))) for name in ways}
    times = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            times[name].append(run(name, counts[name]))
    return times


def compare(operation: str, shape: str, ways: dict[str, Callable], rounds: int, cuda: bool) -> list[dict]:
    """A record of each way, ours first: milliseconds, how many times ours that is by the medians, and how far the
    tensors that it returned at first are from ours, at most, in shares of the largest of ours.
    """
    results = {name: [torch.as_tensor(x).detach().clone() for x in way()] for name, way in ways.items()}
    times = {name: [1e3 * each for each in seconds] for name, seconds in in_turn(ways, rounds, cuda).items()}
    (first, own), *_ = times.items()
    records = []
    for name, ms in times.items():
        apart = [((x.double() - y.double()).abs().max() / y.double().abs().max().clamp(min=1e-30)).item()
                 for x, y in zip(results[name], results[first], strict=True) if y.numel()]
        records.append({"operation": operation, "shape": shape, "way": name, "ms": statistics.median(ms),
                        "least": min(ms), "most": max(ms), "times ours": statistics.median(ms) / statistics.median(own),
                        "difference": max(apart) if apart and name != first else None})
    return records


def with_gradients(what: str, shape: str, rules: dict[str, Callable], inputs: list[torch.Tensor]) -> Iterator[tuple]:
    """Two cases for `compare`: what each rule makes of the inputs, and that with the gradients of all inputs."""
    weight = torch.randn_like(next(iter(rules.values()))(*inputs))
    inputs = [x.detach().requires_grad_() for x in inputs]

    @torch.no_grad()
    def forward(rule: Callable) -> list[torch.Tensor]:
        return [rule(*inputs)]

    def both(rule: Callable) -> list[torch.Tensor]:
        out = rule(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, weight)]

    for how, run in (("forward", forward), ("forward+backward", both)):
        yield f"{what}, {how}", shape, {name: functools.partial(run, rule) for name, rule in rules.items()}


def gdn_cases(ops: SimpleNamespace, device: str) -> Iterator[tuple[str, str, dict]]:
    """(operation, shape, ways) of Gated DeltaNet: over ops.shapes, and for one token a row, as in generation."""
    script, size, dtype = ops.script, ops.chunk, torch.bfloat16 if device == "cuda" else torch.float32
    chunks = {f"gdn_chunk({size})": lambda q, k, *x: script.gdn_chunk(q * k.shape[-1] ** -0.5, k, *x, chunk=size)[0]}
    recur = load_script(ROOT / "sample.py").gdn_step
    steps = {"gdn_step": lambda state, q, *x: recur(*(y[:, 0] for y in (q * q.shape[-1] ** -0.5, *x)), state)}
    if library := load_library("transformers"):
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen
        # unwrapped: where fla is installed, the wrapper takes that; the library scales q itself
        chunk, token = map(inspect.unwrap, (qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule))
        name = f"transformers {library.__version__}"
        chunks[name] = lambda *x: chunk(*x)[0]
        steps[name] = lambda state, *x: token(*x, initial_state=state, output_final_state=True)
    if device == "cuda" and (library := load_library("fla")):  # its kernels are Triton's
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
        name = f"fla {library.__version__}"
        chunks[name] = lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]
        steps[name] = lambda state, q, k, v, g, beta: fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)

    def inputs(b: int, t: int, h: int, d: int) -> list[torch.Tensor]:  # decay and write strength as at initialisation
        torch.manual_seed(0)
        q, k = (F.normalize(torch.randn(b, t, h, d, device=device), dim=-1).to(dtype) for _ in range(2))
        v, (g, beta) = torch.randn(b, t, h, d, device=device, dtype=dtype), torch.rand(2, b, t, h, device=device)
        return [q, k, v, -0.2 * g, beta]

    for b, t, h, d in ops.shapes:
        yield from with_gradients("GDN", f"B{b} T{t} H{h} D{d}", chunks, inputs(b, t, h, d))
    for h, d in dict.fromkeys(shape[2:] for shape in ops.shapes):
        one, state = inputs(32, 1, h, d), torch.randn(32, h, d, d, device=device)
        ways = {name: lambda step=step, one=one, state=state: [x.flatten() for x in step(state, *one)]
                for name, step in steps.items()}
        yield "GDN, a token", f"B32 H{h} D{d}", ways


def attention_cases(ops: SimpleNamespace, device: str) -> Iterator[tuple[str, str, dict]]:
    """Attention in a window of a quarter of the text, and full; two query heads share keys and values."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if mask is not None:  # its fast kernels on CUDA take no mask and shared heads together
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=mask is None)

    for b, t, h, d in ops.shapes:
        few = max(1, h // 2)
        inputs = [torch.randn(b, heads, t, d, device=device, dtype=dtype) for heads in (h, few, few)]
        doc, at = torch.zeros(b, t, dtype=torch.long, device=device), torch.arange(t, device=device)
        gap = at[:, None] - at
        for window in (max(1, t // 4), t):
            mask = (gap >= 0) & (gap < window) if window < t else None
            rules = {"attend": functools.partial(ops.script.attend, doc=doc, window=window),
                     "scaled_dot_product_attention": functools.partial(library, mask=mask)}
            yield from with_gradients(f"attention, window {window}", f"B{b} T{t} H{h} D{d}", rules, inputs)


def muon_cases(ops: SimpleNamespace, device: str) -> Iterator[tuple[str, str, dict]]:
    """A step of Muon, from zero weights and gradients of noise: that of the script, and torch's on each matrix."""
    script, runtime = ops.script, ops.script.Runtime(0, 1, torch.device(device), False)
    for name, given in ops.models.items():
        settings = script.load_settings(script.Settings, given, presets={"ARCH_MODE": script.ARCH_PRESETS})
        network = script.GPT(script.model_config(settings, 1024, 1)).to(device)
        rates, skip = script.pretraining_rates(settings), torch.tensor(False, device=device)
        muon = script.Optimizers(network, settings.optimizer, rates, runtime).all[0]
        muon.param_groups[0]["momentum"] = script.MUON_MOMENTUM
        pieces, copies = [], []  # a parameter may hold several matrices; torch's Muon gets each as a parameter
        for param in muon.param_groups[0]["params"]:
            torch.nn.init.zeros_(param)
            param.grad.normal_()
            splits = getattr(param, "splits", (len(param),))
            for piece, grad in zip(param.detach().split(splits), param.grad.split(splits), strict=True):
                pieces.append(piece)  # a view, which steps change
                copies.append(torch.nn.Parameter(piece.clone()))
                copies[-1].grad = grad.clone()
        other = torch.optim.Muon(copies, lr=settings.matrix_lr, momentum=script.MUON_MOMENTUM,
                                 weight_decay=settings.muon_wd, ns_steps=script.NEWTON_SCHULZ_STEPS)
        ways = {"Muon": lambda muon=muon, pieces=pieces, skip=skip: muon.step(skip) or pieces,
                "torch.optim.Muon, bfloat16": lambda other=other, copies=copies: other.step() or copies}
        yield "Muon, a step", f"{name}, {len(copies)} matrices", ways


def coders(script: ModuleType, codes: np.ndarray) -> dict[str, tuple[Callable, Callable]]:
    """Name -> (what gives a list of bytes or arrays that hold codes int8 (n,), what reads these), ours first."""
    symbols, raw = codes.view(np.uint8), codes.tobytes()
    counts = np.bincount(symbols, minlength=256)

    def write() -> list:
        table, states = script.rans_table(counts), np.full(script.rans_lanes(codes.size), script.RANS_LOW, np.uint32)
        words = script.RansCoder(states, table[None]).encode(symbols)
        return [table, states, words]

    def read(table: np.ndarray, states: np.ndarray, words: np.ndarray) -> np.ndarray:
        return script.RansCoder(states.copy(), table[None]).decode(np.zeros(codes.size, np.uint8), words)

    zstd = zstandard.ZstdCompressor(level=22)
    found = {
        "rANS": (write, read),
        "zstd 22": (lambda: [zstd.compress(raw)], zstandard.ZstdDecompressor().decompress),
        "lzma 9e": (lambda: [lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)], lzma.decompress)}
    if brotli := load_library("brotli"):
        found["brotli 11"] = lambda: [brotli.compress(raw, quality=11, lgwin=24)], brotli.decompress
    if load_library("constriction"):
        from constriction import stream
        low, shares = int(codes.min()), np.bincount(codes.astype(np.int64) - int(codes.min())) / codes.size
        model, shifted = stream.model.Categorical(shares, perfect=False), codes.astype(np.int32) - low

        def encode() -> list:
            coder = stream.stack.AnsCoder()
            coder.encode_reverse(shifted, model)
            return [coder.get_compressed(), shares.astype(np.float32)]

        found["constriction"] = (encode, lambda words, _: (stream.stack.AnsCoder(words).decode(model, codes.size)
                                                           + low).astype(np.int8))
    return found


def coding_records(ops: SimpleNamespace) -> list[dict]:
    """Times and bytes of ops.codes int6 codes of normal weights, or of those of the artifact ops.artifact."""
    if ops.artifact:
        try:
            coded = ops.script.read_artifact(ops.artifact)[2].values()
        except (OSError, ops.script.ArtifactError) as error:
            raise SystemExit(f"error: --artifact: {error}") from None
        every = [part.codes.numpy().reshape(-1) for part in coded if part.bits == 6]
        if not every:
            raise SystemExit(f"error: --artifact {ops.artifact}: none of its tensors has 6 bits")
        codes = np.concatenate(every)
    else:
        torch.manual_seed(0)
        codes = ops.script.quantize(torch.randn(1, ops.codes), 6, 8.0)[0].numpy().reshape(-1)
    ways = coders(ops.script, codes)
    packed = {name: write() for name, (write, _) in ways.items()}
    sizes = {name: sum(memoryview(part).nbytes for part in parts) for name, parts in packed.items()}

    def read(name: str) -> list[np.ndarray]:
        return [np.frombuffer(ways[name][1](*packed[name]), np.int8).copy()]

    for name in ways:
        if not np.array_equal(read(name)[0], codes):
            raise SystemExit(f"error: {name}: codes are read back otherwise than they were written")
    shape = f"{codes.size:,} int6 codes" + f" of {ops.artifact}" * bool(ops.artifact)
    writers = {name: lambda write=write: write() and [] for name, (write, _) in ways.items()}
    records = compare("write", shape, writers, ops.rounds, False)
    records += compare("read", shape, {name: functools.partial(read, name) for name in ways}, ops.rounds, False)
    return [{**record, "bytes": sizes[record["way"]]} for record in records]


def op_records(ops: SimpleNamespace, device: str) -> Iterator[dict]:
    """Records of the operations that ops.only names, as each is measured."""
    for name in ops.only:
        if name == "rans":
            yield from coding_records(ops)
        else:
            for case in {"gdn": gdn_cases, "attention": attention_cases, "muon": muon_cases}[name](ops, device):
                yield from compare(*case, ops.rounds, device == "cuda")


def cell(value) -> str:
    """A figure for people: thousands apart, four digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value


def check_device(device: str) -> None:
    """Raises SystemExit where the device is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device cuda: PyTorch sees no CUDA device; --device cpu runs without")


def bench_ops(args: argparse.Namespace) -> None:
    """Time operations of the script and of libraries in turn: a table and JSON."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    check_device(args.device)
    script = load_script(SCRIPT)
    about = {**script.describe_machine(script.start_runtime(args.device)), "code_sha256": script.sha256_file(SCRIPT)}
    ops, records = SimpleNamespace(**vars(args), script=script, models=MODELS_OF_OPS), []
    for record in op_records(ops, args.device):
        records.append(record)
        print(", ".join(f"{key} {cell(value)}" for key, value in record.items() if value is not None), flush=True)
    head = list(dict.fromkeys(key for record in records for key in record))
    rows = [head, *([cell(record.get(key)) for key in head] for record in records)]
    notes = (f"{torch.get_num_threads()} threads, {args.rounds} rounds in turn, medians; times ours: by the medians; "
             "difference: the largest from ours, over the largest number of ours.")
    publish(args, "runs/bench/ops_{date}.json", [("ops", about)], rows, notes, records=records)


# ------------------------------------------------------------------------------------------------------------ train
def flops_per_token(network: torch.nn.Module, seq_len: int) -> Counter:
    """FLOPs of training that the model asks for, by part (as PaLM counts, arXiv 2204.02311, appendix B).

    Products with weights: as torch counts them forward; as of all others, twice that backward. Attention: 12 H D L,
    for q k^T and the sum of values, 2 H D L each forward, L = mean number of keys a position sees. Gated DeltaNet:
    18 H D^2, for reading at the key, writing, reading at the query: 2 D^2 a head each forward (the recurrence;
    the chunk form does more). Convolutions, norms, gates and recomputation are left out.
    """
    ids = torch.zeros(1, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(ids)
    parts = Counter({"products with weights": 3 * counter.get_flop_counts()["Global"][torch.ops.aten.mm] / seq_len})
    for mixer in (network.mixers[at] for at in network.mixer_of_layer):
        width, window = mixer.heads * mixer.head_dim, getattr(mixer, "window", 0)
        keys = sum(min(i + 1, window) for i in range(seq_len)) / seq_len
        parts["attention" if window else "Gated DeltaNet"] += width * (12 * keys if window else 18 * mixer.head_dim)
    return parts


def run_flops(script: ModuleType, run: dict, tokenizer: dict) -> float:
    """The sum of `flops_per_token` of a run's model; tokenizer: of its manifest."""
    settings = script.Settings(**run["settings"])
    network = script.GPT(script.model_config(settings, tokenizer["vocab_size"], tokenizer["bos_id"]))
    return flops_per_token(network, settings.train_seq_len).total()


def matmul_peak(device: str, dtype: torch.dtype | None = None) -> float:
    """FLOP/s of the best of 20 square products in `dtype`; None: that of runs, bfloat16 on CUDA and else float32."""
    size, usual = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    dtype = dtype or usual
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = timeit.repeat(lambda: (a @ b)[0, 0].item(), number=1, repeat=20, timer=time.perf_counter)  # item: waits
    return 2 * size**3 / min(seconds)


def bench_train(args: argparse.Namespace) -> list[str]:
    """Run each config for some seconds: tokens/s, step time, peak memory, parameters, MFU. Returns failures."""
    script = load_script(SCRIPT)
    short, manifest = short_run(script, args)
    folder = ROOT / args.runs / time.strftime("train_%Y%m%d_%H%M%S")
    rows = [["config", "tokens/s", "step, ms", "peak memory, MiB", "parameters", "MFLOP/token", "MFU"]]
    entries, runs = {}, []
    for config in args.configs:
        run = run_script(script, folder / Path(config).stem, os.path.relpath(config, ROOT), short)
        runs.append((config, run))
        entries[config] = figures(run)
        if "failed" in run:
            continue
        peak = matmul_peak("cpu" if "CPU" in run["hardware"] else "cuda", getattr(torch, run["dtype"]))
        flops = run_flops(script, run, manifest["tokenizer"])
        mfu = run["tokens_per_second"] * flops / peak
        entries[config].update(flops_per_token=flops, matmul_flops=peak, mfu=mfu)
        rows.append([config, f"{run['tokens_per_second']:,.0f}", f"{run['step_ms']:.1f}",
                     f"{run['peak_memory_mib']:,.0f}", f"{run['parameters']:,}", f"{flops / 1e6:.2f}",
                     f"{mfu:.1%} of {peak / 1e9:,.0f} GFLOP/s"])
    notes = (f"{args.seconds:g} s a run. MFU is of the best of 20 square matrix products on this machine right after "
             "the run, in the run's dtype and with as many threads.")
    return publish(args, args.runs + "/train_{date}.json", runs, rows, notes, configs=entries)


# ------------------------------------------------------------------------------------------------------------- cost
# The part of a step that the clock, the plan and the count of skipped steps take.
BOOKKEEPING = ("Clock.is_last", "Clock.median_step", "Clock.progress", "Clock.previous_report", "Clock.send_report",
               "Run.count_skipped", "Plan.begin_phases", "Plan.rates")
TIMED = "import sys; sys.path.insert(0, sys.argv[1]); import bench; sys.exit(bench.timed_main(*sys.argv[2:]))"


def timed_main(script_path: str, out: str) -> int:
    """Run a script's main in this process and write into `out` when its functions were called; its exit code."""
    sys.argv = [script_path]  # the script reads its own arguments
    script, calls, probe = load_script(Path(script_path)), [], SimpleNamespace(empty=lambda run: None)

    def time_calls(holder: object, name: str) -> None:
        inner = getattr(holder, name)

        def outer(run, *args, **more):
            saves = name == "save" and run.saved_step != run.step
            begin = time.perf_counter()
            result = inner(run, *args, **more)
            end = time.perf_counter()
            files = run.folder.glob(f"step_{run.step:06d}/*") if saves else ()
            calls.append((name, begin, end, sum(file.stat().st_size for file in files)))
            return result

        setattr(holder, name, outer)

    for path in (*BOOKKEEPING, "Run.save"):
        time_calls(getattr(script, path.split(".")[0]), path.split(".")[1])
    if code := script.exit_code(script.main):
        return code
    seen, bare = list(calls), timeit.timeit(lambda: probe.empty(None), number=100_000)
    time_calls(probe, "empty")
    overhead = (timeit.timeit(lambda: probe.empty(None), number=100_000) - bare) / 100_000
    Path(out).write_text(json.dumps({"calls": seen, "overhead": overhead}), encoding="utf-8")
    return 0


def costs(calls: list[tuple], overhead: float, waits: bool) -> dict:
    """Of calls (name, begin, end, bytes saved), from the loop's first step to its last; a nested call is its caller's.

    overhead: seconds that timing adds to a call. waits: Clock.previous_report waits for the device; its time is then no
    bookkeeping.
    """
    begins = [begin for name, begin, *_ in calls if name == "is_last"]  # of the steps, and the loop's end
    inside = [call for call in sorted(calls, key=lambda call: call[1]) if begins[0] <= call[1] < begins[-1]]
    steps, saves, spent, until, at = [b - a for a, b in pairwise(begins)], {}, Counter(), 0.0, -1
    for name, begin, end, size in inside:
        if begin >= until:
            until, at = end, at + (name == "is_last")
            spent[name] += end - begin
            steps[at] -= end - begin if name == "save" else 0.0
            if size:
                saves[at] = {"seconds": end - begin, "bytes": size}
    wall, totals = begins[-1] - begins[0], {"saving": spent.pop("save", 0.0), "timing": overhead * len(inside)}
    totals["waiting for the device"] = spent.pop("previous_report", 0.0) if waits else 0.0
    totals["bookkeeping"] = sum(spent.values())
    return {"steps": len(steps), "wall_seconds": wall, "median_step_seconds": statistics.median(steps),
            "median_other_seconds": statistics.median(step for at, step in enumerate(steps) if at not in saves),
            "saves": [{**save, "next_step_seconds": steps[at]} for at, save in saves.items()],
            "seconds_by_function": {name: seconds / len(steps) for name, seconds in spent.items()},
            "totals": {what: {"seconds_per_step": seconds / len(steps), "share": seconds / wall}
                       for what, seconds in totals.items()}}


def bench_cost(args: argparse.Namespace) -> list[str]:
    """One run that saves every 30 s: what checkpoints and bookkeeping take of its time. Returns failures."""
    script, place = load_script(SCRIPT), ROOT / args.runs / time.strftime("cost_%Y%m%d_%H%M%S")
    settings = {**short_run(script, args, SAVE_EVERY="30s")[0], "VAL_LOSS_EVERY": "0"}
    words = ["-c", TIMED, str(Path(__file__).parent), str(SCRIPT), str(place / "calls.json")]
    run = run_script(script, place, os.path.relpath(args.config, ROOT), settings, words=words)
    if "failed" in run:
        return [f"{args.config}: {run['failed']}"]
    calls = json.loads((place / "calls.json").read_text(encoding="utf-8"))
    cost = costs(**calls, waits="CPU" not in run["hardware"])
    if not cost["saves"]:
        return [f"{args.config}: no checkpoint was saved in the loop; use more --seconds, or --set SAVE_EVERY=5s"]
    rows = [["", "a step, µs", "share of the wall time"]]
    rows += [[what, f"{1e6 * total['seconds_per_step']:,.1f}", f"{total['share']:.3%}"]
             for what, total in cost["totals"].items() if total["share"]]
    each = ", ".join(f"{1e3 * save['seconds']:.0f} ms for {save['bytes']:,} bytes" for save in cost["saves"])
    after = statistics.median(save["next_step_seconds"] for save in cost["saves"])
    notes = (f"{args.config}, SAVE_EVERY={settings['SAVE_EVERY']}: {cost['steps']} steps, no validation, in "
             f"{cost['wall_seconds']:.1f} s, median {1e3 * cost['median_step_seconds']:.2f} ms. {len(cost['saves'])} "
             f"checkpoints: {each}. Median of the steps right after one {1e3 * after:.2f} ms, of the others "
             f"{1e3 * cost['median_other_seconds']:.2f} ms. Bookkeeping: {', '.join(BOOKKEEPING)}; on CUDA without "
             "Clock.previous_report, which waits. Timing: what measuring added.")
    return publish(args, args.runs + "/cost_{date}.json", [(args.config, run)], rows, notes, config=args.config, **cost)


# --------------------------------------------------------------------------------------------------------------- rl
def make_generators(settings: SimpleNamespace, batch: int, new: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Two that sample `new` tokens after each of `batch` prompts of 16, by models of one shape: ours, transformers'.

    Each gives ids (batch, new); no token ends a text, the whole distribution is drawn from at temperature 1.
    """
    transformers, ours = load_library("transformers"), load_script(ROOT / "sample.py")
    if transformers is None:
        raise SystemExit("error: rl compares with transformers")
    network = ours.GPT(ours.model_config(settings, settings.vocab_size, 1))
    shape = transformers.LlamaConfig(
        vocab_size=settings.vocab_size, hidden_size=settings.model_dim, num_hidden_layers=settings.num_layers,
        intermediate_size=int(settings.mlp_mult * settings.model_dim), num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads, max_position_embeddings=settings.train_seq_len,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    other, prompts = transformers.LlamaForCausalLM(shape).eval(), torch.randint(2, settings.vocab_size, (batch, 16))
    sizes = [sum(param.numel() for param in model.parameters()) for model in (network, other)]
    if sizes[0] != sizes[1]:
        raise SystemExit(f"error: the models differ: {sizes[0]:,} and {sizes[1]:,} parameters")

    def own() -> torch.Tensor:
        found = ours.generate(network, prompts.tolist(), 1, new, 1.0, 0, 1.0, [(at,) for at in range(batch)],
                              frozenset())
        return torch.tensor([sample.ids for sample in found])

    def library() -> torch.Tensor:
        ids = other.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0,
                             top_k=0, top_p=1.0, max_new_tokens=new, use_cache=True)
        return ids[:, 16:]

    return {"ours": own, f"transformers {transformers.__version__}": library}


def policy_speed(rounds: int) -> dict[str, list[float]]:
    """Tokens of responses a second of train_grpo.py's default policy, not trained: sampled, and trained on, by round.

    The learning rate is 0, so that each round has the same work.
    """
    script = load_script(ROOT / "train_grpo.py")
    settings, runtime = script.Settings(device="cpu"), script.Runtime(0, 1, torch.device("cpu"), False)
    network, tokenizer, _ = script.start_policy(settings, runtime)
    trainer, task = (script.GRPOTrainer(network, tokenizer, settings, runtime=runtime),
                     script.make_task(settings.task, settings.task_path, settings.seed))
    reward, speeds = script.load_reward(settings.reward, task, settings.reward_seconds), {"rollout": [], "update": []}
    for step in range(1 + rounds):
        times = [time.perf_counter()]
        rollout = trainer.rollout(lambda number, draw, step=step: trainer.query(task, step, number, draw),
                                  settings.prompts_per_step, reward, step)
        times.append(time.perf_counter())
        trainer.update(rollout, 0.0)
        times.append(time.perf_counter())
        tokens = sum(len(row[1]) for rows in rollout.rows for row in rows)
        for name, (begin, end) in zip(speeds, pairwise(times), strict=True):
            speeds[name].append(tokens / (end - begin))
    return {name: values[1:] for name, values in speeds.items()}  # the first warmed up


def bench_rl(args: argparse.Namespace) -> None:
    """Time generation, ours and transformers' in turn, and a GRPO step; print tokens/s and their ratio."""
    torch.set_num_threads(args.threads or torch.get_num_threads())
    script, config = load_script(SCRIPT), {"ARCH_MODE": "llama", "VOCAB_SIZE": "1024", "TRAIN_SEQ_LEN": "256",
                                           "NUM_LAYERS": str(args.layers), "MODEL_DIM": str(args.dim)}
    settings = script.load_settings(script.Settings, config, presets={"ARCH_MODE": script.ARCH_PRESETS})
    torch.manual_seed(0)
    generators, speeds = make_generators(settings, args.batch, args.new), {}
    for _ in range(1 + args.rounds):
        for name, make in generators.items():
            begin = time.perf_counter()
            shape = tuple(make().shape)
            seconds = time.perf_counter() - begin
            if shape != (args.batch, args.new):
                raise SystemExit(f"error: {name} made {shape} tokens, not {(args.batch, args.new)}")
            speeds.setdefault(name, []).append(args.batch * args.new / seconds)
    speeds = {name: values[1:] for name, values in speeds.items()} | policy_speed(args.rounds)
    mine, other = list(speeds.values())[:2]
    ratio, each = statistics.median(mine) / statistics.median(other), [a / b for a, b in zip(mine, other, strict=True)]
    about = script.describe_machine(script.Runtime(0, 1, torch.device("cpu"), False))
    about["code_sha256"] = {name: script.sha256_file(ROOT / name) for name in ("sample.py", "train_grpo.py")}
    rows = [["", "tokens/s, median", "least", "most"], *(
        [name, *(f"{pick(values):,.0f}" for pick in (statistics.median, min, max))] for name, values in speeds.items())]
    notes = (f"Generation: {args.new} tokens after each of {args.batch} prompts of 16, {args.layers} layers x "
             f"{args.dim}, {settings.vocab_size} tokens, {args.rounds} rounds in turn; ours / transformers' = "
             f"{ratio:.2f} (rounds: {', '.join(f'{value:.2f}' for value in each)}). rollout, update: tokens of "
             "responses in train_grpo.py's default step, rewards included.")
    publish(args, "runs/bench/rl_{date}.json", [("rl", about)], rows, notes, tokens_per_second=speeds, ratio=ratio,
            ratios=each, shape={key: vars(args)[key] for key in ("layers", "dim", "batch", "new")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    ops = commands.add_parser("ops", help="GDN, attention, Muon and rANS against what libraries offer")
    kinds = ("gdn", "attention", "muon", "rans")
    ops.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="all")
    ops.add_argument("--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BxTxHxD")
    ops.add_argument("--rounds", type=int, default=8)
    ops.add_argument("--chunk", type=int, default=32, help="of GDN; a run takes 32 on a CPU and 64 on CUDA")
    ops.add_argument("--codes", type=int, default=1 << 20, help="for rANS, of normal weights")
    ops.add_argument("--artifact", default="", help="a model.upar whose 6-bit codes rANS takes in their place")
    ops.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    gpu = commands.add_parser("gpu", help="what is worth knowing of one H100 or H200, in under 9 minutes")
    gpu.add_argument("--seconds", type=float, default=540, help="for all parts; what does not fit is left out (540)")
    gpu.add_argument("--only", nargs="+", default=(), metavar="PART", help="all")
    gpu.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a rehearsal at toy size")
    gpu.add_argument("--data", default="", help=f"data folder of the part train ({BENCH_DATA}, made if missing)")
    gpu.add_argument("--runs", default="runs/bench", help="folder (runs/bench)")
    gpu.set_defaults(run=lambda args: load_script(Path(__file__).with_name("gpu.py")).bench_gpu(args), set=[])
    rl = commands.add_parser("rl", help="generation against transformers', and a GRPO step, on the CPU: tokens/s")
    for name, value in {"layers": 4, "dim": 128, "batch": 32, "new": 128, "rounds": 5}.items():
        rl.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    rl.set_defaults(run=bench_rl)
    ops.set_defaults(run=bench_ops)
    for parser_of in (ops, rl):
        parser_of.add_argument("--threads", type=int, default=0, help="0: as PyTorch chooses")
    for parser_of in (ops, gpu, rl):
        parser_of.add_argument("--out", default="", help="the JSON file")
        parser_of.set_defaults(write_docs=False)
    train = add_run_command(commands, "train", "short runs of configs: tokens/s, step time, memory, MFU", bench_train,
                            20.0, "runs/bench")
    train.add_argument("configs", nargs="*", default=["configs/cpu.env"], metavar="CONFIG")
    cost = add_run_command(commands, "cost", "what checkpoints and bookkeeping take of a run's time", bench_cost, 65.0,
                           "runs/bench")
    cost.add_argument("config", nargs="?", default="configs/cpu.env", metavar="CONFIG")
    run_command(parser)


if __name__ == "__main__":
    main()
