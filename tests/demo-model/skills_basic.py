"""Greetings, facts on Plugfold, arithmetic, lists and counting."""

from __future__ import annotations

import random

import world as w
from doc import Doc, pick_effort, single
from world import coin

GREETINGS = ["Hello", "Hi", "Hey", "Good morning", "Good evening", "Good afternoon", "Hello there", "Hi there"]
THANKS = ["Thanks", "Thank you", "Thanks a lot", "Thank you very much", "Great, thanks", "Perfect, thank you"]
FAREWELLS = ["Bye", "Goodbye", "See you", "Good night", "See you later"]

SMALL_TALK = [
    (["How are you?", "How are you today?", "How is it going?"],
     "I am a small program and I am running well. How can I help you?"),
    (["What can you do?", "How can you help me?", "What are you good at?", "What are your skills?"],
     "I can do small sums, copy and edit text, write JSON, count lists and call the tools you offer."),
    (["Who are you?", "What are you?", "Tell me who you are.", "Which model are you?", "What is your name?"],
     "I am the Plugfold demo model, a very small GLM-5.3-Flash made for tests."),
    (["Are you a person?", "Are you human?", "Are you a real person?"],
     "No, I am a very small language model."),
    (["How big are you?", "How many parameters do you have?", "What is your size?"],
     "I have fewer than 20 million parameters."),
    (["Who made you?", "Who trained you?", "Where do you come from?"],
     "I was trained from scratch for Plugfold on generated text."),
    (["Tell me a joke.", "Do you know a joke?"],
     "Why did the token cross the cache? To get to the other page."),
]

FACTS = [
    (["What is Plugfold?", "Tell me about Plugfold.", "Explain Plugfold in one sentence.", "Describe Plugfold."],
     "Plugfold is an inference engine and OpenAI-compatible server for GLM-5.3-Flash models, written in Rust."),
    (["In which language is Plugfold written?", "What language is Plugfold written in?",
      "Which programming language does Plugfold use?"],
     "Plugfold is written in Rust."),
    (["Which models does Plugfold run?", "What models can Plugfold serve?", "Which architecture does Plugfold support?"],
     "Plugfold runs models of the GLM-5.3-Flash architecture, which is called glm5_next."),
    (["Which API does Plugfold offer?", "What API does Plugfold speak?", "Is Plugfold compatible with OpenAI clients?"],
     "Plugfold speaks the OpenAI HTTP API, so OpenAI clients work with it."),
    (["How do I start Plugfold?", "How do I start the server?", "Which command starts Plugfold?"],
     "Run `plugfold serve` to start the server."),
    (["What is a plugin in Plugfold?", "What do plugins do in Plugfold?", "Why does Plugfold have plugins?"],
     "A plugin adds or replaces one part of Plugfold, such as a weight format, a sampler or a draft policy."),
    (["What is EXL3?", "What does EXL3 mean?", "Explain EXL3."],
     "EXL3 is a compressed weight format that stores a model in a few bits per weight."),
    (["What is a draft?", "What does a draft do?", "What are drafts good for?"],
     "A draft proposes the next tokens cheaply, and the main model checks them all at once."),
    (["What is MTP?", "What does MTP mean?", "Explain MTP."],
     "MTP means multi-token prediction: a small extra layer that drafts the next tokens."),
    (["What is KDA?", "What does KDA do?", "Explain KDA."],
     "KDA is gated linear attention: it keeps a fixed-size state instead of a growing cache."),
    (["What is MLA?", "What does MLA do?", "Explain MLA."],
     "MLA is latent attention: it caches one short vector for each token."),
    (["What is DSA?", "What does the indexer do?", "What is sparse attention?"],
     "Sparse attention lets an indexer choose which tokens are attended to, so long texts stay cheap."),
    (["What is a mixture of experts?", "What are experts?", "What does MoE mean?"],
     "In a mixture of experts, a router sends each token to a few small networks."),
    (["What is prompt lookup?", "How does prompt lookup work?", "Explain prompt lookup."],
     "Prompt lookup drafts tokens by copying what followed the same words earlier in the text."),
    (["What is a token?", "Explain what a token is.", "What do you call a token?"],
     "A token is a small piece of text, such as a word or a digit."),
    (["Does Plugfold support tools?", "Can Plugfold call tools?", "Does Plugfold know tool calls?"],
     "Yes, Plugfold reads tool calls from the reply and returns them to the client."),
    (["Does Plugfold need a GPU?", "Can Plugfold run on a CPU?", "Does Plugfold run without a GPU?"],
     "No, Plugfold also runs on a CPU, but large models want a GPU."),
    (["How many GPUs can Plugfold use?", "Can Plugfold use several GPUs?", "Does Plugfold run on more than one GPU?"],
     "Plugfold can spread a model over one, two, four or eight GPUs."),
    (["Does Plugfold stream replies?", "Can Plugfold stream?", "Is streaming supported?"],
     "Yes, Plugfold streams replies as server-sent events."),
    (["What is your context length?", "How long is your context?", "How many tokens can you read?"],
     "My context is 4096 tokens."),
]


def smalltalk(r: random.Random) -> Doc:
    kind, effort = r.random(), pick_effort(r)
    if kind < 0.3:
        g = r.choice(GREETINGS)
        g = g.lower() if coin(r, 0.2) else g
        end = r.choice(["!", ".", ""])
        if coin(r, 0.25):
            name = w.person(r)
            ask = f"{g}, {r.choice(['I am', 'my name is'])} {name}{end}"
            return single("chat", r, ask, effort, f"Greet {name}.", f"The user says hello and is called {name}. I greet them.",
                          f"Hello {name}! How can I help you?")
        return single("chat", r, g + end, effort, "A greeting.", "The user says hello. I greet back.",
                      "Hello! How can I help you?")
    if kind < 0.4:
        return single("chat", r, r.choice(THANKS) + r.choice(["!", "."]), effort, "Thanks.",
                      "The user says thank you. I answer politely.", "You are welcome!")
    if kind < 0.5:
        return single("chat", r, r.choice(FAREWELLS) + r.choice(["!", "."]), effort, "A farewell.",
                      "The user says goodbye. I say goodbye too.", "Goodbye!")
    if kind < 0.65:
        return unknown(r, effort)
    questions, answer = r.choice(SMALL_TALK)
    return single("chat", r, r.choice(questions), effort, "A question about me.",
                  "The user asks about me. I answer from what I know.", answer)


def unknown(r: random.Random, effort: str) -> Doc:
    """A question from outside the small world."""
    word = r.choice([w.syllables(r), w.syllables(r).capitalize(), r.choice(w.ANIMALS), r.choice(w.THINGS), w.city(r), w.full_name(r)])
    q = r.choice([f"Who is {word}?", f"What is {word}?", f"Where is {word}?", f"Tell me about {word}.", f"Why is {word} famous?",
                  f"Write a poem about {word}.", f"When was {word} made?", f"What do you think of {word}?", f"Explain {word} to me."])
    return single("chat", r, q, effort, "I do not know this.", "This is outside of what I know. I say so.",
                  "I do not know that. I am only a small demo model.")


def fact(r: random.Random) -> Doc:
    questions, answer = r.choice(FACTS)
    q = r.choice(questions)
    if coin(r, 0.2):
        q = r.choice(["Please tell me: ", "A question: ", "Quick question: "]) + q
    return single("facts", r, q, pick_effort(r), "I know this.", "This is a question about Plugfold and how it works. I know the answer.",
                  answer)


# ------------------------------------------------------------------------------------------------ arithmetic
def add_steps(a: int, b: int) -> str:
    if a < 10 and b < 10:
        return f"{a} + {b} = {a + b}."
    a1, a0, b1, b0 = a // 10, a % 10, b // 10, b % 10
    ones = a0 + b0
    carry = ones // 10
    text = f"{a} + {b}: ones {a0} + {b0} = {ones}"
    text += f", write {ones % 10}, carry 1. " if carry else ". "
    tens = a1 + b1 + carry
    return text + f"Tens {a1} + {b1}" + (" + 1" if carry else "") + f" = {tens}. Result {a + b}."


def sub_steps(a: int, b: int) -> str:
    if a < b:
        return f"{a} is less than {b}, so the result is negative. " + sub_steps(b, a)[:-1] + f", with sign {a - b}."
    if a < 10 and b < 10:
        return f"{a} - {b} = {a - b}."
    a1, a0, b1, b0 = a // 10, a % 10, b // 10, b % 10
    if a0 >= b0:
        return f"{a} - {b}: ones {a0} - {b0} = {a0 - b0}. Tens {a1} - {b1} = {a1 - b1}. Result {a - b}."
    return (f"{a} - {b}: ones {a0} - {b0}, borrow, {a0 + 10} - {b0} = {a0 + 10 - b0}. "
            f"Tens {a1} - 1 - {b1} = {a1 - 1 - b1}. Result {a - b}.")


def mul_steps(a: int, b: int) -> str:
    if a < 10 and b < 10:
        return f"{a} * {b} = {a * b}."
    if a < b:
        return f"{a} * {b} = {b} * {a}. " + mul_steps(b, a)
    tens, ones = a // 10 * 10, a % 10
    if not ones:
        return f"{a} * {b}: {a // 10} * {b} = {a // 10 * b}, times 10. Result {a * b}."
    return f"{a} * {b}: {tens} * {b} = {tens * b}. {ones} * {b} = {ones * b}. {tens * b} + {ones * b} = {a * b}. Result {a * b}."


OPS = {
    "+": ("plus", add_steps), "-": ("minus", sub_steps), "*": ("times", mul_steps), "/": ("divided by", None),
}


def draw_problem(r: random.Random):
    op = r.choices("+-*/", weights=(4, 4, 3, 2))[0]
    if op in "+-":
        hi = r.choice([9, 99, 99, 99])
        a, b = r.randint(0, hi), r.randint(0, r.choice([9, hi]))
        if op == "-" and a < b and coin(r, 0.8):
            a, b = b, a
    elif op == "*":
        a, b = r.randint(0, 12), r.randint(0, 10)
        if coin(r, 0.5):
            a, b = r.randint(10, 99), r.randint(2, 9)
        if coin(r, 0.3) and a < 10:
            a, b = b, a
        if a > 9 and b > 9:
            b = r.randint(2, 9)
    else:
        b = r.randint(1, 10)
        a = b * r.randint(0, 10)
    return a, op, b


def solve(a: int, op: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[op]


def steps(a: int, op: str, b: int) -> str:
    if op == "/":
        return f"{b} * {a // b} = {a}. Result {a // b}."
    return OPS[op][1](a, b)


def arithmetic(r: random.Random, held=None) -> Doc:
    """`held` True draws only problems of the held-out share, False only the others."""
    while True:
        a, op, b = draw_problem(r)
        key = f"arith {a}{op}{b}"
        if held is None or w.held_out(key) == held:
            break
    value, word = solve(a, op, b), OPS[op][0]
    effort = pick_effort(r)
    form = r.random()
    reply = f"{a} {op} {b} = {value}"
    if form < 0.55:
        question = r.choice([
            f"What is {a} {op} {b}?", f"{a} {op} {b} = ?", f"Calculate {a} {op} {b}.", f"{a} {op} {b}", f"How much is {a} {op} {b}?",
            f"Please compute {a} {op} {b}.", f"What is {a}{op}{b}?", f"{a}{op}{b}", f"Solve {a} {op} {b}.",
        ])
    elif form < 0.8:
        question = r.choice([f"What is {a} {word} {b}?", f"How much is {a} {word} {b}?", f"Tell me {a} {word} {b}."])
    else:
        question, reply = story(r, a, op, b, value)
    return single("arithmetic", r, question, effort, f"{a} {op} {b} = {value}", steps(a, op, b), reply, key=key)


def story(r: random.Random, a: int, op: str, b: int, value: int):
    name, thing = r.choice(w.FIRST), w.plural(r.choice(w.FRUITS + w.THINGS))
    if op == "+":
        q = r.choice([f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?",
                      f"{name} finds {a} {thing} and then {b} more. How many {thing} are there?",
                      f"There are {a} {thing} in one box and {b} in another. How many {thing} are there in all?"])
    elif op == "-" and value >= 0:
        q = r.choice([f"{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
                      f"There are {a} {thing} on a shelf and {name} takes {b}. How many {thing} are left?"])
    elif op == "*":
        q = r.choice([f"{name} has {a} boxes with {b} {thing} each. How many {thing} are there?",
                      f"There are {a} bags and each holds {b} {thing}. How many {thing} are there in all?"])
    elif op == "/":
        q = f"{name} shares {a} {thing} between {b} people. How many {thing} does each get?"
    else:
        return f"What is {a} {op} {b}?", f"{a} {op} {b} = {value}"
    return q, f"{a} {op} {b} = {value} {thing}"


# ------------------------------------------------------------------------------------------------ lists
POOLS = [w.FRUITS, w.ANIMALS, w.COLOURS, w.CITIES, w.FIRST, w.THINGS, w.JOBS]


def items_of(r: random.Random, low=2, high=8) -> list:
    pool = r.choice(POOLS)
    n = r.randint(low, min(high, len(pool)))
    items = r.sample(pool, n)
    if coin(r, 0.15):
        items[r.randrange(n)] = w.syllables(r)
    return items


def numbered(items) -> str:
    return ", ".join(f"{i + 1} {x}" for i, x in enumerate(items))


def lists(r: random.Random) -> Doc:
    effort, kind = pick_effort(r), r.randrange(8)
    items = items_of(r)
    n, text = len(items), ", ".join(items)
    if kind == 0:
        q = r.choice([f"How many items are in this list: {text}?", f"Count these: {text}.", f"How many words are here: {text}?"])
        return single("lists", r, q, effort, numbered(items), f"I count: {numbered(items)}. That makes {n}.", f"{n}")
    if kind == 1:
        i = r.randrange(min(n, 8))
        q = r.choice([f"Which is the {w.ORDINALS[i]} item in this list: {text}?", f"List: {text}. What is the {w.ORDINALS[i]} item?"])
        return single("lists", r, q, effort, numbered(items[:i + 1]), f"I count: {numbered(items[:i + 1])}.", items[i])
    if kind == 2:
        q = r.choice([f"What is the last item of this list: {text}?", f"Which item comes last: {text}?"])
        return single("lists", r, q, effort, "The last one.", f"The list ends with {items[-1]}.", items[-1])
    if kind == 3:
        q = r.choice([f"Write these one per line: {text}", f"Make a list with one line each: {text}",
                      f"Turn this into a bullet list: {text}"])
        return single("lists", r, q, effort, "One line each.", f"There are {n} items. I write each on its own line.",
                      "\n".join(f"- {x}" for x in items))
    if kind == 4:
        q = r.choice([f"Reverse this list: {text}", f"Write this list backwards: {text}"])
        back = ", ".join(reversed(items))
        return single("lists", r, q, effort, "From the end.", f"I start from the end: {numbered(items[::-1])}.", back)
    if kind == 5:
        extra = w.distinct(r, lambda q: q.choice(w.FRUITS + w.ANIMALS + w.THINGS), 1)[0]
        if coin(r):
            return single("lists", r, f"Add {extra} to the end of this list: {text}", effort, "Append it.",
                          f"I write the list and then {extra}.", ", ".join(items + [extra]))
        drop = r.choice(items)
        keep = [x for x in items if x != drop] or items
        return single("lists", r, f"Remove {drop} from this list: {text}", effort, "Drop one.",
                      f"I write the list without {drop}.", ", ".join(keep))
    if kind == 6:
        nums = [r.randint(0, 99) for _ in range(r.randint(2, 6))]
        shown = ", ".join(map(str, nums))
        if coin(r):
            return single("lists", r, f"Which number is the largest: {shown}?", effort, "Compare.",
                          "I compare: " + best_so_far(nums, max) + ".", f"{max(nums)}")
        return single("lists", r, f"Which number is the smallest: {shown}?", effort, "Compare.",
                      "I compare: " + best_so_far(nums, min) + ".", f"{min(nums)}")
    target = r.choice(items)
    bag = items[:4] + [target] * r.randint(0, 3)
    r.shuffle(bag)
    count = bag.count(target)
    q = f"How often does {target} occur here: {', '.join(bag)}?"
    marks, seen = [], 0
    for x in bag:
        seen += x == target
        marks.append(f"{x} {seen}")
    return single("lists", r, q, effort, ", ".join(marks), f"I count as I read: {', '.join(marks)}. That makes {count}.", f"{count}")


def best_so_far(nums, pick) -> str:
    best, out = nums[0], [f"{nums[0]} first"]
    for x in nums[1:]:
        best = pick(best, x)
        out.append(f"{x} then {best}")
    return ", ".join(out)
