"""A model of these scripts for transformers, with trust_remote_code=True.

`quantize.py export` copies this file if transformers has no class for a network, and writes beside
it underpar.py: the sections of sample.py that have the network, its tokenizer and its cache.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizer
from transformers.modeling_outputs import CausalLMOutputWithPast

from .underpar import ENCODINGS, GPT, Decoder, GPTConfig, decode_bytes, load_tokenizer


class UnderparConfig(PretrainedConfig):
    """The content of config.json: `shape` has the fields of GPTConfig."""

    model_type = "underpar"

    def __init__(self, shape=None, **others):
        self.shape = shape or {}
        self.vocab_size = self.shape.get("vocab_size")
        self.max_position_embeddings = self.shape.get("train_seq_len")
        # A document ends where the next one begins.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            others.setdefault(name, self.shape.get("bos_id"))
        super().__init__(**others)


class TextCache(Decoder):
    """A Decoder as a cache of transformers; its logits are those of the last `keep` tokens."""

    def __init__(self, network, prompts, keep):
        self.keep = keep
        super().__init__(network, prompts)

    def read(self, ids):
        """Return logits (R, keep, V) of ids (R, T); of all T if `keep` is 0."""
        return self.network.logits(self.network.features(ids, self)[:, -self.keep :])

    def reorder_cache(self, rows):
        """Go on with these rows, as beam search asks."""
        self.take(rows)


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
        """Return the arguments of `forward`: behind a cache the newest token alone."""
        if past_key_values is not None:
            input_ids = input_ids[:, -1:]
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
        With past_key_values, which such a call returns, texts go on by one token.
        """
        self.network.dtype = self.dtype
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if past_key_values is not None:
            if input_ids.size(1) > 1:
                raise ValueError("input_ids: must be one token a row, with past_key_values")
            past_key_values(input_ids[:, 0])
            logits = past_key_values.logits
        elif use_cache:
            past_key_values = self.read_prompts(input_ids, attention_mask, logits_to_keep)
            logits = past_key_values.logits
        else:
            logits = self.score(input_ids, attention_mask, logits_to_keep)
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    def read_prompts(self, ids, mask, keep):
        """Return a TextCache that has read texts, with logits as `forward` returns them."""
        if not mask[:, -1].all():
            raise ValueError("attention_mask: must be 0 on the left alone, with use_cache")
        pairs = zip(ids, mask.bool(), strict=True)
        cache = TextCache(self.network, [row[is_text].tolist() for row, is_text in pairs], keep)
        missing = (keep or ids.size(1)) - cache.logits.size(1)  # padding of all rows
        cache.logits = F.pad(cache.logits, (0, 0, missing, 0))
        return cache

    def score(self, ids, mask, keep):
        """Return logits of texts as `forward` returns them.

        Rows are turned until their texts begin on the left: no text has padding before it.
        """
        places = torch.arange(ids.size(1), device=ids.device)
        start = mask.long().argmax(1, keepdim=True)  # (B, 1), of the texts
        x = self.network.features(ids.gather(1, (places + start) % ids.size(1)))
        back = (places - start) % ids.size(1)
        x = x.gather(1, back[..., None].expand_as(x))
        return self.network.logits(x[:, -keep:])


class UnderparTokenizer(PreTrainedTokenizer):
    """A SentencePiece model, a rank file, or `bytes`. The name of token 5 is <|5|>.

    Such names in a text are plain text. Texts begin with BOS.
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
        bos = self._convert_id_to_token(self.inner.bos_id)
        others |= {"bos_token": bos, "eos_token": bos, "pad_token": bos}
        others |= {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
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
        return int(token[2:-2])

    def _convert_id_to_token(self, index):
        return f"<|{index}|>"

    def convert_tokens_to_string(self, tokens):
        """Return the text of tokens that begin a document; roles that training added have none."""
        ids = [self._convert_token_to_id(token) for token in tokens]
        known = [i for i in ids if i < self.vocab_size]
        return decode_bytes(self.inner, known).decode(errors="replace")

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        """Return the ids of a text, or of two in a row, behind BOS."""
        return [self.inner.bos_id, *token_ids_0, *(token_ids_1 or [])]

    def save_vocabulary(self, save_directory, filename_prefix=None):
        """Write the tokenizer's file and return its path."""
        path = Path(save_directory) / self.inner.file
        path.write_bytes(self.inner.content)
        return (str(path),)
