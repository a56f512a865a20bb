"""data/download.py against a local HTTP server that drops, truncates, damages and refuses."""

import hashlib
import http.client
import http.server
import json
import re
import ssl
import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import sentencepiece
from test_data import HARD_TEXTS, data, fake_encoding, tokenized, train_model, write_shard

from conftest import ROOT, environment, load_script, read_json, refusal, start

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
        # whether it answers as the hub does, by a redirect that names the SHA-256
        self.linked = False
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
    path = tmp_path_factory.mktemp("model") / "m.model"
    return train_model(path, add_dummy_prefix=True).read_bytes()


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
    assert "; 4 to fetch, 0.8 GB\n" in done.stdout
    manifest = data.load_manifest(out)
    assert manifest["published"] and manifest["tokenizer"]["file"] == "tokenizer.model"
    assert [shard["tokens"] for shard in manifest["train"]["shards"]] == [3002, 3003]
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


def test_an_interrupted_command_goes_on(server, tmp_path):
    """A rest of another file, shorter or longer, is fetched again."""
    name = "fineweb_val_000000.bin"
    begin = server.files[f"{DATASET}/{name}"][:2000]
    for rest, wanted in ((begin, "bytes=2000-"), (b"?" * 1500, ""), (b"?" * 100_000, "")):
        out = tmp_path / f"out {len(rest)}"
        out.mkdir()
        (out / f"{name}.part").write_bytes(rest)
        fetch_all(server, out)
        assert arrived(server, out) and ranges_of(server, name)[-1] == wanted


def test_what_arrives_is_checked(server, tmp_path):
    """By the server's SHA-256, or by the shard's header: truncated there, the size agrees."""
    server.linked = True
    name = f"{DATASET}/fineweb_train_000000.bin"
    server.damage[name] = 1
    fetch_all(server, tmp_path / "out")
    assert arrived(server, tmp_path / "out") and ranges_of(server, name) == ["", ""]
    server.damage[name] = 2
    refuses(r"train_000000\.bin: .*SHA-256", fetch_all, server, tmp_path / "other")
    assert not (tmp_path / "other" / "fineweb_train_000000.bin").exists()
    server.linked = False
    for content in (server.files[name][:-2], b""):
        server.files[name] = content
        refuses(r"train_000000\.bin: .*damaged", fetch_all, server, tmp_path / "other")


def test_server_errors_are_retried_and_missing_files_are_not(server, tmp_path):
    out = tmp_path / "out"
    server.fail[f"{DATASET}/fineweb_val_000000.bin"] = [503, 429, 500, 503]
    fetch_all(server, out)
    assert arrived(server, out)
    del server.files[f"{DATASET}/fineweb_train_000002.bin"]
    refuses(r"train_000002\.bin: .* 404", fetch_all, server, out, 3)
    assert len(ranges_of(server, "000002.bin")) == 1
    server.fail["/manifest.json"] = [503] * 20
    refuses(r"cannot reach 127\.0\.0\.1:\d+", fetch_all, server, out)
    assert len(server.fail["/manifest.json"]) == 20 - download.TRIES


def test_a_fault_of_tls_in_a_body_is_one_of_the_network(server, tmp_path, monkeypatch):
    read = http.client.HTTPResponse.read
    faults = [ssl.SSLError(1, "bad record mac")]

    def read_or_fail(answer, *words):
        if faults:
            raise faults.pop()
        return read(answer, *words)

    monkeypatch.setattr(http.client.HTTPResponse, "read", read_or_fail)
    fetch_all(server, tmp_path / "out")
    assert arrived(server, tmp_path / "out") and not faults
    faults += [ssl.SSLError(1, "bad record mac")] * 9
    refuses(r"^cannot reach .*\(.*bad record mac", fetch_all, server, tmp_path / "other")
    assert len(faults) == 9 - download.TRIES


def test_no_network_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.001)
    words = ["--out", str(tmp_path / "out"), "--base-url", "http://127.0.0.1:9"]
    refuses(r"^cannot reach 127.0.0.1:9 \(.*check the network", download.run, words)
    fault = download.urllib.error.URLError("[SSL: CERTIFICATE_VERIFY_FAILED] unable to get it")
    monkeypatch.setattr(download, "transfer", mock.Mock(side_effect=fault))
    refuses(r"^cannot reach .*CERTIFICATE.*SSL_CERT_FILE=.*certifi", download.run, words)
    assert not (tmp_path / "out").exists()


def described(folder, tokenizer):
    """The manifest that --manifest wrote."""
    download.run(["--manifest", str(folder), "--tokenizer", str(tokenizer)])
    return read_json(folder / "manifest.json")


def test_manifest_of_published_shards(tmp_path, capsys):
    tokenizer = download.load_tokenizer("bytes")
    train = [f"training text {i} " * 3 for i in range(20)]
    val = [f"validation {i} é" * 4 for i in range(6)]
    train[7] = val[2]  # overlaps, and is cut by a shard border below
    train[11] = val[4] = val[0]
    border = len(tokenized(tokenizer, train[:7]))
    stream = tokenized(tokenizer, train)
    parts = np.split(stream, (border + 3, border + 8, border + 60))
    paths = [tmp_path / f"fineweb_train_{i:06d}.bin" for i in range(4)]
    paths.append(tmp_path / "fineweb_val_000000.bin")
    for path, part in zip(paths, [*parts, np.array(tokenized(tokenizer, val))], strict=True):
        write_shard(path, part)
    manifest = described(tmp_path, "bytes")
    facts = dict(overlap_documents=3, published=True, name="fineweb")  # val[0], again, and val[2]
    assert manifest.items() >= facts.items()
    assert "are also in training: 3" in capsys.readouterr().out
    size = sum(len(text.encode()) for text in train)
    facts = dict(documents=20, tokens=len(stream), decoded_bytes=size, source_bytes=None)
    assert manifest["train"].items() >= facts.items()
    download.check_dataset(tmp_path, manifest)  # hashes, too

    write_shard(tmp_path / "other_train_000000.bin", np.array([1, 5]))
    refuses(r"\(fineweb, other\)", described, tmp_path, "bytes")
    (tmp_path / "other_train_000000.bin").unlink()
    write_shard(paths[0], np.array([1, 300]))
    refuses("token 300, .* 264", described, tmp_path, "bytes")
    write_shard(paths[0], np.array([5, 6, 1, 5]))  # llm.c's: inside a document
    assert described(tmp_path, "bytes")["train"]["shards"][0]["tokens"] == 4
    write_shard(paths[-1], np.array([5, 6]))
    refuses("validation begins with token 5", described, tmp_path, "bytes")
    refuses(r"no \*_train_\*\.bin shard", described, tmp_path / "none", "bytes")
    (tmp_path / "llm.c").mkdir()
    for split in ("train", "val"):
        write_shard(tmp_path / "llm.c" / f"tiny_shakespeare_{split}.bin", np.array([1, 5, 6]))
    assert described(tmp_path / "llm.c", "bytes")["name"] == "tiny_shakespeare"


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
    expected = sum(len(processor.decode(ids).encode()) for ids in encoded)
    assert manifest["train"]["decoded_bytes"] == manifest["val"]["decoded_bytes"] == expected
    assert manifest["train"]["documents"] == manifest["overlap_documents"] == len(encoded)
    assert (tmp_path / "tokenizer.model").read_bytes() == model.read_bytes()


def test_a_folder_of_another_variant_is_refused(server, tmp_path):
    """The names of its shards are the same. Only gpt2 has no SentencePiece model."""
    out = tmp_path / "out"
    fetch_all(server, out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    server.files["/tokenizers/fineweb_1024_bpe.model"] += b" "
    refuses("^--variant sp1024: .*out has", fetch_all, server, out)
    refuses("^--variant gpt2: .*out has", download.download, server.url, "gpt2", 1, out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "gpt2.tiktoken").touch()
    refuses("^--variant sp1024: ", fetch_all, server, tmp_path)


REQUESTS = {
    "--manifest .": "--manifest .*--tokenizer",
    "--manifest . --tokenizer bytes": "--out .*out: .*--manifest",
    "--manifest . --tokenizer bytes --train-shards 3": "--train-shards 3: .*--manifest",
    "--tokenizer bytes": "--manifest .*--tokenizer",
    "--variant sp999": "--variant sp999",
    "--train-shards 0": "--train-shards 0",
    "--train-shards 4": "--train-shards 4: .* 3",
    "--variant gpt2 --tokenizer bytes --train-shards 104": "--train-shards 104: .* 103",
    "--variant gpt2 --tokenizer none.model": r"tokenizer .*none\.model",
    "--train-shards 1": "10 bytes free, up to 600,003,072 needed",
}


def test_bad_requests(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    for words, message in REQUESTS.items():
        given = [*words.split(), "--base-url", server.url, "--out", str(tmp_path / "out")]
        refuses(message, download.run, given)


def test_bad_servers(server, tmp_path, monkeypatch):
    for content in (b"<html>", b"{}", b'{"datasets": [{"name": "fineweb10B_sp1024"}]}', b"[]"):
        server.files["/manifest.json"] = content
        refuses("manifest.json|fineweb10B_sp1024", fetch_all, server, tmp_path / "out")
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.05)
    path = f"{DATASET}/fineweb_val_000000.bin"
    server.slow[path] = [30.0] * 20
    message = r"^cannot reach 127\.0\.0\.1:\d+ \(timed out\)"
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
    names = [ranks.name, "manifest.json", "token_bytes.bin", *(path[1:] for path in server.files)]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    manifest = data.load_manifest(out)
    assert manifest["published"] and manifest["overlap_documents"] == 2
    assert manifest["val"]["decoded_bytes"] == sum(len(text.encode()) for text in HARD_TEXTS)
    data.check_dataset(out, manifest)
