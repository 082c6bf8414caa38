"""Questions on synthetic pictures of 112 x 112 pixels: counting shapes, naming a colour, reading a digit."""

from __future__ import annotations

import random

import numpy as np

from doc import Doc, pick_effort, single
from world import NUMBER_WORDS

SIDE = 112
ROWS = (SIDE // 28) ** 2
PLACEHOLDER = "<|begin_of_image|><|image|><|end_of_image|>"
COLOURS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 210, 40), "black": (20, 20, 20),
    "white": (250, 250, 250), "orange": (240, 140, 30), "purple": (140, 60, 170),
}
SHAPES = ("circle", "square", "triangle")
# Digits on a grid of 3 x 5, one bit a cell, top row first.
DIGITS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717")
YY, XX = np.mgrid[0:SIDE, 0:SIDE]


def background(r: random.Random) -> np.ndarray:
    base = r.choice([(235, 235, 225), (200, 210, 220), (120, 125, 130), (245, 225, 215)])
    noise = np.random.default_rng(r.getrandbits(32)).integers(-6, 7, (SIDE, SIDE, 3))
    return np.clip(np.array(base) + noise, 0, 255).astype(np.uint8)


def shade(r: random.Random, name: str) -> tuple:
    return tuple(min(255, max(0, c + r.randint(-12, 12))) for c in COLOURS[name])


def draw_shape(img, shape: str, cx: int, cy: int, size: int, colour) -> None:
    dx, dy = np.abs(XX - cx), YY - cy
    if shape == "circle":
        inside = dx * dx + dy * dy <= size * size
    elif shape == "square":
        inside = (dx <= size) & (np.abs(dy) <= size)
    else:
        inside = (dy >= -size) & (dy <= size) & (dx * 2 <= dy + size)
    img[inside] = colour


def draw_digit(img, digit: int, x: int, y: int, cell: int, colour) -> None:
    for row, bits in enumerate(DIGITS[digit]):
        for col in range(3):
            if int(bits) >> (2 - col) & 1:
                img[y + row * cell:y + (row + 1) * cell, x + col * cell:x + (col + 1) * cell] = colour


def places(r: random.Random, n: int, size: int) -> list:
    """Centres that keep shapes of this size apart."""
    while True:
        got: list = []
        for _ in range(200):
            x, y = r.randint(size + 1, SIDE - size - 2), r.randint(size + 1, SIDE - size - 2)
            if all(max(abs(x - a), abs(y - b)) > 2 * size + 3 for a, b in got):
                got.append((x, y))
                if len(got) == n:
                    return got
        size -= 1


def image_question(r: random.Random) -> tuple[Doc, np.ndarray]:
    effort, img, kind = pick_effort(r), background(r), r.randrange(4)
    if kind == 0:
        shape, n, size = r.choice(SHAPES), r.randint(1, 5), r.randint(7, 12)
        spots = places(r, n, size)
        for x, y in spots:
            draw_shape(img, shape, x, y, size, shade(r, r.choice([c for c in COLOURS if c != "white"])))
        word = shape if n == 1 else shape + "s"
        q = r.choice([f"How many {shape}s are there?", f"Count the {shape}s in the picture.", f"How many {shape}s do you see?"])
        low, high, answer = f"{NUMBER_WORDS[n]}.", f"The picture shows {NUMBER_WORDS[n]} {word}.", f"{n}"
    elif kind in (1, 2):
        shape, colour, size = r.choice(SHAPES), r.choice(list(COLOURS)), r.randint(14, 30)
        (x, y), = places(r, 1, size)
        draw_shape(img, shape, x, y, size, shade(r, colour))
        low, high = f"{colour} {shape}.", f"The picture shows one {colour} {shape}."
        if kind == 1:
            q = r.choice([f"What colour is the {shape}?", f"Which colour has the {shape}?", f"Name the colour of the {shape}."])
            answer = colour
        else:
            q = r.choice(["What shape is in the picture?", "Which shape do you see?", "What is in this picture?"])
            answer = f"a {colour} {shape}"
    else:
        digit, cell = r.randrange(10), r.randint(10, 18)
        x, y = r.randint(2, SIDE - 3 * cell - 2), r.randint(2, SIDE - 5 * cell - 2)
        draw_digit(img, digit, x, y, cell, shade(r, r.choice(["black", "red", "blue", "green", "purple"])))
        q = r.choice(["What number is drawn?", "Which digit is this?", "Read the number in the picture."])
        low, high, answer = f"{digit}.", f"The picture shows the digit {digit}.", f"{digit}"
    text = PLACEHOLDER + q if r.random() < 0.7 else q + PLACEHOLDER
    d = single("image", r, text, effort, low, high, answer)
    d.key = f"{answer} {r.random()}"
    return d, img
