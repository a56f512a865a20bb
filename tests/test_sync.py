"""tools/sync.py in a small repository of its own: what it copies, refuses and lists."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SYNC = Path(__file__).resolve().parents[1] / "tools" / "sync.py"


def fenced(**sections):
    """A script of the given sections, with a line of its own before, between and after them."""
    parts = [
        f"# === shared: {name} ===\n{body}# === end: {name} ===\n"
        for name, body in sections.items()
    ]
    return "top = 1\n" + "own = 2\n".join(parts) + "last = 3\n"


@pytest.fixture
def repo(tmp_path):
    """A committed repository with two scripts at the top and one in data/, all sections equal."""
    for folder in ("tools", "data"):
        (tmp_path / folder).mkdir()
    for path in (SYNC, SYNC.with_name("endings.py")):
        shutil.copy(path, tmp_path / "tools")
    (tmp_path / "a.py").write_text(fenced(data="d = 1\n", batches="m = 1\nm = 2\n"))
    (tmp_path / "b.py").write_text(fenced(batches="m = 1\nm = 2\n"))
    (tmp_path / "data" / "c.py").write_text(fenced(data="d = 1\n", batches="m = 1\nm = 2\n"))
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(repo, *words):
    """Run git under a made-up name."""
    name = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *name, *words], cwd=repo, check=True)


def commit(repo):
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "t")


def sync(repo, *arguments):
    """Run the repository's own sync.py; returns exit code and all its output."""
    command = [sys.executable, "tools/sync.py", *arguments]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def refuses(repo, message, *arguments):
    """sync.py says in one line what is wrong, and changes no script."""
    before = {path: path.read_bytes() for path in repo.rglob("*.py")}
    code, output = sync(repo, *arguments)
    assert code == 1 and output.startswith(message) and output.count("\n") == 1, output
    assert {path: path.read_bytes() for path in repo.rglob("*.py")} == before


def test_copies_every_section_byte_for_byte(repo):
    (repo / "a.py").write_bytes(fenced(data="d = 'é'\r\n", batches="m = 7\n").encode())
    assert sync(repo, "--check")[0] == 1
    code, output = sync(repo, "a.py")
    assert code == 0
    assert set(output.splitlines()) == {
        "a.py -> b.py: batches",
        "a.py -> data/c.py: batches",
        "a.py -> data/c.py: data",
    }
    assert (repo / "b.py").read_bytes() == fenced(batches="m = 7\n").encode()
    assert (repo / "data" / "c.py").read_bytes() == (repo / "a.py").read_bytes()
    assert sync(repo, "--check")[0] == 0


def test_copies_only_the_named_section_from_the_named_file(repo):
    (repo / "data" / "c.py").write_text(fenced(data="d = 8\n", batches="m = 8\n"))
    assert sync(repo, "data/c.py", "data")[0] == 0
    assert (repo / "a.py").read_text() == fenced(data="d = 8\n", batches="m = 1\nm = 2\n")
    assert (repo / "b.py").read_text() == fenced(batches="m = 1\nm = 2\n")


def test_refuses_a_section_edited_since_head_and_writes_nothing(repo):
    (repo / "a.py").write_text(fenced(data="d = 1\n", batches="m = 5\n"))
    (repo / "data" / "c.py").write_text(fenced(data="d = 1\n", batches="m = 6\n"))
    refuses(repo, "section batches of data/c.py was edited since HEAD", "a.py")
    assert sync(repo, "a.py", "data")[0] == 0, "an unnamed section stands in nobody's way"
    commit(repo)
    assert sync(repo, "a.py")[0] == 0, "once committed, the edit is safe in the history"
    assert (repo / "data" / "c.py").read_text() == (repo / "a.py").read_text()


def test_fills_an_empty_fence_and_refuses_an_uncommitted_script(repo):
    (repo / "new.py").write_text(fenced(data="", batches=""))
    git(repo, "add", "new.py")
    assert sync(repo, "a.py")[0] == 0
    assert (repo / "new.py").read_text() == (repo / "a.py").read_text()
    (repo / "new.py").write_text(fenced(data="d = 4\n"))
    refuses(repo, "section data of new.py was edited since HEAD", "a.py")
    (repo / "mine.py").write_text(fenced(batches="m = 7\n"))  # one that git does not know
    refuses(repo, "mine.py is no script here", "mine.py")


def test_git_is_named_if_it_is_missing(repo, monkeypatch):
    monkeypatch.setenv("PATH", str(repo))
    refuses(repo, f"{repo}: sync needs git: ", "--check")


OPEN, CLOSE = "# === shared: batches ===\n", "# === end: batches ===\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OPEN + "m = 1\n", "b.py:1: section batches is never closed"),
        (OPEN + "# === shared: lora ===\n", "b.py:2: # === shared: lora === while batches is open"),
        ("m = 1\n" + CLOSE, "b.py:2: # === end: batches === while no section is open"),
        (OPEN + CLOSE + OPEN + CLOSE, "b.py:3: section batches occurs twice"),
        (
            OPEN + CLOSE + "# === shared: data ===\n# === end: data ===\n",
            "b.py:3: section data comes too late",
        ),
        ("# === shared: modle ===\n# === end: modle ===\n", "b.py:1: section modle is unknown"),
        ("# === shared:batches ===\n", "b.py:1: misspelt fence '# === shared:batches ==='"),
        ("# === shared: batches\n", "b.py:1: misspelt fence '# === shared: batches'"),
    ],
)
def test_malformed_fences_are_errors(repo, text, message):
    (repo / "b.py").write_text(text)
    for argument in ("--check", "a.py"):
        refuses(repo, message, argument)


def test_bad_arguments_are_one_line(repo):
    refuses(repo, "usage: ")
    refuses(repo, "nowhere.py is no script here", "nowhere.py")
    refuses(repo, "b.py has no section lora", "b.py", "lora")
