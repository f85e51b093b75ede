"""HTML as escaped strings: the only way markup is made in the report.

Every child that is not `Markup` is text of unknown origin (names come from models) and is escaped;
so is every attribute value. What no page can hold is replaced: control characters, lone surrogates,
and the marks that reorder or hide the text around them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufdd0-\ufdef\ufeff\ufffe\uffff\ud800-\udfff]"
)
_PARTS = re.compile(r"(?<=[/+_.])(?=\w)")
VOID = frozenset(
    {"meta", "input", "br", "hr", "wbr", "rect", "line", "path", "polygon", "polyline", "circle"}
)


class Markup(str):
    """Text that is HTML already. Made by `el`, `text` and `join` only."""

    __slots__ = ()


Child = str | None


def clean(value: str) -> str:
    """A string without what a page cannot hold: each such character becomes U+FFFD."""
    return _UNSAFE.sub("\ufffd", value)


def text(value: object) -> Markup:
    """Escaped text; `Markup` passes."""
    return (
        value if isinstance(value, Markup) else Markup(html.escape(clean(str(value)), quote=True))
    )


def join(*children: Child | Iterable[Child], gap: str = "") -> Markup:
    """Children in a row, nested lists flattened, None and "" left out."""
    flat: list[str] = []
    for child in children:
        flat += [
            text(c) for c in ([child] if child is None or isinstance(child, str) else child) if c
        ]
    return Markup(text(gap).join(flat))


def el(
    tag: str, *children: Child | Iterable[Child], **attributes: str | float | bool | None
) -> Markup:
    """An element. Attribute names: `class_` for class, other underscores are dashes; None and False
    leave one out, True writes it bare."""
    parts = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        parts.append(
            key
            if value is True
            else f'{key}="{text(number(value) if isinstance(value, float) else value)}"'
        )
    body = join(*children)
    if tag in VOID and not body:
        return Markup(
            f"<{' '.join(parts)}{'' if tag in ('meta', 'input', 'br', 'hr', 'wbr') else '/'}>"
        )
    return Markup(f"<{' '.join(parts)}>{body}</{tag}>")


def number(value: float) -> str:
    """A coordinate: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value == value and abs(value) < 1e12 else "0"


def name(value: str, **attributes: str | None) -> Markup:
    """A name from a model: set in its own direction, breakable between its parts, and anywhere if
    need be."""
    return el("span", join(*_PARTS.split(value), gap=el("wbr")), class_="name", **attributes)
