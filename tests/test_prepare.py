"""data/prepare.py: splits, duplicates, tokenizers, shards, manifests, restarts, errors."""

import hashlib
import importlib.util
import json
import lzma
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import zstandard
from test_data import HARD_TEXTS, fake_encoding, gpt2_file, needs_shared

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "data" / "prepare.py"

spec = importlib.util.spec_from_file_location("prepare_under_test", SCRIPT)
prepare = sys.modules["prepare_under_test"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare)


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
    with pytest.raises(prepare.UserError, match=message) as caught:
        prepare.run([str(argument) for argument in (*arguments, "--workers", 1)])
    assert "\n" not in str(caught.value)


def test_own_tokenizer_gives_every_document_back(tmp_path):
    texts = [words(i) for i in range(40)] + HARD_TEXTS
    bad = ["a document with \u2581 in it " + words(99), "lone surrogate \ud800 " + words(98)]
    source = write_jsonl(tmp_path / "a.jsonl", texts + bad + ["", " \n "])
    out = tmp_path / "out"
    manifest = run(source, "--out", out, "--vocab-size", 400, "--val-frac", 0.3)
    wanted = {text.encode() for text in texts if text.strip()}
    train, val = documents(out, "train"), documents(out, "val")
    assert len(train) + len(val) == len(wanted) and set(train) | set(val) == wanted
    for split, found in (("train", train), ("val", val)):
        part = manifest[split]
        assert part["documents"] == len(found)
        assert part["source_bytes"] == part["decoded_bytes"] == sum(map(len, found))
    # The two blank HARD_TEXTS count as empty, beside the two given here.
    blank = sum(not text.strip() for text in HARD_TEXTS)
    assert manifest["dropped"] == {
        "exact_duplicates": 0,
        "near_duplicates": 0,
        "not_lossless": 2,
        "empty": 2 + blank,
    }
    assert manifest["lossless"] and not manifest["published"] and manifest["overlap_documents"] == 0
    assert (
        manifest["source_files"] == ["a.jsonl"]
        and manifest["name"] == "text"
        and manifest["seed"] == 0
    )
    assert "sources" not in manifest and "document_sources" not in manifest["val"]
    assert not (out / ".work").exists()
    tokenizer = prepare.load_tokenizer(out / "tokenizer.model")
    assert manifest["tokenizer"] == {
        "file": "tokenizer.model",
        "sha256": tokenizer.sha256,
        "vocab_size": 400,
        "bos_id": 1,
    }
    assert tokenizer.roles == {role: 4 + i for i, role in enumerate(prepare.ROLE_TOKENS)}
    assert not tokenizer.drops_space.any() and b"\n" in tokenizer.pieces
    prepare.check_dataset(out, tokenizer, manifest)
    manifest["val"]["tokens"] -= 1
    with pytest.raises(prepare.UserError, match="another number of tokens than the shards of val"):
        prepare.check_dataset(out, tokenizer, manifest)


def test_split_by_hash_and_seeded_order(tmp_path):
    texts = [words(i, 20) for i in range(300)]
    source = write_jsonl(tmp_path / "a.jsonl.zst", texts)
    orders = []
    for seed in (0, 1):
        out = tmp_path / str(seed)
        run(source, "--out", out, "--tokenizer", "bytes", "--val-frac", 0.2, "--seed", seed)
        for split in ("train", "val"):
            # Side and order written out once more from their definition.
            def key(text, seed=seed):
                return hashlib.sha256(
                    f"{seed}:".encode() + hashlib.sha256(text.encode()).digest()
                ).digest()

            side = [
                t
                for t in texts
                if (hashlib.sha256(t.encode()).digest() < bytes([51] * 32)) == (split == "val")
            ]
            assert documents(out, split) == [text.encode() for text in sorted(side, key=key)]
        orders.append(documents(out, "train"))
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert 40 <= 300 - len(orders[0]) <= 80


def test_val_limit_returns_the_rest_to_training(tmp_path):
    texts = [words(i, 50) for i in range(60)]
    out = tmp_path / "out"
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = run(
        source, "--out", out, "--tokenizer", "bytes", "--val-frac", 0.5, "--val-max-bytes", 1500
    )
    assert 1000 < manifest["val"]["source_bytes"] <= 1500
    assert set(documents(out, "train")) | set(documents(out, "val")) == {
        text.encode() for text in texts
    }


def test_exact_duplicates_are_dropped(tmp_path):
    texts = [words(i) for i in range(30)]
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "a.jsonl", texts + texts[:7])
    (tmp_path / "in" / "deep" / "b.txt").write_bytes(texts[8].encode())
    (tmp_path / "in" / "deep" / "c.txt").write_bytes(b"line\r\nends are kept\r")
    out = tmp_path / "out"
    manifest = run(tmp_path / "in", "--out", out, "--tokenizer", "bytes", "--val-frac", 0.3)
    assert manifest["dropped"]["exact_duplicates"] == 8
    found = documents(out, "train") + documents(out, "val")
    assert sorted(found) == sorted([text.encode() for text in texts] + [b"line\r\nends are kept\r"])
    assert manifest["source_files"] == ["in/a.jsonl", "in/deep/b.txt", "in/deep/c.txt"]


@needs_shared
def test_gpt2_tokens_and_the_folder_is_enough_to_read_them(tmp_path):
    texts = [words(i) for i in range(30)] + HARD_TEXTS
    source, out = write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out"
    manifest = run(source, "--out", out, "--tokenizer", gpt2_file(tmp_path), "--val-frac", 0.3)
    assert manifest["lossless"] and manifest["dropped"]["not_lossless"] == 0
    assert (
        manifest["tokenizer"]["file"] == "gpt2.tiktoken"
        and manifest["tokenizer"]["bos_id"] == 50256
    )
    assert set(documents(out, "train")) | set(documents(out, "val")) == {
        text.encode() for text in texts if text.strip()
    }
    run(
        source, "--out", out, "--tokenizer", out / "gpt2.tiktoken", "--val-frac", 0.3
    )  # the same request


def test_a_vocabulary_above_65536_is_written_as_uint32(tmp_path, monkeypatch):
    ranks = fake_encoding(monkeypatch, prepare, tmp_path, end_of_text=70000)
    texts, out = [words(i, 20) for i in range(30)], tmp_path / "out"
    manifest = run(
        write_jsonl(tmp_path / "a.jsonl", texts),
        "--out",
        out,
        "--val-frac",
        0.3,
        "--tokenizer",
        ranks,
    )
    for split in ("train", "val"):
        path, part = out / f"text_{split}_000000.bin", manifest[split]
        assert np.fromfile(path, "<i4", 3).tolist() == [20240801, 7, part["tokens"]]
        tokens = np.fromfile(path, "<u4", offset=1024)
        assert (tokens == 70000).sum() == part["documents"] and len(tokens) == part["tokens"]
    assert sorted(documents(out, "train") + documents(out, "val")) == sorted(
        text.encode() for text in texts
    )


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
    manifest = run(
        train, "--val", write_jsonl(tmp_path / "v.jsonl", val), "--out", out, "--tokenizer", "bytes"
    )
    kept = documents(out, "train")
    assert sorted(documents(out, "val")) == sorted(text.encode() for text in val)
    for text in near + [val[4]]:
        assert text.encode() not in kept
    for text in plain + third:
        assert text.encode() in kept
    assert (
        sum(text.encode() in kept for text in halves) == 1
    )  # both together would hold all of val[9]
    assert (
        manifest["dropped"]["exact_duplicates"] == 1 and manifest["dropped"]["near_duplicates"] == 5
    )
    assert max(shared_share(text, kept) for text in documents(out, "val")) <= 0.5


def test_near_duplicates_of_a_split(tmp_path):
    base = [words(i) for i in range(60)]
    texts = base + [variant(text, 0.75) for text in base[:40]]
    # Long documents that hold a short one: far from a near duplicate of it, while all of it stands in them.
    texts += [words(400 + i, 300) + " " + text for i, text in enumerate(base[40:])]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    out = tmp_path / "out"
    manifest = run(source, "--out", out, "--tokenizer", "bytes", "--val-frac", 0.4)
    train, val = documents(out, "train"), documents(out, "val")
    dropped = manifest["dropped"]["near_duplicates"]
    assert dropped >= 10 and len(train) + len(val) == 120 - dropped
    assert max(shared_share(text, train) for text in val) <= 0.5
    assert max(shared_share(text, val) for text in train) <= 0.5


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
    return [
        sys.executable,
        "-c",
        SMALL.format(folder=str(SCRIPT.parent)),
        str(source),
        "--out",
        str(out),
        "--vocab-size",
        "400",
        "--workers",
        str(workers),
    ]


def test_workers_do_not_change_a_byte(medium, tmp_path):
    source, expected = medium
    subprocess.run(command(source, tmp_path / "out", 2), check=True, capture_output=True)
    assert shard_bytes(tmp_path / "out") == expected
    assert len(expected) >= 8 and "text_train_000003.bin" in expected
    run(source, "--out", tmp_path / "b", "--vocab-size", 400)  # in one shard, by more buckets
    whole = (tmp_path / "b" / "text_train_000000.bin").read_bytes()[1024:]
    assert whole == b"".join(
        expected[name][1024:] for name in sorted(expected) if "_train_" in name
    )


def test_a_killed_run_is_in_nobodys_way(medium, tmp_path):
    """What it has left is of no use to the next run, whose request may be another, and goes."""
    source, expected = medium
    process = subprocess.Popen(command(source, tmp_path / "out", 1), stdout=subprocess.DEVNULL)
    while (
        process.poll() is None
        and not (tmp_path / "out/.work/result/text_train_000000.bin").exists()
    ):
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".work"], (
        "finished before it could be killed"
    )
    run(
        write_jsonl(tmp_path / "b.jsonl", [words(i) for i in range(40)]),
        "--out",
        tmp_path / "out",
        "--tokenizer",
        "bytes",
        "--val-frac",
        0.3,
    )
    names = ["manifest.json", "text_train_000000.bin", "text_val_000000.bin"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_a_refusal_leaves_nothing(tmp_path, monkeypatch):
    source, out = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)]), tmp_path / "out"
    request = (source, "--out", out, "--val-frac", 0.3)
    refuses("--vocab-size 60000: no such tokenizer from this text", *request, "--vocab-size", 60000)
    assert not out.exists()
    monkeypatch.setattr(prepare, "count_overlap", lambda *streams: 2)
    refuses("2 validation documents stand in training, expected 0", *request, "--vocab-size", 400)
    assert not out.exists()
    monkeypatch.undo()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    refuses("--vocab-size 60000", *request, "--vocab-size", 60000)
    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    assert run(*request, "--vocab-size", 400)["tokenizer"]["vocab_size"] == 400


def test_a_single_document_is_split_by_its_tail(tmp_path, capsys):
    lines = [words(i, 10) + "\n" for i in range(100)]
    text = "".join(lines)
    (tmp_path / "input.txt").write_text(text)
    out = tmp_path / "out"
    manifest = run(tmp_path / "input.txt", "--out", out, "--tokenizer", "bytes", "--val-frac", 0.1)
    train, val = documents(out, "train"), documents(out, "val")
    assert (len(train), len(val)) == (1, 1) and train[0] + val[0] == text.encode()
    # The tail begins with the first line that lies within the last tenth.
    starts = [sum(map(len, lines[:i])) for i in range(100)]
    assert len(train[0]) == min(
        start for start in starts if start > len(text) - int(0.1 * len(text))
    )
    assert manifest["split"] == "tail" and manifest["overlap_documents"] == 0
    assert manifest["val"]["source_bytes"] == len(val[0])
    assert (
        f"one document: its last {len(val[0])} bytes are the validation" in capsys.readouterr().out
    )
    assert manifest["dropped"] == dict.fromkeys(
        ("exact_duplicates", "near_duplicates", "not_lossless", "empty"), 0
    )
    # Of a folder of one file too; a line end that is out of reach leaves a word's beginning.
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one").write_text(words(1, 500))
    manifest = run(
        tmp_path / "in", "--out", tmp_path / "b", "--tokenizer", "bytes", "--val-max-bytes", 50
    )
    (tail,) = documents(tmp_path / "b", "val")
    assert words(1, 500).encode().endswith(b" " + tail) and 40 < len(tail) < 50
    (tmp_path / "solid.txt").write_text("x" * 1000)
    refuses(
        "one document, no line or word begins in its last 50 bytes; give --val",
        tmp_path / "solid.txt",
        "--out",
        tmp_path / "c",
        "--tokenizer",
        "bytes",
    )
    several = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)])
    assert "split" not in run(
        several, "--out", tmp_path / "d", "--tokenizer", "bytes", "--val-frac", 0.3
    )


def test_folders_take_text_and_name_what_they_skip(tmp_path, capsys):
    folder = tmp_path / "in"
    texts = {
        "a.txt": words(1),
        "b.md": "# " + words(2),
        "deep/c.py": words(3),
        "LICENSE": words(4),
        "d.jsonl": "",
    }
    for name, text in {
        **texts,
        ".git/HEAD": words(5),
        "deep/.hidden": words(6),
        "e.rst": words(7),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "binary").write_bytes(b"\xff\x00")
    request = (
        folder,
        "--tokenizer",
        "bytes",
        "--val",
        write_jsonl(tmp_path / "v.jsonl", [words(9)]),
    )
    manifest = run(*request, "--out", tmp_path / "out")
    assert documents(tmp_path / "out", "val") == [words(9).encode()]
    assert sorted(documents(tmp_path / "out", "train")) == sorted(
        text.encode() for text in texts.values() if text
    )
    assert manifest["source_files"] == [
        "in/LICENSE",
        "in/a.txt",
        "in/b.md",
        "in/d.jsonl",
        "in/deep/c.py",
        "v.jsonl",
    ]
    assert capsys.readouterr().out.startswith(
        "skipped 3 files, of another kind or not UTF-8: in/binary, in/e.rst, in/latin.txt\n"
    )
    manifest = run(*request, "--out", tmp_path / "only", "--only", ".md", ".py")
    assert manifest["source_files"] == ["in/b.md", "in/deep/c.py", "v.jsonl"]
    capsys.readouterr()
    for i in range(30):
        (folder / f"{i:02d}.png").touch()
    run(*request, "--out", tmp_path / "many")
    names = ", ".join(f"in/{i:02d}.png" for i in range(20))
    assert capsys.readouterr().out.startswith(
        f"skipped 33 files, of another kind or not UTF-8: {names}, …\n"
    )


def test_finished_and_foreign_folders(tmp_path, capsys):
    source, out = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)]), tmp_path / "out"
    request = (source, "--out", out, "--tokenizer", "bytes", "--val-frac", 0.3)
    run(*request)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    run(*request)
    assert "already holds exactly this data; nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    refuses(
        "holds data of another request .* delete .* or choose another --out", *request, "--seed", 1
    )
    write_jsonl(source, [words(i) for i in range(41)])
    refuses("holds data of another request", *request)


def test_source_errors(tmp_path):
    out = ("--out", tmp_path / "out", "--tokenizer", "bytes")
    refuses("source .*none.txt: no such file or folder", tmp_path / "none.txt", *out)
    (tmp_path / "empty").mkdir()
    refuses(
        r"empty: no text in UTF-8 in it; read are \.jsonl, \.jsonl\.zst, \.txt, \.md, \.py$",
        tmp_path / "empty",
        *out,
    )
    (tmp_path / "a.csv").write_text("a,b")
    refuses(r"source .*a\.csv: no text in UTF-8 in it", tmp_path / "a.csv", *out)
    good = json.dumps({"text": words(0)}) + "\n"
    packed = zstandard.ZstdCompressor().compress(good.encode() * 99)
    cases = (
        ("b.jsonl", good + "{oops\n", r"b\.jsonl, line 2: not JSON"),
        (
            "c.jsonl",
            good + good + '{"body": "x"}\n',
            r"c\.jsonl, line 3: no object with a text in `text`",
        ),
        ("d.jsonl", "[1]\n", r"d\.jsonl, line 1: no object"),
        ("e.jsonl", b'{"text": "\xff"}\n', r"e\.jsonl, line 1: not JSON"),
        ("f.txt", b"abc\xffdef", r"f\.txt: no text in UTF-8"),
        ("g.jsonl.zst", b"this is no zstd", r"g\.jsonl\.zst: damaged zstd data"),
        (
            "h.jsonl.zst",
            packed[:8] + b"\x00\xff\x55" + packed[11:],
            r"h\.jsonl\.zst: damaged zstd data",
        ),
    )
    for i, (name, content, message) in enumerate(cases):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        refuses(message, tmp_path / name, "--out", tmp_path / f"out{i}", "--tokenizer", "bytes")


def test_option_errors(tmp_path):
    source, out = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(3)]), tmp_path / "out"
    refuses("--val-frac 1.5: expected a number between 0 and 1", source, "--val-frac", 1.5)
    refuses("--val-max-bytes -1: expected 0 or more", source, "--val-max-bytes", -1)
    refuses("--name a_b: expected", source, "--name", "a_b")
    refuses("--val .*: expected a SOURCE of training text", "--val", source)
    refuses(
        "--val-max-bytes 5: expected 0 or more, and no --val",
        source,
        "--val",
        source,
        "--val-max-bytes",
        5,
    )
    refuses(
        "tokenizer .*no.model: .*No such file",
        source,
        "--out",
        out,
        "--tokenizer",
        tmp_path / "no.model",
    )
    refuses(
        "no validation document among 3 documents",
        source,
        "--out",
        out,
        "--val-frac",
        1e-9,
        "--name",
        "x",
    )
    same = tmp_path / "same"
    refuses(
        "no training document is left of 6",
        source,
        "--val",
        source,
        "--out",
        same,
        "--tokenizer",
        "bytes",
    )
    (tmp_path / "file").write_text("in the way")
    refuses("cannot be written", source, "--out", tmp_path / "file" / "out", "--tokenizer", "bytes")


def test_command_line_prints_one_line_and_exits_2(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "none.jsonl")], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
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
    assert sources == {
        tmp_path / n: f"stdlib/{n}" for n in ("a.py", "pkg/b.py", "test/c.py", "test/d.py")
    }
    assert list(sources.values())[1:3] == ["stdlib/pkg/b.py", "stdlib/test/c.py"]
    assert "4 files, 10,600,000 bytes" in capsys.readouterr().out
    (tmp_path / "a.py").write_bytes(b"x" * 8_000_000)
    assert list(prepare.find_stdlib()) == [tmp_path / "a.py", tmp_path / "pkg/b.py"]
    for path in sources:
        path.unlink()
    with pytest.raises(prepare.UserError, match="only 10 bytes of .py files; name a SOURCE"):
        prepare.find_stdlib()


def test_import_does_nothing(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import prepare, download"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(
        tmp_path.iterdir()
    )


BYTES = prepare.load_tokenizer("bytes")


def slow_count_nats(train, val, vocab_size):
    """Witten-Bell (method C) with dictionaries: nats of val[1:] under the unigram, bigram and trigram model."""
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
        return (
            lower
            if counts is None
            else (counts[token] + len(counts) * lower) / (counts.total() + len(counts))
        )

    nats = [0.0, 0.0, 0.0]
    for i in range(1, len(val)):
        before = (val[i - 2] if i > 1 else None, val[i - 1])
        for order, history in enumerate(((), before[1:], before)):
            nats[order] -= math.log(p(val[i], history))
    return nats


@pytest.mark.parametrize(
    ("vocab_size", "train_count", "val_count"),
    [(2, 30, 20), (7, 200, 90), (60, 500, 300), (300, 90, 80)],
)
def test_count_models_are_those_of_a_slow_implementation(vocab_size, train_count, val_count):
    for seed in range(4):
        rng = random.Random(seed)
        weights = [1 / (1 + rank) for rank in range(vocab_size)]
        train, val = (
            rng.choices(range(vocab_size), weights, k=count) for count in (train_count, val_count)
        )
        expected = slow_count_nats(train, val, vocab_size)
        found = prepare.count_model_nats(
            np.array(train, dtype=np.uint16), np.array(val, dtype=np.int64), vocab_size
        )
        assert found == pytest.approx(expected[1:], rel=1e-12, abs=1e-9)


def test_count_models_by_hand():
    """0 1 1: the unigram knows 1 twice, so p(1) = (2 + 1/2) / 3 = 5/6, and after 0 came 1 once."""
    bigram, trigram = prepare.count_model_nats(np.array([0, 1, 1]), np.array([0, 1]), 2)
    assert math.exp(-bigram) == pytest.approx((1 + 5 / 6) / 2, rel=1e-14)
    assert math.exp(-trigram) == pytest.approx((1 + 11 / 12) / 2, rel=1e-14)


def test_count_models_are_distributions():
    train = np.array(random.Random(1).choices(range(12), k=80))
    for history in (
        int(train[0]),
        int(train[40]),
        12,
    ):  # at the beginning of the training stream, inside it, unseen
        each = [
            prepare.count_model_nats(train, np.array([history, token]), 13) for token in range(13)
        ]
        nats = np.array(each)  # (V, 2)
        assert np.exp(-nats).sum(0) == pytest.approx([1.0, 1.0], rel=1e-12)


def test_yardsticks_are_those_of_the_text(tmp_path):
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)] + [
        "größer",
        "日本",
        "🙂",
    ]
    texts = [" ".join(rng.choices(vocabulary, k=50)) for _ in range(30)]
    train, val = (
        [token for text in half for token in (BYTES.bos_id, *BYTES.encode(text))]
        for half in (texts[:24], texts[24:])
    )
    streams = []
    for name, tokens in (("train", train), ("val", val)):
        prepare.write_shard(tmp_path / name, np.array(tokens))
        streams.append(prepare.TokenStream([tmp_path / name], 1 << 16))
    found = prepare.yardsticks(*streams, BYTES)
    text = "".join(texts[24:]).encode()
    _, bigram, trigram = slow_count_nats(train, val, BYTES.vocab_size)
    assert found == pytest.approx(
        {
            "bigram_bpb": bigram / math.log(2) / len(text),
            "trigram_bpb": trigram / math.log(2) / len(text),
            "zstd22_bpb": 8 * len(zstandard.ZstdCompressor(level=22).compress(text)) / len(text),
            "xz_bpb": 8 * len(lzma.compress(text, preset=9)) / len(text),
        },
        rel=1e-12,
    )
    assert 1.0 < found["trigram_bpb"] < found["bigram_bpb"] < 5.0
