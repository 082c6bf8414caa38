"""Tool use: single calls, parallel calls, chains, no call, unknown functions."""

from __future__ import annotations

import json
import random
import re

import catalog as c
import world as w
from doc import Doc, assistant, call, pick_effort, think, user
from world import coin


def fill(form: str, args: dict) -> str:
    def one(m):
        name, _, extra = m.group(1).partition("?")
        if extra:
            yes, no = extra.split(":")
            return yes if args[name] else no
        name, _, mode = name.partition(":")
        return w.article(args[name]) if mode == "a" else c.shown(args[name])
    return re.sub(r"\{([^{}]+)\}", one, form)


def catalog_tool(r: random.Random, name: str) -> dict:
    description, params, required, *_ = c.CATALOG[name]
    pairs = [(p, k) for p, k, _ in params]
    return c.tool(name, description, c.schema(pairs, [p for p, _ in pairs][:required], r))


def catalog_call(r: random.Random, name: str):
    """(request, arguments)"""
    _, params, required, forms, *_ = c.CATALOG[name]
    form = r.choice(forms)
    args = {p: draw(r) for p, k, draw in params if re.search(r"\{" + p + r"[?:}]", form)}
    text = fill(form, args)
    for p, k, draw in params[required:]:
        if p in args or coin(r, 0.6):
            continue
        args[p] = draw(r)
        word = f"{p} {'on' if args[p] else 'off'}" if k == "boolean" else f"{p} {c.shown(args[p])}"
        text = text.rstrip(".?") + f", {word}" + text[len(text.rstrip(".?")):]
    return text, args


def catalog_result(r: random.Random, name: str, args: dict):
    *_, draw, form = c.CATALOG[name]
    if coin(r, 0.06):
        problem = r.choice(["not found", "timeout", "access denied", "not available"])
        return {"error": problem}, f"That did not work: {problem}."
    result = draw(r, args)
    return result, fill(form, {**args, **result})


def offered(r: random.Random, target: list, others=None) -> list:
    """The target functions among distractors, in random order."""
    have = {t["function"]["name"] for t in target}
    n = r.choice([0, 1, 2, 2, 3, 3, 4, 5, 6]) if others is None else others
    tools = list(target)
    while n > 0:
        t = catalog_tool(r, r.choice(list(c.CATALOG))) if coin(r) else c.made_up(r)[0]
        if t["function"]["name"] not in have:
            have.add(t["function"]["name"])
            tools.append(t)
            n -= 1
    r.shuffle(tools)
    return tools


def result_message(value) -> dict:
    return {"role": "tool", "content": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def made_up_call(r: random.Random):
    """(tool, request, arguments)"""
    t, verb, noun, params, required = c.made_up(r)
    args = {p: c.draw_value(r, p, k) for p, k in params if p in required or coin(r)}
    return t, c.request(r, t["function"]["name"], verb, noun, args), args


def made_up_result(r: random.Random, name: str):
    k = r.randrange(3)
    if k == 0:
        return {"ok": True}, f"Done: {name}."
    if k == 1:
        code = w.code(r)
        return {"ok": True, "id": code}, f"Done: {name}, number {code}."
    problem = r.choice(["not found", "timeout", "access denied", "not available"])
    return {"error": problem}, f"That did not work: {problem}."


def known(args: dict) -> str:
    return ", ".join(f"{k} {json.dumps(v, ensure_ascii=False)}" for k, v in args.items())


def single_call(r: random.Random) -> Doc:
    effort = pick_effort(r)
    if coin(r, 0.45):
        name = r.choice(list(c.CATALOG))
        t, (text, args) = catalog_tool(r, name), catalog_call(r, name)
        result, answer = catalog_result(r, name, args)
    else:
        t, text, args = made_up_call(r)
        name = t["function"]["name"]
        result, answer = made_up_result(r, name)
    reason = think(effort, f"Call {name}.", f"{name} fits. Its arguments: {known(args)}.")
    done = think(effort, "The result is there.", f"{name} has answered. I tell the user.")
    messages = [user(text), assistant("", reason, [call(name, args)]), result_message(result), assistant(answer, done)]
    return Doc("tool", messages, offered(r, [t]), effort, "calls", text)


def parallel_calls(r: random.Random) -> Doc:
    effort = pick_effort(r)
    kind = r.random()
    n = r.choice([2, 2, 3])
    if kind < 0.5:
        name, form = r.choice([("get_weather", "What is the weather in {}?"), ("get_weather", "Compare the weather in {}."),
                               ("get_time", "What time is it in {}?"), ("get_price", "What are the prices of these: {}?"),
                               ("read_file", "Show me the files {}."), ("read_file", "Read {}.")])
        key, _, draw = c.CATALOG[name][1][0]
        values = w.distinct(r, draw, n)
        text, steps = form.format(w.join_and(values)), [(name, {key: v}) for v in values]
        target = [catalog_tool(r, name)]
    else:
        names = r.sample(list(c.CATALOG), 2)
        pairs = [catalog_call(r, x) for x in names]
        joint = r.choice([" Also: ", " And then: ", " "])
        text, steps = joint.join(p[0] for p in pairs), [(x, p[1]) for x, p in zip(names, pairs)]
        target = [catalog_tool(r, x) for x in names]
    results = [catalog_result(r, x, a) for x, a in steps]
    reason = think(effort, f"{len(steps)} calls.", f"This needs {len(steps)} calls: " + "; ".join(f"{x} with {known(a)}" for x, a in steps) + ".")
    done = think(effort, "The results are there.", "All results are there. I tell the user.")
    messages = [user(text), assistant("", reason, [call(x, a) for x, a in steps])] + \
        [result_message(x[0]) for x in results] + [assistant(" ".join(x[1] for x in results), done)]
    return Doc("parallel", messages, offered(r, target), effort, "calls", text)


# ------------------------------------------------------------------------------------------------ chains
OWNERS = "customer user team group channel project account server".split()
OWNED = "order invoice ticket message report booking device backup session task".split()


def chain(r: random.Random) -> Doc:
    """find the owner's number, perhaps look up what it owns, then act on it."""
    effort, three = pick_effort(r), coin(r)
    a, b = r.choice(OWNERS), r.choice(OWNED)
    verb = r.choice(w.VERBS)
    name = w.full_name(r) if a in ("customer", "user", "account") else w.title(r)
    numeric = coin(r)
    first = r.randint(10, 9999) if numeric else w.code(r)
    second = r.randint(10, 9999) if numeric else w.code(r)
    kind = "integer" if numeric else "string"
    finder = r.choice(["find", "search", "lookup"]) + "_" + a
    extra = [p for p in [c.draw_param(r, [])] if coin(r, 0.4) and p[0] not in (a, b, "name")]
    more = {p: c.draw_value(r, p, k) for p, k in extra}
    t1 = c.tool(finder, f"Find the id of {w.article(a)} by name.", c.schema([("name", "string")], ["name"], r))
    steps = [(finder, {"name": name}, {"id": first})]
    tools = [t1]
    if three:
        getter = r.choice(["get_last_", "get_first_", "get_open_"]) + b
        word = getter.split("_")[1]
        tools.append(c.tool(getter, f"Get the {word} {b} of {w.article(a)}.", c.schema([(f"{a}_id", kind)], [f"{a}_id"], r)))
        steps.append((getter, {f"{a}_id": first}, {f"{b}_id": second}))
        acted, number, thing = b, second, f"the {word} {b} of the {a} {name}"
    else:
        acted, number, thing = a, first, f"the {a} {name}"
    actor = f"{verb}_{acted}"
    params = [(f"{acted}_id", kind)] + extra
    tools.append(c.tool(actor, f"{verb.capitalize()} {w.article(acted)}.", c.schema(params, [p for p, _ in params], r)))
    steps.append((actor, {f"{acted}_id": number, **more}, {"ok": True}))
    ask = r.choice([f"{verb.capitalize()} {thing}", f"Please {verb} {thing}", f"I want to {verb} {thing}"])
    ask += "".join(f", {p.replace('_', ' ')} {c.shown(v)}" for p, v in more.items()) + "."
    messages = [user(ask)]
    failed = coin(r, 0.08)
    for i, (fn, args, result) in enumerate(steps):
        if i == 0:
            low, high = f"First {fn}.", f"To {verb} {thing} I need the id of the {a}. First I call {fn} with {known(args)}."
        else:
            low, high = f"Now {fn}.", f"The id is {list(steps[i - 1][2].values())[0]}. Now I call {fn} with {known(args)}."
        messages.append(assistant("", think(effort, low, high), [call(fn, args)]))
        if failed and i == 0:
            messages += [result_message({"error": "not found"}),
                         assistant(f"I could not find the {a} {name}.", think(effort, "Not found.", f"{fn} found nothing. I stop here."))]
            break
        messages.append(result_message(result))
    else:
        messages.append(assistant(f"Done: {actor} with {acted} {number}.", think(effort, "Done.", f"{actor} has worked. I tell the user.")))
    return Doc("chain", messages, offered(r, tools, r.choice([0, 1, 1, 2, 3])), effort, "calls", ask)


# ------------------------------------------------------------------------------------------------ no call
def no_call(r: random.Random, other) -> Doc:
    """Functions are offered, but the question needs none: the answer is the one without functions."""
    base = other(r)
    return Doc("no_call", base.messages, offered(r, [], r.randint(1, 5)), base.effort, base.check, base.key)


def refuse(r: random.Random) -> Doc:
    """The request names or needs a function that is not offered."""
    effort = pick_effort(r)
    tools = offered(r, [], r.choice([1, 2, 3, 4]))
    have = {t["function"]["name"] for t in tools}
    if coin(r):
        t, text, args = made_up_call(r)
        name = t["function"]["name"]
    else:
        name = r.choice(list(c.CATALOG))
        text, args = catalog_call(r, name)
        if name == "add_numbers":
            return refuse(r)
    if name in have:
        return refuse(r)
    if coin(r, 0.15):
        tools, have = [], set()
    names = ", ".join(t["function"]["name"] for t in tools)
    if name in text:
        answer, low = f"There is no function {name} here.", f"{name} is not offered."
        high = f"The user wants {name}. I have {names or 'no functions'}. {name} is not among them."
    else:
        answer, low = "I have no function for that.", "No function fits."
        high = f"I have {names or 'no functions'}. None of them fits this request."
    return Doc("refuse", [user(text), assistant(answer, think(effort, low, high))], tools, effort, "exact", text)
