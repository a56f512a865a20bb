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
    shutil.copy(SYNC, tmp_path / "tools" / "sync.py")
    (tmp_path / "a.py").write_text(fenced(data="d = 1\n", model="m = 1\nm = 2\n"))
    (tmp_path / "b.py").write_text(fenced(model="m = 1\nm = 2\n"))
    (tmp_path / "data" / "c.py").write_text(fenced(data="d = 1\n", model="m = 1\nm = 2\n"))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(tmp_path)
    return tmp_path


def commit(repo):
    """Commit everything under a made-up name."""
    subprocess.run(["git", "add", "-A"], cwd=repo, check=True)
    name = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *name, "commit", "-q", "-m", "t"], cwd=repo, check=True)


def sync(repo, *arguments):
    """Run the repository's own sync.py; returns exit code and all its output."""
    done = subprocess.run(
        [sys.executable, "tools/sync.py", *arguments], cwd=repo, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_copies_every_section_byte_for_byte(repo):
    (repo / "a.py").write_bytes(fenced(data="d = 'é'\r\n", model="m = 7\n").encode())
    assert sync(repo, "--check")[0] == 1
    code, output = sync(repo, "a.py")
    assert code == 0
    assert set(output.splitlines()) == {
        "a.py -> b.py: model",
        "a.py -> data/c.py: model",
        "a.py -> data/c.py: data",
    }
    assert (repo / "b.py").read_bytes() == fenced(model="m = 7\n").encode()
    assert (repo / "data" / "c.py").read_bytes() == fenced(
        data="d = 'é'\r\n", model="m = 7\n"
    ).encode()
    assert sync(repo, "--check") == (0, "sync: the fenced sections are equal\n")
    assert sync(repo, "a.py") == (0, "sync: nothing to copy, the sections are equal\n")


def test_copies_only_the_named_section_from_the_named_file(repo):
    (repo / "data" / "c.py").write_text(fenced(data="d = 8\n", model="m = 8\n"))
    assert sync(repo, "data/c.py", "data")[0] == 0
    assert (repo / "a.py").read_text() == fenced(data="d = 8\n", model="m = 1\nm = 2\n")
    assert (repo / "b.py").read_text() == fenced(model="m = 1\nm = 2\n")


def test_refuses_a_section_edited_since_head_and_writes_nothing(repo):
    (repo / "a.py").write_text(fenced(data="d = 1\n", model="m = 5\n"))
    (repo / "data" / "c.py").write_text(fenced(data="d = 1\n", model="m = 6\n"))
    before = {path: path.read_bytes() for path in repo.rglob("*.py")}
    code, output = sync(repo, "a.py")
    assert code == 1
    assert output.startswith(
        "section model of data/c.py was edited since HEAD and differs from a.py's"
    )
    assert {path: path.read_bytes() for path in repo.rglob("*.py")} == before
    assert sync(repo, "a.py", "data")[0] == 0, "an unnamed section stands in nobody's way"
    commit(repo)
    assert sync(repo, "a.py")[0] == 0, "once committed, the edit is safe in the history"
    assert (repo / "data" / "c.py").read_text() == (repo / "a.py").read_text()


def test_fills_an_empty_fence_and_refuses_an_uncommitted_script(repo):
    (repo / "new.py").write_text(fenced(data="", model=""))
    subprocess.run(["git", "add", "new.py"], cwd=repo, check=True)
    assert sync(repo, "a.py")[0] == 0
    assert (repo / "new.py").read_text() == (repo / "a.py").read_text()
    (repo / "new.py").write_text(fenced(data="d = 4\n"))
    assert sync(repo, "a.py")[1].startswith("section data of new.py was edited since HEAD")


def test_leaves_a_file_alone_that_git_does_not_know(repo):
    (repo / "mine.py").write_text(fenced(model="m = 7\n"))
    assert sync(repo, "--check") == (0, "sync: the fenced sections are equal\n")
    code, output = sync(repo, "mine.py")
    assert code == 1
    assert output.startswith("mine.py is no script here")


OPEN, CLOSE = "# === shared: model ===\n", "# === end: model ===\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OPEN + "m = 1\n", "b.py:1: section model is never closed"),
        (OPEN + "# === shared: lora ===\n", "b.py:2: # === shared: lora === while model is open"),
        ("m = 1\n" + CLOSE, "b.py:2: # === end: model === while no section is open"),
        (OPEN + CLOSE + OPEN + CLOSE, "b.py:3: section model stands twice"),
        (
            OPEN + CLOSE + "# === shared: data ===\n# === end: data ===\n",
            "b.py:3: section data stands too late",
        ),
        ("# === shared: modle ===\n# === end: modle ===\n", "b.py:1: section modle is unknown"),
        ("# === shared:model ===\n", "b.py:1: misspelt fence '# === shared:model ==='"),
        ("# === shared: model\n", "b.py:1: misspelt fence '# === shared: model'"),
    ],
)
def test_malformed_fences_are_errors(repo, text, message):
    (repo / "b.py").write_text(text)
    for arguments in (["--check"], ["a.py"]):
        code, output = sync(repo, *arguments)
        assert code == 1
        assert output.startswith(message)
        assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: "),
        (["nowhere.py"], "nowhere.py is no script here"),
        (["b.py", "lora"], "b.py has no section lora, it has model"),
    ],
)
def test_bad_arguments_are_one_line(repo, arguments, message):
    code, output = sync(repo, *arguments)
    assert code == 1
    assert output.startswith(message)
    assert output.count("\n") == 1
