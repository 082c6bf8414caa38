"""Turns generated documents into fixed-size batches in background processes."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
from dataclasses import dataclass

import numpy as np

import generate
import skills_image
from render import ASSETS, REPLY, pieces

ROWS = 92160                                        # tokens of a batch, padding included
LENGTHS = (64, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 2048)
PICKED = 43008                                      # positions of a batch with a loss
IMAGE_LENGTH = 80
PROMPT_WEIGHT = 0.1


@dataclass
class Batch:
    ids: np.ndarray                                 # [B, L] int64 later, uint16 here
    kind: np.ndarray                                # [B, L] SKIP, PROMPT or REPLY
    picked: np.ndarray                              # [PICKED] flat positions whose next token counts
    images: np.ndarray | None = None                # [B, side, side, 3]


class Encoder:
    def __init__(self):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        from tokenizers import Tokenizer
        self.tok = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
        self.known: dict = {}

    def ids(self, text: str) -> list:
        if len(text) > 60:
            return self.tok.encode(text).ids
        if text not in self.known:
            if len(self.known) > 20000:
                self.known.clear()
            self.known[text] = self.tok.encode(text).ids
        return self.known[text]

    def document(self, d):
        """(ids, kinds)"""
        ids, kinds = [], []
        for text, kind in pieces(d.messages, d.tools, d.effort):
            if "<|image|>" in text:
                text = text.replace("<|image|>", "<|image|>" * skills_image.ROWS)
                part = self.tok.encode(text).ids
            else:
                part = self.ids(text)
            ids += part
            kinds += [kind] * len(part)
        return ids, kinds


def assemble(docs, length: int, rng, images=None) -> Batch:
    count = len(docs)
    ids, kind = np.zeros((count, length), np.uint16), np.zeros((count, length), np.uint8)
    for i, (a, b) in enumerate(docs):
        ids[i, :len(a)], kind[i, :len(b)] = a, b
    nxt = np.zeros_like(kind)
    nxt[:, :-1] = kind[:, 1:]
    flat = nxt.reshape(-1)
    reply, other = np.flatnonzero(flat == REPLY), np.flatnonzero((flat != 0) & (flat != REPLY))
    rng.shuffle(other)
    if len(reply) > PICKED:
        rng.shuffle(reply)
    picked = np.zeros(PICKED, np.int32) - 1
    both = np.concatenate([reply, other])[:PICKED]
    picked[:len(both)] = both
    return Batch(ids, kind, picked, images)


def work(queue, number: int, seed: int, image_share: float, skills: list, mix) -> None:
    os.nice(5)
    r, rng = random.Random(f"train/{seed}/{number}"), np.random.default_rng([seed, number])
    enc, shelves = Encoder(), {n: [] for n in LENGTHS}
    pictures: list = []
    while True:
        if r.random() < image_share:
            d, img = skills_image.image_question(r)
            pictures.append((enc.document(d), img))
            if len(pictures) == ROWS // IMAGE_LENGTH:
                queue.put(assemble([p[0] for p in pictures], IMAGE_LENGTH, rng, np.stack([p[1] for p in pictures])))
                pictures = []
            continue
        ids, kinds = enc.document(generate.draw(r, dict(zip(skills, mix))))
        length = next((n for n in LENGTHS if n >= len(ids)), None)
        if length is None:
            continue
        shelf = shelves[length]
        shelf.append((ids, kinds))
        if len(shelf) == ROWS // length:
            queue.put(assemble(shelf, length, rng))
            shelves[length] = []


def start(workers: int, seed: int, image_share: float = 0.0, weights=generate.WEIGHTS):
    """Starts the processes (before CUDA is touched) and returns (queue, processes, shares of the skills in the order of
    `weights`, which may be changed while they run)."""
    ctx = mp.get_context("fork")
    queue = ctx.Queue(maxsize=4 * workers)
    mix = ctx.Array("d", list(weights.values()), lock=False)
    procs = [ctx.Process(target=work, args=(queue, i, seed, image_share, list(weights), mix), daemon=True) for i in range(workers)]
    for p in procs:
        p.start()
    return queue, procs, mix


def held_out_batches(per_skill: int, image: bool = False, skills=generate.WEIGHTS):
    """[(skill, Batch)]: the held-out set, one skill and one length at a time, padded only in length."""
    enc, rng, out = Encoder(), np.random.default_rng(5), []
    for skill in skills:
        shelves: dict = {}
        for i in range(per_skill):
            ids, kinds = enc.document(generate.draw_held(skill, i))
            length = next(n for n in LENGTHS if n >= len(ids))
            shelves.setdefault(length, []).append((ids, kinds))
        out += [(skill, assemble(docs, length, rng)) for length, docs in shelves.items()]
    if image:
        r = random.Random("held/image")
        pairs = [skills_image.image_question(r) for _ in range(per_skill)]
        out.append(("image", assemble([enc.document(d) for d, _ in pairs], IMAGE_LENGTH, rng, np.stack([p for _, p in pairs]))))
    return out
