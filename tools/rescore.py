"""Print the settings that a record's script resolves, or the scores of its artifacts, as JSON.

    CONFIG=config.env python tools/rescore.py SCRIPT
    CONFIG=config.env DATA_PATH=data python tools/rescore.py SCRIPT SCORE ARTIFACT…

tools/record.py starts this in a process with a clean environment, because it runs the record's code.
SCORE is val_bpb or val_bpb_sliding.
"""

import hashlib
import json
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace

from common import ROOT, load_script
from endings import run_tool


def resolve_settings(script: ModuleType, path: str):
    """Return the settings that the script's own main resolves. It is stopped once it has them."""
    resolved = []
    load_settings = script.load_settings

    def load_and_stop(*args, **options):
        resolved.append(load_settings(*args, **options))
        sys.exit()

    script.load_settings = load_and_stop
    sys.argv = [path]  # the script reads its own arguments
    try:
        script.main()
    except SystemExit:
        return resolved[0]


def printed(settings) -> dict[str, str]:
    """Return settings by environment name, as a log prints them."""
    values = {}
    for setting in fields(settings):
        value = getattr(settings, setting.name)
        values[setting.name.upper()] = str(int(value) if isinstance(value, bool) else value)
    return values


def text_sha256(data, folder: str, tokens) -> str:
    """Return the SHA-256 of the text that the validation tokens of a Dataset decode to."""
    tokenizer = data.tokenizer
    if not hasattr(tokenizer, "pieces"):  # records before 2026-11-27 have the whole tokenizer
        prepare = load_script(ROOT / "data" / "prepare.py")
        tokenizer = prepare.load_tokenizer(Path(folder, tokenizer.file))
    digest = hashlib.sha256()
    for begin in range(1, len(tokens), 1 << 20):
        ids = tokens[begin : begin + (1 << 20)]
        previous = tokens[begin - 1 :][: len(ids)]
        drops = tokenizer.drops_space[ids] & tokenizer.boundary[previous]
        pieces = zip(ids.tolist(), drops.tolist(), strict=True)
        digest.update(b"".join(tokenizer.pieces[token][drop:] for token, drop in pieces))
    return digest.hexdigest()


def score_artifacts(script: ModuleType, settings, score: str, artifacts: list[str]) -> list[dict]:
    """Return score, bytes and hashes of text and tokenizer of each artifact."""
    data = script.open_data(settings)
    runtime = script.start_runtime(settings.device)
    tokens = getattr(data.val, "tokens", data.val)
    text_hash = text_sha256(data, settings.data_path, tokens)
    stride = settings.eval_stride if score == "val_bpb_sliding" else None
    length = settings.train_seq_len
    results = []
    for path in artifacts:
        header, tensors, _ = script.read_artifact(path)
        # Frozen records before the rewrite may have counts of n-grams and another scorer.
        counts = [script.NGrams] if header["settings"].get("ngram_order") else []
        if hasattr(script, "checked_config"):
            config = script.GPTConfig(**header["settings"])
        else:
            config = SimpleNamespace(**header["settings"])
        network = script.GPT(config, *counts).to(runtime.device)
        network.load_state_dict(tensors)
        if hasattr(script, "Scorer"):
            is_new = hasattr(script, "EvalText")
            tokenizer = data.tokenizer.bos_id if is_new else data.tokenizer
            scorer = script.Scorer(tokenizer, runtime, length, 4)
            result = scorer.score(network, data.val, stride)
        else:
            result = script.score_tokens(
                network, data.val, data.tokenizer, runtime, length, stride or length, 4
            )
        results.append(
            {
                "score": result.bpb,
                "val_bytes": result.bytes,
                "val_text_sha256": text_hash,
                "tokenizer_sha256": header["tokenizer_sha256"],
            }
        )
    return results


def main(path: str, score: str = "", *artifacts: str) -> None:
    """Print settings, or the scores of artifacts."""
    script = load_script(Path(path))
    settings = resolve_settings(script, path)
    result = printed(settings)
    if artifacts:
        result = score_artifacts(script, settings, score, artifacts)
    print(json.dumps(result))


if __name__ == "__main__":
    run_tool(main, *sys.argv[1:])
