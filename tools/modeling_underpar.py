"""A model of these scripts for transformers, with trust_remote_code=True.

`quantize.py export` copies this file if transformers has no class for a network, and writes beside
it underpar.py: the sections of sample.py that have the network, its tokenizer and its cache.
"""

from pathlib import Path

import torch
from transformers import (
    AddedToken,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from .underpar import (
    CONV_TAPS,
    ENCODINGS,
    GPT,
    Decoder,
    GPTConfig,
    begin_ids,
    decode_bytes,
    load_tokenizer,
    with_roles,
)


class UnderparConfig(PretrainedConfig):
    """The content of config.json: `shape` has the fields of GPTConfig."""

    model_type = "underpar"

    def __init__(self, shape=None, **others):
        self.shape = shape or {}
        self.vocab_size = self.shape.get("vocab_size")
        self.max_position_embeddings = self.shape.get("context") or self.shape.get("train_seq_len")
        # A document ends where the next one begins.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            others.setdefault(name, self.shape.get("bos_id"))
        super().__init__(**others)


class TextCache(Decoder):
    """A Decoder as a cache of transformers."""

    is_compileable = False

    def reorder_cache(self, rows):
        """Go on with these rows, as beam search asks."""
        self.take(rows)

    def get_seq_length(self, layer_idx=0):
        """Return the number of tokens that the texts have, padding included."""
        return int(self.used) - (CONV_TAPS - 1)

    def read_on(self, ids):
        """Go on with ids (B, T) and return the logits (B, T, V) of what comes after each."""
        if ids.size(1) == 1:
            self(ids)
            return self.logits[:, None]
        while self.used + ids.size(1) > self.kept["ids"].size(1):
            self.grow()
        logits = self.network.logits(self.network.features(ids, context=self.context(ids)))
        self.logits = logits[:, -1]
        return logits


class UnderparForCausalLM(PreTrainedModel, GenerationMixin):
    """The network, with the interface of transformers' language models."""

    config_class = UnderparConfig
    base_model_prefix = "network"  # which the names of tensors in the file lack
    _is_stateful = True  # a state of Gated DeltaNet cannot go back to fewer tokens

    def __init__(self, config):
        super().__init__(config)
        self.network = GPT(GPTConfig(**config.shape))
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # `forward` makes the cache

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, **kwargs):
        """Return the arguments of `forward`: behind a cache the tokens that it does not have."""
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.get_seq_length() :]
        return {**kwargs, "input_ids": input_ids, "past_key_values": past_key_values}

    def forward(
        self,
        input_ids,
        attention_mask=None,
        past_key_values=None,
        use_cache=False,
        logits_to_keep=0,
        **_,
    ):
        """Return logits (B, T, V) of input_ids (B, T), or of the last `logits_to_keep` tokens.

        Texts may be padded on either side, where attention_mask is 0; with use_cache on the left.
        With past_key_values, which such a call returns, texts go on by all of input_ids.
        """
        self.network.dtype = self.dtype
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if past_key_values is not None:
            if not attention_mask[:, -input_ids.size(1) :].all():
                raise ValueError("attention_mask: must be 1 for tokens behind past_key_values")
            logits = past_key_values.read_on(input_ids)[:, -logits_to_keep:]
            return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
        if use_cache:
            if not attention_mask[:, -1].all():
                raise ValueError("attention_mask: with use_cache it must be 0 on the left alone")
            rows = zip(input_ids, attention_mask.bool(), strict=True)
            prompts = [ids[is_text].tolist() for ids, is_text in rows]
            past_key_values = TextCache(self.network, prompts)
        if past_key_values is not None and 1 in (logits_to_keep, input_ids.size(1)):
            logits = past_key_values.logits[:, None]
        else:
            logits = self.score(input_ids, attention_mask, logits_to_keep)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    def score(self, ids, mask, keep):
        """Return logits of texts as `forward` returns them.

        Rows are turned until their texts begin on the left: no text has padding before it. A text is
        one document, as in a Decoder.
        """
        places = torch.arange(ids.size(1), device=ids.device)
        start = mask.long().argmax(1, keepdim=True)  # (B, 1), of the texts
        ids = ids.gather(1, (places + start) % ids.size(1))
        x = self.network.features(ids, doc=torch.zeros_like(ids))
        back = (places - start) % ids.size(1)
        x = x.gather(1, back[..., None].expand_as(x))
        return self.network.logits(x[:, -keep:])


class UnderparTokenizer(PreTrainedTokenizer):
    """A SentencePiece model, a rank file, or `bytes`. The name of token 5 is <|5|>.

    The names of BOS, of role tokens and of an imported model's added tokens are these tokens in a
    text, as everywhere in transformers; with split_special_tokens=True they are plain text. Texts
    begin with BOS, if those of the model do.
    """

    # transformers gives the path of the one that there is.
    vocab_files_names = {
        "sentencepiece": "tokenizer.model",
        "bytes": "bytes",
        **{name: f"{name}.tiktoken" for name in ("imported", *ENCODINGS)},
    }
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, **others):
        paths = [others[name] for name in self.vocab_files_names if others.get(name)]
        self.inner = load_tokenizer(paths[0])
        if others.get("has_added_roles"):
            self.inner = with_roles(self.inner)
        bos_id = self.inner.bos_id
        self.names = {bos_id: f"<|{bos_id}|>"}  # id -> text, of tokens that a text can name
        for tokens in (self.inner.roles, self.inner.facts.get("added", {})):
            self.names |= {i: text for text, i in tokens.items()}
        self.ids = {text: i for i, text in self.names.items()}
        added = {}
        for i, text in self.names.items():
            # Some are shown as text, <think> for one; the others unless skip_special_tokens.
            added[i] = AddedToken(text, normalized=False, special=not self.inner.pieces[i])
            self.inner.pieces[i] = text.encode()
        bos = self.names[bos_id]
        special = {"bos_token": bos, "eos_token": bos, "pad_token": bos}
        special |= {name: text for name, text in self.inner.facts.get("names", {}).items() if text}
        others |= special | {"added_tokens_decoder": added, "clean_up_tokenization_spaces": False}
        super().__init__(**others)

    @property
    def vocab_size(self):
        """Return the number of tokens."""
        return self.inner.vocab_size

    def get_vocab(self):
        """Return the ids of all tokens by name."""
        return {self._convert_id_to_token(i): i for i in range(self.vocab_size)}

    def _tokenize(self, text):
        return [self._convert_id_to_token(i) for i in self.inner.encode(text)]

    def _convert_token_to_id(self, token):
        return self.ids[token] if token in self.ids else int(token[2:-2])

    def _convert_id_to_token(self, index):
        return self.names.get(index, f"<|{index}|>")

    def save_vocabulary(self, save_directory, filename_prefix=None):
        """Write the tokenizer's file and return its path, as save_pretrained asks."""
        path = Path(save_directory, self.inner.file)
        path.write_bytes(self.inner.content)
        return (str(path),)

    def convert_tokens_to_string(self, tokens):
        """Return the text of tokens that begin a document."""
        ids = [self._convert_token_to_id(token) for token in tokens]
        return decode_bytes(self.inner, ids).decode(errors="replace")

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        """Return the ids of a text, or of two in a row, with what a text begins with."""
        return [*begin_ids(self.inner), *token_ids_0, *(token_ids_1 or [])]
