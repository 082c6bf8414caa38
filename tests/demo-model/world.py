"""The small world: words, names and values from which every exercise is made.

All draws go through a `random.Random`, so a seed fixes a document.  Values for the held-out set come from the
same lists but are kept apart by hash (`held_out`): a problem is either always trainable or never.
"""

from __future__ import annotations

import random
import zlib

FIRST = (
    "Anna Bob Carl Dina Emil Fatima Georg Hana Igor Jana Karim Lena Marco Nora Omar Petra Quinn Rosa Sven Tara Uwe "
    "Vera Walid Xenia Yusuf Zoe Alma Boris Clara David Elena Felix Greta Hugo Iris Jonas Katja Leo Mira Nils"
).split()
LAST = (
    "Berg Stone Keller Lopez Novak Silva Tanaka Weber Young Adler Brandt Costa Dahl Evans Fischer Gruber Holm Ivanov "
    "Jensen Kovacs Lang Moreau Neumann Olsen Park Rossi Sato Thomsen Urban Vogel"
).split()
CITIES = (
    "Oslo Rome Paris Berlin Madrid Vienna Lisbon Dublin Prague Warsaw Athens Cairo Delhi Tokyo Lima Quito Boston "
    "Denver Austin Seattle Toronto Sydney Perth Nairobi Accra Dakar Seoul Hanoi Milan Turin Porto Geneva Zurich Bern"
).split()
COLOURS = "red blue green yellow black white orange purple brown grey pink".split()
FRUITS = "apple pear plum cherry lemon mango peach grape melon fig kiwi orange banana".split()
ANIMALS = "cat dog horse cow sheep goat duck hen fox wolf bear owl frog mouse rabbit deer".split()
THINGS = (
    "lamp chair table book pen cup box door clock bag coin stone key bottle plate spoon candle mirror basket ladder "
    "hammer rope bell drum kite boat wheel shelf blanket pillow"
).split()
ADJECTIVES = (
    "small large old new quick slow bright dark soft hard round flat warm cold clean rough light heavy quiet loud "
    "simple strange golden silver wooden broken empty narrow"
).split()
NOUNS = (
    "report ticket invoice order message note task event meeting file folder user account product customer room "
    "device sensor server backup job session project branch release page article photo song video playlist alarm "
    "reminder booking parcel payment contract form survey comment channel team group policy script table record key"
).split()
VERBS = (
    "create delete update archive restore open close send print copy move rename share lock unlock start stop pause "
    "resume cancel approve reject assign tag merge export import schedule publish validate"
).split()
JOBS = "teacher doctor baker pilot painter lawyer farmer nurse driver cook singer writer engineer gardener".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
CODE_WORDS = (
    "count total index value name size data item result list key node user path file line text width height offset "
    "limit step sum left right first last start end temp buffer score level speed angle price rate color label flag "
    "mode state token cache queue stack table row cell page parent child root depth length max min mean delta alpha "
    "beta gamma scale shift"
).split()
ONSETS = "b br d dr f fl g gr h j k kl l m n p pr qu r s sk st t tr v w z zh ch sh".split()
VOWELS = "a e i o u ai ea io ou".split()
CODAS = ["", "", "", "n", "r", "l", "s", "k", "m", "t", "x", "nd", "rk"]
EXTENSIONS = "txt md rs py json csv log toml png pdf".split()
FOLDERS = "src docs tests data home etc tmp lib notes reports images logs".split()

NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
ORDINALS = "first second third fourth fifth sixth seventh eighth".split()


def held_out(key: str, percent: int = 10) -> bool:
    """True for a fixed share of all problems: these appear only in the held-out set."""
    return zlib.crc32(key.encode()) % 100 < percent


def coin(r: random.Random, p: float = 0.5) -> bool:
    return r.random() < p


def syllables(r: random.Random, low: int = 2, high: int = 3) -> str:
    """A made-up word such as `zorvek`: copying has to work on what was never seen."""
    return "".join(r.choice(ONSETS) + r.choice(VOWELS) + r.choice(CODAS) for _ in range(r.randint(low, high)))


def person(r: random.Random) -> str:
    if coin(r, 0.15):
        return syllables(r).capitalize() + " " + r.choice(LAST)
    return r.choice(FIRST) + " " + r.choice(LAST) if coin(r, 0.6) else r.choice(FIRST)


def full_name(r: random.Random) -> str:
    first = syllables(r).capitalize() if coin(r, 0.15) else r.choice(FIRST)
    return first + " " + r.choice(LAST)


def city(r: random.Random) -> str:
    return syllables(r).capitalize() if coin(r, 0.15) else r.choice(CITIES)


def plural(noun: str) -> str:
    if noun.endswith(("ch", "sh", "x", "s")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def join_and(items) -> str:
    items = list(items)
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]


def distinct(r: random.Random, draw, n: int) -> list:
    out: list = []
    while len(out) < n:
        x = draw(r)
        if x not in out:
            out.append(x)
    return out


def title(r: random.Random) -> str:
    """One to three capitalised words, such as `Quiet Golden Lamp`."""
    words = [r.choice(ADJECTIVES) for _ in range(r.randint(0, 2))] + [r.choice(THINGS + NOUNS)]
    if coin(r, 0.2):
        words[-1] = syllables(r)
    return " ".join(w.capitalize() for w in words)


def email(r: random.Random) -> str:
    user = r.choice(FIRST).lower() if coin(r, 0.7) else syllables(r)
    return f"{user}@{r.choice(THINGS + ANIMALS)}.{r.choice(['org', 'com', 'net', 'io'])}"


def path(r: random.Random) -> str:
    parts = r.sample(FOLDERS, r.randint(0, 2))
    stem = r.choice(CODE_WORDS + NOUNS) if coin(r, 0.7) else syllables(r)
    if coin(r, 0.2):
        stem += f"_{r.choice(CODE_WORDS)}"
    return ("/" if parts and coin(r, 0.3) else "") + "/".join(parts + [f"{stem}.{r.choice(EXTENSIONS)}"])


def date(r: random.Random) -> str:
    return f"{r.randint(2020, 2030)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"


def clock(r: random.Random) -> str:
    return f"{r.randint(0, 23):02d}:{r.choice([0, 5, 10, 15, 20, 30, 40, 45, 50]):02d}"


def code_name(r: random.Random) -> str:
    """An identifier in snake case."""
    n = r.choice([1, 1, 2, 2, 3])
    words = [r.choice(CODE_WORDS) for _ in range(n)]
    if coin(r, 0.15):
        words[r.randrange(n)] = syllables(r)
    return "_".join(words)


def number(r: random.Random) -> int:
    kind = r.random()
    if kind < 0.5:
        return r.randint(1, 30)
    if kind < 0.8:
        return r.randint(1, 99)
    return r.randint(100, 9999)


def decimal(r: random.Random) -> float:
    return round(r.choice([0.5, 1.5, 2.5, 0.1, 0.25, 0.75]) + r.randint(0, 40), 2)


def code(r: random.Random) -> str:
    """A short code such as `C-482`."""
    return f"{r.choice('ABCDEFGHKLMNPRSTX')}-{r.randint(100, 999)}"
