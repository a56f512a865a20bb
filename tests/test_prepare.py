"""data/prepare.py: splits, duplicates, tokenizers, shards, manifests, restarts, errors."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
import math
import os
import random
import signal
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


def words(seed: int, count: int = 120) -> str:
    """A document of random words that shares no 8-gram with one of another seed."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(count))


def write_jsonl(path: Path, texts: list[str]) -> Path:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    raw = content.encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(raw) if path.suffix == ".zst" else raw)
    return path


def documents(folder: Path, split: str) -> list[bytes]:
    """The documents of a split read back: shards joined, cut at BOS, decoded."""
    manifest = json.loads((folder / "manifest.json").read_text())
    tokenizer = prepare.load_tokenizer(folder / manifest["tokenizer"]["file"])
    shards = [prepare.read_shard(folder / shard["file"]) for shard in manifest[split]["shards"]]
    tokens = np.concatenate(shards).astype(np.int64)
    starts = np.flatnonzero(tokens == tokenizer.bos_id)
    assert starts[0] == 0
    return [prepare.decode_bytes(tokenizer, part[1:]) for part in np.split(tokens, starts[1:])]


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def run(*arguments: object) -> dict:
    """prepare.py in this process with one worker; the manifest it wrote."""
    prepare.run([str(argument) for argument in (*arguments, "--workers", 1)])
    return json.loads((Path(arguments[arguments.index("--out") + 1]) / "manifest.json").read_text())


def refuses(message: str, *arguments: object) -> None:
    with pytest.raises(prepare.UserError, match=message) as caught:
        prepare.run([str(argument) for argument in (*arguments, "--workers", 1)])
    assert "\n" not in str(caught.value)


def test_own_tokenizer_gives_every_document_back(tmp_path: Path) -> None:
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
    assert manifest["dropped"] == {"exact_duplicates": 0, "near_duplicates": 0, "not_lossless": 2, "empty": 2 + blank}
    assert manifest["lossless"] and not manifest["published"] and manifest["overlap_documents"] == 0
    assert manifest["sources"] == ["a"] and manifest["source_files"] == ["a.jsonl"] and manifest["name"] == "text"
    assert manifest["val"]["document_sources"] == [0] * len(val) and manifest["seed"] == 0
    assert not (out / ".work").exists()
    tokenizer = prepare.load_tokenizer(out / "tokenizer.model")
    assert manifest["tokenizer"] == {"file": "tokenizer.model", "sha256": tokenizer.sha256, "vocab_size": 400,
                                     "bos_id": 1}
    assert tokenizer.roles == {role: 4 + i for i, role in enumerate(prepare.ROLE_TOKENS)}
    assert not tokenizer.drops_space.any() and b"\n" in tokenizer.pieces
    prepare.check_dataset(out, tokenizer, manifest)
    manifest["val"]["tokens"] -= 1
    with pytest.raises(prepare.UserError, match="another number of tokens than the shards of val"):
        prepare.check_dataset(out, tokenizer, manifest)


def test_split_by_hash_and_seeded_order(tmp_path: Path) -> None:
    texts = [words(i, 20) for i in range(300)]
    source = write_jsonl(tmp_path / "a.jsonl.zst", texts)
    orders = []
    for seed in (0, 1):
        out = tmp_path / str(seed)
        run(source, "--out", out, "--tokenizer", "bytes", "--val-frac", 0.2, "--seed", seed)
        for split in ("train", "val"):
            # Side and order written out once more from their definition.
            def key(text: str, seed: int = seed) -> bytes:
                return hashlib.sha256(f"{seed}:".encode() + hashlib.sha256(text.encode()).digest()).digest()

            side = [t for t in texts if (hashlib.sha256(t.encode()).digest() < bytes([51] * 32)) == (split == "val")]
            assert documents(out, split) == [text.encode() for text in sorted(side, key=key)]
        orders.append(documents(out, "train"))
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert 40 <= 300 - len(orders[0]) <= 80


def test_val_limit_returns_the_rest_to_training(tmp_path: Path) -> None:
    texts = [words(i, 50) for i in range(60)]
    out = tmp_path / "out"
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = run(source, "--out", out, "--tokenizer", "bytes", "--val-frac", 0.5, "--val-max-bytes", 1500)
    assert 1000 < manifest["val"]["source_bytes"] <= 1500
    assert set(documents(out, "train")) | set(documents(out, "val")) == {text.encode() for text in texts}


def test_exact_duplicates_are_dropped(tmp_path: Path) -> None:
    texts = [words(i) for i in range(30)]
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write_jsonl(tmp_path / "in" / "a.jsonl", texts + texts[:7])
    (tmp_path / "in" / "deep" / "b.txt").write_bytes(texts[8].encode())
    (tmp_path / "in" / "deep" / "c.txt").write_bytes(b"line\r\nends are kept\r")
    (tmp_path / "in" / "notes.md").write_text("not read")
    out = tmp_path / "out"
    manifest = run(tmp_path / "in", "--out", out, "--tokenizer", "bytes", "--val-frac", 0.3)
    assert manifest["dropped"]["exact_duplicates"] == 8
    found = documents(out, "train") + documents(out, "val")
    assert sorted(found) == sorted([text.encode() for text in texts] + [b"line\r\nends are kept\r"])
    assert manifest["source_files"] == ["in/a.jsonl", "in/deep/b.txt", "in/deep/c.txt"]
    assert manifest["sources"] == ["a", "deep"]


def test_manifest_names_the_source_of_every_validation_document(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep" / "er").mkdir(parents=True)
    files = {"single.jsonl": "single", "in/loose.txt": "loose", "in/deep/b.jsonl": "deep",
             "in/deep/er/c.jsonl.zst": "deep"}
    source_of = {}
    for number, (file, source) in enumerate(files.items()):
        texts = [words(100 * number + i, 30) for i in range(1 if source == "loose" else 25)]
        if source == "loose":
            (tmp_path / file).write_bytes(texts[0].encode())
        else:
            # single.jsonl holds ten texts of deep/b.jsonl too: of equal documents the first source by name counts.
            write_jsonl(tmp_path / file, texts + [words(200 + i, 30) for i in range(10 if source == "single" else 0)])
        source_of |= dict.fromkeys((text.encode() for text in texts), source)
    request = (tmp_path / "single.jsonl", tmp_path / "in", "--tokenizer", "bytes")
    manifest = run(*request, "--out", tmp_path / "out", "--val-frac", 0.5)
    names, numbers = manifest["sources"], manifest["val"]["document_sources"]
    assert names == ["deep", "loose", "single"] and set(numbers) >= {0, 2}
    found = documents(tmp_path / "out", "val")
    assert [names[number] for number in numbers] == [source_of[text] for text in found]
    assert sum(words(200 + i, 30).encode() in found for i in range(10)) >= 2
    # Given validation: only its files are sources.
    val = write_jsonl(tmp_path / "v.jsonl", [words(900 + i, 30) for i in range(3)])
    manifest = run(*request, "--out", tmp_path / "out2", "--val", val)
    assert manifest["sources"] == ["v"] and manifest["val"]["document_sources"] == [0, 0, 0]
    assert manifest["source_files"][-1] == "v.jsonl" and len(manifest["source_files"]) == 5


def test_many_sources_are_counted_by_folder() -> None:
    def sources(*files: str) -> list[str]:
        names, numbers = prepare.number_sources({Path(file): file for file in files}, "n")
        assert names == sorted(set(names)) and len(names) <= prepare.MOST_SOURCES
        return [names[numbers[Path(file)]] for file in files]

    assert sources("in/a.txt", "in/b/c.txt", "in/b/d/e.jsonl.zst", "x.jsonl") == ["a", "b", "b", "x"]
    many = [f"lib/m{i}.py" for i in range(31)]
    assert sources(*many, "lib/p/a.py") == [*(f"m{i}" for i in range(31)), "p"]
    assert sources(*many, "lib/p/a.py", "lib/q/a.py") == ["lib"] * 31 + ["p", "q"]
    assert sources(*(f"lib/p{i}/a.py" for i in range(33)), "x.txt") == ["lib"] * 33 + ["x"]
    assert sources(*(f"{i}.txt" for i in range(33))) == ["n"] * 33


@needs_shared
def test_gpt2_tokens_and_the_folder_is_enough_to_read_them(tmp_path: Path) -> None:
    texts = [words(i) for i in range(30)] + HARD_TEXTS
    source, out = write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out"
    manifest = run(source, "--out", out, "--tokenizer", gpt2_file(tmp_path), "--val-frac", 0.3)
    assert manifest["lossless"] and manifest["dropped"]["not_lossless"] == 0
    assert manifest["tokenizer"]["file"] == "gpt2.tiktoken" and manifest["tokenizer"]["bos_id"] == 50256
    assert (set(documents(out, "train")) | set(documents(out, "val"))
            == {text.encode() for text in texts if text.strip()})
    run(source, "--out", out, "--tokenizer", out / "gpt2.tiktoken", "--val-frac", 0.3)  # the same request


def test_a_vocabulary_above_65536_is_written_as_uint32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = fake_encoding(monkeypatch, prepare, tmp_path, end_of_text=70000)
    texts, out = [words(i, 20) for i in range(30)], tmp_path / "out"
    manifest = run(write_jsonl(tmp_path / "a.jsonl", texts), "--out", out, "--val-frac", 0.3,
                   "--tokenizer", ranks)
    for split in ("train", "val"):
        path, part = out / f"text_{split}_000000.bin", manifest[split]
        assert np.fromfile(path, "<i4", 3).tolist() == [20240801, 7, part["tokens"]]
        tokens = np.fromfile(path, "<u4", offset=1024)
        assert (tokens == 70000).sum() == part["documents"] and len(tokens) == part["tokens"]
    assert sorted(documents(out, "train") + documents(out, "val")) == sorted(text.encode() for text in texts)


def shared_share(text: bytes, others: list[bytes]) -> float:
    """The share of a text's distinct 8-grams that stand in the others, by tuples of words."""
    def tuples(one: bytes) -> set[tuple[str, ...]]:
        parts = one.decode().split()
        return {tuple(parts[i : i + 8]) for i in range(max(1, len(parts) - 7))}

    own = tuples(text)
    return len(own & set().union(*map(tuples, others))) / len(own)


def variant(text: str, keep: float) -> str:
    """A document whose first `keep` of the words are the text's."""
    parts = text.split()
    count = int(len(parts) * keep)
    return " ".join(parts[:count]) + " " + words(hash(len(text)) % 1000 + 5000, len(parts) - count)


def test_near_duplicates_with_given_validation(tmp_path: Path) -> None:
    val = [words(i) for i in range(10)]
    halves = [" ".join(val[9].split()[:60]) + " " + words(300, 300), words(301, 300) + " " + " ".join(
        val[9].split()[58:])]  # each half of val[9], in documents that are mostly other text
    third = [variant(val[2], 0.4)]
    near = [variant(val[0], 0.8), val[1].replace(" ", "\n").upper(), words(302, 200) + " " + val[3],
            " ".join(val[5].split()[20:60]) + " " + words(303, 18)]  # the last: 33 of its 51, only 33 of val[5]'s 113
    plain = [words(i) for i in range(100, 130)]
    train = write_jsonl(tmp_path / "t.jsonl", plain + near + third + halves + [val[4]])
    out = tmp_path / "out"
    manifest = run(train, "--val", write_jsonl(tmp_path / "v.jsonl", val), "--out", out, "--tokenizer", "bytes")
    kept = documents(out, "train")
    assert sorted(documents(out, "val")) == sorted(text.encode() for text in val)
    for text in near + [val[4]]:
        assert text.encode() not in kept
    for text in plain + third:
        assert text.encode() in kept
    assert sum(text.encode() in kept for text in halves) == 1  # both together would hold all of val[9]
    assert manifest["dropped"]["exact_duplicates"] == 1 and manifest["dropped"]["near_duplicates"] == 5
    assert max(shared_share(text, kept) for text in documents(out, "val")) <= 0.5


def test_near_duplicates_of_a_split(tmp_path: Path) -> None:
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


def test_overlap_left_by_a_fault_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    val, out = words(0), tmp_path / "out"
    train = write_jsonl(tmp_path / "t.jsonl", [words(1), variant(val, 0.8)])
    monkeypatch.setattr(prepare, "grams", lambda data: np.frombuffer(hashlib.sha256(data).digest()[:8], "<u8"))
    refuses("2 documents stand in training and validation, expected 0; not written", train, "--val",
            write_jsonl(tmp_path / "v.jsonl", [val]), "--out", out, "--tokenizer", "bytes")
    assert not (out / "manifest.json").exists()


def test_two_gram_implementations_count_alike() -> None:
    for text in HARD_TEXTS + [words(1), words(1) + " " + words(1), "Same SAME same", "?!", "日本語"]:
        assert len(prepare.grams(text.encode())) == len(prepare.recount_grams(text.encode()))
    first, second = words(1).encode(), (words(1) + " tail").encode()
    for make in (prepare.grams, prepare.recount_grams):
        assert len(make(first)) == 113
        assert len(np.intersect1d(make(first), make(second))) == 113 and len(make(second)) == 114
        assert not len(np.intersect1d(make(first), make(words(2).encode())))


@pytest.fixture(scope="module")
def medium(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A source of several chunks and buckets, and what one worker makes of it in one go."""
    folder = tmp_path_factory.mktemp("medium")
    source = write_jsonl(folder / "a.jsonl", [words(i, 300) for i in range(400)])
    subprocess.run(command(source, folder / "out", 1), check=True, capture_output=True)
    return source, shard_bytes(folder / "out")


# Small chunks and shards, so that a little text goes through many jobs, buckets and shard borders.
SMALL = ("import sys; sys.path.insert(0, {folder!r}); import prepare; prepare.CHUNK_BYTES = 20_000; "
         "prepare.BUCKETS = 7; prepare.SHARD_TOKENS = 50_000; prepare.main()")


def command(source: Path, out: Path, workers: int) -> list[str]:
    return [sys.executable, "-c", SMALL.format(folder=str(SCRIPT.parent)), str(source), "--out", str(out),
            "--vocab-size", "400", "--workers", str(workers)]


def test_workers_do_not_change_a_byte(medium: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    source, expected = medium
    subprocess.run(command(source, tmp_path / "out", 2), check=True, capture_output=True)
    assert shard_bytes(tmp_path / "out") == expected
    assert len(expected) >= 8 and "text_train_000003.bin" in expected


def test_chunks_and_buckets_do_not_change_the_tokens(medium: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    source, expected = medium
    run(source, "--out", tmp_path / "out", "--vocab-size", 400)
    whole = (tmp_path / "out" / "text_train_000000.bin").read_bytes()[1024:]
    assert whole == b"".join(expected[name][1024:] for name in sorted(expected) if "_train_" in name)


@pytest.mark.parametrize("stage", [".work/spool", ".work/kept", ".work/tokenizer.model", "text_train_000000.bin"])
def test_killed_run_goes_on_to_the_same_bytes(stage: str, medium: tuple[Path, dict[str, bytes]],
                                              tmp_path: Path) -> None:
    source, expected = medium
    process = subprocess.Popen(command(source, tmp_path / "out", 2), stdout=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / "out" / stage).exists():
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text().split() if children.exists() else []
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out" / "manifest.json").exists(), "finished before it could be killed"
    done = subprocess.run(command(source, tmp_path / "out", 1), check=True, capture_output=True, text=True)
    assert "going on with the unfinished run" in done.stdout
    assert shard_bytes(tmp_path / "out") == expected
    for worker in workers:  # the killed run's workers left with it
        assert not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split()[2]


def test_finished_and_foreign_folders(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)]), tmp_path / "out"
    request = (source, "--out", out, "--tokenizer", "bytes", "--val-frac", 0.3)
    run(*request)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    capsys.readouterr()
    run(*request)
    assert "already holds exactly this data; nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    refuses("holds data of another request .* delete .* or choose another --out", *request, "--seed", 1)
    write_jsonl(source, [words(i) for i in range(41)])
    refuses("holds data of another request", *request)
    (out / "manifest.json").unlink()
    refuses("holds .bin files without a manifest", *request)
    for path in out.glob("*.bin"):
        path.unlink()
    (out / ".work").mkdir()
    (out / ".work" / "request.json").write_text("{}")
    refuses("holds the unfinished data of another request", *request)


def test_source_errors(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out", "--tokenizer", "bytes")
    refuses("source .*none.txt: no such file or folder", tmp_path / "none.txt", *out)
    (tmp_path / "empty").mkdir()
    refuses(r"source .*empty: no text in it .*\.jsonl\.zst", tmp_path / "empty", *out)
    (tmp_path / "a.csv").write_text("a,b")
    refuses(r"source .*a\.csv: no text in it", tmp_path / "a.csv", *out)
    good = json.dumps({"text": words(0)}) + "\n"
    packed = zstandard.ZstdCompressor().compress(good.encode() * 99)
    cases = (("b.jsonl", good + "{oops\n", r"b\.jsonl, line 2: not JSON"),
             ("c.jsonl", good + good + '{"body": "x"}\n', r"c\.jsonl, line 3: not an object with a field `text`"),
             ("d.jsonl", "[1]\n", r"d\.jsonl, line 1: not an object"),
             ("e.jsonl", b'{"text": "\xff"}\n', r"e\.jsonl, line 1: not JSON"),
             ("f.txt", b"abc\xffdef", r"f\.txt: not UTF-8 at byte 3"),
             ("g.jsonl.zst", b"this is no zstd", r"g\.jsonl\.zst: damaged zstd data"),
             ("h.jsonl.zst", packed[:8] + b"\x00\xff\x55" + packed[11:], r"h\.jsonl\.zst: damaged zstd data"))
    for i, (name, content, message) in enumerate(cases):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        refuses(message, tmp_path / name, "--out", tmp_path / f"out{i}", "--tokenizer", "bytes")


def test_option_errors(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(3)]), tmp_path / "out"
    refuses("--val-frac 1.5: expected a number between 0 and 1", source, "--val-frac", 1.5)
    refuses("--vocab-size 5: expected 300 to 65,536", source, "--vocab-size", 5)
    refuses("--name a_b: expected", source, "--name", "a_b")
    refuses("--val .*: expected a SOURCE of training text", "--val", source)
    refuses("--val-max-bytes 5: expected no --val", source, "--val", source, "--val-max-bytes", 5)
    refuses("tokenizer .*no.model: .*No such file", source, "--out", out, "--tokenizer", tmp_path / "no.model")
    refuses("no validation document among 3 documents", source, "--out", out, "--val-frac", 1e-9, "--name", "x")
    same = tmp_path / "same"
    refuses("no training document is left of 6", source, "--val", source, "--out", same, "--tokenizer", "bytes")
    big = write_jsonl(tmp_path / "b.jsonl", [words(i) for i in range(30)])
    refuses("--vocab-size 60000: no such tokenizer from", big, "--out", tmp_path / "big", "--vocab-size", 60000,
            "--val-frac", 0.3)
    (tmp_path / "file").write_text("in the way")
    refuses("cannot be written", source, "--out", tmp_path / "file" / "out", "--tokenizer", "bytes")


def test_command_line_prints_one_line_and_exits_2(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path / "none.jsonl")], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"error: source {tmp_path / 'none.jsonl'}: no such file or folder\n"


def test_standard_library_is_chosen_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("a.py", 700_000), ("pkg/b.py", 400_000), ("test/c.py", 500_000), ("test/d.py", 9_000_000),
                       ("test/e.py", 10), ("site-packages/e.py", 10), ("__pycache__/f.py", 10), ("notes.txt", 10)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    (tmp_path / "latin.py").write_bytes(b"caf\xe9")
    monkeypatch.setattr(prepare.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    sources, note = prepare.find_stdlib()
    # The tests follow the rest, until there is enough text.
    assert sources == {tmp_path / n: f"stdlib/{n}" for n in ("a.py", "pkg/b.py", "test/c.py", "test/d.py")}
    assert list(sources.values())[1:3] == ["stdlib/pkg/b.py", "stdlib/test/c.py"]
    assert "4 files, 10,600,000 bytes (1 files that are not UTF-8 left out)" in note
    (tmp_path / "a.py").write_bytes(b"x" * 8_000_000)
    assert list(prepare.find_stdlib()[0]) == [tmp_path / "a.py", tmp_path / "pkg/b.py"]
    for path in sources:
        path.unlink()
    with pytest.raises(prepare.UserError, match="only 10 bytes of .py files; name a SOURCE"):
        prepare.find_stdlib()


def test_import_does_nothing(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import prepare, download"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "") and not list(tmp_path.iterdir())


BYTES = prepare.load_tokenizer("bytes")


def slow_count_nats(train: list[int], val: list[int], vocab_size: int) -> list[float]:
    """Witten-Bell (method C) with dictionaries: nats of val[1:] under the unigram, bigram and trigram model."""
    followers: dict[tuple, Counter] = defaultdict(Counter)
    for i in range(1, len(train)):
        before = (train[i - 2] if i > 1 else None, train[i - 1])
        for history in ((), before[1:], before):
            followers[history][train[i]] += 1

    def p(token: int, history: tuple | None) -> float:
        if history is None:
            return 1 / vocab_size
        lower = p(token, history[1:] if history else None)
        counts = followers.get(history)
        return lower if counts is None else (counts[token] + len(counts) * lower) / (counts.total() + len(counts))

    nats = [0.0, 0.0, 0.0]
    for i in range(1, len(val)):
        before = (val[i - 2] if i > 1 else None, val[i - 1])
        for order, history in enumerate(((), before[1:], before)):
            nats[order] -= math.log(p(val[i], history))
    return nats


@pytest.mark.parametrize(("vocab_size", "train_count", "val_count"), [
    (2, 30, 20), (7, 200, 90), (60, 500, 300), (300, 90, 80)])
def test_count_models_are_those_of_a_slow_implementation(vocab_size, train_count, val_count):
    for seed in range(4):
        rng = random.Random(seed)
        weights = [1 / (1 + rank) for rank in range(vocab_size)]
        train, val = (rng.choices(range(vocab_size), weights, k=count) for count in (train_count, val_count))
        expected = slow_count_nats(train, val, vocab_size)
        found = prepare.count_model_nats(np.array(train, dtype=np.uint16), np.array(val, dtype=np.int64), vocab_size)
        assert found == pytest.approx(expected[1:], rel=1e-12, abs=1e-9)


def test_count_models_by_hand():
    """0 1 1: the unigram knows 1 twice, so p(1) = (2 + 1/2) / 3 = 5/6, and after 0 came 1 once."""
    bigram, trigram = prepare.count_model_nats(np.array([0, 1, 1]), np.array([0, 1]), 2)
    assert math.exp(-bigram) == pytest.approx((1 + 5 / 6) / 2, rel=1e-14)
    assert math.exp(-trigram) == pytest.approx((1 + 11 / 12) / 2, rel=1e-14)


def test_count_models_are_distributions():
    train = np.array(random.Random(1).choices(range(12), k=80))
    for history in (int(train[0]), int(train[40]), 12):  # at the beginning of the training stream, inside it, unseen
        each = [prepare.count_model_nats(train, np.array([history, token]), 13) for token in range(13)]
        nats = np.array(each)  # (V, 2)
        assert np.exp(-nats).sum(0) == pytest.approx([1.0, 1.0], rel=1e-12)


def test_yardsticks_are_those_of_the_text(tmp_path):
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)] + ["größer", "日本", "🙂"]
    texts = [" ".join(rng.choices(vocabulary, k=50)) for _ in range(30)]
    train, val = ([token for text in half for token in (BYTES.bos_id, *BYTES.encode(text))]
                  for half in (texts[:24], texts[24:]))
    streams = []
    for name, tokens in (("train", train), ("val", val)):
        prepare.write_shard(tmp_path / name, np.array(tokens))
        streams.append(prepare.TokenStream([tmp_path / name], 1 << 16))
    found = prepare.yardsticks(*streams, BYTES)
    text = "".join(texts[24:]).encode()
    _, bigram, trigram = slow_count_nats(train, val, BYTES.vocab_size)
    assert found == pytest.approx({
        "bigram_bpb": bigram / math.log(2) / len(text), "trigram_bpb": trigram / math.log(2) / len(text),
        "zstd22_bpb": 8 * len(zstandard.ZstdCompressor(level=22).compress(text)) / len(text),
        "xz_bpb": 8 * len(lzma.compress(text, preset=9)) / len(text)}, rel=1e-12)
    assert 1.0 < found["trigram_bpb"] < found["bigram_bpb"] < 5.0
