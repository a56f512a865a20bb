"""Section weights: the network of a run, a checkpoint or an artifact, with its tokenizer; and what is refused."""

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_data import train_model
from test_model import config

import sample as S
import train_gpt as T
import train_grpo as P

BYTES = S.load_tokenizer("bytes")
IDS = torch.tensor([[1, *range(70, 110)]])


def network(seed: int, tokenizer: S.Tokenizer = BYTES, **changes) -> T.GPT:
    torch.manual_seed(seed)
    layers = dict(layer_pattern="g s A1 A1", norm="rms_weight layer")
    net = T.GPT(config(tokenizer.vocab_size, tokenizer.bos_id, **layers, **changes))
    with torch.no_grad():
        for param in net.parameters():
            param.add_(0.03 * torch.randn_like(param))
    return net


def save(folder: Path, step: int, net: T.GPT, tokenizer: S.Tokenizer = BYTES) -> Path:
    """A checkpoint of the run in `folder`, as train_gpt.py leaves it; its own folder."""
    folder.mkdir(exist_ok=True)
    if tokenizer.file != "bytes":
        (folder / tokenizer.file).write_bytes(tokenizer.content)
    meta = {
        "script": "train_gpt.py",
        "settings": {},
        "step": step,
        "identity": {**vars(net.config), "manifest_sha256": "0", "seed": 1},
    }
    with mock.patch.object(T, "KEEP_CHECKPOINTS", 9):
        T.save_checkpoint(folder, step, {"model": net.state_dict(), "training": {}}, meta)
    return folder / f"step_{step:06d}"


def pack(
    folder: Path, net: T.GPT, tokenizer: S.Tokenizer = BYTES
) -> tuple[Path, dict[str, torch.Tensor]]:
    """The run's artifact, as train_gpt.py packs it, and the weights that it stands for."""
    folder.mkdir(exist_ok=True)
    state = net.state_dict()
    coded = T.quantize_all(state, T.quant_table(T.Settings()))
    packed = T.pack_artifact(
        state,
        coded,
        settings=vars(net.config),
        tokenizer_sha256=tokenizer.sha256,
        meta={"seed": 1, "tokenizer": tokenizer.file},
    )
    (folder / "model.upar").write_bytes(packed)
    if tokenizer.file != "bytes":
        (folder / tokenizer.file).write_bytes(tokenizer.content)
    values = dict(state)
    for name, part in coded.items():
        values[name] = T.dequantize(part.codes, part.scale).view_as(state[name])
    return folder / "model.upar", values


def check(
    loaded: tuple, state: dict[str, torch.Tensor], file: Path, tokenizer: S.Tokenizer = BYTES
) -> None:
    """That `loaded` is a network with this state, bit for bit but for small tensors in 16 bits, from that file."""
    net, found, taken = loaded
    exact = file.suffix != ".upar"
    assert (taken, found.sha256, found.file) == (str(file), tokenizer.sha256, tokenizer.file)
    assert net.embed.device.type == "cpu" and net.state_dict().keys() == state.keys()
    for name, w in net.state_dict().items():
        low = (
            not exact
            and T.tensor_class(name, w) == "control"
            and name.rpartition(".")[2] not in T.FLOAT32_CONTROLS
        )
        assert torch.equal(w, state[name].half().float() if low else state[name]), name


def test_a_run_is_its_artifact_or_its_newest_checkpoint(tmp_path):
    old, new, packed = (network(seed) for seed in range(3))
    run = tmp_path / "run"
    first = save(run, 5, old)
    check(S.load_model("ARTIFACT", str(run)), old.state_dict(), first)
    second = save(run, 12, new)
    check(S.load_model("ARTIFACT", str(run)), new.state_dict(), second)
    check(S.load_model("ARTIFACT", str(first)), old.state_dict(), first)
    (run / "step_000020.part").mkdir()  # half-written
    check(S.load_model("ARTIFACT", str(run)), new.state_dict(), second)
    artifact, values = pack(run, packed)
    for path in (run, artifact):
        check(S.load_model("ARTIFACT", str(path)), values, artifact)
    check(S.load_model("ARTIFACT", str(second)), new.state_dict(), second)  # asked for by name
    moved = shutil.copy(
        artifact, tmp_path / "elsewhere.bin"
    )  # an artifact needs no name and, with bytes, no folder
    net, _, taken = S.load_model("ARTIFACT", str(moved), "bytes")
    assert taken == str(moved) and torch.equal(net.embed, values["embed"])
    with torch.no_grad():
        packed.load_state_dict(net.state_dict())
        assert torch.equal(net(IDS), packed(IDS)) and net(IDS).std() > 0.1


@pytest.mark.parametrize("harm", ["model.pt", "meta.json", "training.pt", "SHA256SUMS"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, harm):
    run, nets = tmp_path / "run", [network(seed) for seed in range(2)]
    first, second = (save(run, 5 * (at + 1), net) for at, net in enumerate(nets))
    data = (second / harm).read_bytes()
    (second / harm).write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    check(S.load_model("INIT_FROM", str(run)), nets[0].state_dict(), first)
    said = refused("INIT_FROM", second)
    what = f"checkpoint {second} is damaged and skipped: "
    assert said.startswith(
        f"INIT_FROM={str(second)!r}: neither model.upar nor a whole checkpoint; {what}"
    )
    (second / harm).unlink()
    check(S.load_model("INIT_FROM", str(run)), nets[0].state_dict(), first)
    shutil.rmtree(first)
    assert refused("INIT_FROM", run).startswith(
        f"INIT_FROM={str(run)!r}: neither model.upar nor a whole checkpoint; {what}"
    )


@pytest.mark.parametrize("damage", ["byte", "short", "empty", "text"])
def test_a_damaged_artifact_is_an_error_though_checkpoints_stand_beside(tmp_path, damage):
    net = network(0)
    save(tmp_path / "run", 5, net)
    artifact, _ = pack(tmp_path / "run", net)
    data = artifact.read_bytes()
    artifact.write_bytes(
        {
            "byte": data[:900] + bytes([data[900] ^ 1]) + data[901:],
            "short": data[:-1],
            "empty": b"",
            "text": b"no model\n" * 100,
        }[damage]
    )
    assert refused("ARTIFACT", tmp_path / "run").startswith(f"ARTIFACT={str(tmp_path / 'run')!r}: ")


def refused(name: str, path: Path | str, tokenizer_path: Path | str = "") -> str:
    """The one line that such a call is refused with."""
    with pytest.raises(S.UserError) as error:
        S.load_model(name, str(path), str(tokenizer_path))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_tokenizer_is_the_one_beside_or_the_same_from_elsewhere(tmp_path):
    kinds = [{}, {"control_symbols": ["<|a|>", "<|b|>", "<|c|>", "<|d|>"]}, {"vocab_size": 420}]
    own, other, larger = (
        S.load_tokenizer(train_model(tmp_path / f"{at}.model", **changes))
        for at, changes in enumerate(kinds)
    )
    net, run = network(0, own), tmp_path / "run"
    place = save(run, 5, net, own)
    check(S.load_model("ARTIFACT", str(run)), net.state_dict(), place, own)
    renamed = S.load_model("ARTIFACT", str(run), str(tmp_path / "0.model"))[
        1
    ]  # the same by its content
    assert (
        renamed.sha256 == own.sha256 != other.sha256 and own.vocab_size == other.vocab_size == 400
    )
    artifact, values = pack(tmp_path / "packed", net, own)
    check(S.load_model("ARTIFACT", str(artifact)), values, artifact, own)
    for path, file in ((run, place), (artifact, artifact)):
        for at, (found, size) in enumerate(((other, 400), (larger, 420)), 1):
            given = tmp_path / f"{at}.model"
            assert found.vocab_size == size and refused("ARTIFACT", path, given) == (
                f"TOKENIZER_PATH={str(given)!r}: tokenizer.model with {size} tokens is not the one of {file}, "
                "which has 400"
            )
        assert refused("ARTIFACT", path, "bytes") == (
            f"TOKENIZER_PATH='bytes': bytes with 264 tokens is not the one of {file}, which has 400"
        )
    (
        run / "tokenizer.model"
    ).unlink()  # the run's own is lost: one of the right size is taken, bytes are not
    assert S.load_model("ARTIFACT", str(run), str(tmp_path / "0.model"))[1].sha256 == own.sha256
    assert refused("ARTIFACT", run) == (
        f"TOKENIZER_PATH='': bytes with 264 tokens is not the one of {place}, which has 400"
    )
    (tmp_path / "packed" / "tokenizer.model").write_bytes(larger.content)
    assert refused("ARTIFACT", artifact) == (
        f"TOKENIZER_PATH='': tokenizer.model with 420 tokens is not the one of {artifact}, which has 400"
    )
    (tmp_path / "packed" / "tokenizer.model").unlink()
    assert refused("ARTIFACT", artifact).startswith(
        f"tokenizer {tmp_path}/packed/tokenizer.model: [Errno 2] "
    )


def test_what_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack(tmp_path, network(0))  # ./model.upar, which an empty setting does not mean
    for path in ("", "runs/none", str(tmp_path / "model.upra")):
        assert refused("ARTIFACT", path).startswith(
            f"ARTIFACT={path!r}: must be a run, a checkpoint or an artifact; [Errno "
        )
    (tmp_path / "empty").mkdir()
    assert refused("ARTIFACT", "empty") == (
        "ARTIFACT='empty': neither model.upar nor a whole checkpoint; checkpoint empty is damaged and skipped: "
        "[Errno 2] No such file or directory: 'empty/SHA256SUMS'"
    )


def test_a_checkpoint_with_an_adapter(tmp_path):
    net = S.setup_lora_adapter(network(0, bigram_vocab_size=32), 3, 5.0)
    for name, param in net.named_parameters():
        if name.endswith("lora_b"):
            param.data.normal_()
    place = save(tmp_path / "run", 5, net)
    found, tokenizer, taken = S.load_model("INIT_FROM", str(tmp_path / "run"))
    check((found, tokenizer, taken), net.state_dict(), place)
    with torch.no_grad():
        expected = net(IDS)
        assert torch.equal(found(IDS), expected)
        with P.reference_policy(found, frozen=False)():
            assert (found(IDS) - expected).abs().max() > 0.1
    check((S.merge_lora(found), tokenizer, taken), S.merge_lora(net).state_dict(), place)
