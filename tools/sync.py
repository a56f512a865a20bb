"""Keep the fenced sections of the scripts equal.

    python tools/sync.py FILE [SECTION…]    copy FILE's sections (all, or the named ones) into the other scripts
    python tools/sync.py --check            list every difference and malformed fence; exit code 1 if there is one

A section stands between `# === shared: NAME ===` and `# === end: NAME ===`. The scripts are the top-level *.py,
data/*.py and tools/*.py. Only a script that carries the fence receives the section; an empty fence is an invitation. A
section that was itself edited since HEAD is never overwritten: commit it, revert it, or name its file as the source.
"""

import os
import re
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORDER = (
    "bounds settings runtime tokenizer data text chat preparation batches model lora optimizer schedule "
    "quantization artifact export deltas weights evaluation checkpoint generation tasks rows responses start "
    "supervision pairs policy judge runs jobs"
).split()
FENCE = re.compile(r"# === (shared|end): (\w+) ===\n?")
NEARLY_FENCE = re.compile(r"\s*#\W*(shared|end)\b\W*\w+\W*=\s*$|\s*#\s*=+\s*(shared|end)\b", re.IGNORECASE)


class SyncError(SystemExit):
    """A malformed fence or a refused copy: Python prints the one line it carries and exits with code 1."""


def parse(text: str, name: str) -> dict[str, tuple[int, list[str]]]:
    """Fenced sections: section -> (line number of its opening fence, lines between the fences); may raise SyncError."""
    sections: dict[str, tuple[int, list[str]]] = {}
    is_open, body, allowed = "", [], ORDER
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        fence = FENCE.fullmatch(line)
        if not fence:
            if NEARLY_FENCE.match(line):
                raise SyncError(f"{name}:{number}: misspelt fence {line.strip()!r}, expected '# === shared: NAME ==='")
            body.append(line)
            continue
        kind, section = fence.groups()
        if kind == "end" and section == is_open:
            is_open, body = "", []
        elif kind == "end" or is_open:
            raise SyncError(f"{name}:{number}: {line.strip()} while {is_open or 'no section'} is open")
        elif section not in allowed:
            why = "stands twice" if section in sections else "stands too late" if section in ORDER else "is unknown"
            raise SyncError(f"{name}:{number}: section {section} {why}, the order is {' '.join(ORDER)}")
        else:
            is_open, body, allowed = section, [], ORDER[ORDER.index(section) + 1:]
            sections[section] = (number, body)
    if is_open:
        raise SyncError(f"{name}:{sections[is_open][0]}: section {is_open} is never closed")
    return sections


def load(root: Path) -> dict[str, str]:
    """The scripts that may carry fences: name relative to root -> text, line ends as they are."""
    paths = sorted(path for folder in ("", "data/", "tools/") for path in root.glob(folder + "*.py"))
    return {path.relative_to(root).as_posix(): path.read_bytes().decode("utf-8") for path in paths}


def differences(texts: dict[str, str]) -> list[str]:
    """One line for each section that differs from the same section of the first script that carries it."""
    first: dict[str, tuple[str, list[str]]] = {}
    found = []
    for name, text in texts.items():
        for section, (start, here) in parse(text, name).items():
            origin, there = first.setdefault(section, (name, here))
            unequal = [i for i, (a, b) in enumerate(zip_longest(here, there)) if a != b]
            if unequal:
                found.append(f"{name}: {section}, line {start + 1 + unequal[0]} differs from {origin}")
    return found


def copy(root: Path, source: str, wanted: list[str]) -> list[str]:
    """Copy sections of `source` (all if none is wanted) into the other scripts; returns a line for each one copied.

    SyncError, with nothing written, if a target's section is neither empty nor the source's nor that of HEAD.
    """
    texts = load(root)
    if source not in texts:
        raise SyncError(f"{source} is no script here, expected one of {' '.join(texts)}")
    ours = {section: body for section, (_, body) in parse(texts[source], source).items()}
    if missing := [section for section in wanted if section not in ours]:
        raise SyncError(f"{source} has no section {missing[0]}, it has {' '.join(ours)}")
    chosen = {section: ours[section] for section in wanted or ours}
    changed, report = {}, []
    for name, text in texts.items():
        lines = text.splitlines(keepends=True)
        shown = subprocess.run(["git", "show", f"HEAD:./{name}"], cwd=root, capture_output=True)
        committed = parse(shown.stdout.decode("utf-8"), f"HEAD:{name}") if shown.returncode == 0 else {}
        for section, (start, body) in reversed(parse(text, name).items()):
            if body == chosen.get(section, body):
                continue
            if body and body != committed.get(section, (0, []))[1]:
                raise SyncError(f"section {section} of {name} was edited since HEAD and differs from {source}'s: "
                                f"commit it, revert it or name {name} as the source (nothing was copied)")
            lines[start:start + len(body)] = chosen[section]
            changed[name] = "".join(lines)
            report.append(f"{source} -> {name}: {section}")
    for name, text in changed.items():
        (root / name).write_bytes(text.encode("utf-8"))
    return report


def main(arguments: list[str]) -> None:
    """Run the command line described at the top of this file."""
    if arguments == ["--check"]:
        found = differences(load(ROOT))
        print("\n".join(found) or "sync: the fenced sections are equal")
        sys.exit(1 if found else 0)
    if not arguments:
        raise SyncError("usage: python tools/sync.py FILE [SECTION…] | --check")
    source = Path(os.path.relpath(arguments[0], ROOT)).as_posix()
    print("\n".join(copy(ROOT, source, arguments[1:])) or "sync: nothing to copy, the sections are equal")


if __name__ == "__main__":
    main(sys.argv[1:])
