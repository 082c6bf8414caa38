"""Copy, edit and rename on code-like text, and JSON replies to a described shape."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import world as w
from doc import Doc, pick_effort, single
from world import coin


# ------------------------------------------------------------------------------------------------ code-like text
def value(r: random.Random) -> str:
    k = r.random()
    if k < 0.5:
        return str(w.number(r))
    if k < 0.65:
        return str(w.decimal(r))
    if k < 0.85:
        return f'"{r.choice(w.THINGS + w.COLOURS + w.ANIMALS) if coin(r, 0.7) else w.syllables(r)}"'
    return r.choice(["true", "false"])


def python_text(r, names, n):
    lines, args = [], names[:2]
    lines.append(f"def {names[0]}({', '.join(names[1:3])}):")
    while len(lines) < n:
        a, b, c = (r.choice(names) for _ in range(3))
        lines.append("    " + r.choice([
            f"{a} = {value(r)}", f"{a} = {b} {r.choice('+-*')} {c}", f"{a} += {r.randint(1, 9)}", f"print({a})",
            f"if {a} > {r.randint(0, 99)}: {b} = {c}", f"{a} = {b}({c})", f"{a}.append({b})"]))
    lines.append(f"    return {r.choice(args)}")
    return lines


def rust_text(r, names, n):
    lines = [f"fn {names[0]}({names[1]}: u32) -> u32 {{"]
    while len(lines) < n:
        a, b, c = (r.choice(names) for _ in range(3))
        lines.append("    " + r.choice([
            f"let {a} = {value(r)};", f"let mut {a} = {b} {r.choice('+-*')} {c};", f"{a} += {r.randint(1, 9)};",
            f"{a}.push({b});", f"let {a} = {b}({c});", f"println!(\"{{}}\", {a});"]))
    return lines + [f"    {r.choice(names)}", "}"]


def script_text(r, names, n):
    lines = []
    while len(lines) < n:
        a, b, c = (r.choice(names) for _ in range(3))
        lines.append(r.choice([f"const {a} = {value(r)};", f"let {a} = {b} {r.choice('+-*')} {c};", f"{a}({b});",
                               f"{a} = {value(r)};", f"console.log({a});"]))
    return lines


def setting_text(r, names, n):
    style = r.choice(["=", " = ", ": "])
    lines = [f"[{r.choice(w.NOUNS)}]"] if style == " = " and coin(r) else []
    for name in r.sample(names, min(n, len(names))):
        lines.append(f"{name}{style}{value(r)}")
    return lines


def table_text(r, names, n):
    head = names[:3]
    return [",".join(head)] + [",".join([r.choice(w.FIRST), str(w.number(r)), r.choice(w.CITIES)][:len(head)]) for _ in range(n)]


LANGUAGES = [("python", python_text), ("rust", rust_text), ("js", script_text), ("toml", setting_text), ("csv", table_text)]


def snippet(r: random.Random, low=3, high=12, name=w.code_name, share=(4, 4, 3, 3, 1)):
    """(language, names, lines)"""
    language, make = r.choices(LANGUAGES, weights=share)[0]
    names = w.distinct(r, name, r.randint(3, 6) if make is not setting_text else r.randint(3, 9))
    lines = make(r, names, r.randint(low, high))
    used = [x for x in names if re.search(rf"\b{x}\b", "\n".join(lines))]
    return language, used, lines


def fence(language: str, lines) -> str:
    return f"```{language}\n" + "\n".join(lines) + "\n```"


def ask(r: random.Random, request: str, language: str, lines) -> str:
    block = fence(language, lines)
    return r.choice([f"{request}\n{block}", f"{request}\n\n{block}", f"{block}\n{request}", f"{block}\n\n{request}"])


def copy(r: random.Random) -> Doc:
    effort = pick_effort(r)
    language, _, lines = snippet(r, 2, 14)
    if coin(r, 0.3):
        text = plain_text(r)
        q = r.choice([f"Repeat exactly: {text}", f"Copy this text: {text}", f"Say this word for word: {text}", f"Echo: {text}"])
        return single("copy", r, q, effort, "Copy it.", "I repeat the text word for word.", text)
    request = r.choice(["Repeat this code exactly.", "Copy this text exactly.", "Write this again without changes.",
                        "Print the following unchanged.", "Repeat this:", "Give me the same code back."])
    return single("copy", r, ask(r, request, language, lines), effort, "Copy it.",
                  "I repeat the text without any change.", fence(language, lines))


def plain_text(r: random.Random) -> str:
    kind = r.randrange(5)
    if kind == 0:
        return " ".join(w.syllables(r, 1, 3) for _ in range(r.randint(2, 8)))
    if kind == 1:
        return " ".join(r.choice(w.ADJECTIVES + w.NOUNS + w.COLOURS + w.ANIMALS) for _ in range(r.randint(2, 10)))
    if kind == 2:
        return f"{w.full_name(r)}, {w.city(r)}, {w.email(r)}, {w.date(r)}"
    if kind == 3:
        return " ".join(str(w.number(r)) for _ in range(r.randint(2, 8)))
    return f"The {r.choice(w.ADJECTIVES)} {r.choice(w.ANIMALS)} in {w.city(r)} has {w.number(r)} {w.plural(r.choice(w.THINGS))}."


def fresh_name(r, names):
    while True:
        new = w.code_name(r)
        if new not in names:
            return new


@dataclass
class Style:
    """What an edit is about.  Every function gets the random source first, `new_name` then the names that are taken and
    `new_number` the number to replace."""

    snippet: Callable = snippet
    new_name: Callable = fresh_name
    new_number: Callable = lambda r, _: w.number(r)
    kinds: tuple = (8, 4, 3, 3, 3, 3)


def edit(r: random.Random, style: Style | None = None) -> Doc:
    style = style or Style()
    effort, kind = pick_effort(r), r.choices(range(6), weights=style.kinds)[0]
    language, names, lines = style.snippet(r, 2, 12)
    if kind == 0:
        old, new = r.choice(names), style.new_name(r, names)
        out = [re.sub(rf"\b{old}\b", new, x) for x in lines]
        q = r.choice([f"Rename `{old}` to `{new}`.", f"Rename {old} to {new} in this code.", f"Replace every `{old}` by `{new}`.",
                      f"Please rename the variable {old} to {new}.", f"Change the name {old} to {new} everywhere."])
        low, high = f"{old} becomes {new}.", f"I write the text again and put {new} where {old} was. Nothing else changes."
    elif kind == 1:
        spots = [i for i, x in enumerate(lines) if re.search(r"\d+", x)]
        if not spots:
            return edit(r, style)
        i = r.choice(spots)
        old = r.choice(re.findall(r"\d+(?:\.\d+)?", lines[i]))
        if len(re.findall(rf"(?<![\d.]){re.escape(old)}(?![\d.])", "\n".join(lines))) != 1:
            return edit(r, style)
        new = str(style.new_number(r, old))
        out = [re.sub(rf"(?<![\d.]){re.escape(old)}(?![\d.])", new, x) for x in lines]
        q = r.choice([f"Change {old} to {new}.", f"Replace the number {old} by {new}.", f"Use {new} instead of {old}."])
        low, high = f"{old} becomes {new}.", f"I write the text again with {new} in place of {old}. Nothing else changes."
    elif kind == 2:
        i = r.randrange(len(lines))
        if lines.count(lines[i]) != 1 or len(lines) < 3:
            return edit(r, style)
        out = lines[:i] + lines[i + 1:]
        q = r.choice([f"Delete the line `{lines[i].strip()}`.", f"Remove the line `{lines[i].strip()}`."])
        low, high = "Drop that line.", f"I write all lines but `{lines[i].strip()}`."
    elif kind == 3:
        i = r.randrange(len(lines))
        if lines.count(lines[i]) != 1:
            return edit(r, style)
        indent = lines[i][:len(lines[i]) - len(lines[i].lstrip())]
        new = f"{w.code_name(r)} = {value(r)}"
        out = lines[:i + 1] + [indent + new] + lines[i + 1:]
        q = r.choice([f"Add the line `{new}` after `{lines[i].strip()}`.", f"Insert `{new}` below the line `{lines[i].strip()}`."])
        low, high = "Insert it there.", f"I write the text and put `{new}` after `{lines[i].strip()}`."
    elif kind == 4:
        new = f"# {r.choice(w.ADJECTIVES)} {r.choice(w.NOUNS)}"
        if coin(r):
            out, place = [new] + lines, r.choice(["at the top", "as the first line"])
        else:
            out, place = lines + [new], r.choice(["at the end", "as the last line"])
        q = f"Add the line `{new}` {place}."
        low, high = f"Put it {place}.", f"I write the text with `{new}` {place}."
    else:
        old, new = r.choice(names), style.new_name(r, names)
        old2 = r.choice([x for x in names if x != old] or [old])
        if old2 == old:
            return edit(r, style)
        new2 = style.new_name(r, names + [new])
        swap = {old: new, old2: new2}
        out = [re.sub("|".join(rf"\b{x}\b" for x in swap), lambda m: swap[m.group()], x) for x in lines]
        q = f"Rename `{old}` to `{new}` and `{old2}` to `{new2}`."
        low, high = f"{old} becomes {new}, {old2} becomes {new2}.", \
            f"I put {new} where {old} was and {new2} where {old2} was. Nothing else changes."
    return single("edit", r, ask(r, q, language, lines), effort, low, high, fence(language, out))


# ------------------------------------------------------------------------------------------------ JSON
def record_person(r):
    name, age, town, job = w.full_name(r), r.randint(18, 90), w.city(r), r.choice(w.JOBS)
    text = r.choice([f"{name} is {age} years old, lives in {town} and works as {w.article(job)}.",
                     f"{name} is {w.article(job)} from {town} and {age} years old.",
                     f"In {town} lives {name}, {age}, {w.article(job)}."])
    return text, {"name": ("string", name), "age": ("number", age), "city": ("string", town), "job": ("string", job)}


def record_product(r):
    name, price, stock = w.title(r), w.number(r), coin(r)
    colours = r.sample(w.COLOURS, r.randint(1, 3))
    text = f"The {name} costs {price} euros, comes in {w.join_and(colours)} and is " + \
        ("in stock." if stock else "not in stock.")
    return text, {"name": ("string", name), "price": ("number", price), "colors": ("array of strings", colours),
                  "in_stock": ("boolean", stock)}


def record_event(r):
    what, day, time = w.title(r), r.choice(w.DAYS), w.clock(r)
    guests, online = w.distinct(r, lambda q: q.choice(w.FIRST), r.randint(1, 3)), coin(r)
    text = f"{what} is on {day} at {time} with {w.join_and(guests)}, " + ("online." if online else "on site.")
    return text, {"title": ("string", what), "day": ("string", day), "time": ("string", time),
                  "guests": ("array of strings", guests), "online": ("boolean", online)}


def record_order(r):
    number, thing, qty, paid = w.code(r), r.choice(w.THINGS), r.randint(1, 20), coin(r)
    text = f"Order {number}: {qty} {w.plural(thing) if qty > 1 else thing}, " + ("already paid." if paid else "not yet paid.")
    return text, {"order": ("string", number), "item": ("string", thing), "quantity": ("number", qty), "paid": ("boolean", paid)}


def record_pet(r):
    name, kind, age = r.choice(w.FIRST), r.choice(w.ANIMALS), r.randint(1, 19)
    owner = w.person(r)
    text = r.choice([f"{name} is a {age} year old {kind} and belongs to {owner}.", f"{owner} has a {kind} called {name}, {age} years old."])
    return text, {"name": ("string", name), "animal": ("string", kind), "age": ("number", age), "owner": ("string", owner)}


RECORDS = [record_person, record_product, record_event, record_order, record_pet]


def shape_words(r, keys, kinds) -> str:
    style = r.randrange(4)
    if style == 0:
        return "{" + ", ".join(f'"{k}": {t}' for k, t in zip(keys, kinds)) + "}"
    if style == 1:
        return "the fields " + ", ".join(f"{k} ({t})" for k, t in zip(keys, kinds))
    if style == 2:
        return "the keys " + w.join_and(keys)
    names = {"string": "string", "number": "number", "boolean": "boolean"}
    props = {k: {"type": names[t]} if t in names else {"type": "array", "items": {"type": "string"}} for k, t in zip(keys, kinds)}
    return json.dumps({"type": "object", "properties": props, "required": list(keys)})


def json_reply(r: random.Random) -> Doc:
    effort = pick_effort(r)
    if coin(r, 0.15):
        pool = r.choice([w.FRUITS, w.ANIMALS, w.COLOURS, w.CITIES])
        items = r.sample(pool, r.randint(2, 6))
        q = r.choice([f"Write these as a JSON array: {', '.join(items)}", f"Give me a JSON array with {w.join_and(items)}."])
        return single("json", r, q, effort, "An array of strings.", f"The array has {len(items)} strings.", json.dumps(items), "json")
    text, fields = r.choice(RECORDS)(r)
    keys = r.sample(list(fields), r.randint(min(2, len(fields)), len(fields)))
    kinds = [fields[k][0] for k in keys]
    shape = shape_words(r, keys, kinds)
    q = r.choice([
        f"Answer only with JSON with {shape}. Text: {text}", f"{text}\nWrite this as JSON with {shape}.",
        f"Extract {'a JSON object' if shape[0] != '{' else 'JSON like'} {'with ' if shape[0] != '{' else ''}{shape} from this text: {text}",
        f"Reply in JSON with {shape}.\n{text}"])
    facts = ", ".join(f"{k} {json.dumps(fields[k][1])}" for k in keys)
    return single("json", r, q, effort, f"Keys: {', '.join(keys)}.", f"I look up each key: {facts}.",
                  json.dumps({k: fields[k][1] for k in keys}), "json")
