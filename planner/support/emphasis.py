"""Text on its way to a terminal: our emphasis, and nothing else that steers one.

Names come from models and may hold anything. Emphasis is therefore marked, where a text is made, in
a way that no file can know of, and becomes what terminals read only where the text is written;
every other control character is written out, visibly.
"""

from __future__ import annotations

import os
import re

_OURS = f"\x1b[{int.from_bytes(os.urandom(6), 'big')};"
"""How codes of this process begin until they are written. Widths are counted without them
(`ANSI`)."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What moves the cursor, rings, changes colours or the direction of writing; not line breaks and
tabs, which texts are made with."""
_PLAIN = str.maketrans({"·": "-", "×": "x", "…": "."})


def emphasised(code: str, text: str) -> str:
    """A text with a code of emphasis (SGR) before it, and the end of that behind it."""
    return f"{_OURS}{code}m{text}{_OURS}0m"


def printable(text: str, encoding: str = "utf-8") -> str:
    """A text for a terminal: what an encoding cannot show is replaced, control characters that
    names brought are written out, our emphasis is left."""
    text = "\x1b[".join(_CONTROL.sub(_written, part) for part in text.split(_OURS))
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text


def one_line(text: str) -> str:
    """A text without line breaks: a name with some would look like lines of ours."""
    return text if text.isprintable() else re.sub("[\n\r\v\f]", _written, text)


def _written(match: re.Match[str]) -> str:
    """A control character as Python writes it."""
    return ascii(match[0])[1:-1]
