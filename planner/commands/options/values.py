"""How values of options are read."""

from __future__ import annotations

import argparse
import re


def pair(text: str) -> tuple[str, str]:
    """(name, value) of NAME=VALUE."""
    name, eq, value = text.partition("=")
    if not eq or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def whole(text: str) -> int:
    """A whole number of at least 1, with k and M for thousands of 1024: "4k"."""
    scale = {"k": 1024, "K": 1024, "M": 1024**2}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 15 or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(digits) * scale


def amount(text: str) -> float:
    """A number above 0 with K, M, B or T for powers of a thousand: "2T" tokens, "1.5M" dollars."""
    scale = {"K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:], 1.0)
    try:
        value = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount above 0, such as 2T or 1.5M")
    return value


def duration(text: str) -> float:
    """Seconds of "30d", "12h" or "2w"."""
    scale = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}.get(text[-1:], 0)
    try:
        value = float(text[:-1]) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30d, 12h or 2w")
    return value


def span(text: str) -> tuple[int, int]:
    """(least, most) of "2..8"; of "8" both are 8."""
    least, dots, most = text.partition("..")
    bounds = whole(least), whole(most if dots else least)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} runs backwards")
    return bounds


def whole_or_fewest(text: str) -> int | str:
    """A whole number, or the word."""
    if re.fullmatch(r"\d{1,8}x[A-Za-z].*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is also a device: --hardware {text}")
    return text if text == "fewest" else whole(text)


def lengths(text: str) -> int | str:
    """Tokens of a request: a number, or a distribution as written, "512..2048", "512~2048"."""
    mark = next((m for m in ("..", "~") if m in text), "")
    if not mark:
        return whole(text)
    return mark.join(str(whole(part)) for part in text.split(mark, 1))


def seconds(text: str) -> float:
    """Seconds above 0."""
    return positive(text.removesuffix("s"))


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
