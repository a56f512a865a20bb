"""An export of a network that transformers has no class for: it brings its code and its tokenizer."""

import copy
import dataclasses
import importlib.metadata
import random
import re
import runpy
import sys

import pytest
import torch
from test_data import PREFIX, train_model
from test_models import train_tokenizer
from test_quantize import BYTES, network, save

import convert as C
import sample
import train_gpt as T
from conftest import ROOT, read_json, refusal, write_json

pytestmark = pytest.mark.usefixtures("remote_code")
SIZES = dict(num_layers=4, model_dim=32, num_heads=4, num_kv_heads=2)
LAYOUTS = {mode: T.ARCH_PRESETS[mode] | SIZES for mode in ("D", "gdn", "baseline")}
LAYOUTS |= {
    "window": dict(layer_pattern="g s", attn_window=7),
    "learned": dict(layer_pattern="a g", positions="learned"),
    "none": dict(layer_pattern="a", positions="none", norm="layer"),
    "bio": dict(layer_pattern="g s", mlp="bio_soft", norm="rms_weight"),
    "ngrams": dict(layer_pattern="g1 s g1 s", bigram_vocab_size=50, unet_skips=True),
    "depth": dict(layer_pattern="A1 A2 A1 A2", tie_embeddings=False, logit_softcap=0.0),
}
GREEDY = dict(do_sample=False, eos_token_id=None)


@pytest.fixture
def exported(transformers, call, tmp_path):
    """exported(network): the model that transformers loads from its export; its folder is `hf`."""

    def export(net):
        code, output, error = call("export", save(tmp_path / "run", net), tmp_path / "hf")
        assert code == 0 and "trust_remote_code=True" in output, error
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", trust_remote_code=True, output_loading_info=True
        )
        assert not any(loading.values()), loading
        return model

    return export


def texts():
    """Return ids of three texts (3, 40), with BOS in the middle of the second."""
    ids = torch.randint(4, 260, (3, 40), generator=torch.Generator().manual_seed(5))
    ids[:, 0] = ids[1, 20] = BYTES.bos_id
    return ids


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_logits_and_greedy_texts(exported, name):
    """Of texts without padding, of rows padded on either side, and token by token behind padding."""
    net = network(**LAYOUTS[name])
    model = exported(net)
    ids = texts()
    expected = net.logits(net.features(ids, doc=torch.zeros_like(ids)))  # each text a document
    assert 0.5 < expected.abs().max() and torch.equal(model(ids).logits, expected)
    difference = (expected - net(ids)).abs()
    assert difference[::2].max() < 1e-4 < difference[1].max()
    mask = torch.ones_like(ids)
    mask[0, :13] = mask[1, -9:] = 0
    logits = model(ids, attention_mask=mask).logits
    assert (logits[0, 13:] - net(ids[:1, 13:])[0]).abs().max() < 1e-4
    assert (logits[1:, :-9] - expected[1:, :-9]).abs().max() < 1e-4
    mask[1] = 1
    prompts = [ids[0, 13:].tolist(), ids[1].tolist(), ids[2].tolist()]
    samples = sample.generate(net, prompts, 1, 12, 0.0, [(0,), (1,), (2,)], frozenset())
    options = dict(attention_mask=mask, max_new_tokens=12, **GREEDY)
    found = model.generate(ids, **options)
    assert found[:, 40:].tolist() == [row.ids for row in samples]
    assert torch.equal(found, model.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_the_cache(exported):
    """Several tokens behind it, copies of it, beams, texts that go on, and what it cannot do."""
    net = network(layer_pattern="g s a", attn_window=7, tie_embeddings=False)
    net.head.data = torch.randn_like(net.head)  # so that the best beam changes
    model = exported(net)
    ids = texts()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = model(ids, attention_mask=mask).logits
    for begin, end in ((10, 40), (39, 40)):
        cache = model(
            ids[:, :begin], attention_mask=mask[:, :begin], use_cache=True
        ).past_key_values
        assert cache.get_seq_length() == begin
        for kept in (copy.deepcopy(cache), cache):
            words = dict(attention_mask=mask[:, :end], past_key_values=kept)
            logits = model(ids[:, begin:end], **words).logits
            assert logits.shape == expected[:, begin:end].shape
            assert (logits - expected[:, begin:end]).abs().max() < 1e-4
    after = model(ids[:, :1], past_key_values=cache, logits_to_keep=1).logits
    longer, longer_mask = (torch.cat([one, one[:, :1]], 1) for one in (ids, mask))
    longer_mask[:, -1] = 1
    wanted = model(longer, attention_mask=longer_mask).logits[:, -1:]
    assert (after - wanted).abs().max() < 1e-4
    for wrong in (
        dict(attention_mask=mask[:, :2] * 0, past_key_values=cache),
        dict(attention_mask=mask[:, 4:6].flip(1), use_cache=True),
    ):
        with pytest.raises(ValueError, match="attention_mask: with use_cache"):
            model(ids[:, :2], **wrong)
    options = dict(attention_mask=mask, max_new_tokens=6, eos_token_id=None)
    cache = model(ids[:, :30], attention_mask=mask[:, :30], use_cache=True).past_key_values
    goes_on = model.generate(ids, past_key_values=cache, do_sample=False, **options)
    assert torch.equal(goes_on, model.generate(ids, do_sample=False, **options))
    beams = [
        model.generate(ids, num_beams=3, do_sample=False, use_cache=use_cache, **options)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)
    drawn = model.generate(ids, num_return_sequences=2, do_sample=True, **options)
    assert drawn.shape == (6, 46)


def test_files_of_an_export(exported, transformers, monkeypatch, tmp_path):
    """What they say, and that a saved model loads again. convert.py says if it was copied without tools."""
    net = network()
    model = exported(net)
    folder = tmp_path / "hf"
    code = (ROOT / "tools" / "modeling_underpar.py").read_bytes()
    assert (folder / "modeling_underpar.py").read_bytes() == code
    packages = set(re.findall(rb"^ *(?:from|import) (\w+)", code, re.M))
    assert packages - {*map(str.encode, sys.stdlib_module_names)} == {b"torch", b"transformers"}
    config = read_json(folder / "config.json")
    assert config["shape"] == dataclasses.asdict(net.config)
    assert config["architectures"] == ["AutoModelForCausalLM"]  # for `transformers serve`
    assert model.generation_config.pad_token_id == BYTES.bos_id
    model.save_pretrained(tmp_path / "saved")
    assert read_json(tmp_path / "saved" / "config.json")["architectures"] == config["architectures"]
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", trust_remote_code=True, dtype=torch.bfloat16
    )
    assert again(texts(), output_hidden_states=True).hidden_states[-1].dtype == torch.bfloat16
    for name, param in again.named_parameters():
        assert torch.equal(param, model.get_parameter(name).bfloat16())
    with pytest.raises(ValueError, match="device_map: must offload no weights"):
        again.to("meta")(texts())
    shape = model(texts()).logits.shape
    assert again(texts().to("meta")).logits.shape == shape
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.3.0")
    with pytest.raises(ImportError, match=r"transformers>=5\.4 is required .* found .*5\.3\.0"):
        runpy.run_path(str(folder / "modeling_underpar.py"))
    monkeypatch.setattr(C, "__file__", str(tmp_path / "convert.py"))
    refusal(C.UserError, "chat_template.jinja: no such file", C.read_tool, "chat_template.jinja")


def random_texts(count):
    """Return texts of letters, marks, spaces and rarer characters, and the empty one."""
    parts = [*"abcthe mat sat on  0123456789\n\t.,'é", "naïve ", "日本", "🙂", "  ", "'re", " the"]
    parts += ["I'LL", "\r\n", "\xa0", "▁", "def f(x):", "\x00", "\x7f", "<s>"]
    draw = random.Random(4)
    return ["", *("".join(draw.choices(parts, k=draw.randrange(1, 60))) for _ in range(count))]


KINDS = {  # name -> how its SentencePiece model is trained
    "bytes": None,
    "fineweb": PREFIX,
    "ours": {},
    "unigram": dict(PREFIX, model_type="unigram", hard_vocab_limit=False),
    "imported": None,
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_tokenizer(kind, run, folder):
    """Return a tokenizer of these scripts, whose file is put into a run's folder."""
    run.mkdir()
    if kind == "bytes":
        return sample.load_tokenizer("bytes")
    if kind == "imported":
        train_tokenizer("llama3").save(str(folder / "tokenizer.json"))
        config = dict(bos_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=TEMPLATE)
        config |= dict(pad_token="<|im_start|>")
        write_json(folder / "tokenizer_config.json", config)
        path = run / "imported.tiktoken"
        path.write_bytes(C.hf_tokenizer(folder, 1000).content)
        return sample.load_tokenizer(path)
    train_model(run / "tokenizer.model", **KINDS[kind])
    tokenizer = sample.load_tokenizer(run / "tokenizer.model")
    return sample.with_roles(tokenizer) if kind == "fineweb" else tokenizer


CONVERSATION = [("system", "Be short."), ("user", "naïve 12?"), ("assistant", "yes"), ("user", "b")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer(exported, transformers, tmp_path, kind):
    """Ids are those of section encoding behind BOS, if texts begin with it; decoded they are the text.

    Ids of a conversation are those of sample.py, and an answer ends at the same tokens.
    tokenizer.json needs no code of ours.
    """
    tokenizer = make_tokenizer(kind, tmp_path / "run", tmp_path)
    bos = tokenizer.bos_id
    changes = dict(vocab_size=tokenizer.vocab_size, bos_id=bos)
    model = exported(T.GPT(dataclasses.replace(network().config, **changes)))
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in random_texts(300):
        if kind == "unigram":
            text = text.replace("<s>", "")  # pieces of it, in transformers too
        ids = tokenizer.encode(text)
        assert found(text, add_special_tokens=False, split_special_tokens=True).input_ids == ids
        assert found.decode(ids) == sample.decode_bytes(tokenizer, ids).decode(errors="replace")
    # tokenizers before 0.20 reads no lists.
    merges = read_json(tmp_path / "hf" / "tokenizer.json")["model"].get("merges", [])
    assert all(isinstance(merge, str) for merge in merges)
    begin = sample.begin_ids(tokenizer)
    assert begin == ([] if kind == "imported" else [bos]) and found.bos_token_id == bos
    for text in ("the cat", "", "naïve café 12345", "🙂"):
        ids = [*begin, *tokenizer.encode(text)]
        assert found(text).input_ids == ids
        assert found.decode(ids, skip_special_tokens=True) == text
    marked = found(f"a {found.bos_token} b", add_special_tokens=False).input_ids
    assert marked.count(bos) == 1
    batch = found(["a", "the cat"], padding=True, return_tensors="pt")
    lengths = [len(begin) + len(tokenizer.encode(text)) for text in ("a", "the cat")]
    assert batch.attention_mask.sum(1).tolist() == lengths and batch.attention_mask[:, -1].all()
    generation = model.generation_config
    assert generation.eos_token_id == sorted(sample.stop_ids(tokenizer))
    assert generation.pad_token_id == found.pad_token_id
    assert generation.pad_token_id == (601 if kind == "imported" else bos)
    if kind == "unigram":
        return  # has no roles
    messages = [{"role": role, "content": text} for role, text in CONVERSATION]
    expected = sample.asked_ids(tokenizer, [(f"<|{role}|>", text) for role, text in CONVERSATION])
    found.save_pretrained(tmp_path / "again")
    for one in (found, transformers.AutoTokenizer.from_pretrained(tmp_path / "again")):
        ids = one.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ids == expected and len(ids) > 20


def test_conversations_with_tools(exported, transformers, tmp_path):
    """Tools, calls, results, thoughts and lists of parts have the ids that sample.py gives them."""
    exported(network())
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    function = {"name": "time", "arguments": {"zone": 1}}
    call = {"id": "c1", "type": "function", "function": function}
    text_call = {"function": {"name": "Zürich", "arguments": '{"zone": 1}'}}
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, text_call]},
        {"role": "tool", "content": "sunny"},
        {
            "role": "assistant",
            "content": "yes",
            "tool_calls": [call],
            "reasoning_content": "it says so",
        },
        {"role": "user", "content": "b"},
    ]
    tools = [{"type": "function", "function": {"name": "time", "parameters": {}}}]
    ids = found.apply_chat_template(messages, tools=tools, add_generation_prompt=True)["input_ids"]
    row = {"tools": tools, "messages": messages}
    turns = sample.leading_turns(row, sample.listed_turns(row, "messages", set()))
    assert ids == sample.asked_ids(sample.load_tokenizer("bytes"), turns)
    answer = '<think>\nso\n</think>\n\n<tool_call>{"name": "time", "arguments": {"zone": 1}}</tool_call><|end|>'
    answer += found.pad_token * 2  # as in a batch
    assert found.response_template["fields"]["content"]["close"] == [found.bos_token, "<|end|>"]
    reply = found.parse_response(answer, prefix="<|assistant|>")
    assert reply["tool_calls"] == [{"type": "function", "function": function}]
    assert reply["reasoning_content"].strip() == "so" and not reply.get("content")
    for wrong in (
        {"role": "wizard", "content": ""},
        {"role": "user", "content": [{"type": "image"}]},
    ):
        with pytest.raises(Exception, match="wizard|image"):
            found.apply_chat_template([wrong])


@pytest.mark.parametrize("name", ["D", "depth", "ngrams"])
def test_what_transformers_asks_of_a_model(exported, transformers, tmp_path, name):
    """Labels, hidden states, embeddings, tuples, positions, checkpointing, resizing; or an error."""
    model = exported(network(**LAYOUTS[name]))
    ids = texts()
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, -4:] = 0
    labels = ids.where(mask.bool(), -100)
    output = model(ids, attention_mask=mask, labels=labels, output_hidden_states=True)
    picks = output.logits[:, :-1].transpose(1, 2)
    expected = torch.nn.functional.cross_entropy(picks, labels[:, 1:], ignore_index=-100)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    states = output.hidden_states
    assert len(states) == 5 and all(state.shape == (3, 40, 32) for state in states)
    loss, logits = model(ids, attention_mask=mask, labels=labels, return_dict=False)
    assert torch.equal(loss, output.loss) and torch.equal(logits, output.logits)
    kept = model(ids, attention_mask=mask, logits_to_keep=3).logits
    assert kept.shape == (3, 3, 264) and (kept - logits[:, -3:]).abs().max() < 1e-5
    positions = (mask.cumsum(1) - 1).clamp(0)
    same = model(ids, attention_mask=mask, position_ids=positions)
    assert torch.equal(same.logits, output.logits)
    gap = mask.clone()
    gap[1, 7] = 0
    for wrong in (
        {"position_ids": positions + 1},
        {"attention_mask": gap},
        {"attention_mask": mask[:, None, None]},
        {"output_attentions": True},
        {"inputs_embeds": torch.zeros(3, 40, 32)},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            model(ids, **{"attention_mask": mask, **wrong})
    with pytest.raises(TypeError, match="cache_position"):
        model(ids, cache_position=positions)

    embeds = model.get_input_embeddings()(ids)
    if name == "ngrams":
        with pytest.raises(ValueError, match="inputs_embeds"):
            model(inputs_embeds=embeds)
    else:
        assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
        options = dict(max_new_tokens=5, attention_mask=torch.ones_like(ids), **GREEDY)
        options["tokenizer"] = object()  # as `transformers serve` gives one
        wanted = model.generate(ids, **options)[:, 40:]
        assert torch.equal(model.generate(inputs_embeds=embeds, **options), wanted)
        options["past_key_values"] = model(ids[:, :30], use_cache=True).past_key_values
        assert torch.equal(model.generate(inputs_embeds=embeds, **options), wanted)

    loss.backward()
    gradients = [param.grad for param in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model.train()
    forwards = []
    for block in model.base_model.network.blocks:
        block.register_forward_pre_hook(lambda *_: forwards.append(1))
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    assert len(forwards) == 8  # four layers, and each of them again in the backward pass
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(param.grad, gradient)

    model.resize_token_embeddings(270)
    model.save_pretrained(tmp_path / "larger")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "larger", trust_remote_code=True
    )
    logits = again(ids, attention_mask=mask).logits
    assert logits.shape[-1] == 270 and (logits[..., :264] - output.logits).abs().max() < 1e-5


def test_adapters_of_peft(exported):
    """PEFT finds the matrices by name, trains adapters, and merges them."""
    peft = pytest.importorskip("peft")
    model = exported(network(layer_pattern="g s"))
    ids = texts()
    before = model(ids).logits
    names = ["w_qkvg", "w_qkv", "w_o", "w_up", "w_down"]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=names)
    model = peft.get_peft_model(model, config)
    assert (model(ids).logits - before).abs().max() < 1e-5
    model(ids, labels=ids).loss.backward()
    trained = [param for param in model.parameters() if param.requires_grad]
    assert len(trained) == 16 and all(param.grad is not None for param in trained)
    for param in trained:
        param.data += 0.1 * torch.randn_like(param)
    after = model(ids).logits
    assert (after - before).abs().max() > 0.1
    assert (model.merge_and_unload()(ids).logits - after).abs().max() < 1e-4


def test_accelerate_keeps_the_weights_together(exported):
    """They are read past the `forward` of their modules, so one device must hold all of them."""
    pytest.importorskip("accelerate")
    from transformers.integrations.accelerate import infer_auto_device_map

    model = exported(network(tie_embeddings=False))
    size = 4 * sum(param.numel() for param in model.model.parameters())
    room = {0: size, 1: 2 * size, "cpu": 0}  # the first is to have room for the head, too
    places = infer_auto_device_map(model, room, model._no_split_modules)
    assert {*places.values()} == {1}
