"""Section weights: the network of a run, a checkpoint or an artifact, and its tokenizer."""

import shutil
from unittest import mock

import pytest
import torch
from test_data import train_model
from test_model import config

import sample as S
import train_gpt as T
import train_sft
from conftest import BYTES, ROOT, add_noise, environment, pack, refusal, start

IDS = torch.tensor([[1, *range(70, 110)]])


def network(seed, tokenizer=BYTES, **changes):
    torch.manual_seed(seed)
    layers = dict(layer_pattern="g s A1 A1", norm="rms_weight layer")
    net = T.GPT(config(tokenizer.vocab_size, tokenizer.bos_id, **layers, **changes))
    add_noise(net, 0.03)
    return net


def save(folder, step, net, tokenizer=BYTES):
    """Return a checkpoint of the run in `folder`, as post-training leaves it."""
    folder.mkdir(exist_ok=True)
    if tokenizer.file != "bytes":
        (folder / tokenizer.file).write_bytes(tokenizer.content)
    identity = {"tokenizer_sha256": tokenizer.sha256, "seed": 1}
    meta = {"script": "train_gpt.py", "settings": {}, "step": step, "identity": identity}
    meta["shape"] = vars(net.config)
    with mock.patch.object(T, "KEEP_CHECKPOINTS", 9):
        T.save_checkpoint(folder, step, {"model": net.state_dict(), "training": {}}, meta)
    return folder / f"step_{step:06d}"


def check(path, state, file):
    """Check that `path` is a network with this state, bit for bit, from that file; return it."""
    net, _, taken = S.load_model("ARTIFACT", str(path))
    assert taken == str(file) and net.embed.device.type == "cpu"
    assert net.state_dict().keys() == state.keys()
    assert all(torch.equal(w, state[name]) for name, w in net.state_dict().items())
    return net


def refused(path):
    """Return the line that refuses a path, behind the setting."""
    line = refusal(S.UserError, "", S.load_model, "ARTIFACT", str(path))
    assert line.startswith(f"ARTIFACT={str(path)!r}: ")
    return line.removeprefix(f"ARTIFACT={str(path)!r}: ")


def test_a_run_is_its_artifact_or_its_newest_checkpoint(tmp_path):
    old, new, packed = (network(seed) for seed in range(3))
    run = tmp_path / "run"
    first = save(run, 5, old)
    second = save(run, 12, new)
    (run / "step_000020.part").mkdir()  # half-written
    loaded = check(run, new.state_dict(), second)
    assert torch.equal(loaded(IDS), new(IDS))
    splits = [
        {name: getattr(param, "splits", None) for name, param in net.named_parameters()}
        for net in (loaded, new)
    ]
    assert splits[0] == splits[1] and any(splits[0].values())  # Muon has its matrices
    check(first, old.state_dict(), first)
    artifact = pack(packed, BYTES, run) / "model.upar"
    moved = shutil.copy(artifact, tmp_path / "elsewhere.upar")
    _, tensors, _ = T.read_artifact(artifact)
    for path, file in ((run, artifact), (artifact, artifact), (moved, moved)):
        check(path, tensors, file)
    check(second, new.state_dict(), second)  # asked for by name


@pytest.mark.parametrize("harm", ["model.pt", "training.pt", "SHA256SUMS"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, harm, capsys):
    run = tmp_path / "run"
    net = network(0)
    first = save(run, 5, net)
    file = save(run, 10, network(1)) / harm
    data = bytearray(file.read_bytes())
    data[40] ^= 1
    file.write_bytes(data)
    check(run, net.state_dict(), first)
    assert capsys.readouterr().err.startswith(f"checkpoint {file.parent} is damaged and skipped: ")
    file.unlink()
    check(run, net.state_dict(), first)
    shutil.rmtree(first)
    fault = "neither model.upar nor a whole checkpoint; "
    assert refused(run).startswith(f"{fault}checkpoint {file.parent} is damaged")
    shutil.rmtree(file.parent)
    assert refused(run).startswith(f"{fault}{run} has no checkpoint")
    for name in ("config.json", "adapter_config.json"):
        (run / name).write_text("{}")
        line = f"{fault}{run} is no run: first python convert.py import {run} runs/imported"
        assert refused(run) == line
        (run / name).unlink()


def test_a_damaged_artifact_is_an_error_though_checkpoints_stand_beside(tmp_path):
    save(tmp_path, 5, network(0))
    artifact = pack(network(0), BYTES, tmp_path) / "model.upar"
    data = artifact.read_bytes()
    byte = data[:900] + bytes([data[900] ^ 1]) + data[901:]
    for damaged in (byte, data[:-1], b"", b"no model\n" * 100):
        artifact.write_bytes(damaged)
        assert refused(tmp_path).startswith(f"{artifact}: ")


def test_the_tokenizer_is_the_one_beside(tmp_path):
    tokenizers = []
    for size, name in ((400, "a"), (400, "b"), (420, "a")):
        changes = dict(vocab_size=size, control_symbols=[f"<|{name}|>"])
        path = train_model(tmp_path / f"{name}{size}.model", **changes)
        tokenizers.append(S.load_tokenizer(path))
    own, *wrong = tokenizers
    net = network(0, own)
    run, packed = tmp_path / "run", tmp_path / "packed"
    place = save(run, 5, net, own)
    artifact = pack(net, own, packed) / "model.upar"
    for path, file in ((run, place), (packed, artifact)):
        _, tokenizer, taken = S.load_model("ARTIFACT", str(path))
        assert (tokenizer.sha256, taken) == (own.sha256, str(file))
    # An artifact and a checkpoint know the content of theirs.
    for path, beside in ((run, run), (artifact, packed)):
        for other in wrong:
            (beside / "tokenizer.model").write_bytes(other.content)
            size = f"tokenizer.model with {other.vocab_size}"
            assert f"has 400 tokens, and the tokenizer beside it, {size}, is" in refused(path)
        (beside / "tokenizer.model").unlink()
    assert "the tokenizer beside it, bytes with 264" in refused(run)
    message = f"^tokenizer {packed}/tokenizer.model: .Errno 2. "
    refusal(S.UserError, message, S.load_model, "ARTIFACT", str(artifact))


def test_what_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack(network(0), BYTES, tmp_path)  # ./model.upar, which an empty setting does not mean
    for path in ("", "runs/none", tmp_path / "model.upra"):
        assert refused(path) == "no such file; must be a run, a checkpoint or an artifact"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_checkpoint_with_an_adapter(tmp_path, device):
    """On CUDA its frozen weights are in bfloat16."""
    net = network(0, bigram_vocab_size=32)
    settings = train_sft.Settings(lora_rank=3, lora_alpha=5.0, qat=False)
    train_sft.adapt(net, settings, torch.device(device))
    for name, param in net.named_parameters():
        if name.endswith("lora_b"):
            param.data.normal_()
    loaded = check(tmp_path / "run", net.state_dict(), save(tmp_path / "run", 5, net))
    dtypes = [[w.dtype for w in one.state_dict().values()] for one in (loaded, net)]
    assert dtypes[0] == dtypes[1] and (torch.bfloat16 in dtypes[0]) == (device == "cuda")


READ = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch, train_sft
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
network, *_ = train_sft.load_model("INIT_FROM", sys.argv[2])  # a small one: imports what it needs
before = peak()
network, *_ = train_sft.load_model("INIT_FROM", sys.argv[3])
sum(float(param.sum()) for param in network.parameters())
print(peak() - before, sum(param.nbytes for param in network.parameters()))
"""


def test_a_model_is_read_without_a_second_copy(tmp_path):
    save(tmp_path / "small", 1, network(0))
    shape = dict(model_dim=512, num_heads=8, num_kv_heads=8)
    net = T.GPT(config(BYTES.vocab_size, BYTES.bos_id, **shape, layer_pattern="a a a a a a"))
    save(tmp_path / "large", 1, net)
    (tmp_path / "read.py").write_text(READ)
    words = [tmp_path / "read.py", ROOT, tmp_path / "small", tmp_path / "large"]
    done = start(words, environment())
    grown, size = map(int, done.stdout.split())  # bytes
    assert size > 50e6
    assert grown < 1.4 * size, (grown, size)  # two copies until 2026-11-26
