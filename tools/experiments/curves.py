"""Draw the README's picture: validation loss against seconds, from logs of committed records.

    python tools/experiments/curves.py                    # writes docs/img/curves.png
    python tools/experiments/curves.py --out curves.png   # another file (the name's end decides: .png, .svg)

All curves come from records of track_cpu_10min, which ran in turn on one machine (two cores): 600 s
each, one text. They are in bits per byte, because the records have different tokenizers. A thin
line is one seed, the thick line their mean, and a dot the model read back from its artifact. A log
has the validation of every 400th step. Needs matplotlib.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "records" / "track_cpu_10min"
# Record -> its label and color.
CURVES = {
    "2026-11-28_Start": ("Parameter Golf's baseline", "tab:gray"),
    "2026-11-28_Windows1024": ("our hybrid of two layers", "tab:blue"),
    "2026-11-28_FourLayers": ("of four layers", "tab:red"),
}


@dataclass
class Curve:
    """The validation losses of one run while it trained, and that of its artifact."""

    seconds: np.ndarray
    losses: np.ndarray
    train_seconds: float
    val_bpb: float


def read_curve(log: Path) -> Curve:
    """Return the curve of a run from its log. Raises SystemExit if the log has no validations.

    The line of a validation has no time: it is between those of the steps beside it.
    """
    text = log.read_text(encoding="utf-8")
    timed = re.findall(r"^step:(\d+)/.* train_time:(\d+)ms", text, re.MULTILINE)
    scored = re.findall(r"^step:(\d+)/.* val_bpb:([\d.]+)$", text, re.MULTILINE)
    final = re.findall(r"^val_bpb: ([\d.]+)$", text, re.MULTILINE)
    if not timed or not scored or not final:
        raise SystemExit(f"error: {log}: must have steps, validations and a val_bpb")
    steps, milliseconds = np.array(timed, dtype=float).T
    scored_steps, losses = np.array(scored, dtype=float).T
    is_trained = (scored_steps > 0) & (scored_steps <= steps[-1])
    seconds = np.interp(scored_steps[is_trained], steps, milliseconds / 1000)
    return Curve(seconds, losses[is_trained], milliseconds[-1] / 1000, float(final[-1]))


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
        final = float(np.mean([curve.val_bpb for curve in curves]))
        end = float(np.mean([curve.train_seconds for curve in curves]))
        axes.plot(*mean_curve(curves), color=color, linewidth=2, label=f"{label}: {final:.3f}")
        axes.plot(end, final, "o", color=color, markersize=6, clip_on=False)
    axes.set(xlim=(0, 600), ylim=(0.95, 1.6), xlabel="seconds of training on 2 CPU cores")
    axes.set_ylabel("validation, bits per byte")
    axes.grid(alpha=0.25)
    axes.legend(title="mean of 3 seeds; dot: read back from the artifact", frameon=False)
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
