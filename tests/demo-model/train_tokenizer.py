"""Trains the byte-level BPE of the demo model on generated documents and writes tokenizer.json and its companions.

    python train_tokenizer.py [documents]

Words, single digits, single signs, runs of JSON punctuation and runs of blanks are kept apart, and a blank never joins
a word: a name is the same tokens wherever it stands, which makes copying easy for a small model.
"""

from __future__ import annotations

import json
import random
import sys

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import generate
from render import ASSETS, pieces

VOCAB = 4096
SPECIAL = [
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|begin_of_audio|>", "<|end_of_audio|>", "<|image|>", "<|video|>", "<|audio|>", "/nothink",
]
MARKUP = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]
WORDS = r'\p{L}+|\p{N}|["{}\[\]:,]+(?: ["{}\[\]]+)?|[^\s\p{L}\p{N}]|[\r\n]+|[^\S\r\n]+'


def corpus(documents: int):
    r = random.Random(11)
    marks = SPECIAL + MARKUP
    for _ in range(documents):
        d = generate.draw(r)
        text = "".join(t for t, _ in pieces(d.messages, d.tools, d.effort))
        for mark in marks:
            text = text.replace(mark, "\n")
        yield text


def main() -> None:
    documents = int(sys.argv[1]) if len(sys.argv) > 1 else 15000
    tok = Tokenizer(models.BPE(byte_fallback=False))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])
    tok.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)
    fixed = SPECIAL + MARKUP
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(fixed), min_frequency=2, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False)
    tok.train_from_iterator(corpus(documents), trainer)
    size = tok.get_vocab_size()
    if size != VOCAB - len(fixed):
        raise SystemExit(f"the corpus gave {size} entries, {VOCAB - len(fixed)} are needed: draw more documents")
    data = json.loads(tok.to_str())
    data["added_tokens"] = [
        {"id": size + i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": t in SPECIAL} for i, t in enumerate(fixed)]
    ASSETS.mkdir(parents=True, exist_ok=True)
    (ASSETS / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "clean_up_tokenization_spaces": False,
        "padding_side": "left", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "additional_special_tokens": SPECIAL}
    (ASSETS / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    tok = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    for t in fixed:
        if len(tok.encode(t).ids) != 1:
            raise SystemExit(f"{t} is not a single token")
    print(f"{tok.get_vocab_size()} entries; special tokens from {size}:")
    print({t: tok.token_to_id(t) for t in fixed})


if __name__ == "__main__":
    main()
