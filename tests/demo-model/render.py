"""Renders a conversation exactly as chat_template.jinja does, but in pieces with a training weight each.

`python render.py` checks many random documents against the template itself; `python render.py goldens` writes
render_goldens.json.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ASSETS = Path(__file__).resolve().parents[2] / "host" / "assets" / "demo-model"
EFFORT = {"low": "Low", "high": "High"}
PROMPT, REPLY, SKIP = 1, 2, 0

TOOLS_HEAD = "# Tools\n\nThese functions can be called. Each line is one JSON object:\n<tools>\n"
TOOLS_TAIL = (
    "</tools>\n\nTo call a function, write its name and then each argument:\n"
    "<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>\n"
    "Strings are written as they are, other values as JSON. Several calls may follow each other."
)


def dump(x) -> str:
    return json.dumps(x, ensure_ascii=False)


def call_text(c) -> str:
    f = c["function"]
    args = "".join(f"<arg_key>{k}</arg_key><arg_value>{v if isinstance(v, str) else dump(v)}</arg_value>"
                   for k, v in f["arguments"].items())
    return f"<tool_call>{f['name']}{args}</tool_call>"


def pieces(messages, tools=(), effort="max", clear=True):
    """[(text, weight)]: what the model writes is REPLY, what it reads PROMPT, earlier replies SKIP."""
    off = effort == "off"
    out = [("[gMASK]<sop>", SKIP)]
    if not off:
        out.append((f"<|system|>Reasoning Effort: {EFFORT.get(effort, 'Max')}", SKIP))
    if tools:
        lines = "".join(dump(t["function"]) + "\n" for t in tools)
        out.append(("<|system|>" + TOOLS_HEAD, SKIP))
        out.append((lines, PROMPT))
        out.append((TOOLS_TAIL, SKIP))
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    before = None
    for i, m in enumerate(messages):
        role = m["role"]
        if role == "system":
            out.append(("<|system|>" + m["content"], PROMPT))
        elif role == "user":
            out.append(("<|user|>", SKIP if i != 0 else PROMPT))
            out.append((m["content"], PROMPT))
        elif role == "assistant":
            live = i > last_user
            reasoning = m.get("reasoning_content", "") if live or not clear else ""
            body = m["content"].strip() + "".join(call_text(c) for c in m.get("tool_calls") or ())
            end = "<|observation|>" if m.get("tool_calls") else "<|user|>"
            if live and off:
                out += [("<|assistant|><think></think>", SKIP), (body, REPLY)]
            elif live:
                out += [("<|assistant|><think>", SKIP), (f"{reasoning}</think>{body}", REPLY)]
            else:
                out.append((f"<|assistant|><think>{reasoning}</think>{body}", SKIP))
            if live:
                out.append((end, REPLY))
        else:
            if before != "tool" and not (out and out[-1][0] == "<|observation|>"):
                out.append(("<|observation|>", SKIP))
            out.append((f"<tool_response>{m['content']}</tool_response>", PROMPT))
        before = role
    return out


def prompt(messages, tools=(), effort="max") -> str:
    """The text that the server sends to the model, ending in the open (or closed) think block."""
    parts = pieces(messages, tools, effort)
    if parts[-1] == ("<|user|>", REPLY):
        parts.pop()
    return "".join(t for t, _ in parts) + "<|assistant|><think>" + ("</think>" if effort == "off" else "")


def template():
    """chat_template.jinja in the environment that the server must offer."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, **k: json.dumps(x, ensure_ascii=False)

    def fail(text):
        raise jinja2.TemplateError(text)
    env.globals["raise_exception"] = fail
    return env.from_string((ASSETS / "chat_template.jinja").read_text())


def by_template(messages, tools=(), effort="max") -> str:
    """The prompt through the template and the server's edit for thinking off."""
    kwargs = {"reasoning_effort": effort} if effort in EFFORT else {}
    text = template().render(messages=messages, tools=list(tools) or None, add_generation_prompt=True, **kwargs)
    if effort == "off":
        text = text.replace("<|system|>Reasoning Effort: Max", "", 1)
        text += "</think>" if text.endswith("<|assistant|><think>") else ""
    return text


def goldens() -> None:
    """Writes render_goldens.json: inputs of the template and what comes out, for implementations of Jinja."""
    weather = {"type": "function", "function": {
        "name": "get_weather", "description": "Wetter für <eine> Stadt & 'mehr'.", "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
    late = {"type": "function", "function": {"name": "late", "description": "Deferred.", "defer_loading": True, "parameters": {}}}

    def calls(*cities, key="city"):
        return [{"id": f"call_{c}", "type": "function", "function": {"name": "get_weather", "arguments": {key: c, "n": 2, "x": [1, "a"], "on": True}}}
                for c in cities]
    user, tool = {"role": "user", "content": "Hi"}, lambda c: {"role": "tool", "tool_call_id": f"call_{c}", "content": c}
    both = {"role": "assistant", "content": None, "reasoning_content": " think ", "tool_calls": calls("Rom", "Köln")}
    old = {"role": "assistant", "content": "<think>\nsecret\n</think>\n\n answer "}
    cases = {
        "plain": ([user], [], {}), "low": ([user], [], {"reasoning_effort": "low"}), "high": ([user], [], {"reasoning_effort": "high"}),
        "other_effort": ([user], [], {"reasoning_effort": "medium"}), "no_prompt": ([user], [], {"add_generation_prompt": False}),
        "system": ([{"role": "system", "content": "Be short."}, user], [], {}), "tools": ([user], [weather, late], {}),
        "parts": ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "text", "text": "b"}]}], [], {}),
        "history": ([user, old, user], [], {}), "history_kept": ([user, old, user], [], {"clear_thinking": False}),
        "results": ([user, both, tool("Rom"), tool("Köln")], [weather], {}), "results_reordered": ([user, both, tool("Köln"), tool("Rom")], [weather], {}),
        "results_unknown_id": ([user, both, tool("Köln"), tool("Oslo")], [weather], {}),
        "results_twice": ([user, both, tool("Köln"), tool("Rom"), {"role": "assistant", "content": "ok"}, user], [weather], {}),
        "tool_parts": ([user, {"role": "assistant", "content": "", "tool_calls": calls("Rom")[:1]},
                        {"role": "tool", "content": [{"type": "text", "text": "x"}, {"type": "tool_reference", "name": "late"}]}], [weather, late], {})}
    out = []
    for name, (messages, tools, kwargs) in cases.items():
        text = template().render(messages=messages, tools=tools or None, **{"add_generation_prompt": True, **kwargs})
        out.append({"name": name, "messages": messages, "tools": tools, "kwargs": kwargs, "text": text})
    Path(__file__).with_name("render_goldens.json").write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(out)} renderings")


def main() -> int:
    if sys.argv[1:] == ["goldens"]:
        goldens()
        return 0
    import generate
    r = random.Random(7)
    for n in range(500):
        d = generate.draw(r)
        cut = r.choice([i for i, m in enumerate(d.messages) if m["role"] == "assistant"])
        cut = max(cut, max(i for i, m in enumerate(d.messages) if m["role"] == "user") + 1)
        a, b = prompt(d.messages[:cut], d.tools, d.effort), by_template(d.messages[:cut], d.tools, d.effort)
        if a != b:
            print(f"document {n} differs\n--- direct\n{a}\n--- template\n{b}")
            return 1
    print("500 prompts are equal to the template's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
