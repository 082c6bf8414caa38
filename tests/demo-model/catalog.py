"""The functions of the small world: a hand-written catalogue and an endless supply of made-up ones.

A parameter is (name, kind, description).  `draw` gives a value and the words that ask for it.
"""

from __future__ import annotations

import random

import world as w
from world import coin

STRINGS = {
    "title": w.title, "name": w.full_name, "owner": w.full_name, "author": w.person, "recipient": w.person, "city": w.city,
    "place": w.city, "email": w.email, "path": w.path, "file": w.path, "target": w.path, "date": w.date, "day": lambda r: r.choice(w.DAYS),
    "month": lambda r: r.choice(w.MONTHS), "time": w.clock, "color": lambda r: r.choice(w.COLOURS), "label": lambda r: r.choice(w.ADJECTIVES),
    "category": lambda r: r.choice(w.THINGS), "code": w.code, "reason": lambda r: f"{r.choice(w.ADJECTIVES)} {r.choice(w.NOUNS)}",
    "text": lambda r: sentence(r), "query": lambda r: f"{r.choice(w.ADJECTIVES)} {w.plural(r.choice(w.NOUNS))}", "key": w.code_name,
    "symbol": w.code_name, "animal": lambda r: r.choice(w.ANIMALS), "item": lambda r: r.choice(w.THINGS), "word": lambda r: w.syllables(r),
}
NUMBERS = "count limit priority level size amount quantity width height age page volume duration timeout score weight price floor seat".split()
BOOLEANS = "force public urgent verbose dry_run notify recursive private archived hidden draft overwrite loop paid".split()
ARRAYS = {
    "tags": lambda r: r.choice(w.ADJECTIVES + w.COLOURS), "colors": lambda r: r.choice(w.COLOURS), "users": lambda r: r.choice(w.FIRST),
    "guests": lambda r: r.choice(w.FIRST), "members": lambda r: r.choice(w.FIRST), "cities": w.city, "files": w.path,
    "items": lambda r: r.choice(w.THINGS + w.FRUITS), "fields": w.code_name, "labels": lambda r: r.choice(w.ADJECTIVES),
}
NUMBER_ARRAYS = ["ids", "numbers", "pages", "values"]

SCHEMAS = {
    "string": {"type": "string"}, "number": {"type": "number"}, "integer": {"type": "integer"}, "boolean": {"type": "boolean"},
    "strings": {"type": "array", "items": {"type": "string"}}, "integers": {"type": "array", "items": {"type": "integer"}},
}


def sentence(r: random.Random) -> str:
    return r.choice([
        f"the {r.choice(w.NOUNS)} is {r.choice(w.ADJECTIVES)}", f"see you on {r.choice(w.DAYS)}", f"bring the {r.choice(w.ADJECTIVES)} {r.choice(w.THINGS)}",
        f"{w.plural(r.choice(w.THINGS))} are ready", f"call {r.choice(w.FIRST)} at {w.clock(r)}", f"meet in {w.city(r)}",
        f"I am {r.choice(['late', 'ready', 'on my way', 'at home'])}", f"buy {r.randint(2, 20)} {w.plural(r.choice(w.FRUITS))}"])


def schema(params, required, r: random.Random | None = None, words=None) -> dict:
    """A JSON schema; half of the time with descriptions."""
    props = {}
    with_words = r is not None and coin(r)
    for name, kind in params:
        props[name] = dict(SCHEMAS[kind])
        if with_words:
            props[name]["description"] = (words or {}).get(name) or f"The {name.replace('_', ' ')}."
    out = {"type": "object", "properties": props, "required": required}
    if r is not None and coin(r, 0.1):
        out["additionalProperties"] = False
    return out


def tool(name: str, description: str, parameters: dict) -> dict:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


# ------------------------------------------------------------------------------------------------ made-up functions
def draw_param(r: random.Random, taken):
    while True:
        k = r.random()
        if k < 0.5:
            name, kind = r.choice(list(STRINGS)), "string"
        elif k < 0.7:
            name, kind = r.choice(NUMBERS), r.choice(["integer", "integer", "number"])
        elif k < 0.85:
            name, kind = r.choice(BOOLEANS), "boolean"
        elif k < 0.95:
            name, kind = r.choice(list(ARRAYS)), "strings"
        else:
            name, kind = r.choice(NUMBER_ARRAYS), "integers"
        if name not in taken:
            return name, kind


def draw_value(r: random.Random, name: str, kind: str):
    if kind == "string":
        return STRINGS[name](r)
    if kind == "integer":
        return w.number(r)
    if kind == "number":
        return w.number(r) if coin(r, 0.6) else w.decimal(r)
    if kind == "boolean":
        return coin(r)
    if kind == "strings":
        return w.distinct(r, ARRAYS[name], r.randint(1, 3))
    return [w.number(r) for _ in range(r.randint(1, 4))]


def made_up(r: random.Random):
    """(tool, verb, noun, params)"""
    verb, noun = r.choice(w.VERBS), r.choice(w.NOUNS)
    if coin(r, 0.12):
        noun = w.syllables(r)
    params: list = []
    for _ in range(r.choice([1, 1, 2, 2, 3, 3, 4])):
        params.append(draw_param(r, [p for p, _ in params] + [noun]))
    required = [p for p, _ in params][:r.randint(1, len(params))]
    style = r.random()
    name = f"{verb}_{noun}" if style < 0.8 else f"{noun}_{verb}" if style < 0.9 else verb + noun.capitalize()
    words = f"{verb.capitalize()} {w.article(noun)}."
    return tool(name, words, schema(params, required, r)), verb, noun, params, required


def shown(value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return w.join_and([str(x) for x in value])
    return str(value)


def request(r: random.Random, name: str, verb: str, noun: str, args: dict) -> str:
    """Words that ask for the call."""
    style = r.random()
    spoken = {k: k.replace("_", " ") for k in args}
    if style < 0.45:
        parts = []
        for k, v in args.items():
            if isinstance(v, bool):
                parts.append(r.choice([f"{spoken[k]} {'on' if v else 'off'}", f"{spoken[k]} {'true' if v else 'false'}"]))
            elif isinstance(v, str) and coin(r, 0.4):
                parts.append(f'{spoken[k]} "{v}"')
            else:
                parts.append(f"{spoken[k]} {shown(v)}")
        head = r.choice([f"{verb.capitalize()} {w.article(noun)}", f"Please {verb} {w.article(noun)}", f"{verb.capitalize()} the {noun}",
                         f"Can you {verb} the {noun}", f"I want to {verb} {w.article(noun)}"])
        text = head + (" with " + "; ".join(parts) if parts else "")
        return text + ("?" if head.startswith("Can") else ".")
    if style < 0.75:
        parts = [f"{spoken[k].capitalize()}: {('yes' if v else 'no') if isinstance(v, bool) else shown(v)}." for k, v in args.items()]
        head = r.choice([f"{verb.capitalize()} {w.article(noun)}.", f"Please {verb} the {noun}.", f"{verb.capitalize()} the {noun} now."])
        return " ".join([head] + parts)
    parts = [f"{k} is {shown(v)}" for k, v in args.items()]
    head = r.choice([f"Use {name}", f"Call {name}", f"Run {name}"])
    return head + (" where " + ", ".join(parts) if parts else "") + "."


# ------------------------------------------------------------------------------------------------ hand-written functions
def pick(options):
    return lambda r: r.choice(options)


CATALOG = {
    # name: (description, params [(name, kind, draw)], number required, request forms, result draw, answer form)
    "get_weather": ("Get the current weather of a city.", [("city", "string", w.city)], 1,
                    ["What is the weather in {city}?", "How is the weather in {city} today?", "Weather in {city}, please.", "Is it warm in {city}?"],
                    lambda r, a: {"city": a["city"], "temperature": r.randint(-9, 35), "sky": r.choice("sunny cloudy rainy windy foggy".split())},
                    "It is {sky} in {city} with {temperature} degrees."),
    "get_time": ("Get the local time of a city.", [("city", "string", w.city)], 1,
                 ["What time is it in {city}?", "Tell me the time in {city}.", "Current time in {city}?"],
                 lambda r, a: {"city": a["city"], "time": w.clock(r)}, "It is {time} in {city}."),
    "read_file": ("Read a text file.", [("path", "string", w.path)], 1,
                  ["Show me the file {path}.", "Read {path}.", "What is in {path}?", "Open {path} and show it."],
                  lambda r, a: {"path": a["path"], "text": sentence(r)}, "The file {path} says: {text}"),
    "write_file": ("Write text to a file.", [("path", "string", w.path), ("text", "string", sentence)], 2,
                   ["Write \"{text}\" to {path}.", "Save the text \"{text}\" in {path}.", "Put \"{text}\" into the file {path}."],
                   lambda r, a: {"ok": True, "path": a["path"]}, "I wrote the text to {path}."),
    "list_files": ("List the files of a folder.", [("folder", "string", pick(w.FOLDERS)), ("recursive", "boolean", coin)], 1,
                   ["List the files in {folder}.", "Which files are in the folder {folder}?", "Show the folder {folder}."],
                   lambda r, a: {"files": w.distinct(r, w.path, r.randint(1, 3))}, "The files are {files}."),
    "send_email": ("Send an email.", [("to", "string", w.email), ("subject", "string", w.title), ("body", "string", sentence)], 3,
                   ["Send an email to {to} with subject {subject}: {body}", "Email {to}. Subject: {subject}. Text: {body}"],
                   lambda r, a: {"sent": True, "to": a["to"]}, "The email to {to} is sent."),
    "set_timer": ("Start a timer.", [("minutes", "integer", lambda r: r.randint(1, 90))], 1,
                  ["Set a timer for {minutes} minutes.", "Timer for {minutes} minutes, please.", "Wake me in {minutes} minutes."],
                  lambda r, a: {"ok": True, "minutes": a["minutes"]}, "The timer runs for {minutes} minutes."),
    "set_light": ("Switch a light on or off.", [("room", "string", pick("kitchen bedroom bathroom office hall garage".split())), ("on", "boolean", coin)], 2,
                  ["Turn {on?on:off} the light in the {room}.", "Switch the {room} light {on?on:off}.", "Light {on?on:off} in the {room}."],
                  lambda r, a: {"room": a["room"], "on": a["on"]}, "The light in the {room} is {on?on:off}."),
    "add_numbers": ("Add a list of numbers.", [("numbers", "integers", lambda r: [r.randint(1, 999) for _ in range(r.randint(2, 4))])], 1,
                    ["Add the numbers {numbers} with the tool.", "Use the tool to sum {numbers}.", "Sum up {numbers} with your function."],
                    lambda r, a: {"sum": sum(a["numbers"])}, "The sum is {sum}."),
    "create_event": ("Create a calendar event.", [("title", "string", w.title), ("day", "string", pick(w.DAYS)), ("guests", "strings",
                     lambda r: w.distinct(r, pick(w.FIRST), r.randint(1, 3)))], 2,
                     ["Create the event {title} on {day} with {guests}.", "Plan {title} for {day} and invite {guests}."],
                     lambda r, a: {"id": w.code(r), "title": a["title"]}, "The event {title} has the number {id}."),
    "translate": ("Translate a text.", [("text", "string", sentence), ("language", "string", pick("German French Spanish Italian Greek Polish".split()))], 2,
                  ["Translate \"{text}\" to {language}.", "What is \"{text}\" in {language}?", "Say \"{text}\" in {language}."],
                  lambda r, a: {"translation": " ".join(w.syllables(r) for _ in range(r.randint(2, 4)))}, "The translation is: {translation}"),
    "convert_money": ("Convert an amount of money.", [("amount", "number", w.number), ("from", "string", pick("EUR USD GBP CHF JPY".split())),
                      ("to", "string", pick("EUR USD GBP CHF JPY".split()))], 3,
                      ["Convert {amount} {from} to {to}.", "How much is {amount} {from} in {to}?", "Change {amount} {from} into {to}."],
                      lambda r, a: {"result": w.number(r), "currency": a["to"]}, "That is {result} {currency}."),
    "play_song": ("Play a song.", [("title", "string", w.title), ("volume", "integer", lambda r: r.randint(1, 100)), ("loop", "boolean", coin)], 1,
                  ["Play the song {title}.", "Please play {title}.", "I want to hear {title}."],
                  lambda r, a: {"playing": a["title"]}, "Now playing {playing}."),
    "search_web": ("Search the web.", [("query", "string", STRINGS["query"]), ("limit", "integer", lambda r: r.randint(1, 20))], 1,
                   ["Search the web for {query}.", "Look up {query} on the web.", "Find pages about {query}."],
                   lambda r, a: {"results": [w.title(r) for _ in range(r.randint(1, 3))]}, "I found {results}."),
    "run_command": ("Run a shell command.", [("command", "string", lambda r: r.choice([f"ls {r.choice(w.FOLDERS)}", f"cat {w.path(r)}", f"rm {w.path(r)}",
                    f"mkdir {r.choice(w.FOLDERS)}", "cargo test", "cargo build", "git status", f"grep {w.code_name(r)} {w.path(r)}"]))], 1,
                    ["Run `{command}`.", "Execute the command `{command}`.", "Please run `{command}` in the shell."],
                    lambda r, a: {"exit_code": 0, "output": sentence(r)}, "The command printed: {output}"),
    "get_price": ("Get the price of an item.", [("item", "string", pick(w.THINGS))], 1,
                  ["What does {item:a} cost?", "How much is {item:a}?", "Price of {item:a}, please."],
                  lambda r, a: {"item": a["item"], "price": w.number(r)}, "The {item} costs {price} euros."),
}
