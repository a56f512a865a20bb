"""Downloads the published FineWeb shards and tokenizer of Parameter Golf and writes their manifest.json.

    python data/download.py                        validation and 10 training shards (1 billion tokens, 2 GB)
    python data/download.py --train-shards 80      what the challenge trains on

An interrupted download goes on where it stopped when the command is given again. Sizes are checked against the
server's, SHA-256 where the server names one, shard headers always. Layout of the published data: openai/parameter-golf,
data/cached_challenge_fineweb.py.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

BASE_URL = "https://huggingface.co/datasets/willdepueoai/parameter-golf/resolve/main/datasets"
VARIANTS = ("sp1024",)
TRIES = 6  # without a new byte, before giving up
FIRST_TRIES = 3  # of the first request: a machine without a network is told so within seconds
RETRY_SECONDS = 1.0  # doubled with each try
TIMEOUT_SECONDS = 30
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError)


class UserError(Exception):
    """A mistake of the user's: printed as one line, exit code 2."""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves a redirect as the answer: the hub's redirects carry size and SHA-256 of the file behind them."""

    def redirect_request(self, *args: object) -> None:
        """Follows nothing."""


@dataclass(frozen=True)
class Remote:
    """A file to fetch."""

    url: str
    path: Path
    size: int
    sha256: str | None  # None: the server names none


def unreachable(url: str, error: Exception) -> UserError:
    """The one line for a server that does not answer."""
    reason = getattr(error, "reason", None) or error or type(error).__name__
    return UserError(f"cannot reach {urllib.parse.urlsplit(url).netloc} ({reason}); check the network or --base-url, "
                     "then give the same command again: what has arrived is kept")


def missing(url: str, error: urllib.error.HTTPError) -> UserError:
    """The one line for an answer that no retry will change."""
    return UserError(f"{url}: the server answers {error.code} {error.reason}; check --base-url and --variant")


def retried(url: str, action: Callable, progress: Callable[[], int] = lambda: 0, most: int = TRIES) -> Any:
    """`action()`, again after a network error. Tries count from the last time that `progress()` had grown."""
    tries, before = 0, progress()
    while True:
        try:
            return action()
        except NETWORK_ERRORS as error:
            if isinstance(error, urllib.error.HTTPError) and error.code < 500 and error.code not in (408, 429):
                raise missing(url, error) from error
            tries = 1 if progress() > before else tries + 1
            before = progress()
            if tries >= most:
                raise unreachable(url, error) from error
            time.sleep(RETRY_SECONDS * 2 ** (tries - 1))


def probe(url: str, path: Path) -> Remote:
    """Size and, where the server names it, SHA-256 of the file at `url`, by a HEAD request.

    For a large file the hub answers with a redirect whose X-Linked-Size and X-Linked-ETag are size and SHA-256.
    """

    def head() -> Remote:
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.build_opener(NoRedirect).open(request, timeout=TIMEOUT_SECONDS) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as error:
            if not 300 <= error.code < 400:
                raise
            headers = error.headers
            if "X-Linked-Size" not in headers:
                with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                    headers = answer.headers
        size = headers.get("X-Linked-Size") or headers.get("Content-Length")
        if size is None:
            raise UserError(f"{url}: the server names no size; use another --base-url")
        etag = (headers.get("X-Linked-ETag") or "").strip('"')
        return Remote(url, path, int(size), etag if re.fullmatch(r"[0-9a-f]{64}", etag) else None)

    return retried(url, head)


def fault(remote: Remote, path: Path) -> str | None:
    """What is wrong with the file at `path` as a copy of `remote`, or None."""
    size = path.stat().st_size
    if size != remote.size:
        return f"{size} bytes, the server has {remote.size}"
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        header = file.read(12)
        file.seek(0)
        while remote.sha256 and (block := file.read(1 << 22)):
            digest.update(block)
    if remote.sha256 and digest.hexdigest() != remote.sha256:
        return f"SHA-256 {digest.hexdigest()[:12]}…, the server says {remote.sha256[:12]}…"
    if remote.path.suffix == ".bin":
        magic, version, tokens = (int.from_bytes(header[i : i + 4], "little") for i in (0, 4, 8))
        if (magic, version, 1024 + 2 * tokens) != (20240520, 1, size):
            return f"not a token shard of {size} bytes: its header says {magic}, version {version}, {tokens} tokens"
    return None


def fetch(remote: Remote, bar: Any = None) -> None:
    """Brings one file, going on with PATH.part. Raises UserError when it cannot be had whole and right."""
    part = remote.path.with_name(remote.path.name + ".part")

    def have() -> int:
        return part.stat().st_size if part.exists() else 0

    def transfer() -> None:
        start = have()
        if start > remote.size:
            part.unlink()
            start = 0
        if start == remote.size and part.exists():
            return
        request = urllib.request.Request(remote.url, headers={"Range": f"bytes={start}-"} if start else {})
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            resumed = answer.status == 206 and f"bytes {start}-" in answer.headers.get("Content-Range", "")
            if answer.status == 206 and not resumed:
                raise http.client.HTTPException("the server sent another range than asked for")
            with open(part, "ab" if resumed else "wb") as file:
                while block := answer.read(1 << 20):
                    file.write(block)
                    if bar is not None:
                        bar.update(len(block))
        if have() < remote.size:
            raise http.client.HTTPException(f"the connection ended at byte {have()} of {remote.size}")

    remote.path.parent.mkdir(parents=True, exist_ok=True)
    for last in (False, True):  # a damaged rest of an earlier run is fetched once more from the start
        retried(remote.url, transfer, have)
        wrong = fault(remote, part)
        if wrong is None:
            os.replace(part, remote.path)
            return
        part.unlink()
        if last:
            raise UserError(f"{remote.url}: arrived damaged twice: {wrong}; try again later or another --base-url")


def read_json(url: str) -> dict:
    """A JSON file of the server."""

    def get() -> bytes:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            return answer.read()

    try:
        return json.loads(retried(url, get, most=FIRST_TRIES))
    except ValueError as error:
        raise UserError(f"{url}: not JSON ({error}); check --base-url") from error


def plan(base_url: str, variant: str, train_shards: int, out: Path) -> list[Remote]:
    """The files of a variant, from the published manifest.json: tokenizer, all validation shards, N training shards."""
    url, name = f"{base_url}/manifest.json", f"fineweb10B_{variant}"
    published = read_json(url)
    data = next((d for d in published.get("datasets", []) if d.get("name") == name), None)
    if data is None:
        raise UserError(f"{url}: no data set {name}; check --base-url and --variant")
    tokenizer = next((t for t in published.get("tokenizers", []) if t.get("name") == data.get("tokenizer_name")), {})
    stats, model = data.get("stats", {}), tokenizer.get("model_path")
    if not model or not stats.get("files_val") or not stats.get("files_train"):
        raise UserError(f"{url}: {name} names no tokenizer model or no numbers of shards; check --base-url")
    if train_shards > stats["files_train"]:
        raise UserError(f"--train-shards {train_shards}: {variant} has {stats['files_train']}")
    names = [f"fineweb_val_{i:06d}.bin" for i in range(stats["files_val"])]
    names += [f"fineweb_train_{i:06d}.bin" for i in range(train_shards)]
    files = [(f"{base_url}/{model}", out / "tokenizer.model")]
    files += [(f"{base_url}/datasets/{name}/{file}", out / file) for file in names]
    return [probe(*file) for file in files]


def download(base_url: str, variant: str, train_shards: int, out: Path) -> None:
    """Fetches what is missing in `out`."""
    remotes = plan(base_url, variant, train_shards, out)
    wanted = [remote for remote in remotes if not remote.path.exists() or fault(remote, remote.path)]
    parts = [remote.path.with_name(remote.path.name + ".part") for remote in wanted]
    left = sum(remote.size for remote in wanted) - sum(part.stat().st_size for part in parts if part.exists())
    left = max(left, 0)
    print(f"{len(remotes)} files, {sum(remote.size for remote in remotes):,} bytes, into {out}; still to fetch "
          f"{left:,} bytes: about {left / 1.25e7:,.0f} s at 100 Mbit/s, {left / 1.25e8:,.0f} s at 1 Gbit/s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if left > free:
        raise UserError(f"--out {out}: {free:,} bytes free, {left:,} needed; fewer --train-shards or another --out")
    if tqdm is None:
        print("no progress bar: tqdm is not installed (pip install tqdm)")
    bar = None if tqdm is None else tqdm(total=left, unit="B", unit_scale=True, disable=None)
    for remote in wanted:
        fetch(remote, bar)
        if bar is None or bar.disable:
            print(f"fetched {remote.path.name} ({remote.size:,} bytes)", flush=True)
    if bar is not None:
        bar.close()


def run(arguments: list[str] | None = None) -> None:
    """The command; raises UserError for the user's mistakes and for a network that fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", default="sp1024", help=f"one of {', '.join(VARIANTS)}")
    parser.add_argument("--train-shards", type=int, default=10, help="training shards of 100 million tokens (10)")
    parser.add_argument("--out", type=Path, help="folder (data/datasets/fineweb10B_VARIANT beside this script)")
    parser.add_argument("--base-url", default=BASE_URL, help="where the published manifest.json is")
    args = parser.parse_args(arguments)
    if args.variant not in VARIANTS:
        raise UserError(f"--variant {args.variant}: expected one of {', '.join(VARIANTS)}")
    if args.train_shards < 1:
        raise UserError(f"--train-shards {args.train_shards}: expected 1 or more")
    here = Path(__file__).resolve().parent
    out = args.out or Path(os.path.relpath(here / "datasets" / f"fineweb10B_{args.variant}"))
    try:
        download(args.base_url.rstrip("/"), args.variant, args.train_shards, out)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror or error})") from error
    describe = [sys.executable, str(here / "prepare.py"), "--manifest", str(out)]
    done = subprocess.run([*describe, "--tokenizer", str(out / "tokenizer.model")], check=False)
    if done.returncode:
        raise UserError(f"{out}: the shards arrived, their manifest could not be written (see above)")


def main() -> None:
    """Runs the command; a mistake of the user's is one line and exit code 2."""
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
