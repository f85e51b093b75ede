"""Arguments of a command as a table of keys: `--key value`, `--key=value`, flags, several values
behind one key, and `key=value` without dashes (MaxText's overrides)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.interop.shell import END, MARK, Command, Script
from planner.interop.shell_words import NotShell
from planner.interop.unset import Unset, shown

OVERRIDE = re.compile(r"(?:--)?([A-Za-z_][\w.\-]*)=(.*)", re.S)
GIVEN = re.compile(r"(?:--)?(\w[\w.\-]*)=(.*)", re.S)
"""The same behind a file, where arguments of a script have numbers."""
SUFFIXES = (".sh", ".bash", ".zsh", ".sbatch", ".slurm", ".args", ".txt")
"""How scripts and lists of arguments are called."""
PROGRAMS = ("python", "python3", "torchrun", "srun", "accelerate", "deepspeed", "mpirun")


def scalar(text: str) -> Any:
    """A word as the number, flag or null that it is, else as it stands."""
    if MARK in text:
        return Unset(text[text.find(MARK) + 1 : text.find(END)])
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.?\d+)([eE][+-]?\d{1,3})?", text):
        return float(text)
    return {"true": True, "false": False, "null": None, "None": None}.get(
        text if text in ("null", "None") else text.lower(), text
    )


def table_of(words: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Keys of arguments; of a key that is there twice the last counts, as in argparse."""
    table: dict[str, Any] = {}
    key, values = "", list[Any]()

    def close() -> None:
        if key:
            value = values[0] if len(values) == 1 else list(values) if values else True
            if key in table and table[key] != value:
                before, now = (shown(v) for v in (table[key], value))
                notes.append(f"{key} is {before} and later {now}: the last counts")
            table[key] = value

    for word in words:
        named = OVERRIDE.fullmatch(word)
        option = word.startswith("--") and len(word) > 2
        if option or (named and not word.startswith("-")):
            close()
            key, values = (named[1] if named else word.lstrip("-")), []
            key = f"--{key}" if option else key
            if named:
                values.append(scalar(named[2]))
                close()
                key = ""
        elif re.fullmatch(r"-[A-Za-z]\w*", word):
            close()
            key = ""
        elif key:
            values.append(scalar(word))
    close()
    return table


@dataclass(frozen=True)
class ReadScript:
    """What a script starts its program with. table: keys; files: configurations that the program is
    given, as it names them; used: variables that were given and asked for."""

    table: dict[str, Any]
    notes: list[str]
    files: tuple[str, ...] = ()
    used: frozenset[str] = frozenset()


def read_script(text: str, path: Path, variables: Mapping[str, str]) -> ReadScript:
    """The program that a script starts. variables: as of the environment. Raises PlanError
    P190."""
    try:
        script = Script(text, variables, path)
        used = frozenset(name for name in variables if name in script.names)
    except (NotShell, RecursionError) as e:
        raise PlanError(
            "P190",
            f"{path} is no shell script that can be followed: {str(e)[:200]}",
            help=["a plain list of arguments in FILE.args"],
        ) from e
    notes = list(script.notes)
    commands = [(len(table_of(c.words, [])), c) for c in script.commands if _starts(c)]
    loose = tuple(w for c in script.commands if c.words[0].startswith("--") for w in c.words)
    if not commands and loose:  # a list of arguments, in lines
        commands = [(len(table_of(loose, [])), Command(1, loose))]
    most = max((n for n, _ in commands), default=0)
    if most:
        several = [c for n, c in commands if n == most]
        chosen = several[-1]
        if len({c.words for c in several}) > 1:
            notes.append(f"several commands: the one in line {chosen.line} is read")
        return ReadScript(*_program(chosen, notes), used)
    table: dict[str, Any] = {}
    for words in script.variables():
        has_arguments = any(w.startswith("--") or OVERRIDE.fullmatch(w) for w in words)
        table |= table_of(words, notes) if has_arguments else {}
    return ReadScript(table, notes, (), used)


def _starts(command: Command) -> bool:
    """Whether a command starts a program of Python."""
    return any(
        w.endswith(".py") or w.rpartition("/")[2] in PROGRAMS for w in command.words
    ) and any(w.startswith("--") or OVERRIDE.fullmatch(w) for w in command.words)


def _program(
    command: Command, notes: list[str]
) -> tuple[dict[str, Any], list[str], tuple[str, ...]]:
    """(keys, notes, configurations) of a program, without what starts it (torchrun, srun), of which
    only the number of processes is a key."""
    words = command.words
    program = next((k for k, w in enumerate(words) if w.endswith(".py")), len(words))
    module = next((k for k, w in enumerate(words[:-1]) if w == "-m"), len(words))
    start = min(program + 1, module + 2) if min(program, module) < len(words) else 0
    before = table_of(words[: min(program, module)] if start else (), [])
    names = {k.lstrip("-").replace("-", "_"): v for k, v in before.items()}
    nodes, processes = names.get("nnodes", 1), names.get("nproc_per_node")
    started: dict[str, Any] = {}
    if type(nodes) is int and type(processes) is int:
        started = {"num_processes": nodes * processes}
    if words[0].rpartition("/")[2] == "accelerate":
        started = before
    files = tuple(
        w.rpartition(END)[2].lstrip("/")
        for w in words[start:]
        if w.endswith((".yml", ".yaml")) and not w.startswith("-") and "=" not in w
    )
    return started | table_of(words[start:], notes), notes, files
