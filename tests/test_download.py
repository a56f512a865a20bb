"""data/download.py against a local HTTP server that drops, truncates, damages and refuses."""

import hashlib
import http.server
import json
import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
from test_data import HARD_TEXTS, data, fake_encoding, tokenized, train_model, write_shard

from conftest import ROOT, environment, load_script, refusal, start

SCRIPT = ROOT / "data" / "download.py"

download = load_script(SCRIPT)


class Server(http.server.ThreadingHTTPServer):
    """Files by path, and how to misbehave."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}
        self.log = []  # path, Range
        self.drop_after = {}  # path -> bytes sent of each answer before the connection is closed
        self.damage = {}  # path -> answers whose last byte is wrong
        self.fail = {}  # path -> status codes of the next answers
        self.slow = {}  # path -> seconds before each of the next answers' bodies
        self.linked = (
            False  # whether it answers as the hub does, by a redirect that names the SHA-256
        )
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    """One answer of the server above."""

    server: Server

    def log_message(self, *args):
        """Nothing to the terminal."""

    def do_GET(self):
        server = self.server
        path = self.path.removeprefix("/elsewhere")
        wanted = self.headers.get("Range", "")
        content = server.files.get(path)
        start = 0
        if server.linked and path == self.path and content is not None:
            self.send_response(302)
            self.send_header("Location", f"{server.url}/elsewhere{path}")
            self.send_header("X-Linked-ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.end_headers()
            return
        server.log.append((path, wanted))
        if server.fail.get(path) or content is None:
            self.send_error(server.fail[path].pop(0) if content is not None else 404)
            return
        if match := re.fullmatch(r"bytes=(\d+)-", wanted):
            start = int(match.group(1))
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if server.slow.get(path):
            time.sleep(server.slow[path].pop(0))
        rest = content[start:]
        if server.damage.get(path, 0) > 0:
            server.damage[path] -= 1
            rest = rest[:-1] + bytes([rest[-1] ^ 1])
        self.wfile.write(rest[: server.drop_after.get(path, len(rest))])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return train_model(
        tmp_path_factory.mktemp("model") / "m.model", add_dummy_prefix=True
    ).read_bytes()


DATASET = "/datasets/fineweb10B_sp1024"


@pytest.fixture
def server(model, tmp_path, monkeypatch):
    """A served copy of the published layout: one validation shard, three training shards."""
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.001)
    one, shard = Server(), tmp_path / "shard"
    rng = np.random.default_rng(0)
    for i, name in enumerate(["val_000000", "train_000000", "train_000001", "train_000002"]):
        write_shard(shard, np.concatenate([[1], rng.integers(8, 400, 3000 + i)]))
        one.files[f"{DATASET}/fineweb_{name}.bin"] = shard.read_bytes()
    one.files["/tokenizers/fineweb_1024_bpe.model"] = model
    stats = {"files_train": 3, "files_val": 1}
    dataset = {"name": "fineweb10B_sp1024", "tokenizer_name": "sp_bpe_1024", "stats": stats}
    tokenizer = {"name": "sp_bpe_1024", "model_path": "tokenizers/fineweb_1024_bpe.model"}
    described = {"datasets": [dataset], "tokenizers": [tokenizer]}
    one.files["/manifest.json"] = json.dumps(described).encode()
    thread = threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield one
    one.shutdown()
    one.server_close()
    thread.join()


def fetch_all(server, out, shards=2):
    download.download(server.url, "sp1024", shards, out)


def arrived(server, out, shards=2):
    """Whether exactly the files wanted are in the folder, byte for byte."""
    wanted = {"tokenizer.model": server.files["/tokenizers/fineweb_1024_bpe.model"]}
    for name in ["val_000000", "train_000000", "train_000001", "train_000002"][: shards + 1]:
        wanted[f"fineweb_{name}.bin"] = server.files[f"{DATASET}/fineweb_{name}.bin"]
    return {path.name: path.read_bytes() for path in out.iterdir()} == wanted


def ranges_of(server, name):
    return [wanted for path, wanted in server.log if path.endswith(name)]


def refuses(message, call, *arguments):
    return refusal(download.UserError, message, call, *arguments)


def test_command_downloads_and_writes_the_manifest(server, tmp_path):
    out = tmp_path / "out"
    words = ["--train-shards", 2, "--out", out, "--base-url", server.url + "/"]
    done = start([SCRIPT, *words], environment())
    assert done.returncode == 0, done.stderr
    head = f"4 files into {out}; 4 to fetch, 0.8 GB\nfetched tokenizer.model ("
    assert done.stdout.startswith(head)
    manifest = data.load_manifest(out)
    assert manifest["published"] and manifest["tokenizer"]["file"] == "tokenizer.model"
    assert [shard["tokens"] for shard in manifest["train"]["shards"]] == [3002, 3003]
    content = server.files[f"{DATASET}/fineweb_val_000000.bin"]
    assert manifest["val"]["shards"][0]["sha256"] == hashlib.sha256(content).hexdigest()
    data.check_dataset(out, manifest)
    again = start([SCRIPT, *words], environment())
    assert again.returncode == 0 and "; 0 to fetch" in again.stdout
    assert len(ranges_of(server, ".bin")) == 3


def test_dropped_connections_are_resumed_by_range(server, tmp_path):
    name = f"{DATASET}/fineweb_train_000001.bin"
    size = len(server.files[name])
    server.drop_after[name] = 1000
    fetch_all(server, tmp_path / "out")
    assert arrived(server, tmp_path / "out")
    assert ranges_of(server, name) == [""] + [f"bytes={at}-" for at in range(1000, size, 1000)]


@pytest.mark.parametrize("rest", ["begin", b"?" * 1500, b"?" * 100_000])
def test_an_interrupted_command_goes_on(rest, server, tmp_path):
    """A rest of another file, shorter or longer, is fetched again."""
    name = "fineweb_val_000000.bin"
    (tmp_path / "out").mkdir()
    content = server.files[f"{DATASET}/{name}"][:2000] if rest == "begin" else rest
    (tmp_path / "out" / f"{name}.part").write_bytes(content)
    fetch_all(server, tmp_path / "out")
    assert arrived(server, tmp_path / "out")
    assert ranges_of(server, name)[-1] == ("bytes=2000-" if rest == "begin" else "")


def test_sha256_of_the_server_is_checked(server, tmp_path):
    server.linked = True
    name = f"{DATASET}/fineweb_train_000000.bin"
    server.damage[name] = 1
    fetch_all(server, tmp_path / "out")
    assert arrived(server, tmp_path / "out") and ranges_of(server, name) == ["", ""]
    server.damage[name] = 2
    message = r"train_000000\.bin: arrived damaged twice: its SHA-256 is not"
    refuses(message, fetch_all, server, tmp_path / "other")
    assert not (tmp_path / "other" / "fineweb_train_000000.bin").exists()


def test_shard_header_is_checked(server, tmp_path):
    """Truncated at the server: the size of the answer agrees, the shard's header does not."""
    name = f"{DATASET}/fineweb_val_000000.bin"
    for content, fault in ((server.files[name][:-2], ".* truncated, "), (b"", "0 bytes;")):
        server.files[name] = content
        message = rf"val_000000\.bin: arrived damaged twice: {fault}"
        refuses(message, fetch_all, server, tmp_path / "out")


def test_server_errors_are_retried_and_missing_files_are_not(server, tmp_path):
    out = tmp_path / "out"
    server.fail[f"{DATASET}/fineweb_val_000000.bin"] = [503, 429, 500, 503]
    fetch_all(server, out)
    assert arrived(server, out)
    del server.files[f"{DATASET}/fineweb_train_000002.bin"]
    message = r"train_000002\.bin: the server answers 404"
    refuses(message, fetch_all, server, out, 3)
    assert len(ranges_of(server, "000002.bin")) == 1
    server.fail["/manifest.json"] = [503] * 20
    message = r"cannot reach 127\.0\.0\.1:\d+ \(Service Unavailable\)"
    refuses(message, fetch_all, server, out)
    assert len(server.fail["/manifest.json"]) == 20 - download.TRIES


def test_no_network_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.001)
    words = ["--out", str(tmp_path / "out"), "--base-url", "http://127.0.0.1:9"]
    refuses(r"^cannot reach 127.0.0.1:9 \(", download.run, words)
    assert not (tmp_path / "out").exists()


def described(folder, tokenizer):
    """The manifest that --manifest wrote."""
    download.run(["--manifest", str(folder), "--tokenizer", str(tokenizer)])
    return json.loads((folder / "manifest.json").read_text())


def test_manifest_of_published_shards(tmp_path, capsys):
    tokenizer = download.load_tokenizer("bytes")
    texts = {
        "train": [f"training text {i} " * 3 for i in range(20)],
        "val": [f"validation {i} é" * 4 for i in range(6)],
    }
    texts["train"][7] = texts["val"][2]  # overlaps, and is cut by a shard border below
    texts["train"][11] = texts["val"][4] = texts["val"][0]
    streams = {split: tokenized(tokenizer, parts) for split, parts in texts.items()}
    border = len(tokenized(tokenizer, texts["train"][:7]))
    parts = np.split(streams["train"], (border + 3, border + 8, border + 60))
    paths = [tmp_path / f"fineweb_train_{i:06d}.bin" for i in range(4)]
    for path, part in zip(paths, parts, strict=True):
        write_shard(path, part)
    val = tmp_path / "fineweb_val_000000.bin"
    write_shard(val, np.array(streams["val"]))
    manifest = described(tmp_path, "bytes")
    assert manifest["overlap_documents"] == 3  # val[0], its repeat val[4], and val[2]
    assert "also stand in training: 3" in capsys.readouterr().out
    for split, documents in texts.items():
        facts = {
            "documents": len(documents),
            "tokens": len(streams[split]),
            "decoded_bytes": sum(len(text.encode()) for text in documents),
            "source_bytes": None,
        }
        assert manifest[split].items() >= facts.items()
    assert manifest["published"] and manifest["name"] == "fineweb"
    download.check_dataset(tmp_path, manifest)  # hashes, too

    write_shard(tmp_path / "other_train_000000.bin", np.array([1, 5]))
    refuses(r"shards of several data sets \(fineweb, other\)", described, tmp_path, "bytes")
    (tmp_path / "other_train_000000.bin").unlink()
    write_shard(paths[0], np.array([1, 300]))
    message = "token 300, expected ids below 264; another tokenizer"
    refuses(message, described, tmp_path, "bytes")
    write_shard(paths[0], np.array([5, 6, 1, 5]))  # llm.c's: inside a document
    assert described(tmp_path, "bytes")["train"]["shards"][0]["tokens"] == 4
    write_shard(val, np.array([5, 6]))
    message = r"validation begins with token 5, expected BOS \(1\)"
    refuses(message, described, tmp_path, "bytes")
    refuses(r"no \*_train_\*\.bin shard", described, tmp_path / "none", "bytes")


def test_decoded_bytes_across_pieces_and_shards(tmp_path, monkeypatch):
    model = train_model(tmp_path / "m.model", add_dummy_prefix=True)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    encoded = [processor.encode(text) for text in HARD_TEXTS] * 3
    stream = np.array([token for ids in encoded for token in (1, *ids)])
    for i, part in enumerate(np.array_split(stream, 5)):
        write_shard(tmp_path / f"x_train_{i:06d}.bin", part)
    write_shard(tmp_path / "x_val_000000.bin", stream)
    monkeypatch.setattr(download, "READ_TOKENS", 7)
    manifest = described(tmp_path, model)
    expected = sum(len(processor.decode(ids).encode("utf-8")) for ids in encoded)
    assert manifest["train"]["decoded_bytes"] == manifest["val"]["decoded_bytes"] == expected
    assert manifest["train"]["documents"] == manifest["overlap_documents"] == 3 * len(HARD_TEXTS)
    assert manifest["tokenizer"]["file"] == "tokenizer.model"
    assert (tmp_path / "tokenizer.model").read_bytes() == model.read_bytes()


REQUESTS = [
    ("--manifest .", "--manifest DIR and --tokenizer PATH go together"),
    ("--tokenizer bytes", "--manifest DIR and --tokenizer PATH go together"),
    ("--variant sp999", "--variant sp999: expected one of sp1024"),
    ("--train-shards 0", "--train-shards 0: expected 1 or more"),
    ("--train-shards 4", "--train-shards 4: sp1024 has 3"),
    ("--variant gpt2 --tokenizer bytes --train-shards 104", "--train-shards 104: gpt2 has 103"),
    ("--variant gpt2 --tokenizer none.model", r"tokenizer .*none\.model: .*No such file"),
    ("--train-shards 1", "10 bytes free, up to 600,003,072 needed; fewer --train-shards"),
]


@pytest.mark.parametrize(("words", "message"), REQUESTS)
def test_bad_requests(server, tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    words = [*words.split(), "--base-url", server.url, "--out", str(tmp_path / "out")]
    refuses(message, download.run, words)


def test_bad_servers(server, tmp_path, monkeypatch):
    for content, message in (
        (b"<html>", "JSONDecodeError"),
        (b"{}", "does not describe fineweb10B_sp1024"),
        (b'{"datasets": [{"name": "fineweb10B_sp1024"}]}', "KeyError"),
        (b"[]", "TypeError"),
    ):
        server.files["/manifest.json"] = content
        refuses(message, fetch_all, server, tmp_path / "out")
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.05)
    path = f"{DATASET}/fineweb_val_000000.bin"
    server.slow[path] = [30.0] * 20
    message = r"^cannot reach 127\.0\.0\.1:\d+ \(timed out\); .* kept$"
    refuses(message, download.fetch, server.url + path, tmp_path / "a.bin")


def test_gpt2_shards_and_their_tokenizer(server, tmp_path, monkeypatch):
    """By a tokenizer of 258 ranks in the place of GPT-2's."""
    ranks, out = fake_encoding(monkeypatch, download, tmp_path), tmp_path / "out"
    tokenizer = download.load_tokenizer(ranks)
    texts = {"val_000000": HARD_TEXTS, "train_000001": ["one"], "train_000002": HARD_TEXTS[:2]}
    server.files = {}
    for name, documents in texts.items():
        write_shard(tmp_path / "shard", np.array(tokenized(tokenizer, documents)))
        server.files[f"/fineweb_{name}.bin"] = (tmp_path / "shard").read_bytes()
    words = f"--variant gpt2 --train-shards 2 --out {out} --tokenizer {ranks}".split()
    download.run([*words, "--base-url", server.url])
    names = [
        ranks.name,
        "manifest.json",
        "token_bytes.bin",
        *(path[1:] for path in server.files),
    ]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    manifest = data.load_manifest(out)
    assert manifest["published"] and manifest["overlap_documents"] == 2
    assert manifest["val"]["decoded_bytes"] == sum(len(text.encode()) for text in HARD_TEXTS)
    data.check_dataset(out, manifest)
