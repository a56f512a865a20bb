"""data/prepare.py: splits, duplicates, tokenizers, shards, manifests, restarts, errors."""

import gzip
import hashlib
import json
import lzma
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import zstandard
from faults import limit
from test_data import HARD_TEXTS, NO_SPACE, fake_encoding, tokenized, train_model

from conftest import ROOT, load_script, load_tool, read_json, refusal, write_json

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
    manifest = read_json(folder / "manifest.json")
    tokenizer = prepare.load_tokenizer(folder / manifest["tokenizer"]["file"])
    shards = [prepare.read_shard(folder / shard["file"]) for shard in manifest[split]["shards"]]
    tokens = np.concatenate(shards).astype(np.int64)
    starts = np.flatnonzero(tokens == tokenizer.bos_id)
    assert starts[0] == 0
    return [prepare.decode_bytes(tokenizer, part[1:]) for part in np.split(tokens, starts[1:])]


def all_documents(folder):
    return sorted(documents(folder, "train") + documents(folder, "val"))


def shard_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def run(*arguments):
    """prepare.py in this process with one worker; the manifest it wrote."""
    prepare.run([*map(str, arguments), "--workers", "1"])
    return read_json(Path(arguments[arguments.index("--out") + 1]) / "manifest.json")


def refuses(message, *arguments):
    return refusal(
        prepare.UserError, message, prepare.run, [*map(str, arguments), "--workers", "1"]
    )


def prepared(folder, texts, *options):
    """Return the folder and the manifest of prepared texts."""
    source = write_jsonl(folder / "a.jsonl", texts)
    return folder / "out", run(source, "--out", folder / "out", *options)


BYTES = ("--tokenizer", "bytes")


def encoded(texts):
    return sorted(text.encode() for text in texts)


def test_own_tokenizer_gives_every_document_back(tmp_path):
    texts = [words(i) for i in range(40)] + HARD_TEXTS
    lossy = ["a document with \u2581 in it " + words(99), "lone surrogate \ud800 " + words(98)]
    given = [*texts, *lossy, "", " \n ", texts[0]]
    out, manifest = prepared(tmp_path, given, "--vocab-size", 400, "--val-frac", 0.3)
    whole = list(filter(str.strip, texts))
    assert all_documents(out) == encoded(whole)
    for split in ("train", "val"):
        size = sum(map(len, documents(out, split)))
        assert manifest[split]["source_bytes"] == manifest[split]["decoded_bytes"] == size
    counts = dict(exact_duplicates=1, near_duplicates=0, not_lossless=2)
    counts["empty"] = len(texts) - len(whole) + 2
    tokenizer = prepare.load_tokenizer(out / "tokenizer.model")
    about = dict(file="tokenizer.model", sha256=tokenizer.sha256, vocab_size=400, bos_id=1)
    about["token_bytes_sha256"] = prepare.sha256_file(out / "token_bytes.bin")
    facts = dict(dropped=counts, lossless=True, published=False, overlap_documents=0, seed=0)
    facts |= dict(source_files=["a.jsonl"], name="text", tokenizer=about)
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


def test_few_documents_are_refused_with_a_limit_that_works(tmp_path):
    """One document is within it, and the rest trains."""
    texts = [words(i, 25) for i in range(5, 10)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    request = (source, "--out", tmp_path / "out", *BYTES)
    message = "^no validation document among 5 documents .*; must be (.*), or give --val$"
    options = re.match(message, refuses(message, *request))[1].split()
    assert options[2] == "--val-max-bytes"
    manifest = run(*request, "--val-frac", 0.9, *options[2:])
    assert 0 < manifest["val"]["source_bytes"] <= int(options[3])
    assert all_documents(tmp_path / "out") == encoded(texts)


def test_a_vocabulary_above_65536_is_written_as_uint32(tmp_path, monkeypatch):
    ranks = fake_encoding(monkeypatch, prepare, tmp_path, end_of_text=70000)
    texts = [words(i, 20) for i in range(30)] + HARD_TEXTS
    options = ("--val-frac", 0.3, "--tokenizer")
    out, manifest = prepared(tmp_path, texts, *options, ranks)
    assert manifest["lossless"] and manifest["tokenizer"]["file"] == ranks.name
    head = np.fromfile(out / "text_val_000000.bin", "<i4", 3)
    assert head.tolist() == [20240801, 7, manifest["val"]["tokens"]]
    assert all_documents(out) == encoded(filter(str.strip, texts))
    prepared(tmp_path, texts, *options, out / ranks.name)  # the same request


def grams(text):
    """The distinct 8-grams of a text."""
    parts = text.split()
    return {tuple(parts[i : i + 8]) for i in range(max(1, len(parts) - 7))}


def test_near_duplicates_with_given_validation(tmp_path):
    """A document goes if it has more than half of a validation document, or is more than half of it."""
    val = [words(i) for i in range(10)]
    parts = [text.split() for text in val]

    def mixed(number, begin, end, seed, count):
        return " ".join(parts[number][begin:end]) + " " + words(seed, count)

    # Each half of val[9], in documents that are mostly other text; both would hold all of it.
    halves = [mixed(9, 0, 60, 300, 300), mixed(9, 58, 120, 301, 300)]
    third = mixed(2, 0, 48, 304, 72)
    near = [mixed(0, 0, 96, 305, 24), val[1].replace(" ", "\n").upper(), mixed(3, 0, 120, 302, 200)]
    near.append(mixed(5, 20, 60, 303, 18))  # 33 of its 51, only 33 of val[5]'s 113
    # Of the 113, what is between other words has 7 times 9 (runs of 16 words), or 8 (of 15).
    near.append(" ".join("x" * (i % 17 == 0) or word for i, word in enumerate(parts[6])))
    less = " ".join("x" * (i % 16 == 0) or word for i, word in enumerate(parts[7]))
    plain = [words(i) for i in range(100, 130)]
    train = write_jsonl(tmp_path / "t.jsonl", [*plain, *near, third, less, *halves, val[4]])
    out = tmp_path / "out"
    manifest = run(train, "--val", write_jsonl(tmp_path / "v.jsonl", val), "--out", out, *BYTES)
    rest = documents(out, "train")
    assert sorted(documents(out, "val")) == encoded(val)
    left = set(rest) - set(encoded([*plain, third, less]))
    assert len(left) == 1 and left < set(encoded(halves)) and len(rest) == 33
    dropped = manifest["dropped"]
    assert (dropped["exact_duplicates"], dropped["near_duplicates"]) == (1, 6)
    every = set().union(*map(grams, rest))
    for own in map(grams, documents(out, "val")):
        assert len(own & every) <= len(own) / 2


# Few buckets and small shards, so that a little text crosses their borders.
SMALL = (
    "import sys; sys.path.insert(0, {folder!r}); import prepare; "
    "prepare.BUCKETS = 7; prepare.SHARD_TOKENS = 50_000; prepare.main()"
)


def test_workers_and_buckets_do_not_change_a_byte(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", [words(i, 300) for i in range(400)])
    code = SMALL.format(folder=str(SCRIPT.parent))
    for workers in ("1", "2"):
        command = [sys.executable, "-c", code, source, "--out", tmp_path / workers]
        command += ["--vocab-size", "400", "--workers", workers]
        subprocess.run(command, check=True, capture_output=True)
    expected = shard_bytes(tmp_path / "1")
    assert shard_bytes(tmp_path / "2") == expected and "text_train_000003.bin" in expected
    monkeypatch.setattr(prepare, "LARGE_BYTES", 1)
    run(source, "--out", tmp_path / "b", "--vocab-size", 400)  # in one shard, by 256 buckets
    whole = (tmp_path / "b" / "text_train_000000.bin").read_bytes()[1024:]
    names = [name for name in sorted(expected) if "_train_" in name]
    assert whole == b"".join(expected[name][1024:] for name in names)


def test_a_refusal_leaves_nothing(tmp_path, monkeypatch):
    source, out = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)]), tmp_path / "out"
    request = (source, "--out", out, "--val-frac", 0.3)
    refuses("^--vocab-size 60000: ", *request, "--vocab-size", 60000)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "count_overlap", lambda *streams: 2)
        refuses("2 validation documents", *request, "--vocab-size", 400)
    assert not out.exists()
    (out / ".work" / "result").mkdir(parents=True)  # as a killed run leaves it
    (out / ".work" / "result" / "text_train_000000.bin").touch()
    (out / "notes.txt").write_text("mine")
    refuses("--vocab-size 60000", *request, "--vocab-size", 60000)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    assert run(*request, "--vocab-size", 400)["tokenizer"]["vocab_size"] == 400


def test_a_single_document_is_split_by_its_tail(tmp_path):
    """It begins with the first line that lies within the last tenth; or with a word."""
    text = "".join(words(i, 10) + "\n" for i in range(100))
    for options, end in ((("--val-frac", 0.1), "\n"), (("--val-max-bytes", 50), " ")):
        (tmp_path / "input.txt").write_text(text.replace("\n", end))
        out = tmp_path / f"out{len(end + options[0])}"
        manifest = run(tmp_path / "input.txt", "--out", out, *BYTES, *options)
        (train,), (val,) = (documents(out, split) for split in ("train", "val"))
        assert train + val == text.replace("\n", end).encode()
        border = len(text) - (50 if end == " " else int(0.1 * len(text)))
        assert len(train) == text.replace("\n", end).index(end, border) + 1
        assert (manifest["split"], manifest["val"]["source_bytes"]) == ("tail", len(val))
        assert not any(manifest["dropped"].values()) and manifest["overlap_documents"] == 0


MARK = "<|endoftext|>"


def test_a_txt_is_split_at_its_separators(tmp_path, monkeypatch, capsys):
    """The shards are those of a .jsonl with these documents, wherever a read ends."""
    monkeypatch.setattr(prepare, "READ_BYTES", 13)
    monkeypatch.setattr(prepare, "DOCUMENT_BYTES", 2000)  # less than a file has
    texts = [*(words(i, 20) for i in range(60)), f"two\n\nparts, größer than {MARK} is "]
    options = (*BYTES, "--val-frac", 0.3, "--out")
    wanted = run(write_jsonl(tmp_path / "a.jsonl", texts), *options, tmp_path / "out")
    files = {
        "a.txt": f"\n{MARK}\n".join(texts) + f"\n{MARK}\n",
        "b.TXT": "\ufeff" + "".join(f"<|startoftext|>{text}{MARK}\r\n" for text in texts),
        "c.txt.gz": f"{MARK} \n{MARK}" + f"\n{MARK}".join([*texts, texts[3]]),
    }
    for name, content in files.items():
        raw = content.encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
        capsys.readouterr()
        manifest = run(tmp_path / name, *options, tmp_path / f"{name} out")
        assert (manifest["train"], manifest["val"]) == (wanted["train"], wanted["val"])
        count = len(texts) + (name == "c.txt.gz")
        printed = capsys.readouterr().out
        text = (
            f"1 .txt files, the first is {name}, {count} documents; where it is text, write .jsonl"
        )
        assert f"split at {MARK}: {text}\n" in printed
        assert f"warning: {MARK} stays text in 1 documents; " in printed
        assert manifest["dropped"]["exact_duplicates"] == count - len(texts)
        assert "split" not in manifest
    assert all_documents(tmp_path / "out") == encoded(texts)
    del manifest["request"]["separator"]  # as if it were of a version that did not split
    write_json(tmp_path / "c.txt.gz out" / "manifest.json", manifest)
    refuses("data of another request", tmp_path / "c.txt.gz", *options, tmp_path / "c.txt.gz out")


def test_a_document_may_take_all_the_memory():
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert prepare.DOCUMENT_BYTES == memory // 70


def test_only_txt_is_read_to_look_for_separators(tmp_path, monkeypatch):
    names = "a.md", "b.py", "c", "d.jsonl", "e.txt"
    read = []
    monkeypatch.setattr(prepare, "split_text", lambda path: read.append(path.name) or iter("12"))
    assert [name for name in names if prepare.is_separated(tmp_path / name)] == ["e.txt"]
    assert read == ["e.txt"]


def test_marks_around_the_only_document(tmp_path):
    """A byte-order mark is no text, nor is a separator, but in files of other kinds."""
    text = "\n".join(words(i, 10) for i in range(30))
    for name, content, whole in (
        ("a.txt", "\ufeff" + text, text),
        ("b.txt", f"{text}\n{MARK}\n", text),
        ("c.md", text + MARK, text + MARK),
        ("d.raw", text + MARK, text + MARK),  # as WikiText's, which is named itself
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        out = tmp_path / f"{name} out"
        assert run(tmp_path / name, "--out", out, *BYTES)["split"] == "tail"
        assert b"".join(documents(out, "train") + documents(out, "val")) == whole.encode()


def passed_over(capsys):
    """The lines on what was passed over."""
    lines = capsys.readouterr().out.splitlines()
    start = "passed over, "
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def test_folders_take_text_and_name_what_they_skip(tmp_path, capsys):
    folder = tmp_path / "in"
    names = ["LICENSE", "a.txt", "b.md", "deep/c.py"]
    others = [".git/HEAD", "deep/.hidden", *(f"{i:02d}.png" for i in range(30))]
    for number, name in enumerate([*names, *others]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(words(number))
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    request = (folder, *BYTES, "--val", write_jsonl(tmp_path / "v.jsonl", [words(99)]), "--out")
    manifest = run(*request, tmp_path / "out")
    assert sorted(documents(tmp_path / "out", "train")) == encoded(map(words, range(4)))
    assert manifest["source_files"] == [*(f"in/{name}" for name in names), "v.jsonl"]
    pictures = ", ".join(f"in/{name}" for name in others[2:22]) + ", …"
    assert passed_over(capsys) == [
        "hidden: 2 (in/.git, in/deep/.hidden)",
        f"of another kind: 30 ({pictures})",
        f"{prepare.NOT_UTF8}: 1 (in/latin.txt)",
    ]
    manifest = run(*request, tmp_path / "only", "--only", ".md", ".py")
    assert manifest["source_files"] == ["in/b.md", "in/deep/c.py", "v.jsonl"]


def test_finished_and_foreign_folders(tmp_path, capsys):
    source, out = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)]), tmp_path / "out"
    request = (source, "--out", out, *BYTES, "--val-frac", 0.3)
    run(*request)
    expected = shard_bytes(out)
    run(*request)
    assert "nothing to do" in capsys.readouterr().out
    # As an older version left it: the same command and the option both write what is missing.
    for again in ((*request, "--workers", 1), ("--token-bytes", out)):
        manifest = json.loads(expected["manifest.json"])
        del manifest["tokenizer"]["token_bytes_sha256"]
        write_json(out / "manifest.json", manifest)
        (out / "token_bytes.bin").unlink()
        prepare.run([*map(str, again)])
        assert shard_bytes(out) == expected
    refuses("holds data of another request", *request, "--seed", 1)
    write_jsonl(source, [words(1)])
    refuses("holds data of another request", *request)


def test_a_full_disk_leaves_the_tokenizer_whole(tmp_path):
    out, _ = prepared(tmp_path, [*map(words, range(40))], "--vocab-size", 400, "--val-frac", 0.3)
    whole = (out / "tokenizer.model").read_bytes()
    limit(1000)
    try:
        refusal(prepare.UserError, "out: cannot be", prepare.run, ["--token-bytes", str(out)])
    finally:
        limit(-1)
    assert (out / "tokenizer.model").read_bytes() == whole


GOOD = (json.dumps({"text": words(0)}) + "\n").encode()
PACKED = zstandard.ZstdCompressor().compress(GOOD * 99)
SOURCES = [
    ("a.csv", b"a,b", "a.csv: .*1 of another kind.*; pandas.read_csv"),
    ("a.Tar.gz", b"", "tar xf"),
    ("a.json", b"[\n{}]", "a.json: .*; of a list pandas.read_json"),
    ("train.bin", b"", "train.bin: .*data/download.py --manifest"),
    ("a.pdf", b"%PDF", "a.pdf: .*pdftotext"),
    ("a.parquet", b"PAR1", "a.parquet: (Parquet needs pyarrow: pip|damaged Parquet)"),
    ("a.txt", "\u20ac".encode("utf-16"), "a.txt: .*1 UTF-16 .iconv -f UTF-16"),
    ("a.jsonl", b"", "no text in 0 documents"),
    ("a.jsonl", GOOD, "give --val, or the only document as .txt"),
    ("b.jsonl", GOOD + b"{oops\n", "b.jsonl, line 2"),
    ("c.jsonl", b'{"id": "1", "body": "ab"}\n', "c.jsonl line 1: .* --field body or --field id$"),
    ("d.jsonl", b"[" * 99999, "d.jsonl, line 1"),
    ("d.jsonl", b"[1]\n", "d.jsonl, line 1"),
    ("e.jsonl", b'{"text": "\xff"}\n', "e.jsonl, line 1"),
    ("f.txt", b"abc\xffdef", "f.txt: .*UTF-8"),
    ("g.jsonl.zst", b"this is no zstd", "g.jsonl.zst: damaged"),
    ("g.jsonl.zst", PACKED[:-9], "g.jsonl.zst: damaged"),
    ("h.jsonl.zst", PACKED[:8] + b"\x00\xff" + PACKED[10:], "h.jsonl.zst: damaged"),
    ("g.jsonl.gz", gzip.compress(GOOD)[:-9], "g.jsonl.gz: damaged"),
    ("g.txt.GZ", b"no gzip", "g.txt.GZ: damaged"),
    ("g.txt.gz", gzip.compress(bytes(10**6)), "g.txt.gz: unpacks to over 200 times its size"),
    ("g.jsonl.zst", zstandard.compress(bytes(10**8)), "zst: unpacks to over 200 times its size"),
    ("i.txt", b"word " * 40_001, "i.txt: .* over 200,000 bytes, .* 0.014 GB of this .* be .jsonl"),
    (
        "i.txt",
        b"word " * 40_001 + b"\n<|endoftext|>\nword",
        "i.txt: a document of over 200,000 bytes",
    ),
    ("j", b"\xff" * 200_001, "j: .*1 not UTF-8"),
]


def test_source_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "UNPACKED_BYTES", 1000)
    monkeypatch.setattr(prepare, "MEMORY", 200_000 * prepare.MEMORY_PER_BYTE)
    monkeypatch.setattr(prepare, "DOCUMENT_BYTES", 200_000)
    for name, content, message in SOURCES:
        (tmp_path / name).write_bytes(content)
        refuses(message, tmp_path / name, "--out", tmp_path / "out", *BYTES)


def test_rows_without_a_text_are_counted_and_named(tmp_path, capsys):
    """One file of another field does not stop a folder."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [*map(words, range(40)), None, *range(29), words(50)])
    (folder / "c.jsonl").write_text("\ufeff" + json.dumps({"content": words(60)}), encoding="utf-8")
    manifest = run(folder, "--out", tmp_path / "out", *BYTES, "--val-frac", 0.3)
    names = ", ".join(f"in/a.jsonl line {i}" for i in range(41, 61))
    assert passed_over(capsys) == [f"rows with no text in `text`: 31 ({names}, …)"]
    assert manifest["dropped"]["no_text"] == 31 and manifest["dropped"]["exact_duplicates"] == 0
    assert all_documents(tmp_path / "out") == encoded([*map(words, range(40)), words(50)])


def test_another_field_and_compressions(tmp_path, capsys):
    texts = [words(i) for i in range(40)]
    lines = "".join(json.dumps({"content": text}) + "\n" for text in texts).encode()
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in {
        "a.JSONL": b"\xef\xbb\xbf" + lines,  # as Windows writes it
        "b.jsonl.gz": gzip.compress(lines) * 2,  # two members
        "c.Jsonl.ZST": zstandard.compress(lines) * 2,
        "d.TXT.gz": gzip.compress(words(50).encode()),
        "LICENSE.zst": zstandard.compress(words(51).encode()),
        "line ends.txt": b"line\r\nends are kept\r",
    }.items():
        (folder / name).write_bytes(content)
    options = ("--val-frac", 0.3, *BYTES, "--field", "content")
    manifest = run(folder, "--out", tmp_path / "out", *options)
    assert manifest["dropped"]["exact_duplicates"] == 4 * 40 and passed_over(capsys) == []
    plain = [words(50), words(51), "line\r\nends are kept\r"]
    assert all_documents(tmp_path / "out") == encoded([*texts, *plain])
    assert len(manifest["source_files"]) == 6
    only = run(folder, "--out", tmp_path / "only", *options, "--only", ".jsonl")
    assert len(only["source_files"]) == 3
    refuses("^--field content: ", folder / "d.TXT.gz", "--out", tmp_path / "no", *options)


def test_rows_by_other_names(tmp_path, capsys):
    """As C4, wikiextractor and a cache of the Hugging Face hub name them."""
    lines = write_jsonl(tmp_path / "lines", [*map(words, range(40))]).read_bytes()
    pointer = prepare.LFS + b"v1\noid sha256:0\n"
    for name, content in {
        "c4.json.gz": gzip.compress(lines),
        "hub/blobs/0f": lines,
        "hub/refs/main": b"0f",
        "hub/snapshots/0f/a.ndjson": lines,
        "pointer.jsonl": pointer,
        "pretty.json": b'{\n"text": "x"}',
        "wiki_00": lines,
    }.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    manifest = run(tmp_path / "in", "--out", tmp_path / "out", *BYTES, "--val-frac", 0.3)
    assert manifest["dropped"]["exact_duplicates"] == 2 * 40
    assert all_documents(tmp_path / "out") == encoded(map(words, range(40)))
    printed = capsys.readouterr().out
    assert "reading the sources: 1 .json, 1 .ndjson, 1 without ending\n" in printed
    for reason, names in {
        "of a cache, whose snapshots are read": "in/hub/blobs, in/hub/refs",
        prepare.LFS_POINTER: "in/pointer.jsonl",
        "of another kind": "in/pretty.json",
    }.items():
        assert re.search(f"^passed over, {re.escape(reason)}: \\d \\({names}\\)$", printed, re.M)


def test_rows_of_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    texts = [*map(words, range(205)), None]
    rows = [{"path": "a/b.py", "content": text, "stars": 1} for text in texts]
    path = tmp_path / "a.parquet"
    pq.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=150)
    request = (path, "--out", tmp_path / "out", *BYTES)
    refuses("all 206 rows; must be --field content or --field path$", *request)
    manifest = run(*request, "--field", "content")
    assert all_documents(tmp_path / "out") == encoded(texts[:-1])
    assert manifest["dropped"]["no_text"] == 1


def test_published_validation_is_named(capsys):
    prepare.print_held_out(["pg19/train/1.txt", "pg19/validation/2.txt", "pg19/test/3.txt"])
    start = (
        "warning: 2 sources are named as validation or test, the first is pg19/validation/2.txt; "
    )
    assert capsys.readouterr().out.startswith(start)
    prepare.print_held_out(["a/train.py", "a/tests/test_train.py", "a/interval.md"])
    assert not capsys.readouterr().out


def test_links_are_followed_and_what_cannot_be_read_is_named(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "in"
    for number, name in enumerate(["in/a.txt", "in/x.txt/deep/b.txt", "elsewhere/c.txt"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)  # a folder's name is no kind
        (tmp_path / name).write_text(words(number))
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "linked.txt").symlink_to(tmp_path / "elsewhere" / "c.txt")
    (folder / "loop").symlink_to(folder)
    (folder / "none.txt").symlink_to(tmp_path / "none")
    for name in ("shut.txt", "shut.jsonl"):
        (folder / name).write_text("x")
    os.mkfifo(folder / "pipe.txt")

    def refuse(path, *words):  # a test as root could read it
        if "shut" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return open(path, *words)

    monkeypatch.setattr(prepare, "open", refuse, raising=False)
    val = write_jsonl(tmp_path / "v.jsonl", [words(9)])
    manifest = run(folder, "--val", val, "--out", tmp_path / "out", *BYTES)
    names = ["in/a.txt", "in/linked.txt", "in/linked/c.txt", "in/x.txt/deep/b.txt", "v.jsonl"]
    assert sorted(manifest["source_files"]) == names
    assert sorted(passed_over(capsys)) == [
        "broken links: 1 (in/none.txt)",
        "links to a folder that is searched already: 1 (in/loop)",
        "no regular files: 1 (in/pipe.txt)",
        "not readable: 2 (in/shut.jsonl, in/shut.txt)",
    ]
    assert sorted(documents(tmp_path / "out", "train")) == encoded(map(words, range(3)))


def test_a_tokenizer_that_changes_the_text_is_said(tmp_path, capsys):
    lines = ["thecat", "sat", "onthe", "matandhat"] * 9
    model = train_model(tmp_path / "spaceless.model", lines=lines, **NO_SPACE)
    texts = [words(i) for i in range(40)]
    out, manifest = prepared(tmp_path, texts, "--tokenizer", model, "--val-frac", 0.3)
    shown = capsys.readouterr().out
    for split in ("train", "val"):
        source, decoded = (manifest[split][f"{kind}_bytes"] for kind in ("source", "decoded"))
        assert decoded == sum(map(len, documents(out, split))) > source
        assert f"changes the text of {split}: {source:,} bytes become {decoded:,}" in shown


# ------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("hello world", 0.546),
        ("one line of text\n", 0.353),
        ("first\nsecond line is longer than the first one is", 0.062),
    ],
)
def test_a_tiny_text_is_refused_with_a_value_that_works(tmp_path, text, share):
    (tmp_path / "tiny.txt").write_text(text)
    request = (tmp_path / "tiny.txt", "--out", tmp_path / "out")
    hint = f"--val-frac {share} or --val"
    refuses(f"{hint}; .* --tokenizer bytes, as --vocab-size 1024", *request)
    refuses(f"{hint}$", *request, *BYTES)
    run(*request, *BYTES, "--val-frac", share)
    (train,), (val,) = (documents(tmp_path / "out", split) for split in ("train", "val"))
    assert train + val == text.encode() and len(val.split()) == 1


OPTIONS = {
    "--val-frac 1.5": "--val-frac 1.5",
    "--val-max-bytes -1": "--val-max-bytes -1",
    "--name a_b": "--name a_b",
    "--vocab-size 0": "--vocab-size 0",
    "--vocab-size 400 --tokenizer bytes": "--vocab-size 400: .*--tokenizer",
    "--val a.jsonl --val-frac 0.1": "--val-frac 0.1: .*--val ",
    "--only .md --tokenizer bytes": "--only .md: expected a folder",
    "--token-bytes old --seed 3": "--token-bytes old: .* out, seed, workers$",
    "--val a.jsonl --val-max-bytes 5": "--val-max-bytes 5: .*--val",
    "--tokenizer no.model": "tokenizer .*no.model",
    "--val-frac 1e-9 --name x": "no validation document among 3 documents",
    "--val a.jsonl --tokenizer bytes": r"left of 6 \(3 exact",
    "--val empty.jsonl --tokenizer bytes": r"^--val: .*\(2 empty\)",
    "--out a.jsonl/out --tokenizer bytes": "cannot be written",
}


def test_option_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(3)])
    write_jsonl(tmp_path / "empty.jsonl", ["", " "])
    for options, message in OPTIONS.items():
        refuses(message, source, "--out", "out", *options.split())
    monkeypatch.setattr(sys, "argv", ["prepare.py", "none.jsonl"])
    with pytest.raises(SystemExit) as ended:
        prepare.main()
    assert ended.value.code == 2
    assert re.fullmatch("error: source none.jsonl: .*\n", capsys.readouterr().err)


def test_ctrl_c_is_one_line_and_leaves_no_folder(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    source = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(3)])
    monkeypatch.setattr(prepare, "select", interrupt)
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(source), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        prepare.main()
    assert ended.value.code == 130 and not (tmp_path / "out").exists()
    assert capsys.readouterr().err == "stopped by SIGINT; the same command does the rest\n"


# The first of many jobs waits, or its process dies.
WORKERS = """
import os, sys, time
sys.path.insert(0, {folder!r})
import prepare

def work(folder, bucket):
    if bucket == prepare.BUCKETS - 1:
        print("the last job")
    if bucket == 0:
        {act}

prepare.match_bucket = work
if __name__ == "__main__":
    prepare.main()
"""


@pytest.mark.parametrize(
    ("act", "code", "line"),
    [
        ("time.sleep(3)", 130, "stopped by SIGINT"),
        ("os.kill(os.getpid(), 9)", 2, "error: --workers 3"),
    ],
)
def test_workers_end_without_a_traceback(tmp_path, act, code, line):
    """After Ctrl-C, which reaches all processes, and where one of them is killed."""
    script = tmp_path / "script.py"
    script.write_text(WORKERS.format(folder=str(SCRIPT.parent), act=act))
    source = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)])
    command = [sys.executable, script, source, "--out", tmp_path / "out", *BYTES, "--workers", "3"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    with subprocess.Popen([*command, "--val-frac", "0.3"], **pipes) as process:
        if code == 130:
            assert "the last job\n" in process.stdout
            time.sleep(0.5)  # until `map`, which is deaf to Ctrl-C, has returned
            os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=90)
    assert process.returncode == code
    assert error.startswith(line) and error.count("\n") == 1, error


def test_a_container_has_fewer_cores_than_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    assert prepare.container_limit("memory.max") == [] and prepare.available_cores() == 8
    for text, cores in {"max 100000\n": 8, "350000 100000\n": 3, "5 10\n": 1, "90 10\n": 8}.items():
        (tmp_path / "cpu.max").write_text(text)
        assert prepare.available_cores() == cores
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert prepare.available_cores() == 4 == len(load_tool("common").available_cores())


def test_standard_library_is_chosen_by_size(tmp_path, monkeypatch):
    """Without packages and caches; its tests follow the rest, until there is enough text."""
    sizes = {"a.py": 700_000, "pkg/b.py": 400_000, "test/c.py": 500_000, "test/d.py": 9_000_000}
    sizes |= dict.fromkeys("test/e.py site-packages/e.py __pycache__/f.py notes.txt".split(), 10)
    for name, size in sizes.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "latin.py").write_bytes(b"caf\xe9")
    monkeypatch.setattr(prepare.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    expected = {tmp_path / name: f"stdlib/{name}" for name in list(sizes)[:4]}
    assert prepare.find_stdlib() == expected
    (tmp_path / "a.py").write_bytes(b"x" * 8_000_000)
    assert list(prepare.find_stdlib()) == list(expected)[:2]
    for path in expected:
        path.unlink()
    refusal(prepare.UserError, "only 10 bytes of .py", prepare.find_stdlib)


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
    vocabulary = [*words(0, 40).split(), "größer", "日本", "🙂"]
    rng = random.Random(0)
    texts = [" ".join(rng.choices(vocabulary, k=50)) for _ in range(30)]
    halves = [tokenized(BYTE_TOKENIZER, half) for half in (texts[:24], texts[24:])]
    streams = []
    for number, tokens in enumerate(halves):
        prepare.write_shard(tmp_path / str(number), np.array(tokens))
        streams.append(prepare.TokenStream([tmp_path / str(number)], 1 << 16))
    text = "".join(texts[24:]).encode()
    found = prepare.yardsticks(*streams, BYTE_TOKENIZER, len(text))
    _, bigram, trigram = slow_count_nats(*halves, BYTE_TOKENIZER.vocab_size)
    nats = dict(bigram_bpb=bigram, trigram_bpb=trigram)
    sizes = {name: value / math.log(2) for name, value in nats.items()}
    sizes["zstd22_bpb"] = 8 * len(zstandard.ZstdCompressor(level=22).compress(text))
    sizes["xz_bpb"] = 8 * len(lzma.compress(text, preset=9))
    expected = {name: size / len(text) for name, size in sizes.items()}
    assert found == pytest.approx(expected, rel=1e-12)
    assert 1.0 < found["trigram_bpb"] < found["bigram_bpb"] < 5.0


def test_a_pipe_is_refused(tmp_path):
    """The text is read more than once."""
    os.mkfifo(tmp_path / "pipe")
    command = [str(tmp_path / "pipe"), "--out", str(tmp_path / "out")]
    refusal(prepare.UserError, "must be a file or a folder", prepare.run, command)


def test_the_cores_of_a_container_count(monkeypatch):
    monkeypatch.setattr(prepare.os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert prepare.available_cores() == 2
