"""The README's table of what a machine does, from files that tools/bench.py wrote.

    python tools/bench.py ops; python tools/bench.py rl; python tools/bench.py train configs/cpu.env
    python tools/figures.py runs/bench/ops_DATE.json runs/bench/rl_DATE.json runs/bench/train_DATE.json

The files are kept as docs/lab/bench_<kind>.json; without a FILE the table is written again from those kept there.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"records": "ops", "tokens_per_second": "rl", "configs": "train"}  # the key by which a file is known


def of_ops(found: dict) -> list[list[str]]:
    """A row for each operation at its kind's first shape: ours, and each library's time or bytes over ours."""
    rows, first = [], {}
    for operation, shape in dict.fromkeys((each["operation"], each["shape"]) for each in found["records"]):
        kind = "a token" if operation.endswith(", a token") else operation.split(",")[0]
        if first.setdefault(kind, shape) != shape or operation.endswith(", forward"):  # with its backward, below
            continue
        alike = [each for each in found["records"] if (each["operation"], each["shape"]) == (operation, shape)]
        own, *others = alike
        size, beside = "", [f"{each['way']} ×{each['times ours']:.2f}" for each in others]
        if operation == "write":
            operation, size = "int6 codes to bytes", f"{own['bytes']:,} bytes, "
            beside = [f"{each['way']} {each['bytes'] / own['bytes'] - 1:+.1%} bytes" for each in others]
        elif operation == "read":
            operation = "and back"
        rows.append([f"{operation}, {shape}", f"{own['way']}: {size}{own['ms']:.3g} ms", ", ".join(beside)])
    return rows


def of_rl(found: dict) -> list[list[str]]:
    """Generation against the library's; the two halves of a GRPO step."""
    ours, theirs, *halves = found["tokens_per_second"]
    median = {name: statistics.median(values) for name, values in found["tokens_per_second"].items()}
    shape = found["shape"]
    rows = [[f"generation, {shape['batch']} rows, {shape['layers']} layers x {shape['dim']}",
             f"{median[ours]:,.0f} tokens/s", f"{theirs} {median[theirs]:,.0f} (ours ×{found['ratio']:.2f})"]]
    parts = ", ".join(f"{name} {median[name]:,.0f}" for name in halves)
    return [*rows, ["GRPO at its defaults", f"{parts} tokens/s", ""]]


def of_train(found: dict) -> list[list[str]]:
    """Speed, memory and share of peak of each config."""
    return [[f"training, `{config}`", f"{run['tokens_per_second']:,.0f} tokens/s, {run['step_ms']:.0f} ms a step",
             f"{run['peak_memory_mib']:,.0f} MiB, MFU {run['mfu']:.0%} of {run['matmul_flops'] / 1e9:,.0f} GFLOP/s"]
            for config, run in found["configs"].items() if "failed" not in run]


def table(found: dict[str, dict]) -> str:
    """Markdown of the files by kind, in the order of KINDS, with their commands, dates and machine."""
    makers = {"ops": of_ops, "rl": of_rl, "train": of_train}
    rows = [["", "here", "beside it"], ["---"] * 3]
    rows += [row for kind in makers if kind in found for row in makers[kind](found[kind])]
    about = [found[kind] for kind in makers if kind in found]
    said = "; ".join(f"`{each['command']}`, {each['date']}" for each in about)
    machine = f"{about[0]['cores']} cores of {about[0]['cpu']}, torch {about[0]['versions']['torch']}"
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n×: its time over ours. {machine}. {said}."


def main() -> int:
    """Keep the files given, write README.md. Raises SystemExit for a file of no command of bench.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="of bench.py ops, rl or train")
    kept = {kind: ROOT / "docs" / "lab" / f"bench_{kind}.json" for kind in KINDS.values()}
    for name in parser.parse_args().files:
        text = Path(name).read_text(encoding="utf-8")
        kind = next((KINDS[key] for key in KINDS if key in json.loads(text)), "")
        if not kind:
            raise SystemExit(f"error: {name}: has none of {', '.join(KINDS)}; must be a file of bench.py "
                             f"{', '.join(KINDS.values())}")
        kept[kind].write_text(text, encoding="utf-8")
    found = {kind: json.loads(path.read_text(encoding="utf-8")) for kind, path in kept.items() if path.is_file()}
    if not found:
        raise SystemExit("error: no FILE, and none in docs/lab; run bench.py ops, rl or train first")
    page = ROOT / "README.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- bench -->\n")
    _, end, after = rest.partition("<!-- /bench -->")
    if not end:
        raise SystemExit(f"error: {page}: must have <!-- bench --> and then <!-- /bench -->")
    page.write_text(before + begin + table(found) + "\n" + end + after, encoding="utf-8")
    print(f"written: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
