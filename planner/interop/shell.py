"""Launch scripts, read and never run: what the commands of a shell script would be called with.

Assignments, arrays, `${TP:-4}`, `$((NODES * 8))`, `if` and `case` on what is known, functions and
here-documents are followed, and scripts that a script sources or starts, where they lie near it;
loops and what `$(...)` would print are not.
A variable that the script does not set is what is given for it, else unknown: it stands in a word
as MARK + name, so that an option that needs it can say so.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from costmodels.hardware.intake import read_text
from planner.interop.nearby import nearby_file
from planner.interop.python_modules import syntax_tree
from planner.interop.shell_words import (
    ASSIGNED,
    Lexer,
    NotShell,
    Piece,
    Token,
    Word,
    keyword,
    plain_text,
)

MARK = "\ue000"
"""Before the name of a variable that nobody set, and END behind it."""
END = "\ue001"
LONGEST = 2**16
"""Characters of a word after its variables are put in."""
DEEPEST = 12
"""Scripts within scripts (`bash -c "..."`, here-documents)."""
MOST_WORDS = 100_000
DECLARE = ("export", "declare", "local", "readonly", "typeset")
COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
SHELLS = ("bash", "sh", "zsh")
FOLLOWED = (".sh", ".bash")
LARGEST = 2**20
"""Bytes of a script that another starts."""
MOST_SCRIPTS = 64
"""Scripts that one sources and starts, at any depth."""
ENDS = ("then", "elif", "else", "fi", "do", "done", "esac")
SEPARATORS = ("\n", ";", "&&", "||", "|", "&", ";;", "(", ")")
_OPERATION = re.compile(
    r"(\w+|[@#?*!$-])(\[[@*\d]+\])?(?:(:?[-=+?])(.*)|(%%?|##?|/|:|\^|,).*)?", re.S
)


@dataclass(frozen=True)
class Command:
    """A command with its words, and the line it begins on."""

    line: int
    words: tuple[str, ...]


class Script:
    """What a script would start. variables: of the environment, and they stay as they are given;
    file: where it lies, None for a text alone. Raises NotShell.

    commands, in order; names: every variable it asks for; notes: what was not followed."""

    def __init__(self, text: str, variables: Mapping[str, str], file: Path | None = None) -> None:
        self.given, self.file = dict(variables), file
        self.values: dict[str, list[str]] = {k: [v] for k, v in variables.items()}
        self.commands: list[Command] = []
        self.names: set[str] = set()
        self.notes: list[str] = []
        self.words = self.followed = 0
        self.stopped = False
        self._run_text(text, 1, 0)

    def _run_text(self, text: str, line: int, depth: int) -> None:
        if depth > DEEPEST:
            raise NotShell("scripts in scripts, too deep", line)
        _Reader(self, Lexer(text, line).tokens(), depth).follow((), True)

    def note(self, text: str) -> None:
        """Add a note, each once."""
        if text not in self.notes:
            self.notes.append(text)

    def variables(self) -> list[tuple[str, ...]]:
        """Words of every variable, in the order in which they were last set."""
        return [tuple(w for one in items for w in one.split()) for items in self.values.values()]

    def set(self, name: str, items: list[str], append: bool, array: bool) -> None:
        """One assignment; what was given for the name stays."""
        if name in self.given:
            return
        before = self.values.pop(name, []) if append else (self.values.pop(name, None) and [])
        if append and before and not array:
            items = ["".join([*before[:1], *items]), *before[1:]]
        elif append:
            items = [*(before or []), *items]
        if sum(map(len, items)) > LONGEST * 8:
            raise NotShell(f"{name} grows beyond bounds", 0)
        self.values[name] = items

    # expansion

    def expand(self, word: Word) -> list[str]:
        """The words that one word of the script is, blanks of unquoted variables apart."""
        done: list[str] = []
        now: str | None = None
        for piece in word:
            values = self._values(piece)
            if piece.kind == "text" or piece.quoted:
                every = piece.kind == "name" and (piece.text == "@" or "[@]" in piece.text)
                parts = values if every else [" ".join(values)]
                if every and not values:
                    now = now or None  # "${NONE[@]}" is no word, not an empty one
                    continue
                lead, trail = False, False
            else:
                joined = " ".join(values)
                parts, lead, trail = joined.split(), joined[:1].isspace(), joined[-1:].isspace()
            if lead and now is not None:
                done, now = [*done, now], None
            for k, part in enumerate(parts):
                if k and now is not None:
                    done, now = [*done, now], None
                now = (now or "") + part
            if trail and now is not None:
                done, now = [*done, now], None
            self.words += len(parts)
            if len(now or "") > LONGEST or self.words > MOST_WORDS:
                raise NotShell("a word grows beyond bounds", 0)
        return [*done, now] if now is not None else done

    def joined(self, word: Word) -> str:
        """A word as one, as in assignments and conditions."""
        text = "".join(" ".join(self._values(p)) for p in word)
        if len(text) > LONGEST:
            raise NotShell("a word grows beyond bounds", 0)
        return text

    def _values(self, piece: Piece) -> list[str]:
        if piece.kind == "text":
            return [piece.text]
        if piece.kind == "run":
            return [f"{MARK}({END}"]
        if piece.kind == "sum":
            return [self._sum(piece.text)]
        return self._named(piece.text)

    def _named(self, text: str) -> list[str]:
        """`TP`, `TP:-4`, `ARGS[@]`, `#ARGS[@]`: other operations on a value are unknown."""
        match = _OPERATION.fullmatch(text)
        if match is None:
            return [f"{MARK}{text[:40]}{END}"]
        name, index, operation, default, other = match.groups()
        self.names.add(name)
        value = self.values.get(name)
        empty = value is None or not any(value)
        if operation in (":-", ":=", "-", "="):
            if value is None or (operation[0] == ":" and empty):
                value = [self._text(default)]
                if operation.endswith("="):
                    self.set(name, value, False, False)
        elif operation in (":+", "+"):
            value = [] if empty else [self._text(default)]
        if value is None and name in "@*":  # arguments of the script: none
            return []
        if value is None or (other and value):
            return [f"{MARK}{name}{END}"]
        if index and index.strip("[]").isdigit():
            k = int(index.strip("[]")[:6])
            return value[k : k + 1]
        return value if index else value[:1]

    def _text(self, text: str) -> str:
        """A default's text: quotes and variables in it are read once more."""
        tokens = Lexer(f'"{text}"' if '"' not in text else text.replace("\n", " ")).tokens()
        return " ".join(self.joined(t.word) for t in tokens if not t.op)

    def _sum(self, text: str) -> str:
        """Whole numbers with + - * / %, names without $ too; unknown where it is anything else."""
        text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda m: "".join(self._named(m[1])[:1]), text)
        try:
            tree = syntax_tree(text.strip(), "eval")
            value = _number(tree.body) if isinstance(tree, ast.Expression) else 0
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            first = text[text.find(MARK) + 1 : text.find(END)] if MARK in text else "("
            return f"{MARK}{first}{END}"
        return str(value)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 2**63:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp):
        a, b = _number(node.left), _number(node.right)
        if isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
            quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            return a - quotient * b if isinstance(node.op, ast.Mod) else quotient
        number = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}.get(type(node.op))  # type: ignore[call-overload]
        if number is not None and abs(number) < 2**63:
            return int(number)
    raise ValueError("no sum of whole numbers")


class _Reader:
    """Statements of one list of tokens, followed as they are read."""

    def __init__(self, script: Script, tokens: Sequence[Token], depth: int) -> None:
        self.script, self.tokens, self.depth, self.at = script, tokens, depth, 0
        self.nested = 0

    def _token(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def follow(self, stop: tuple[str, ...], active: bool) -> str:
        """Statements up to a word of `stop`, which is returned and read; "" at the end."""
        self.nested += 1
        if self.nested > 64:
            raise NotShell("statements in statements, too deep", 0)
        try:
            while (token := self._token()) is not None:
                word = keyword(token) if not token.op else token.op
                if word in stop:
                    self.at += 1
                    return word
                if token.op:
                    self._operator(token, active)
                else:
                    self._statement(token, active and not self.script.stopped)
            return ""
        finally:
            self.nested -= 1

    def _operator(self, token: Token, active: bool) -> None:
        self.at += 1
        if token.op == "<<" and active and token.text:
            if token.quoted:
                text = token.text.replace("\\", "\\\\").replace("$", "\\$")
                self.script._run_text(text, token.line, self.depth + 1)
            else:
                self.script._run_text(token.text, token.line, self.depth + 1)

    def _statement(self, token: Token, active: bool) -> None:
        word = keyword(token)
        if word == "if":
            self._if(active)
        elif word == "case":
            self._case(active)
        elif word in ("for", "while", "until", "select"):
            self._loop(token, active)
        elif word in ("{", "}", "function", "!", "time", *ENDS):
            self.at += 1
        else:
            self._command(active)

    def _if(self, active: bool) -> None:
        self.at += 1
        taken: bool | None = False
        while True:
            line, test = self.tokens[self.at - 1].line, self._condition("then")
            holds = _test(self.script, test) if active and taken is False else False
            start = self.at
            end = self.follow(("elif", "else", "fi"), bool(active and holds))
            taken = holds if taken is False and holds is not False else taken
            if end == "else":
                end = self.follow(("fi",), active and taken is False)
            if holds is None and any(map(_sets, self.tokens[start : self.at])):
                self.script.note(f"line {line}: an if that cannot be decided is left out")
            if end != "elif":
                return

    def _condition(self, stop: str) -> list[Token]:
        start = self.at
        while (token := self._token()) is not None and keyword(token) != stop:
            self.at += 1
        self.at += 1
        return [t for t in self.tokens[start : self.at - 1] if t.op not in ("\n", ";")]

    def _case(self, active: bool) -> None:
        self.at += 1
        head = self._condition("in")
        value = self.script.joined(head[0].word) if head else ""
        value = "" if MARK in value and "(" not in value else value
        taken = False
        while (token := self._token()) is not None:
            if token.op in ("\n", ";", ";;", "("):
                self.at += 1
                continue
            if keyword(token) == "esac":
                self.at += 1
                return
            patterns = []
            while (token := self._token()) is not None and token.op != ")":
                patterns += [] if token.op else [self.script.joined(token.word)]
                self.at += 1
            self.at += 1
            here = active and not taken and any(fnmatchcase(value, p) for p in patterns)
            taken = taken or here
            if self.follow((";;", "esac"), here) == "esac":
                return

    def _loop(self, token: Token, active: bool) -> None:
        self.at += 1
        head = self._condition("do")
        if active and not any(p.text == "@" for t in head for p in t.word):
            self.script.note(f"line {token.line}: a loop is not followed")
        self.follow(("done",), False)

    def _command(self, active: bool) -> None:
        """Assignments, or a command with its words up to the next separator."""
        first = self.tokens[self.at]
        words: list[Token] = []
        while (token := self._token()) is not None and token.op not in SEPARATORS:
            self.at += 1
            if token.op == "<<":  # a here-document's text comes behind its line
                self.at -= 1
                break
            if token.op:  # a redirection: its target is no argument
                following = self._token()
                if following is not None and not following.op:
                    self.at += 1
                if words and keyword(words[-1]).isdigit():
                    words.pop()
                continue
            words.append(token)
        if self._token() is not None and self._token().op == "(" and len(words) == 1:  # type: ignore[union-attr]
            self.at += 1  # a function: its body is followed where it stands
            if (closing := self._token()) is not None and closing.op == ")":
                self.at += 1
            return
        if active and words:
            self._carry_out(first, words)

    def _carry_out(self, first: Token, words: list[Token]) -> None:
        name = keyword(first)
        if name in DECLARE:
            words = [w for w in words[1:] if not plain_text(w.word).startswith("-")]
        rest = list(words)
        while rest and self._assign(rest[0]):
            rest.pop(0)
        if name in DECLARE or not rest:
            return
        if name == "unset":
            for w in rest[1:]:
                self.script.values.pop(plain_text(w.word), None)
            return
        if name in ("exit", "return"):
            code = self.script.joined(rest[1].word) if len(rest) > 1 else "0"
            if name == "exit" and code != "0":  # of a variable that somebody else would set
                self.script.note(f"line {first.line}: exit {_shown(code)} is passed over")
            self.script.stopped = self.script.stopped or (name == "exit" and code == "0")
            return
        if name in (".", "source"):
            text = " ".join(self.script.joined(w.word) for w in rest[1:2])
            if not self._another(text, None):
                self.script.note(f"line {first.line}: {_shown(text)} is read there, not here")
            return
        expanded = tuple(w for t in rest if t.items is None for w in self.script.expand(t.word))
        if not expanded:
            return
        k = expanded.index("-c") if "-c" in expanded[1:] else 0
        if (
            k
            and any(w.rpartition("/")[2] in SHELLS for w in expanded[:k])
            and len(expanded) > k + 1
        ):
            self.script._run_text(expanded[k + 1], first.line, self.depth + 1)
            return
        started = expanded[1:] if expanded[0].rpartition("/")[2] in SHELLS else expanded
        if started and self._another(started[0], started[1:]):
            return
        self.script.commands.append(Command(first.line, expanded))

    def _another(self, name: str, arguments: Sequence[str] | None) -> bool:
        """Whether a script that is sourced, or started with arguments, lies near this one; then it
        is followed."""
        script = self.script
        if script.file is None or not name.endswith(FOLLOWED):
            return False
        there = nearby_file(script.file, name.rpartition(END)[2].lstrip("/"))
        if there is None or self.depth >= DEEPEST or script.followed >= MOST_SCRIPTS:
            return False
        script.followed += 1
        try:
            text = read_text(there, LARGEST)
        except (OSError, ValueError):
            return False
        before = {k: v for k, v in script.values.items() if k.isdigit() or k in "@*"}
        stopped = script.stopped
        if arguments is not None:
            positional = {str(k): [word] for k, word in enumerate(arguments, 1)}
            script.values |= positional | {key: list(arguments) for key in "@*"}
        script._run_text(text, 1, self.depth + 1)
        if arguments is not None:
            for name in ("@", "*", *map(str, range(1, len(arguments) + 1))):
                script.values.pop(name, None)
            script.values |= before
            script.stopped = stopped
        return True

    def _assign(self, token: Token) -> bool:
        """Whether a token is an assignment; then it is made."""
        if token.items is not None:
            name = plain_text(token.word)
            items = [w for word in token.items for w in self.script.expand(word)]
            self.script.set(name.rstrip("+="), items, name.endswith("+="), True)
            return True
        head = token.word[0] if token.word else None
        match = (
            ASSIGNED.match(head.text) if head and head.kind == "text" and not head.quoted else None
        )
        if head is None or match is None:
            return False
        value = (Piece("text", head.text[match.end() :]), *token.word[1:])
        self.script.set(
            match[0].rstrip("+="), [self.script.joined(value)], match[0].endswith("+="), False
        )
        return True


def _sets(token: Token) -> bool:
    head = token.word[0] if token.word else None
    return token.items is not None or bool(
        head and head.kind == "text" and ASSIGNED.match(head.text)
    )


def _shown(text: str) -> str:
    return re.sub(f"{MARK}([^{END}]*){END}", r"$\1", text).replace("$(", "$(...)")[:80]


def _test(script: Script, tokens: Sequence[Token]) -> bool | None:
    """Whether a condition holds: [ ], [[ ]] and test, joined by && and ||; None for any other."""
    parts: list[list[str]] = [[]]
    for t in tokens:
        if t.op in ("&&", "||"):
            parts += [[t.op], []]
        elif t.op:
            return None
        else:
            word = script.joined(t.word)
            parts[-1].append(word)
            if word in ("&&", "||"):
                parts[-1].pop()
                parts += [[word], []]
    holds = _single(parts[0])
    for joint, part in zip(parts[1::2], parts[2::2], strict=False):
        decides = joint[0] == "||"  # the value of one side that decides both
        sides = (holds, _single(part))
        holds = decides if decides in sides else None if None in sides else not decides
    return holds


def _single(words: Sequence[str]) -> bool | None:
    words = [w for w in words if w not in ("[", "]", "[[", "]]", "test")]
    if words[:1] == ["!"]:
        inner = _single(words[1:])
        return None if inner is None else not inner
    if any(f"{MARK}({END}" in w for w in words):
        return None
    words = [re.sub(f"{MARK}[^{END}]*{END}", "", w) for w in words]
    if len(words) == 2 and words[0] in ("-n", "-z"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) == 1 and not words[0].startswith("-"):
        return {"true": True, "false": False, ":": True}.get(words[0], bool(words[0]))
    if len(words) != 3:
        return None
    a, op, b = words
    if op in ("=", "==", "!="):
        return fnmatchcase(a, b) == (op != "!=")
    compared = COMPARED.get(op)
    if compared is None or not all(re.fullmatch(r"-?\d{1,18}", w) for w in (a, b)):
        return None
    return compared(int(a), int(b))
