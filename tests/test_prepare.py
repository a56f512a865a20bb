"""data/prepare.py: splits, duplicates, tokenizers, shards, manifests, restarts, errors."""

import gzip
import hashlib
import json
import lzma
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import zstandard
from test_data import HARD_TEXTS, NO_SPACE, fake_encoding, tokenized, train_model

from conftest import ROOT, environment, load_script, refusal, start

SCRIPT = ROOT / "data" / "prepare.py"
prepare = load_script(SCRIPT)


def words(seed, count=120):
    """A document of random words that shares no 8-gram with one of another seed."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(count))


def write_jsonl(path, texts):
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    raw = content.encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(raw) if path.suffix == ".zst" else raw)
    return path


def documents(folder, split):
    """The documents of a split read back: shards joined, cut at BOS, decoded."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tokenizer = prepare.load_tokenizer(folder / manifest["tokenizer"]["file"])
    shards = [prepare.read_shard(folder / shard["file"]) for shard in manifest[split]["shards"]]
    tokens = np.concatenate(shards).astype(np.int64)
    starts = np.flatnonzero(tokens == tokenizer.bos_id)
    assert starts[0] == 0
    return [prepare.decode_bytes(tokenizer, part[1:]) for part in np.split(tokens, starts[1:])]


def shard_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def run(*arguments):
    """prepare.py in this process with one worker; the manifest it wrote."""
    prepare.run([str(argument) for argument in (*arguments, "--workers", 1)])
    return json.loads((Path(arguments[arguments.index("--out") + 1]) / "manifest.json").read_text())


def refuses(message, *arguments):
    arguments = [str(argument) for argument in (*arguments, "--workers", 1)]
    return refusal(prepare.UserError, message, prepare.run, arguments)


def prepared(folder, texts, *options):
    """Return the folder and the manifest of prepared texts."""
    source = write_jsonl(folder / "a.jsonl", texts)
    return folder / "out", run(source, "--out", folder / "out", *options)


BYTES = ("--tokenizer", "bytes")


def encoded(texts):
    return sorted(text.encode() for text in texts)


def test_own_tokenizer_gives_every_document_back(tmp_path):
    texts = [words(i) for i in range(40)] + HARD_TEXTS
    bad = ["a document with \u2581 in it " + words(99), "lone surrogate \ud800 " + words(98)]
    given = texts + bad + ["", " \n "]
    out, manifest = prepared(tmp_path, given, "--vocab-size", 400, "--val-frac", 0.3)
    found = {split: documents(out, split) for split in ("train", "val")}
    assert sorted(found["train"] + found["val"]) == encoded(filter(str.strip, texts))
    for split, parts in found.items():
        size = sum(map(len, parts))
        facts = {"documents": len(parts), "source_bytes": size, "decoded_bytes": size}
        assert manifest[split].items() >= facts.items()
    # The blank HARD_TEXTS count as empty, beside the two given here.
    blank = sum(not text.strip() for text in HARD_TEXTS)
    counts = {"exact_duplicates": 0, "near_duplicates": 0, "not_lossless": 2, "empty": 2 + blank}
    tokenizer = prepare.load_tokenizer(out / "tokenizer.model")
    about = {"file": "tokenizer.model", "sha256": tokenizer.sha256, "vocab_size": 400, "bos_id": 1}
    about["token_bytes_sha256"] = prepare.sha256_file(out / "token_bytes.bin")
    facts = {
        "dropped": counts,
        "lossless": True,
        "published": False,
        "overlap_documents": 0,
        "source_files": ["a.jsonl"],
        "name": "text",
        "seed": 0,
        "tokenizer": about,
    }
    assert manifest.items() >= facts.items() and not (out / ".work").exists()
    assert tokenizer.roles == {role: 4 + i for i, role in enumerate(prepare.ROLE_TOKENS)}
    assert not tokenizer.drops_space.any() and b"\n" in tokenizer.pieces
    prepare.check_dataset(out, manifest)


def sha256(text):
    return hashlib.sha256(text).digest()


def test_split_by_hash_and_seeded_order(tmp_path):
    """Side and order written out once more from their definition."""
    texts = [words(i, 20) for i in range(300)]
    source = write_jsonl(tmp_path / "a.jsonl.zst", texts)
    sides = {"train": [], "val": []}
    for text in encoded(texts):
        sides["val" if sha256(text) < bytes([51] * 32) else "train"].append(text)
    assert 40 <= len(sides["val"]) <= 80
    for seed in (0, 1):
        run(source, "--out", tmp_path / str(seed), *BYTES, "--val-frac", 0.2, "--seed", seed)
        for split, side in sides.items():
            order = {sha256(f"{seed}:".encode() + sha256(text)): text for text in side}
            assert documents(tmp_path / str(seed), split) == [order[key] for key in sorted(order)]


def test_val_limit_returns_the_rest_to_training(tmp_path):
    texts = [words(i, 50) for i in range(60)]
    limit = ("--val-frac", 0.5, "--val-max-bytes", 1500)
    out, manifest = prepared(tmp_path, texts, *BYTES, *limit)
    assert 1000 < manifest["val"]["source_bytes"] <= 1500
    assert sorted(documents(out, "train") + documents(out, "val")) == encoded(texts)


def test_exact_duplicates_are_dropped(tmp_path):
    texts = [words(i) for i in range(30)]
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "a.jsonl", texts + texts[:7])
    (tmp_path / "in" / "deep" / "b.txt").write_bytes(texts[8].encode())
    (tmp_path / "in" / "deep" / "c.txt").write_bytes(b"line\r\nends are kept\r")
    out = tmp_path / "out"
    manifest = run(tmp_path / "in", "--out", out, *BYTES, "--val-frac", 0.3)
    assert manifest["dropped"]["exact_duplicates"] == 8
    found = documents(out, "train") + documents(out, "val")
    assert sorted(found) == encoded([*texts, "line\r\nends are kept\r"])
    assert manifest["source_files"] == ["in/a.jsonl", "in/deep/b.txt", "in/deep/c.txt"]


def test_a_vocabulary_above_65536_is_written_as_uint32(tmp_path, monkeypatch):
    ranks = fake_encoding(monkeypatch, prepare, tmp_path, end_of_text=70000)
    texts = [words(i, 20) for i in range(30)] + HARD_TEXTS
    options = ("--val-frac", 0.3, "--tokenizer")
    out, manifest = prepared(tmp_path, texts, *options, ranks)
    assert manifest["lossless"] and manifest["tokenizer"]["file"] == ranks.name
    for split in ("train", "val"):
        path = out / f"text_{split}_000000.bin"
        count = manifest[split]["tokens"]
        assert np.fromfile(path, "<i4", 3).tolist() == [20240801, 7, count]
        tokens = np.fromfile(path, "<u4", offset=1024)
        assert (tokens == 70000).sum() == manifest[split]["documents"] and len(tokens) == count
    found = documents(out, "train") + documents(out, "val")
    assert sorted(found) == encoded(filter(str.strip, texts))
    prepared(tmp_path, texts, *options, out / ranks.name)  # the same request


def shared_share(text, others):
    """The share of a text's distinct 8-grams that stand in the others, by tuples of words."""

    def tuples(one):
        parts = one.decode().split()
        return {tuple(parts[i : i + 8]) for i in range(max(1, len(parts) - 7))}

    own = tuples(text)
    return len(own & set().union(*map(tuples, others))) / len(own)


def variant(text, keep):
    """A document whose first `keep` of the words are the text's."""
    parts = text.split()
    count = int(len(parts) * keep)
    return " ".join(parts[:count]) + " " + words(hash(len(text)) % 1000 + 5000, len(parts) - count)


def test_near_duplicates_with_given_validation(tmp_path):
    val = [words(i) for i in range(10)]
    halves = [
        " ".join(val[9].split()[:60]) + " " + words(300, 300),
        words(301, 300) + " " + " ".join(val[9].split()[58:]),
    ]  # each half of val[9], in documents that are mostly other text
    third = [variant(val[2], 0.4)]
    near = [
        variant(val[0], 0.8),
        val[1].replace(" ", "\n").upper(),
        words(302, 200) + " " + val[3],
        " ".join(val[5].split()[20:60]) + " " + words(303, 18),
    ]  # the last: 33 of its 51, only 33 of val[5]'s 113
    plain = [words(i) for i in range(100, 130)]
    train = write_jsonl(tmp_path / "t.jsonl", plain + near + third + halves + [val[4]])
    out = tmp_path / "out"
    manifest = run(train, "--val", write_jsonl(tmp_path / "v.jsonl", val), "--out", out, *BYTES)
    rest = documents(out, "train")
    assert sorted(documents(out, "val")) == encoded(val)
    # Both halves together would hold all of val[9].
    assert [text for text in halves if text.encode() in rest] in ([halves[0]], [halves[1]])
    assert set(rest) - set(encoded(halves)) == set(encoded(plain + third))
    dropped = manifest["dropped"]
    assert (dropped["exact_duplicates"], dropped["near_duplicates"]) == (1, 5)
    assert max(shared_share(text, rest) for text in documents(out, "val")) <= 0.5


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """A source of several shards, and what one worker makes of it in few buckets."""
    folder = tmp_path_factory.mktemp("medium")
    source = write_jsonl(folder / "a.jsonl", [words(i, 300) for i in range(400)])
    subprocess.run(command(source, folder / "out", 1), check=True, capture_output=True)
    return source, shard_bytes(folder / "out")


# Few buckets and small shards, so that a little text crosses their borders.
SMALL = (
    "import sys; sys.path.insert(0, {folder!r}); import prepare; "
    "prepare.BUCKETS = 7; prepare.SHARD_TOKENS = 50_000; prepare.main()"
)


def command(source, out, workers):
    words = [sys.executable, "-c", SMALL.format(folder=str(SCRIPT.parent)), source, "--out", out]
    return [*map(str, words), "--vocab-size", "400", "--workers", str(workers)]


def test_workers_do_not_change_a_byte(medium, tmp_path):
    source, expected = medium
    subprocess.run(command(source, tmp_path / "out", 2), check=True, capture_output=True)
    assert shard_bytes(tmp_path / "out") == expected
    assert len(expected) >= 8 and "text_train_000003.bin" in expected
    run(source, "--out", tmp_path / "b", "--vocab-size", 400)  # in one shard, by more buckets
    whole = (tmp_path / "b" / "text_train_000000.bin").read_bytes()[1024:]
    names = [name for name in sorted(expected) if "_train_" in name]
    assert whole == b"".join(expected[name][1024:] for name in names)


def test_a_refusal_leaves_nothing(tmp_path, monkeypatch):
    source, out = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)]), tmp_path / "out"
    request = (source, "--out", out, "--val-frac", 0.3)
    message = r"^--vocab-size 60000: must be at most (\d+) for this text; or give more text"
    refuses(message, *request, "--vocab-size", 60000)
    assert not out.exists()
    monkeypatch.setattr(prepare, "count_overlap", lambda *streams: 2)
    refuses("2 validation documents stand in training, expected 0", *request, "--vocab-size", 400)
    assert not out.exists()
    monkeypatch.undo()
    (out / ".work" / "result").mkdir(parents=True)  # as a killed run leaves it
    (out / ".work" / "result" / "text_train_000000.bin").touch()
    (out / "notes.txt").write_text("mine")
    refuses("--vocab-size 60000", *request, "--vocab-size", 60000)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    assert run(*request, "--vocab-size", 400)["tokenizer"]["vocab_size"] == 400


def test_a_single_document_is_split_by_its_tail(tmp_path, capsys):
    lines = [words(i, 10) + "\n" for i in range(100)]
    text = "".join(lines)
    (tmp_path / "input.txt").write_text(text)
    out = tmp_path / "out"
    manifest = run(tmp_path / "input.txt", "--out", out, *BYTES, "--val-frac", 0.1)
    train, val = documents(out, "train"), documents(out, "val")
    assert (len(train), len(val)) == (1, 1) and train[0] + val[0] == text.encode()
    # The tail begins with the first line that lies within the last tenth.
    starts = [sum(map(len, lines[:i])) for i in range(100)]
    tenth = len(text) - int(0.1 * len(text))
    assert len(train[0]) == min(start for start in starts if start > tenth)
    size = len(val[0])
    assert f"one document: its last {size} bytes are the validation" in capsys.readouterr().out
    assert (manifest["split"], manifest["val"]["source_bytes"]) == ("tail", size)
    assert not any(manifest["dropped"].values()) and manifest["overlap_documents"] == 0
    # Of a folder of one file too; a line end that is out of reach leaves a word's beginning.
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one").write_text(words(1, 500))
    limit = (*BYTES, "--val-max-bytes", 50)
    run(tmp_path / "in", "--out", tmp_path / "b", *limit)
    (tail,) = documents(tmp_path / "b", "val")
    assert words(1, 500).encode().endswith(b" " + tail) and 40 < len(tail) < 50
    (tmp_path / "solid.txt").write_text("x" * 1000)
    message = "one document, whose end of 50 bytes for validation has no line or word of its own; give --val"
    refuses(message, tmp_path / "solid.txt", "--out", tmp_path / "c", *BYTES)


def passed_over(capsys):
    """The lines on what was passed over."""
    lines = capsys.readouterr().out.splitlines()
    start = "passed over, "
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def test_folders_take_text_and_name_what_they_skip(tmp_path, capsys):
    folder = tmp_path / "in"
    names = ["LICENSE", "a.txt", "b.md", "deep/c.py"]
    for number, name in enumerate([*names, "d.jsonl", ".git/HEAD", "deep/.hidden", "e.rst"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(words(number) * (name != "d.jsonl"))
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "binary").write_bytes(b"\xff\x00")
    request = (folder, *BYTES, "--val", write_jsonl(tmp_path / "v.jsonl", [words(9)]))
    manifest = run(*request, "--out", tmp_path / "out")
    assert documents(tmp_path / "out", "val") == [words(9).encode()]
    assert sorted(documents(tmp_path / "out", "train")) == encoded(map(words, range(4)))
    files = [f"in/{name}" for name in sorted([*names, "d.jsonl"])]
    assert manifest["source_files"] == [*files, "v.jsonl"]
    assert passed_over(capsys) == [
        "hidden: 2 (in/.git, in/deep/.hidden)",
        f"{prepare.NOT_UTF8}: 2 (in/binary, in/latin.txt)",
        "of another kind: 1 (in/e.rst)",
    ]
    for i in range(30):
        (folder / f"{i:02d}.png").touch()
    manifest = run(*request, "--out", tmp_path / "only", "--only", ".md", ".py")
    assert manifest["source_files"] == ["in/b.md", "in/deep/c.py", "v.jsonl"]
    capsys.readouterr()
    run(*request, "--out", tmp_path / "many")
    names = ", ".join(f"in/{i:02d}.png" for i in range(20)) + ", …"
    assert passed_over(capsys)[1] == f"of another kind: 31 ({names})"


def test_finished_and_foreign_folders(tmp_path, capsys):
    source, out = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)]), tmp_path / "out"
    request = (source, "--out", out, *BYTES, "--val-frac", 0.3)
    run(*request)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    run(*request)
    assert "already holds exactly this data; nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    # As an older version left it: the same command and the option both write what is missing.
    current = (out / "manifest.json").read_text()
    for again in (request, ("--token-bytes", out)):
        manifest = json.loads(current)
        del manifest["tokenizer"]["token_bytes_sha256"]
        (out / "manifest.json").write_text(json.dumps(manifest))
        (out / "token_bytes.bin").unlink()
        prepare.run([*map(str, again), "--workers", "1"])
        assert (out / "manifest.json").read_text() == current
        assert (out / "token_bytes.bin").stat().st_size == 2 * 264 * 4
    refuses(
        "holds data of another request .* delete .* or choose another --out", *request, "--seed", 1
    )
    write_jsonl(source, [words(i) for i in range(41)])
    refuses("holds data of another request", *request)


GOOD = (json.dumps({"text": words(0)}) + "\n").encode()
PACKED = zstandard.ZstdCompressor().compress(GOOD * 99)
SOURCES = [
    ("none.txt", None, "source .*none.txt: no such file or folder"),
    (
        "a.csv",
        b"a,b",
        r"source .*a\.csv: no text in it \(1 of another kind\); read are UTF-8 files \.jsonl, ",
    ),
    ("b.jsonl", GOOD + b"{oops\n", r"b\.jsonl, line 2: not JSON"),
    ("c.jsonl", b'{"body": "a", "n": 1}\n', r"source c\.jsonl line 1: .* must be --field body$"),
    ("c.jsonl", b'{"body": 1}\n', r"must be --field NAME of a field that holds text$"),
    ("d.jsonl", b"[" * 99999, r"d\.jsonl, line 1: not JSON"),
    ("d.jsonl", b"[1]\n", r"d\.jsonl, line 1: no object"),
    ("e.jsonl", b'{"text": "\xff"}\n', r"e\.jsonl, line 1: not JSON"),
    ("f.txt", b"abc\xffdef", r"f\.txt: no text in it \(1 not UTF-8 \(iconv "),
    ("g.jsonl.zst", b"this is no zstd", r"g\.jsonl\.zst: damaged zstd data"),
    ("g.jsonl.zst", PACKED[:-9], r"g\.jsonl\.zst: damaged zstd data \(it ends early\)"),
    ("g.jsonl.gz", gzip.compress(GOOD)[:-9], r"g\.jsonl\.gz: damaged gzip data"),
    ("g.txt.GZ", b"no gzip", r"g\.txt\.GZ: damaged gzip data"),
    ("g.txt.gz", gzip.compress(bytes(10**6)), r"g\.txt\.gz: unpacks to over 200 times its size"),
    ("g.jsonl.zst", zstandard.compress(bytes(10**8)), r"zst: unpacks to over 200 times its size"),
    ("h.jsonl.zst", PACKED[:8] + b"\x00\xff" + PACKED[10:], r"h\.jsonl\.zst: damaged zstd data"),
]


@pytest.mark.parametrize(("name", "content", "message"), SOURCES)
def test_source_errors(tmp_path, monkeypatch, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(prepare, "UNPACKED_BYTES", 1000)
    refuses(message, tmp_path / name, "--out", tmp_path / "out", *BYTES)


def test_rows_without_a_text_are_counted_and_named(tmp_path, capsys):
    """One file of another field does not stop a folder."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [words(i) for i in range(40)])
    rows = [{"text": None}, {"text": 5}, {"text": words(50)}, {"body": "x"}]
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "b.jsonl").write_text("".join(lines))
    (folder / "c.jsonl").write_text(json.dumps({"content": words(60)}) + "\n")
    options = (*BYTES, "--val-frac", 0.3)
    manifest = run(folder, "--out", tmp_path / "out", *options)
    names = "in/b.jsonl line 1, in/b.jsonl line 2, in/b.jsonl line 4, in/c.jsonl line 1"
    assert passed_over(capsys) == [f"rows with no text in `text`: 4 ({names})"]
    assert manifest["dropped"]["no_text"] == 4 and manifest["dropped"]["exact_duplicates"] == 0
    found = documents(tmp_path / "out", "train") + documents(tmp_path / "out", "val")
    assert sorted(found) == encoded([*map(words, range(40)), words(50)])


def test_another_field_and_compressions(tmp_path, capsys):
    texts = [words(i) for i in range(40)]
    lines = "".join(json.dumps({"content": text}) + "\n" for text in texts)
    folder = tmp_path / "in"
    folder.mkdir()
    raw = "\ufeff" + lines  # as Windows writes it
    (folder / "a.JSONL").write_text(raw, encoding="utf-8")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()) * 2)  # two members
    (folder / "c.Jsonl.ZST").write_bytes(zstandard.compress(lines.encode()) * 2)
    (folder / "d.TXT.gz").write_bytes(gzip.compress(words(50).encode()))
    (folder / "LICENSE.zst").write_bytes(zstandard.compress(words(51).encode()))
    (folder / "e.gz").write_bytes(gzip.compress(words(52).encode()))
    options = ("--val-frac", 0.3, *BYTES, "--field", "content")
    manifest = run(folder, "--out", tmp_path / "out", *options)
    assert manifest["dropped"]["exact_duplicates"] == 4 * 40 and passed_over(capsys) == []
    found = documents(tmp_path / "out", "train") + documents(tmp_path / "out", "val")
    assert sorted(found) == encoded([*texts, words(50), words(51), words(52)])
    assert len(manifest["source_files"]) == 6
    only = run(folder, "--out", tmp_path / "only", *options, "--only", ".jsonl")
    assert len(only["source_files"]) == 3
    message = "^--field content: expected a source of .jsonl, whose rows have fields$"
    refuses(message, folder / "d.TXT.gz", "--out", tmp_path / "no", *options)


def test_links_are_followed_and_what_cannot_be_read_is_named(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "in"
    (folder / "x.txt" / "deep").mkdir(parents=True)  # a folder's name is no kind
    (tmp_path / "elsewhere").mkdir()
    for number, name in enumerate(["in/a.txt", "in/x.txt/deep/b.txt", "elsewhere/c.txt"]):
        (tmp_path / name).write_text(words(number))
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "linked.txt").symlink_to(tmp_path / "elsewhere" / "c.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "none.txt").symlink_to(tmp_path / "none")
    (folder / "shut").mkdir()
    (folder / "shut.txt").write_text("x")
    os.mkfifo(folder / "pipe.txt")
    scan, read = os.scandir, prepare.read_text

    def refuse(path):
        if isinstance(path, Path | str) and Path(path).name.startswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))

    # A test as root could read all of it.
    monkeypatch.setattr(os, "scandir", lambda path: refuse(path) or scan(path))
    monkeypatch.setattr(prepare, "read_text", lambda path: refuse(path) or read(path))
    val = write_jsonl(tmp_path / "v.jsonl", [words(9)])
    manifest = run(folder, "--val", val, "--out", tmp_path / "out", *BYTES)
    names = ["a.txt", "linked.txt", "linked/c.txt", "x.txt/deep/b.txt"]
    files = [f"in/{name}" for name in names]
    assert sorted(manifest["source_files"]) == sorted([*files, "v.jsonl"])
    assert sorted(passed_over(capsys)) == [
        "broken links: 1 (in/none.txt)",
        "links to a folder that is searched already: 1 (in/loop)",
        "no regular files: 1 (in/pipe.txt)",
        "not readable: 2 (in/shut, in/shut.txt)",
    ]
    assert sorted(documents(tmp_path / "out", "train")) == encoded(map(words, range(3)))
    refuses("shut.txt: no text in it \\(1 not readable", folder / "shut.txt", "--out", "x", *BYTES)


def test_a_tokenizer_that_changes_the_text_is_said(tmp_path, capsys):
    lines = ["thecat", "sat", "onthe", "matandhat"] * 9
    model = train_model(tmp_path / "spaceless.model", lines=lines, **NO_SPACE)
    texts = [words(i) for i in range(40)]
    out, manifest = prepared(tmp_path, texts, "--tokenizer", model, "--val-frac", 0.3)
    shown = capsys.readouterr().out
    for split in ("train", "val"):
        part = manifest[split]
        assert part["decoded_bytes"] == sum(map(len, documents(out, split))) > part["source_bytes"]
        sizes = f"{part['source_bytes']:,} bytes become {part['decoded_bytes']:,}; scores divide"
        assert f"warning: the tokenizer changes the text of {split}: {sizes}" in shown
        assert f"{part['source_bytes']:,} bytes, " in shown
    val = [text for text in texts if sha256(text.encode()) < bytes([77] * 32)]
    size = len(lzma.compress("".join(val).encode(), preset=9))
    assert manifest["yardsticks"]["xz_bpb"] * manifest["val"]["source_bytes"] / 8 > size


TINY = [
    ("hello world", "--val-frac 0.546 or --val"),
    ("hello", "give --val"),
    ("one line of text\n", "--val-frac 0.353 or --val"),
    ("first\nsecond line is longer than the first one is", "--val-frac 0.062 or --val"),
]


@pytest.mark.parametrize(("text", "hint"), TINY)
def test_a_tiny_text_is_refused_with_a_value_that_works(tmp_path, text, hint):
    (tmp_path / "tiny.txt").write_text(text)
    request = (tmp_path / "tiny.txt", "--out", tmp_path / "out", *BYTES)
    refuses(
        f"whose end of . bytes for validation has no line or word of its own; (give )?{hint}$",
        *request,
    )
    both = (
        f"{hint}; so short a text also needs --tokenizer bytes, as --vocab-size 1024 is too large$"
    )
    refuses(both, *request[:3])
    share = re.findall(r"--val-frac (\S+)", hint)
    if share:
        run(*request, "--val-frac", *share)
        train, val = (documents(tmp_path / "out", split)[0] for split in ("train", "val"))
        assert train + val == text.encode() and len(val.split()) == 1


def test_few_documents_are_refused_with_values_that_work(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [words(i, 25) for i in range(5, 10)])
    request = (source, "--out", tmp_path / "out")
    message = "^no validation document among 5 documents .*; must be (.*), or give --val$"
    line = refuses(message, *request)
    options = re.match(message, line)[1].split()
    line = refuses("^--vocab-size 1024: must be at most", *request, *options)
    size = re.search(r"most (\d+)", line)[1]
    manifest = run(*request, *options, "--vocab-size", size)
    assert (manifest["val"]["documents"], manifest["train"]["documents"]) == (1, 4)
    request = (source, "--out", tmp_path / "b", *options)
    line = refuses("^--vocab-size 9: must be at least", *request, "--vocab-size", 9)
    size = re.search(r"least (\d+)", line)[1]
    assert run(*request, "--vocab-size", size)["tokenizer"]["vocab_size"] == int(size)


OPTIONS = [
    ("--val-frac 1.5", "--val-frac 1.5: expected a number between 0 and 1"),
    ("--val-max-bytes -1", "--val-max-bytes -1: expected 0 or more"),
    ("--name a_b", "--name a_b: expected"),
    ("--vocab-size 0", "--vocab-size 0: expected 1 or more"),
    ("--val a.jsonl --val-max-bytes 5", "--val-max-bytes 5: expected 0 or more, and no --val"),
    ("--tokenizer no.model", "tokenizer .*no.model: .*No such file"),
    ("--val-frac 1e-9 --name x", "no validation document among 3 documents"),
    (
        "--val a.jsonl --tokenizer bytes",
        r"left of 6 \(3 exact, 0 near duplicates, 0 empty\); give more text$",
    ),
    ("--val empty.jsonl --tokenizer bytes", r"^--val: no text in its documents \(2 empty\); give "),
    ("--out a.jsonl/out --tokenizer bytes", "cannot be written"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_option_errors(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    source = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(3)])
    write_jsonl(tmp_path / "empty.jsonl", ["", " "])
    refuses(message, source, "--out", "out", *options.split())


def test_command_line_prints_one_line_and_exits_2(tmp_path):
    done = start([SCRIPT, tmp_path / "none.jsonl"], environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: source {tmp_path / 'none.jsonl'}: no such file or folder\n"


def test_standard_library_is_chosen_by_size(tmp_path, monkeypatch, capsys):
    for name, size in (
        ("a.py", 700_000),
        ("pkg/b.py", 400_000),
        ("test/c.py", 500_000),
        ("test/d.py", 9_000_000),
        ("test/e.py", 10),
        ("site-packages/e.py", 10),
        ("__pycache__/f.py", 10),
        ("notes.txt", 10),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "latin.py").write_bytes(b"caf\xe9")
    monkeypatch.setattr(prepare.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    sources = prepare.find_stdlib()
    # The tests follow the rest, until there is enough text.
    names = ["a.py", "pkg/b.py", "test/c.py", "test/d.py"]
    assert list(sources.items()) == [(tmp_path / name, f"stdlib/{name}") for name in names]
    assert "4 files, 10,600,000 bytes" in capsys.readouterr().out
    (tmp_path / "a.py").write_bytes(b"x" * 8_000_000)
    assert list(prepare.find_stdlib()) == [tmp_path / "a.py", tmp_path / "pkg/b.py"]
    for path in sources:
        path.unlink()
    message = "only 10 bytes of .py files; name a SOURCE"
    refusal(prepare.UserError, message, prepare.find_stdlib)


BYTE_TOKENIZER = prepare.load_tokenizer("bytes")


def slow_count_nats(train, val, vocab_size):
    """Witten-Bell (method C) with dictionaries: nats of val[1:] under the unigram, bigram and
    trigram model.
    """
    followers = defaultdict(Counter)
    for i in range(1, len(train)):
        before = (train[i - 2] if i > 1 else None, train[i - 1])
        for history in ((), before[1:], before):
            followers[history][train[i]] += 1

    def p(token, history):
        if history is None:
            return 1 / vocab_size
        lower = p(token, history[1:] if history else None)
        counts = followers.get(history)
        if counts is None:
            return lower
        return (counts[token] + len(counts) * lower) / (counts.total() + len(counts))

    nats = [0.0, 0.0, 0.0]
    for i in range(1, len(val)):
        before = (val[i - 2] if i > 1 else None, val[i - 1])
        for order, history in enumerate(((), before[1:], before)):
            nats[order] -= math.log(p(val[i], history))
    return nats


def test_yardsticks_are_those_of_the_text(tmp_path):
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    vocabulary += ["größer", "日本", "🙂"]
    texts = [" ".join(rng.choices(vocabulary, k=50)) for _ in range(30)]
    train, val = (tokenized(BYTE_TOKENIZER, half) for half in (texts[:24], texts[24:]))
    streams = []
    for name, tokens in (("train", train), ("val", val)):
        prepare.write_shard(tmp_path / name, np.array(tokens))
        streams.append(prepare.TokenStream([tmp_path / name], 1 << 16))
    found = prepare.yardsticks(*streams, BYTE_TOKENIZER, len("".join(texts[24:]).encode()))
    text = "".join(texts[24:]).encode()
    _, bigram, trigram = slow_count_nats(train, val, BYTE_TOKENIZER.vocab_size)
    sizes = {
        "bigram_bpb": bigram / math.log(2),
        "trigram_bpb": trigram / math.log(2),
        "zstd22_bpb": 8 * len(zstandard.ZstdCompressor(level=22).compress(text)),
        "xz_bpb": 8 * len(lzma.compress(text, preset=9)),
    }
    expected = {name: size / len(text) for name, size in sizes.items()}
    assert found == pytest.approx(expected, rel=1e-12)
    assert 1.0 < found["trigram_bpb"] < found["bigram_bpb"] < 5.0
