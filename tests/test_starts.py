"""INIT_FROM: networks of changed copies and weights that are not finite are refused; a network is
trained on; defaults of an imported start.
"""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from test_weights import network, pack, refused, save

import train_gpt as T
import train_sft as S
from conftest import TINY, Place, refusal

COPY = "a changed copy of a script wrote it: use that copy, or copy section `model` from it into "


# ------------------------------------------------------------------------- networks of changed copies
FIELDS = [
    (dict(conv_taps=4), "has the field 'conv_taps' that this script does not know; " + COPY),
    (dict(conv_taps=None), "has the field 'conv_taps' that this script does not know"),
    (dict(model_dim="32"), ": its settings.model_dim is '32', must be of type int"),
    (dict(model_dim=True), ": its settings.model_dim is True, must be of type int"),
    (dict(norms=7), ": its settings.norms is 7, must be of type str"),
    (dict(tie_embeddings=1), ": its settings.tie_embeddings is 1, must be of type bool"),
    (dict(gdn_shape={}), ": its settings.gdn_shape is {}, must be of type list"),
    (
        dict(mlp="swish"),
        "has settings that make no network: ValueError(\"mlp='swish': no such kind",
    ),
    (dict(norms="rms rms rms dyt"), "norm='dyt': no such kind"),
    (dict(layers="g s A1 M1"), "'M1' is no kind of layer"),
    (dict(positions="alibi"), "positions='alibi': no such kind"),
    (dict(mlp_mult=5.0), "has the tensor 'blocks.0.mlp.w_up' of shape "),
    (dict(qkv_bias=True), "lacks the tensor 'mixers.1.bias' that this script needs; " + COPY),
    (dict(tie_embeddings=False), "lacks the tensor 'head' that this script needs"),
    (dict(num_heads=0), "has settings that make no network: "),
    (dict(layers="g " * 5000), "has more than 1024 layers"),
    (dict(rope_scaling=[8.0, "1", 4.0, 64.0]), "has rope_scaling=[8.0, '1', 4.0, 64.0]: must be 4"),
    (dict(rope_scaling=[8.0, 1.0, 4.0]), "has rope_scaling=[8.0, 1.0, 4.0]: must be 4 numbers"),
]


@pytest.mark.parametrize("changes, message", FIELDS)
def test_a_field_that_a_script_does_not_know(tmp_path, call, changes, message):
    net = network(0)
    vars(net.config).update(changes)
    artifact, _ = pack(tmp_path, net)
    line = refused(artifact)
    assert line.startswith(f"{artifact} ") or line.startswith(str(artifact))
    assert message in f"ARTIFACT: {line}"
    for command in ("info", "verify"):
        code, _, error = call(command, artifact)
        assert code == (1 if command == "verify" else 2) and message in error, error


def test_a_field_that_is_missing_has_its_default(tmp_path):
    net = network(0)
    del net.config.head_dim  # of an older version
    net.config.logit_softcap = 30  # a whole number may stand for a float
    artifact, _ = pack(tmp_path, net)
    loaded, *_ = S.load_model("INIT_FROM", str(artifact))
    assert loaded.config.head_dim == 0
    del net.config.norms
    line = refused(pack(tmp_path, net)[0])
    assert "lacks a field of its network's settings: " in line and "'norms'" in line


def changed_tensors(net):
    """Return name of a change -> state of a network, and what is said about it."""
    state = net.state_dict()
    more = {**state, "blocks.0.taps": torch.ones(4)}
    less = {name: w for name, w in state.items() if name != "blocks.0.mlp_scale"}
    wide = {**state, "blocks.0.mlp_scale": torch.ones(7)}
    whole = {**state, "blocks.0.mlp_scale": torch.ones(len(state["blocks.0.mlp_scale"])).int()}
    byte = {**state, "blocks.0.mlp_scale": state["blocks.0.mlp_scale"].to(torch.float8_e4m3fn)}
    return [
        (more, "has the tensor 'blocks.0.taps' that this script does not know; " + COPY),
        (less, "lacks the tensor 'blocks.0.mlp_scale' that this script needs; " + COPY),
        (wide, "has the tensor 'blocks.0.mlp_scale' of shape (7,), which is "),
        (whole, "model.pt has no weights under 'blocks.0.mlp_scale'"),
        (byte, "model.pt has no weights under 'blocks.0.mlp_scale'"),
    ]


def read_by_gpt(path):
    return T.read_network(T.read_stored("INIT_FROM", path))


@pytest.mark.parametrize("at", range(5))
def test_a_tensor_that_a_script_does_not_know(tmp_path, call, at):
    net = network(0)
    state, message = changed_tensors(net)[at]
    net.state_dict = lambda: state
    checkpoint = save(tmp_path / "run", 5, net)
    for path in map(str, (tmp_path / "run", checkpoint)):
        assert message in refused(path)
        refusal(T.UserError, re.escape(message), read_by_gpt, path)
    if at < 3:
        code, _, error = call("pack", checkpoint, tmp_path / "new.upar")
        assert code == 2 and message in error, error


def test_a_checkpoint_says_its_shape_apart(tmp_path):
    net = network(0)
    checkpoint = save(tmp_path / "run", 5, net)
    meta = json.loads((checkpoint / "meta.json").read_text())
    shape = {**vars(net.config), "conv_taps": 4}
    for given, fault in (
        (shape, "'conv_taps' that this"),
        ([], "lacks"),
        (3, "its settings is 3, must be of type dict"),
    ):
        parts = {"model": net.state_dict(), "training": {}}
        T.write_checkpoint(checkpoint, parts, {**meta, "shape": given})
        if given:
            assert fault in refused(checkpoint)
        else:  # an older one has it among the identity of the run
            S.load_model("INIT_FROM", str(checkpoint))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite(tmp_path, value):
    net = network(0)
    with torch.no_grad():
        net.blocks[0].mlp.w_up[2, 3] = value
    message = "has NaN or infinite weights in the tensor 'blocks.0.mlp.w_up'; take a model or a "
    save(tmp_path / "run", 5, net)
    assert message in refused(tmp_path / "run")
    stored = T.read_stored("X", str(tmp_path / "run"))
    refusal(T.UserError, re.escape(message), T.read_network, stored)


def test_a_weight_beyond_float32_is_infinite():
    message = "has NaN or infinite weights in the tensor 'w'"
    weight = torch.tensor([1.0, 1e300], dtype=torch.float64)
    refusal(T.ArtifactError, message, T.check_finite, {"w": weight}, "X")
    T.check_finite({"w": torch.tensor([1.0, 1e30], dtype=torch.float64)}, "X")


# ------------------------------------------------------------------------------ a second training
@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    """Return a place for runs of train_gpt.py, with a finished run `first`."""
    place = Place(tmp_path_factory.mktemp("starts"), tiny_data, TINY)
    place.run("first", NUM_HEADS=2, MLP="swiglu")
    return place


SHAPE = dict.fromkeys(["LAYER_PATTERN", "MODEL_DIM", "NUM_HEADS", "NUM_KV_HEADS", "ATTN_WINDOW"])


def score_of(line):
    return float(re.search(r"loss:(\S+)", line)[1])


def test_a_finished_run_is_trained_on(place):
    first = place.result("first")
    place.run("on", **SHAPE, INIT_FROM=place.of("first"), SEED=2)
    log = place.log("on")
    assert f"\nstart: {place.of('first') / 'final'}\n" in log
    # The score before training is that of the unrounded weights of the first run.
    start = place.logged("on", "val_loss")[0]
    assert start == pytest.approx(first["before_quantization"]["val_loss"], abs=1e-5)
    second = place.result("on")
    assert second["settings"]["mlp"] == "swiglu" and second["settings"]["num_heads"] == 2
    assert second["init_from"] == str(place.of("first"))
    assert second["params"] == first["params"]
    # Of the artifact, as a run of an older version gives it.
    shutil.copytree(place.of("first"), place.of("old"))
    shutil.rmtree(place.of("old") / "final")
    place.run("from old", **SHAPE, INIT_FROM=place.of("old"), ITERATIONS=1, EMA=0, SWA=0, QAT=0)
    rounded = place.logged("from old", "val_loss")[0]
    assert rounded == pytest.approx(first["val_loss"], abs=1e-5) and rounded != start
    assert "model.upar, rounded weights: the run is of an older version" in place.log("from old")


def test_a_run_goes_on_without_the_start_that_it_began_with(place, tmp_path):
    """Also where its data name the tokenizer's file by another name; its config must be there."""
    start = shutil.copytree(place.of("first"), tmp_path / "start")
    config = tmp_path / "some.env"
    config.write_text("MLP=swiglu\n")  # what the start has may be given
    place.run("moved", **SHAPE, INIT_FROM=start, CONFIG=config, SAVE_EVERY=10)
    folder = place.of("moved")
    straight = shutil.copytree(folder, place.of("straight"))
    for name in ("result.json", "model.upar", "step_000030"):
        shutil.rmtree(folder / name) if name[0] == "s" else (folder / name).unlink()
    shutil.rmtree(start)
    (folder / "tokenizer.model").rename(folder / "other_name.model")
    config.rename(tmp_path / "other.env")
    assert "some.env': no such file; must be where it is now" in place.refused(
        "moved", **place.unset | {"RUN_ID": None, "RESUME": "run"}
    )
    (tmp_path / "other.env").rename(config)
    place.resume("moved")
    assert (folder / "model.upar").read_bytes() == (straight / "model.upar").read_bytes()


NOT_ON_META = """
class Network(T.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.scale = self.embed[0].float().std().item()
T.GPT = Network
"""


def test_a_network_that_cannot_be_rebuilt_is_told_before_step_1(place):
    """By the traceback of the code that cannot run without memory."""
    child = place.begin("not on meta", NOT_ON_META)
    assert child.wait() == 1
    assert "self.scale = " in child.err or "in __init__" in child.err
    assert "item" in child.err and "step:1/" not in child.out


def test_what_does_not_fit_a_start(place, tmp_path):
    start = dict(SHAPE, INIT_FROM=place.of("first"))
    for name, value, fault in [
        ("MODEL_DIM", 64, "MODEL_DIM=64: must be 32, as INIT_FROM="),
        ("MLP", "gelu", "MLP='gelu': must be 'swiglu', as "),
        ("NUM_LAYERS", 7, "LAYERS='"),
        ("NORM", "layer", "NORMS='layer"),
        ("TIE_EMBEDDINGS", 0, "TIE_EMBEDDINGS=False: must be True"),
        ("ARCH_MODE", "llama", "must be "),
        ("ARCH_MODE", "hybrid", "LAYERS='g g a"),
        ("INIT_FROM", tmp_path / "none", "must be a run, a checkpoint or an artifact"),
    ]:
        assert fault in place.refused(f"no {name}", **{**start, name: value})
    other = pack(tmp_path, network(0))[0]  # of another tokenizer
    error = place.refused("tokenizer", **{**start, "INIT_FROM": other})
    assert "bytes: missing, or its SHA-256 is not the one of the data; to train INIT_FROM=" in error
    assert "data/prepare.py TEXTS --tokenizer " in error


@pytest.mark.parametrize("name", ["bos_id", "attn_window", "train_seq_len"])
def test_a_number_that_no_tensor_takes(name):
    shape = dataclasses.asdict(T.GPTConfig(64, 1, "a", "rms")) | {name: 2**64}
    with pytest.raises(S.UserError, match=f"has {name}=18446744073709551616: must be below 2"):
        S.checked_config(shape, "a file")
