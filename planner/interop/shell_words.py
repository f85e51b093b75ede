"""Words of a shell script: quotes, continued lines, comments, arrays and here-documents taken
apart, nothing expanded and nothing run.

A word is a tuple of pieces; an array is the word before `=(` and the words inside. What a script
computes by running something ($(...), `...`) is a piece of kind "run", whose value nobody knows
here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "name", "sum", "run"]
BREAKS = frozenset(" \t\n;&|()<>")
OPERATORS = ("<<<", "<<-", "&&", "||", ";;", "<<", ">>", ">&", "<&", "\n", ";", "&", "|", "(", ")",
             "<", ">")  # fmt: skip
ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=")
NAME = re.compile(r"[A-Za-z_]\w*|\d+|[@#?*!$-]")


class NotShell(ValueError):
    """A quote or a bracket that does not end. what: in a few words; line: where it began."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(f"line {line}: {what}")


@dataclass(frozen=True)
class Piece:
    """Part of a word. text: as it stands, a variable's name with what follows it in braces
    (`TP:-4`), or an arithmetic expression. quoted: it is not split at blanks."""

    kind: Kind
    text: str
    quoted: bool = False


Word = tuple[Piece, ...]


@dataclass(frozen=True)
class Token:
    """A word, an operator (op), an array (`name` is the word up to `=`, items its words), or the
    text of a here-document (op "<<", `text`; quoted: its variables stay)."""

    line: int
    word: Word = ()
    op: str = ""
    items: tuple[Word, ...] | None = None
    text: str = ""
    quoted: bool = False


def plain_text(word: Word) -> str:
    """A word that is nothing but text; "" for any other."""
    return "".join(p.text for p in word) if all(p.kind == "text" for p in word) else ""


def keyword(token: Token) -> str:
    """An unquoted word of text alone: what may be a word of the language."""
    bare = token.items is None and all(p.kind == "text" and not p.quoted for p in token.word)
    return "".join(p.text for p in token.word) if bare else ""


class Lexer:
    """Tokens of one text, in order. Raises NotShell."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.at, self.line = text.replace("\r\n", "\n"), 0, line
        self.pending: list[tuple[str, bool, bool]] = []  # here-documents: end, quoted, tabs cut

    def tokens(self) -> list[Token]:
        """All tokens."""
        listed: list[Token] = []
        while (token := self._next()) is not None:
            listed.append(token)
            if token.op == "\n" and self.pending:
                listed += [self._document(*one) for one in self.pending]
                self.pending = []
            elif token.op in ("<<", "<<-"):
                end = self._next()
                if end is not None and not end.op:
                    quoted = any(p.quoted for p in end.word)
                    self.pending.append(
                        ("".join(p.text for p in end.word), quoted, token.op == "<<-")
                    )
                listed.pop()
        return listed

    def _blanks(self, newlines: bool = False) -> None:
        """Past blanks, continued lines and comments."""
        text = self.text
        while self.at < len(text):
            c = text[self.at]
            if c in " \t" or (newlines and c == "\n"):
                self.line += c == "\n"
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at, self.line = self.at + 2, self.line + 1
            elif c == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def _next(self) -> Token | None:
        self._blanks()
        if self.at >= len(self.text):
            return None
        line = self.line
        for op in OPERATORS:
            if self.text.startswith(op, self.at):
                self.at += len(op)
                self.line += op == "\n"
                return Token(line, op=op)
        word = self._word()
        if self.text.startswith("(", self.at) and ASSIGNED.fullmatch(plain_text(word)):
            self.at += 1
            return Token(line, word, items=self._array(line))
        return Token(line, word)

    def _array(self, line: int) -> tuple[Word, ...]:
        items: list[Word] = []
        while True:
            self._blanks(newlines=True)
            if self.at >= len(self.text):
                raise NotShell("an array does not end", line)
            if self.text[self.at] == ")":
                self.at += 1
                return tuple(items)
            if self.text[self.at] in BREAKS:
                raise NotShell(f"{self.text[self.at]!r} in an array", self.line)
            items.append(self._word())

    def _word(self) -> Word:
        pieces: list[Piece] = []
        while self.at < len(self.text) and (c := self.text[self.at]) not in BREAKS:
            if c == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise NotShell("a quote does not end", self.line)
                pieces.append(self._text(self.text[self.at + 1 : end], quoted=True))
                self.at = end + 1
            elif c == '"':
                pieces += self._double()
            elif c == "\\":
                nxt = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if nxt == "\n":
                    self.line += 1
                elif nxt:
                    pieces.append(Piece("text", nxt, True))
            elif c in "$`":
                pieces.append(self._expansion(quoted=False))
            else:
                end = self.at
                while end < len(self.text) and self.text[end] not in BREAKS | set("'\"\\$`"):
                    end += 1
                pieces.append(Piece("text", self.text[self.at : end]))
                self.at = end
        return tuple(pieces)

    def _text(self, text: str, quoted: bool) -> Piece:
        self.line += text.count("\n")
        return Piece("text", text, quoted)

    def _double(self) -> list[Piece]:
        """Pieces of a "..." string; an empty one is a piece too."""
        start, self.at = self.line, self.at + 1
        pieces = [Piece("text", "", True)]
        while True:
            if self.at >= len(self.text):
                raise NotShell("a quote does not end", start)
            c = self.text[self.at]
            if c == '"':
                self.at += 1
                return pieces
            if c == "\\":
                nxt = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                self.line += nxt == "\n"
                if nxt != "\n":
                    pieces.append(Piece("text", nxt if nxt in '$`"\\' else "\\" + nxt, True))
            elif c in "$`":
                pieces.append(self._expansion(quoted=True))
            else:
                end = self.at
                while end < len(self.text) and self.text[end] not in '"\\$`':
                    end += 1
                pieces.append(self._text(self.text[self.at : end], quoted=True))
                self.at = end

    def _expansion(self, quoted: bool) -> Piece:
        """What a $ or a backquote begins."""
        text, start = self.text, self.at
        if text[start] == "`":
            end = text.find("`", start + 1)
            if end < 0:
                raise NotShell("a backquote does not end", self.line)
            self.at = end + 1
            return Piece("run", text[start + 1 : end], quoted)
        if text.startswith("$((", start):
            inside = self._balanced(start + 1, "(", ")")
            return Piece("sum", inside.removeprefix("(").removesuffix(")"), quoted)
        if text.startswith("$(", start):
            return Piece("run", self._balanced(start + 1, "(", ")"), quoted)
        if text.startswith("${", start):
            return Piece("name", self._balanced(start + 1, "{", "}"), quoted)
        named = NAME.match(text, start + 1)
        if named is None:
            self.at = start + 1
            return Piece("text", "$", quoted)
        name = named[0][:1] if named[0].isdigit() else named[0]
        self.at = start + 1 + len(name)
        return Piece("name", name, quoted)

    def _balanced(self, position: int, opening: str, closing: str) -> str:
        """What stands between two brackets, the first of them at `position`."""
        depth, start = 0, position
        while position < len(self.text):
            c = self.text[position]
            depth += (c == opening) - (c == closing)
            position += 2 if c == "\\" else 1
            if depth == 0:
                inside = self.text[start + 1 : position - 1]
                self.at, self.line = position, self.line + inside.count("\n")
                return inside
        raise NotShell(f"{opening!r} does not end", self.line)

    def _document(self, end: str, quoted: bool, tabs: bool) -> Token:
        line, lines = self.line, []
        while self.at < len(self.text):
            stop = self.text.find("\n", self.at)
            stop = len(self.text) if stop < 0 else stop
            row, self.at, self.line = self.text[self.at : stop], stop + 1, self.line + 1
            row = row.lstrip("\t") if tabs else row
            if row == end:
                break
            lines.append(row)
        return Token(line, op="<<", text="\n".join(lines), quoted=quoted)
