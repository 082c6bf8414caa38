"""Edits of text in which everything looks alike: identifiers that share parts (`mean`, `root_mean`, `mean_buffer_flag`,
`shoutfos` and `shoprat`) and numbers of the same few digits (84, 48, 8, 4.8).

After the first phase the model had nearly all edits right, and what it had wrong was nearly always this: a neighbour of
the name or the number that was asked for.  Ordinary edits seldom have such neighbours, so this is the second phase's
main exercise.
"""

from __future__ import annotations

import random
import re

import skills_text as text
import world as w
from doc import Doc
from world import coin

NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")           # not the digits of a type such as u32


def alike_words(r: random.Random) -> list:
    """Three to five words, some of them made up and with the same beginning."""
    words = r.sample(w.CODE_WORDS, r.randint(1, 3))
    stem = w.syllables(r, 1, 1) if coin(r, 0.7) else r.choice(w.ONSETS)
    while len(words) < 3 or (len(words) < 5 and coin(r)):
        words.append(stem + w.syllables(r, 1, 2) if coin(r, 0.5) else w.syllables(r))
    return words


def alike_names(words: list):
    """A source of identifiers made of the given words."""
    def draw(r: random.Random) -> str:
        return "_".join(r.choice(words) for _ in range(r.choice([1, 1, 2, 2, 3])))
    return draw


def new_names(name):
    """A source of names to rename to: often of the same words, or one of the old names with a word more or less."""
    def draw(r: random.Random, taken: list) -> str:
        while True:
            kind = r.random()
            if kind < 0.35:
                new = name(r)
            elif kind < 0.55:
                parts = r.choice(taken).split("_")
                at = r.randrange(len(parts))
                parts = parts[:at] + [r.choice(w.CODE_WORDS)] + parts[at + coin(r):]
                new = "_".join(parts[:4])
            else:
                new = w.code_name(r)
            if new not in taken:
                return new
    return draw


def alike_numbers(r: random.Random) -> list:
    """Eight to fourteen numbers of two or three different digits."""
    digits = r.sample("123456789", r.choice([2, 2, 3])) + (["0"] if coin(r, 0.2) else [])

    def one(q: random.Random) -> str:
        x = "".join(q.choice(digits) for _ in range(q.choices([1, 2, 3, 4], weights=(2, 5, 3, 2))[0])).lstrip("0") or digits[0]
        return x[:-1] + "." + x[-1] if len(x) > 1 and coin(q, 0.08) else x
    return [one(r) for _ in range(r.randint(8, 14))]


def edit(r: random.Random) -> Doc:
    name, numbers = alike_names(alike_words(r)), alike_numbers(r)

    def snippet(q: random.Random, low: int, high: int):
        language, names, lines = text.snippet(q, low, high, name, (4, 4, 3, 3, 3))
        return language, names, [NUMBER.sub(lambda _: q.choice(numbers), x) for x in lines]

    def new_number(q: random.Random, old: str):
        return q.choice([x for x in numbers if x != old] or ["0"]) if coin(q) else w.number(q)
    return text.edit(r, text.Style(snippet, new_names(name), new_number, (8, 8, 2, 2, 1, 5)))
