"""Draws documents: `draw(seed)` for training, `draw_held(skill, i)` for the held-out set."""

from __future__ import annotations

import random

import skills_alike as alike
import skills_basic as basic
import skills_text as text
import skills_tools as tools
import world as w
from doc import Doc, assistant
from world import coin

SYSTEM = [
    "You are a helpful assistant.", "You are the Plugfold demo.", "Answer briefly.", "You are a careful assistant.",
    "Be polite and short.", "You help with code and tools.", "Answer in English.",
]


def plain(r: random.Random) -> Doc:
    return r.choices([basic.smalltalk, basic.fact, basic.arithmetic, basic.lists], weights=(3, 3, 4, 2))[0](r)


MAKERS = {
    "chat": basic.smalltalk, "facts": basic.fact, "arithmetic": basic.arithmetic, "lists": basic.lists,
    "copy": text.copy, "edit": text.edit, "json": text.json_reply, "tool": tools.single_call,
    "parallel": tools.parallel_calls, "chain": tools.chain, "no_call": lambda r: tools.no_call(r, plain), "refuse": tools.refuse,
    "alike": alike.edit,
}
# How many documents of each skill: the first phase, and the second, of which a third are edits.
WEIGHTS = {
    "chat": 2, "facts": 2, "arithmetic": 10, "lists": 6, "copy": 9, "edit": 16, "json": 10, "tool": 18,
    "parallel": 6, "chain": 12, "no_call": 4, "refuse": 5,
}
SECOND = {
    "chat": 2, "facts": 2, "arithmetic": 13, "lists": 7, "copy": 8, "edit": 14, "json": 9, "tool": 10,
    "parallel": 4, "chain": 8, "no_call": 3, "refuse": 3, "alike": 20,
}


def fresh(skill: str, r: random.Random, held: bool) -> Doc:
    """A document of a skill from the held-out or from the trainable share of all problems."""
    while True:
        d = MAKERS[skill](r)
        if w.held_out(d.key) == held or (skill in ("chat", "facts", "no_call") and not d.key.startswith("arith")):
            return d


def draw(r: random.Random, weights=None) -> Doc:
    """A training document, sometimes with a system text and with earlier turns; of the first phase unless told."""
    weights = weights or WEIGHTS
    skill = r.choices(list(weights), weights=list(weights.values()))[0]
    d = fresh(skill, r, False)
    long = coin(r, 0.02)
    if long or coin(r, 0.15):
        earlier = []
        for _ in range(r.randint(4, 14) if long else r.choice([1, 1, 2])):
            e = fresh(r.choice(["chat", "facts", "arithmetic", "lists", "copy", "json"]), r, False)
            if len(e.messages[0]["content"]) < 400:
                earlier += [e.messages[0], assistant(e.messages[1]["content"])]
        if d.tools and coin(r, 0.3):
            t, ask, args = tools.made_up_call(r)
            d.tools.append(t)
            result, answer = tools.made_up_result(r, t["function"]["name"])
            earlier += [{"role": "user", "content": ask}, assistant("", "", [tools.call(t["function"]["name"], args)]),
                        tools.result_message(result), assistant(answer)]
            names = [x["function"]["name"] for x in d.tools]
            if len(set(names)) != len(names):
                return draw(r, weights)
        d.messages = earlier + d.messages
    if coin(r, 0.2):
        d.messages = [{"role": "system", "content": r.choice(SYSTEM)}] + d.messages
    return d


def draw_held(skill: str, index: int, seed: int = 1_000_003) -> Doc:
    return fresh(skill, random.Random(f"{seed}/{skill}/{index}"), True)
