"""Keep the fenced sections of the scripts equal.

    python tools/sync.py FILE [SECTION…]    copy FILE's sections (all, or the named ones) into the other scripts
    python tools/sync.py --check            list every difference and malformed fence; exit code 1 if there is one

A section is between `# === shared: NAME ===` and `# === end: NAME ===`. The scripts are the top-level *.py,
data/*.py and tools/modeling_underpar.py, if git knows them: a copy for an experiment is left alone until `git add`.
A section is copied into each script that has its fences, which may be empty. A section that was edited since HEAD is
never overwritten: commit it, revert it, or name its file as the source.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from endings import run_tool

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    "bounds",
    "model",
    "kernels",
    "optimizer",
    "schedule",
    "quantization",
    "qat",
    "artifact",
    "packing",
    "export",
    "deltas",
    "rebuild",
    "files",
    "tokenizer",
    "data",
    "documents",
    "batches",
    "evaluation",
    "settings",
    "streams",
    "device",
    "runtime",
    "errors",
    "folders",
    "machine",
    "models",
    "stored",
    "weights",
    "starts",
    "checkpoint",
    "log",
    "run",
    "lora",
    "encoding",
    "roles",
    "template",
    "stops",
    "reader",
    "turns",
    "forms",
    "prompt",
    "ends",
    "text",
    "chat",
    "conversations",
    "preferences",
    "questions",
    "preparation",
    "command",
    "decoder",
    "generation",
    "split",
    "rewards",
    "problems",
    "examples",
    "rows",
    "responses",
    "start",
    "choice",
    "teacher",
    "recorded",
    "sharding",
    "finetuning",
    "intervals",
    "pairs",
    "samples",
    "answers",
    "policy",
    "exam",
    "policy_run",
    "environment",
    "judge",
)
FENCE = re.compile(r"# === (shared|end): (\w+) ===\n?")
NEARLY_FENCE = re.compile(
    r"\s*#\W*(shared|end)\b\W*\w+\W*=\s*$|\s*#\s*=+\s*(shared|end)\b", re.IGNORECASE
)


class SyncError(SystemExit):
    """A malformed fence or a refused copy: Python prints the one line it carries and exits with code 1."""


@dataclass
class Section:
    """A fenced section of a script."""

    line: int  # number of the line of its opening fence
    body: list[str]  # the lines between the fences


def parse(text: str, name: str) -> dict[str, Section]:
    """Return the fenced sections of a script by name. Raises SyncError for malformed fences."""
    sections = {}
    current = ""  # the open section
    allowed = ORDER
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        fence = FENCE.fullmatch(line)
        if fence is None:
            if NEARLY_FENCE.match(line):
                raise SyncError(
                    f"{name}:{number}: misspelt fence {line.strip()!r}, "
                    "expected '# === shared: NAME ==='"
                )
            if current:
                sections[current].body.append(line)
            continue
        kind, section = fence.groups()
        if kind == "end" and section == current:
            current = ""
        elif kind == "end" or current:
            state = current or "no section"
            raise SyncError(f"{name}:{number}: {line.strip()} while {state} is open")
        elif section not in allowed:
            reason = "is unknown"
            if section in ORDER:
                reason = "occurs twice" if section in sections else "comes too late"
            order = " ".join(ORDER)
            raise SyncError(f"{name}:{number}: section {section} {reason}, the order is {order}")
        else:
            current = section
            allowed = ORDER[ORDER.index(section) + 1 :]
            sections[section] = Section(number, [])
    if current:
        line = sections[current].line
        raise SyncError(f"{name}:{line}: section {current} is never closed")
    return sections


def load(root: Path) -> dict[str, str]:
    """Return the texts of the scripts that may carry fences, by name relative to `root`.

    A file that is not added to git is somebody's experiment: it is neither read nor changed.
    """
    command = ["git", "ls-files", ":(glob)*.py", ":(glob)data/*.py", "tools/modeling_underpar.py"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except OSError as error:
        raise SyncError(f"{root}: sync needs git: {error}") from None
    if done.returncode:
        raise SyncError(f"{root}: sync needs a git checkout: {done.stderr.strip()}")
    names = [name for name in sorted(done.stdout.split()) if (root / name).exists()]
    # Bytes, because reading as text would change the line ends.
    return {name: (root / name).read_bytes().decode() for name in names}


def differences(texts: dict[str, str]) -> list[str]:
    """Return a line for each section that differs from the first script that carries it."""
    first = {}
    lines = []
    for name, text in texts.items():
        for section, own in parse(text, name).items():
            origin, original = first.setdefault(section, (name, own))
            pairs = zip_longest(own.body, original.body)
            unequal = [index for index, (a, b) in enumerate(pairs) if a != b]
            if unequal:
                line = own.line + 1 + unequal[0]
                lines.append(f"{name}: {section}, line {line} differs from {origin}")
    return lines


def committed_sections(root: Path, name: str) -> dict[str, Section]:
    """Return the fenced sections of a script as of HEAD."""
    done = subprocess.run(["git", "show", f"HEAD:./{name}"], cwd=root, capture_output=True)
    return parse(done.stdout.decode(), f"HEAD:{name}") if done.returncode == 0 else {}


def copy(root: Path, source: str, wanted: list[str]) -> list[str]:
    """Copy sections of `source` (all if none is wanted) to the other scripts; return what was done.

    Raises SyncError and writes nothing if a section to be replaced is neither empty nor equal to
    the source's or to that of HEAD.
    """
    texts = load(root)
    if source not in texts:
        raise SyncError(f"{source} is no script here, expected one of {' '.join(texts)}")
    available = parse(texts[source], source)
    for section in wanted:
        if section not in available:
            raise SyncError(f"{source} has no section {section}, it has {' '.join(available)}")
    bodies = {section: available[section].body for section in wanted or available}
    changed = {}
    report = []
    for name, text in texts.items():
        lines = text.splitlines(keepends=True)
        committed = committed_sections(root, name)
        # Backwards, so that the line numbers of the sections before stay right.
        for section, own in reversed(parse(text, name).items()):
            if section not in bodies or own.body == bodies[section]:
                continue
            if own.body and (section not in committed or own.body != committed[section].body):
                raise SyncError(
                    f"section {section} of {name} was edited since HEAD and differs from "
                    f"{source}'s: commit it, revert it or name {name} as the source "
                    "(nothing was copied)"
                )
            lines[own.line : own.line + len(own.body)] = bodies[section]
            changed[name] = "".join(lines)
            report.append(f"{source} -> {name}: {section}")
    for name, text in changed.items():
        (root / name).write_bytes(text.encode())
    return report


def main(arguments: list[str]) -> None:
    """Run the command line described at the top of this file."""
    if arguments == ["--check"]:
        lines = differences(load(ROOT))
        print("\n".join(lines) or "sync: the fenced sections are equal")
        sys.exit(1 if lines else 0)
    if not arguments:
        raise SyncError("usage: python tools/sync.py FILE [SECTION…] | --check")
    source = Path(os.path.relpath(arguments[0], ROOT)).as_posix()
    print(
        "\n".join(copy(ROOT, source, arguments[1:]))
        or "sync: nothing to copy, the sections are equal"
    )


if __name__ == "__main__":
    run_tool(main, sys.argv[1:])
