"""Draw the README's picture: training loss against seconds, from logs of committed records.

    python tools/experiments/curves.py                    # writes docs/img/curves.png
    python tools/experiments/curves.py --out curves.png   # another file (the name's end decides: .png, .svg)

All curves come from records of track_cpu_3min that ran on the same machine (two cores with AMX): 180 s
each, one text, one tokenizer. A thin line is one seed, the thick line their mean, and a dot at the
right end the validation loss of the model read back from its artifact. A log has the losses of
steps 1 to 5 and of every 50th step, each of one batch, so the thin lines are noisy. Needs
matplotlib.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "records" / "track_cpu_3min"
# Record -> its label and color.
CURVES = {
    "2026-11-22_NanoGPT": ("nanoGPT's recipe", "tab:gray"),
    "2026-11-22_Baseline": ("Parameter Golf's baseline", "tab:blue"),
    "2026-11-22_Bigrams": ("our record Bigrams", "tab:red"),
}


@dataclass
class Curve:
    """The training losses of one run, and its validation loss."""

    seconds: np.ndarray
    losses: np.ndarray
    val_loss: float


def read_curve(log: Path) -> Curve:
    """Return the curve of a run from its log. Raises SystemExit if the log has no step lines."""
    text = log.read_text(encoding="utf-8")
    steps = re.findall(r"^step:\d+/.* train_loss:([\d.]+) .*train_time:(\d+)ms", text, re.MULTILINE)
    points = [(int(ms) / 1000, float(loss)) for loss, ms in steps]
    val_loss = re.findall(r"^val_loss: ([\d.]+)$", text, re.MULTILINE)
    if not points or not val_loss:
        raise SystemExit(f"error: {log}: no step lines or no val_loss")
    seconds, losses = np.array(points).T
    return Curve(seconds, losses, float(val_loss[-1]))


def mean_curve(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return seconds and the mean loss of several runs over the time that all of them have."""
    start = max(curve.seconds[0] for curve in curves)
    end = min(curve.seconds[-1] for curve in curves)
    seconds = np.linspace(start, end, 90)
    losses = [np.interp(seconds, curve.seconds, curve.losses) for curve in curves]
    return seconds, np.mean(losses, axis=0)


def draw(path: Path) -> None:
    """Draw all curves into a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), dpi=200, layout="constrained")
    axes = figure.subplots()
    for record, (label, color) in CURVES.items():
        curves = [read_curve(log) for log in sorted((RECORDS / record).glob("seed_*.txt"))]
        for curve in curves:
            axes.plot(curve.seconds, curve.losses, color=color, linewidth=0.7, alpha=0.35)
        final = float(np.mean([curve.val_loss for curve in curves]))
        axes.plot(*mean_curve(curves), color=color, linewidth=2, label=f"{label}: {final:.2f}")
        axes.plot(180, final, "o", color=color, markersize=6, clip_on=False)
    axes.set(xlim=(0, 180), ylim=(1.8, 7), xlabel="seconds of training on 2 CPU cores with AMX")
    axes.set_ylabel("training loss, nats per token")
    axes.grid(alpha=0.25)
    axes.legend(title="mean of 3 seeds, and validation loss (dot)", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a software version in it, the file does not change from one machine to the next.
    figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else None)


def main() -> None:
    """Draw the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img" / "curves.png")
    path = parser.parse_args().out
    try:
        draw(path)
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is missing: pip install {error.name}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
