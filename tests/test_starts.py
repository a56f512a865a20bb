"""INIT_FROM: networks of changed copies and weights that are not finite are refused; a network is
trained on; defaults of an imported start.
"""

import os
import re
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from test_weights import network, refused, save

import train_gpt as T
import train_sft as S
from conftest import BYTES, TINY, Place, pack, read_json, refusal

COPY = "a changed copy of a script wrote it"


# ------------------------------------------------------------------------- networks of changed copies
FIELDS = [
    (dict(conv_taps=4), f"has the field 'conv_taps' that this script does not know; {COPY}"),
    (dict(model_dim="32"), ": its settings.model_dim is '32', must be of type int"),
    (dict(model_dim=True), ": its settings.model_dim is True, must be of type int"),
    (dict(tie_embeddings=1), ": its settings.tie_embeddings is 1, must be of type bool"),
    (dict(bos_id=2**64), "has bos_id=18446744073709551616: must be below 2"),
    (dict(mlp="swish"), "has settings that make no network: "),
    (dict(norms="rms rms rms dyt"), "norm='dyt': no such kind"),
    (dict(layers="g s A1 M1"), "'M1' is no kind of layer"),
    (dict(positions="alibi"), "positions='alibi': no such kind"),
    (
        dict(mlp_mult=5.0),
        "the tensor 'blocks.0.mlp.w_up' is [64, 32], and [160, 32] in this script",
    ),
    (dict(qkv_bias=True), "the tensor 'mixers.1.bias' is missing, and "),
    (dict(layers="g " * 5000), "its network has more than 1024 layers"),
    (dict(rope_scaling=[8.0, "1", 4.0, 64.0]), "rope_scaling[1] is '1', must be of type float"),
    (dict(rope_scaling=[8.0, 1.0, 4.0]), "has rope_scaling=[8.0, 1.0, 4.0]: must be 4 numbers"),
]


def test_fields_that_a_script_does_not_know(tmp_path, call):
    for changes, message in FIELDS:
        net = network(0)
        vars(net.config).update(changes)
        assert message in f"ARTIFACT: {refused(pack(net, BYTES, tmp_path))}"
    for command, expected in (("info", 2), ("verify", 1)):
        code, _, error = call(command, tmp_path / "model.upar")
        assert code == expected and message in error, error


def test_a_field_that_is_missing_has_its_default(tmp_path):
    net = network(0)
    del net.config.head_dim  # of an older version
    net.config.logit_softcap = 30  # a whole number may stand for a float
    loaded, *_ = S.load_model("INIT_FROM", str(pack(net, BYTES, tmp_path)))
    assert loaded.config.head_dim == 0
    del net.config.norms
    assert "lacks a field of its network's settings: " in refused(pack(net, BYTES, tmp_path))


SCALE = "blocks.0.mlp_scale"
TENSORS = [
    (SCALE, None, f"the tensor {SCALE!r} is missing, and [32] in this script"),
    (
        SCALE,
        torch.ones(7),
        f"the tensor {SCALE!r} is [7], and [32] in this script",
    ),
    (SCALE, torch.ones(32).int(), f"tensor {SCALE!r}: is no tensor of weights, but of torch.int32"),
    (SCALE, torch.ones(32).to(torch.float8_e4m3fn), f"tensor {SCALE!r}: is no tensor of weights"),
    (SCALE, torch.ones(32).to_sparse(), f"tensor {SCALE!r}: "),
    (SCALE, torch.ones(32, device="meta"), f"tensor {SCALE!r}: "),
    (SCALE, torch.ones(1).expand(1 << 40), f"tensor {SCALE!r}: has fewer weights than its shape"),
    (SCALE, torch.tensor([torch.nan] + [1.0] * 31), f"tensor {SCALE!r}: has NaN or infinite"),
    # Beyond float32 a weight is infinite.
    (SCALE, torch.full((32,), 1e300, dtype=torch.float64), "has NaN or infinite weights"),
    ("blocks.0.taps", torch.ones(4), "the tensor 'blocks.0.taps' is [4], and missing in this"),
]


def read_by_gpt(path):
    return T.read_network(T.read_stored("INIT_FROM", path))


def test_tensors_that_a_script_does_not_know(tmp_path, call):
    for name, tensor, message in TENSORS:
        net = network(0)
        state = net.state_dict() | {name: tensor}
        if tensor is None:
            del state[name]
        net.state_dict = lambda state=state: state
        checkpoint = str(save(tmp_path / "run", 5, net))
        assert message in refused(checkpoint)
        assert (COPY in refused(checkpoint)) == ("the tensor " in message)
        refusal(T.UserError, re.escape(message), read_by_gpt, checkpoint)
    code, _, error = call("pack", checkpoint, tmp_path / "new.upar")
    assert code == 2 and message in error, error


def test_the_clock_of_an_imported_start_has_time_to_pack(monkeypatch):
    """A second for 6 million weights, which the reserve and the clock both have more."""
    weights = [torch.empty(12_000_000, device="meta")]
    monkeypatch.setattr(
        T, "empty_network", lambda config: SimpleNamespace(parameters=lambda: weights)
    )
    tokenizer = SimpleNamespace(name="bytes")
    start = SimpleNamespace(config=SimpleNamespace(context=64), source="x", tokenizer=tokenizer)
    values = T.imported_values(start, {"qat": False})
    assert values == {"qat": False, "reserve_seconds": 7.0, "max_wallclock_seconds": 602.0}
    start.config.context = 0
    assert T.imported_values(start, {"qat": False}) == {}


def test_what_an_imported_model_may_not_do_is_noted():
    """Ends that only a template writes, with adapters alone; texts beyond its positions."""
    tokenizer = SimpleNamespace(facts={"template_end": 7, "added": {"<|im_end|>": 7, "<s>": 1}})
    config = SimpleNamespace(context=2048)
    lines = []
    S.note_limits(S.Settings(lora_rank=4, train_seq_len=2048), config, tokenizer, lines.append)
    [line] = lines
    assert line.startswith("note: LORA_RANK=4: ") and "'<|im_end|>'" in line
    S.note_limits(S.Settings(train_seq_len=2049), config, tokenizer, lines.append)
    assert lines[1].startswith("note: texts may have 2049 tokens") and len(lines) == 2
    config.context = 0  # a model of our own
    S.note_limits(S.Settings(train_seq_len=4096), config, tokenizer, lines.append)
    S.note_limits(S.Settings(lora_rank=4), config, SimpleNamespace(facts={}), lines.append)
    assert len(lines) == 2


def test_the_date_of_a_run_stays_under_resume(tmp_path, monkeypatch):
    """Whatever the environment says then; a new run takes the environment's, or today's in local time."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "")
    S.start_settings({})
    today = time.strftime("%Y-%m-%d")
    assert time.strftime("%Y-%m-%d", time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))) == today
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "315532800")
    S.start_settings({})
    assert os.environ["SOURCE_DATE_EPOCH"] == "315532800"
    checkpoint = save(tmp_path / "run", 5, network(0))
    meta = read_json(checkpoint / "meta.json")
    meta |= {"settings": vars(S.Settings(out_dir=str(tmp_path))), "identity": {"date": "86400"}}
    parts = {"model": network(0).state_dict(), "training": {}}
    T.write_checkpoint(checkpoint, parts, meta)
    S.start_settings({"RESUME": "run", "OUT_DIR": str(tmp_path)})
    assert os.environ["SOURCE_DATE_EPOCH"] == "86400"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    refusal(S.UserError, "^SOURCE_DATE_EPOCH='today': must be seconds", S.start_settings, {})


def test_a_checkpoint_says_its_shape(tmp_path):
    net = network(0)
    checkpoint = save(tmp_path / "run", 5, net)
    meta = read_json(checkpoint / "meta.json")
    parts = {"model": net.state_dict(), "training": {}}
    shape = {**vars(net.config), "conv_taps": 4}
    for given, fault in (
        (shape, "'conv_taps' that this"),
        (3, "settings is 3, must be of type dict"),
        (None, "has no settings of its network; a version before 2026-11-27 wrote it"),
    ):
        T.write_checkpoint(checkpoint, parts, {**meta, "shape": given})
        assert fault in refused(checkpoint)


# ------------------------------------------------------------------------------ a second training
@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_data):
    """Return a place for runs of train_gpt.py, with a finished run `first`."""
    place = Place(tmp_path_factory.mktemp("starts"), tiny_data, TINY)
    place.run("first", NUM_HEADS=2, MLP="swiglu")
    return place


SHAPE = dict.fromkeys(["LAYER_PATTERN", "MODEL_DIM", "NUM_HEADS", "NUM_KV_HEADS", "ATTN_WINDOW"])
SHORT = dict(SHAPE, ITERATIONS=1, EMA=0, SWA=0, QAT=0)


def test_a_finished_run_is_trained_on(place):
    first = place.result("first")
    place.run("on", **SHORT, INIT_FROM=place.of("first"))
    assert f"\nstart: {place.of('first') / 'final'}\n" in place.log("on")
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
    place.run("from old", **SHORT, INIT_FROM=place.of("old"))
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
    expected = place.artifact("moved")
    shutil.rmtree(folder / "step_000030")
    for name in ("result.json", "model.upar"):
        (folder / name).unlink()
    shutil.rmtree(start)
    (folder / "tokenizer.model").rename(folder / "other_name.model")
    config.rename(tmp_path / "other.env")
    line = place.refused("moved", **place.resumed)
    assert "some.env': no such file; must be where it is now" in line
    (tmp_path / "other.env").rename(config)
    place.resume("moved")
    assert place.artifact("moved") == expected


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
    assert "item" in child.err and "step:1/" not in child.out


def test_what_does_not_fit_a_start(place, tmp_path):
    start = dict(SHAPE, INIT_FROM=place.of("first"))
    for name, value, fault in [
        ("MODEL_DIM", 64, "MODEL_DIM=64: must be 32, as INIT_FROM="),
        ("MLP", "gelu", "MLP='gelu': must be 'swiglu', as "),
        (
            "NUM_LAYERS",
            7,
            "LAYER_PATTERN (NUM_LAYERS words)='g s1 s1 g s1 s1 g': must be 'g s1 s1'",
        ),
        (
            "NORM",
            "layer",
            "NORM (a word for each layer)='layer layer layer': must be 'rms rms rms'",
        ),
        ("TIE_EMBEDDINGS", 0, "TIE_EMBEDDINGS=False: must be True"),
        ("ARCH_MODE", "llama", "must be "),
        ("ARCH_MODE", "D", "LAYER_PATTERN (NUM_LAYERS words)='g g g g g s1 "),
        ("INIT_FROM", tmp_path / "none", "must be a run, a checkpoint or an artifact"),
    ]:
        assert fault in place.refused(f"no {name}", **{**start, name: value})
    other = pack(network(0), BYTES, tmp_path)  # of another tokenizer
    error = place.refused("tokenizer", **{**start, "INIT_FROM": other})
    assert (
        "is not the one of the data; to train INIT_FROM=" in error
        and "data/prepare.py TEXTS --tokenizer " in error
    )


def test_whole_documents_want_positions_without_an_end(place):
    """Before the first step, in a new network and in that of INIT_FROM."""
    place.run("learned", POSITIONS="learned", **{**SHORT, "LAYER_PATTERN": "g a", "MODEL_DIM": 32})
    for changes in (dict(POSITIONS="learned"), dict(SHAPE, INIT_FROM=place.of("learned"))):
        assert "EVAL_STATEFUL=1" in place.refused("stateful", EVAL_STATEFUL=1, **changes)


def test_large_networks_read_at_least_1024_tokens_at_a_time():
    """Otherwise half of 1 GiB on a CPU, at 250 bytes per token, channel and layer."""
    for width, layers, tokens in ((32, 4, 2**29 // 32000), (576, 30, 1024)):
        shape = SimpleNamespace(model_dim=width)
        stand_in = SimpleNamespace(config=shape, layers=range(layers), embed=torch.zeros(1))
        assert S.fitting_tokens(stand_in) == tokens
