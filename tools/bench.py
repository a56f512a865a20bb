"""Measurements on this machine: of a function, of generation and its training, of a run (tools/arms.py: of choices).

train and cost start train_gpt.py with settings in its environment and read its result.json and log.txt. Settings that
the shell exports are not passed on: `--set NAME=VALUE` is. Step time is the median over the run, tokens/s is the batch
over that time. Without --data the text is Python's own standard library, with little of it for validation.
"""

import argparse
import importlib
import json
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
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train_gpt.py"  # the file that is measured
BENCH_DATA = "data/bench"  # made at the first use
TRANSFORMERS = "5.23.0"  # its rule became 1.2 to 1.7 times faster between 4.57 and this version: a ratio names one
SHAPES = [(4, 512, 8, 64), (4, 2048, 8, 64), (16, 256, 4, 32)]  # (B, T, H, D)


# === shared: runs ===
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
        ours = "|".join([*setting_names(script), *script.FOREIGN_NAMES, "CONFIG", "IGNORE_ENV", "RANK", "WORLD_SIZE"])
        environ = {name: value for name, value in os.environ.items() if not re.fullmatch(ours, name)}
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
    """Milliseconds of a step: the median over the logged steps; NaN where fewer than three were logged.

    The log has whole milliseconds, so steps are taken together until a stretch lasts 200 ms.
    """
    logged = re.finditer(r"^step:(\d+)/\S+ train_loss:.* train_time:(\d+)ms", log, re.MULTILINE)
    points = [(int(line[1]), int(line[2])) for line in logged]
    if len(points) < 3:
        return math.nan
    stretches, (step, ms) = [], points[0]
    for next_step, next_ms in points[1:]:
        if next_ms - ms >= 200 or (next_step == points[-1][0] and not stretches):
            stretches.append((next_ms - ms) / (next_step - step))
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
        raise SystemExit(f"error: docs/choices.md must have <!-- {tag} --> and then <!-- /{tag} -->, once each")
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


def load_transformers() -> ModuleType:
    """The library that is compared with. Raises SystemExit where it is missing."""
    try:
        import transformers
    except ImportError:
        raise SystemExit(f"transformers is missing: pip install transformers=={TRANSFORMERS}") from None
    transformers.utils.logging.set_verbosity_error()
    if transformers.__version__ != TRANSFORMERS:
        print(f"note: transformers is {transformers.__version__}; the project's figures name {TRANSFORMERS}")
    return transformers


def bench_ops(args: argparse.Namespace) -> None:
    """Time gdn_chunk and transformers' rule in turn, forward and backward, and print the times for each shape."""
    transformers = load_transformers()
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    torch.set_num_threads(args.threads or torch.get_num_threads())
    script, size = load_script(SCRIPT), args.chunk
    rules = {  # transformers scales q itself
        f"gdn_chunk({size})": lambda q, k, *x: script.gdn_chunk(q * k.shape[-1] ** -0.5, k, *x, chunk=size)[0],
        f"transformers {transformers.__version__}": lambda *x: torch_chunk_gated_delta_rule(*x)[0],
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {args.rounds} rounds in turn")
    for b, t, h, d in args.shapes:
        torch.manual_seed(0)  # decay and write strength as at initialisation
        q, k = (torch.nn.functional.normalize(torch.randn(b, t, h, d), dim=-1) for _ in range(2))
        g, beta, v, weight = -0.2 * torch.rand(b, t, h), torch.rand(b, t, h), *torch.randn(2, b, t, h, d)
        inputs, times, results = [x.requires_grad_() for x in (q, k, v, g, beta)], {key: [] for key in rules}, {}
        for _ in range(1 + args.rounds):
            for key, rule in rules.items():
                begin = time.perf_counter()
                out = rule(*inputs)
                middle = time.perf_counter()
                results[key] = [out.detach(), *torch.autograd.grad(out, inputs, weight)]
                times[key].append((1e3 * (middle - begin), 1e3 * (time.perf_counter() - begin)))
        print(f"B{b} T{t} H{h} D{d}")
        columns = {key: list(zip(*pairs[1:], strict=True)) for key, pairs in times.items()}  # the first warmed up
        for key, (forward, both) in columns.items():
            print(f"  {key:<24} forward+backward min {min(both):8.1f} ms  median {statistics.median(both):8.1f} ms"
                  f"   forward min {min(forward):7.1f} ms")
        (_, mine), (_, other) = columns.values()
        ratios = f"min {min(other) / min(mine):.2f}  median {statistics.median(other) / statistics.median(mine):.2f}"
        worst = max((x - y).abs().max() / y.abs().max().clamp(min=1e-3) for x, y in zip(*results.values(), strict=True))
        print(f"  ratio {ratios}  largest relative difference {worst:.1e}")


# ------------------------------------------------------------------------------------------------------------ train
def flops_per_token(network: torch.nn.Module, seq_len: int) -> float:
    """FLOPs of training that the model asks for, per token (as PaLM counts, arXiv 2204.02311, appendix B).

    Products with weights: as torch counts them, forward and backward. Attention: 12 H D L, for q k^T and the sum of
    values, 2 H D L each forward and twice that backward, L = mean number of keys a position sees. Gated DeltaNet:
    18 H D^2, for reading at the key, writing, reading at the query: 2 D^2 a head each forward (the recurrence;
    the chunk form does more). Convolutions, norms, gates and recomputation are left out.
    """
    ids = torch.zeros(1, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        network(ids, ids).sum().backward()
    total = counter.get_flop_counts()["Global"][torch.ops.aten.mm] / seq_len
    for mixer in (network.mixers[at] for at in network.mixer_of_layer):
        window = getattr(mixer, "window", None)
        keys = sum(min(i + 1, window) for i in range(seq_len)) / seq_len if window else 0.0
        total += mixer.heads * mixer.head_dim * (12 * keys if window else 18 * mixer.head_dim)
    return total


def matmul_peak(device: str) -> float:
    """FLOP/s of the best of 20 square products in the dtype of runs on `device`: bfloat16 on CUDA, else float32."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = timeit.repeat(lambda: (a @ b)[0, 0].item(), number=1, repeat=20, timer=time.perf_counter)  # item: waits
    return 2 * size**3 / min(seconds)


def bench_train(args: argparse.Namespace) -> list[str]:
    """Run each config for some seconds: tokens/s, step time, peak memory, parameters, MFU. Returns failures."""
    script = load_script(SCRIPT)
    short, manifest = short_run(script, args, TRAIN_LOG_EVERY="1")
    folder = ROOT / args.runs / time.strftime("train_%Y%m%d_%H%M%S")
    rows = [["config", "tokens/s", "step, ms", "peak memory, MiB", "parameters", "MFLOP/token", "MFU"]]
    entries, runs = {}, []
    for config in args.configs:
        run = run_script(script, folder / Path(config).stem, os.path.relpath(config, ROOT), short)
        runs.append((config, run))
        entries[config] = figures(run)
        if "failed" in run:
            continue
        peak = matmul_peak("cpu" if "CPU" in run["hardware"] else "cuda")  # now: a machine's speed drifts
        settings, tokenizer = script.Settings(**run["settings"]), manifest["tokenizer"]
        network = script.GPT(script.model_config(settings, tokenizer["vocab_size"], tokenizer["bos_id"]))
        flops = flops_per_token(network, settings.train_seq_len)
        mfu = run["tokens_per_second"] * flops / peak
        entries[config].update(flops_per_token=flops, matmul_flops=peak, mfu=mfu)
        rows.append([config, f"{run['tokens_per_second']:,.0f}", f"{run['step_ms']:.1f}",
                     f"{run['peak_memory_mib']:,.0f}", f"{run['parameters']:,}", f"{flops / 1e6:.2f}",
                     f"{mfu:.1%} of {peak / 1e9:,.0f} GFLOP/s"])
    notes = (f"{args.seconds:g} s a run. MFU is of the best of 20 square matrix products on this machine right after "
             "the run, in the run's dtype and with as many threads.")
    return publish(args, args.runs + "/train_{date}.json", runs, rows, notes, configs=entries)


# ------------------------------------------------------------------------------------------------------------- cost
# The clock's and the plan's part of a step. The thread Watch runs beside the loop and is left out.
BOOKKEEPING = ("Clock.is_last", "Clock.median_step", "Clock.progress", "Clock.receive", "Clock.send", "Run.judge",
               "Plan.advance", "Plan.rates")
TIMED = "import sys; sys.path.insert(0, sys.argv[1]); import bench; sys.exit(bench.timed_main(*sys.argv[2:]))"


def timed_main(script_path: str, out: str) -> int:
    """Run a script's main in this process and write into `out` when its functions were called; its exit code."""
    script, calls, probe = load_script(Path(script_path)), [], SimpleNamespace(empty=lambda run: None)

    def time_calls(holder: object, name: str) -> None:
        inner = getattr(holder, name)

        def outer(run, *args, **more):
            saves = name == "save" and run.stands != run.step
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

    overhead: seconds that timing adds to a call. waits: Clock.receive waits for the device and is no bookkeeping.
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
    totals["waiting for the device"] = spent.pop("receive", 0.0) if waits else 0.0
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
             "Clock.receive, which waits; the thread Watch is in no row. Timing: what measuring added.")
    return publish(args, args.runs + "/cost_{date}.json", [(args.config, run)], rows, notes, config=args.config, **cost)


# --------------------------------------------------------------------------------------------------------------- rl
def make_generators(settings: SimpleNamespace, batch: int, new: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Two that sample `new` tokens after each of `batch` prompts of 16, by models of one shape: ours, transformers'.

    Each gives ids (batch, new); no token ends a text, the whole distribution is drawn from at temperature 1.
    """
    transformers, ours = load_transformers(), load_script(ROOT / "sample.py")
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
    settings = script.load_settings(script.Settings, config, {"arch_mode": script.ARCH_PRESETS})
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
    ops = commands.add_parser("ops", help="gdn_chunk against transformers' PyTorch chunk rule, on the CPU")
    ops.add_argument("--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BxTxHxD")
    ops.add_argument("--rounds", type=int, default=8)
    ops.add_argument("--chunk", type=int, default=32)
    ops.add_argument("--threads", type=int, default=0, help="0: as PyTorch chooses")
    ops.set_defaults(run=bench_ops)
    rl = commands.add_parser("rl", help="generation against transformers', and a GRPO step, on the CPU: tokens/s")
    for name, value in {"layers": 4, "dim": 128, "batch": 32, "new": 128, "rounds": 5}.items():
        rl.add_argument(f"--{name}", type=int, default=value, help=f"{value}")
    rl.add_argument("--threads", type=int, default=0, help="0: as PyTorch chooses")
    rl.add_argument("--out", default="", help="the JSON file")
    rl.set_defaults(run=bench_rl, write_docs=False)
    train = add_run_command(commands, "train", "short runs of configs: tokens/s, step time, memory, MFU", bench_train,
                            20.0, "runs/bench")
    train.add_argument("configs", nargs="*", default=["configs/cpu.env"], metavar="CONFIG")
    cost = add_run_command(commands, "cost", "what checkpoints and bookkeeping take of a run's time", bench_cost, 65.0,
                           "runs/bench")
    cost.add_argument("config", nargs="?", default="configs/cpu.env", metavar="CONFIG")
    run_command(parser)


if __name__ == "__main__":
    main()
