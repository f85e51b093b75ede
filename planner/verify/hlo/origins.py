"""From a compiled instruction back to the line of the emitted program it came from, and so to the
operator or tensor that line names.

HLO text ends its metadata with `stack_frame_id=N`; the tables at its head lead from there to files,
functions and lines. Every line of an emitted program says what it is for in a comment (`#
/h.0/fc/MatMul -> [...]`, `# all-reduce over tensor: NAME`). Of a stack of frames the innermost one
with such a line counts; optimizer and gradient code has none and is called by its functions' names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ROW = re.compile(r"(\d+) (.*)")
_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NODE = re.compile(r"#\s+(?:[A-Z]\w*\s+)?(\S+)\s+->")
_COLLECTIVE = re.compile(r"#\s+.*\bover\b.*:\s+(\S+)\s*$")


@dataclass(frozen=True)
class Origins:
    """The tables of one HLO text beside the source of its program."""

    source: tuple[str, ...]
    functions: dict[int, str] = field(default_factory=dict)
    locations: dict[int, tuple[int, int]] = field(default_factory=dict)
    """location -> (function, line) of lines in the emitted program"""
    frames: dict[int, tuple[int, int]] = field(default_factory=dict)
    """frame -> (location, parent frame)"""

    @classmethod
    def of(cls, text: str, source: str, file: str = "emitted.py") -> Origins:
        """text: HLO of the program whose source this is, compiled from `file`."""
        tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        table: dict[int, str] | None = None
        for line in text.splitlines():
            if line.startswith(("%", "ENTRY")):
                break
            if line.strip() in tables:
                table = tables[line.strip()]
            elif table is not None and (match := _ROW.match(line)):
                table[int(match.group(1))] = match.group(2)
        mine = {i for i, name in tables["FileNames"].items() if name.strip('"').endswith(file)}
        locations = {}
        for i, row in tables["FileLocations"].items():
            f = {k: int(v) for k, v in _FIELD.findall(row)}
            if f.get("file_name_id") in mine:
                locations[i] = (f.get("function_name_id", 0), f["line"])
        frames = {}
        for i, row in tables["StackFrames"].items():
            f = {k: int(v) for k, v in _FIELD.findall(row)}
            frames[i] = (f["file_location_id"], f.get("parent_frame_id", 0))
        if any(
            parent == i for i, (_, parent) in frames.items()
        ):  # written one too high: no frame is its own parent
            frames = {i: (location, parent - 1) for i, (location, parent) in frames.items()}
        return cls(
            tuple(source.splitlines()),
            {i: name.strip('"') for i, name in tables["FunctionNames"].items()},
            locations,
            frames,
        )

    def name(self, attributes: str) -> str:
        """The node or tensor an instruction serves, from its attributes; else the emitted function
        it is in; "" where nothing tells."""
        function = ""
        for where, line in self._lines(attributes):
            text = self.source[line - 1] if 0 < line <= len(self.source) else ""
            if match := _NODE.search(text) or _COLLECTIVE.search(text):
                return match.group(1)
            function = function or where.split(".")[0]
        return function

    def _lines(self, attributes: str) -> list[tuple[str, int]]:
        """(function, line) of the frames of an instruction in the emitted program, innermost
        first."""
        match = _FRAME.search(attributes)
        frame, lines, seen = int(match.group(1)) if match else 0, [], set()
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            location, parent = self.frames[frame]
            if location in self.locations:
                function, line = self.locations[location]
                lines.append((self.functions.get(function, ""), line))
            frame = parent
        return lines
