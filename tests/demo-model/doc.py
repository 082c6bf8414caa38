"""What a generator returns, and small helpers shared by the skills."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

EFFORTS = ("off", "low", "high", "max")


@dataclass
class Doc:
    """One conversation in OpenAI chat form.  `check` says how the held-out set judges the reply."""

    skill: str
    messages: list
    tools: list = field(default_factory=list)
    effort: str = "max"
    check: str = "exact"
    key: str = ""


def pick_effort(r: random.Random) -> str:
    return r.choices(EFFORTS, weights=(22, 22, 28, 28))[0]


def think(effort: str, low: str, high: str) -> str:
    """The reasoning text for an effort; empty with thinking off."""
    return {"off": "", "low": low}.get(effort, high)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(content: str, reasoning: str = "", calls: list | None = None) -> dict:
    m = {"role": "assistant", "content": content}
    if reasoning:
        m["reasoning_content"] = reasoning
    if calls:
        m["tool_calls"] = calls
    return m


def call(name: str, arguments: dict) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def single(skill, r, question, effort, low, high, answer, check="exact", key="") -> Doc:
    """A one-question document."""
    reply = assistant(answer, think(effort, low, high))
    return Doc(skill, [user(question), reply], effort=effort, check=check, key=key or question)
