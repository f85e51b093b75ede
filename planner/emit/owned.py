"""A program as a folder: the text of its model.py, and the runtime that is vendored beside it."""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path, PurePath

import planner.emit.runtime as runtime
from planner.emit.source import defined_in, imports_for, names_in

PACKAGE = "meshwright_runtime"
MODEL = "model.py"
START = f'''"""`python FOLDER` is `python FOLDER/{MODEL}`."""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).with_name("{MODEL}")), run_name="__main__")
'''
_SAYS = (
    f"What this program takes of {PACKAGE}, by file; it reads all tables. What is defined"
    " above stands: a function of the name of one of theirs (update, learning_rate, main) takes its"
    " place."
)
DIGEST = re.compile(r"^As emitted: sha256 [0-9a-f]{16}\.$", re.MULTILINE)


def model_text(
    doc: Sequence[str], tables: str, model: str, rest: Sequence[str], files: Sequence[str]
) -> str:
    """The text of model.py: tables, the model, and the parts of the runtime that it takes.

    doc: lines of the docstring, clean; tables: what a person edits; rest: the other tables, then
    statements that need functions of the parts; files: of the runtime, in the order of a program in
    one file, those last whose functions take the place of others.
    """
    used = names_in("\n".join([tables, model, *rest]))
    modules: dict[str, list[str]] = {}
    bound: set[str] = set()
    for file in files:
        names = used.intersection(defined_in(file))
        if runtime.is_module(file) and names:
            modules.setdefault(_module(file), []).extend(names)
        elif names:
            bound |= names
    parts = ", ".join(f'"{file}"' for file in files if not runtime.is_module(file))
    others, *statements = rest
    rows = [
        "# What else the plan says: how it runs, where weights lie, how gradients are reduced.",
        others,
        *textwrap.wrap(_SAYS, 98, initial_indent="# ", subsequent_indent="# "),
        "RUNTIME = (",
        *textwrap.wrap(f"{parts},", 96, initial_indent="    ", subsequent_indent="    "),
        ")",
        f"program = {PACKAGE}.bind(globals(), RUNTIME)",
        *(f"{name} = program.{name}" for name in sorted(bound)),
        *statements,
    ]
    run = 'if __name__ == "__main__":\n    program.main()'
    code = "\n\n\n".join([tables.rstrip("\n"), model, "\n".join(rows)]) + f"\n\n{run}\n"
    runtime_imports = [
        f"import {PACKAGE}",
        *(
            f"from {module} import {', '.join(sorted(names))}"
            for module, names in sorted(modules.items())
        ),
    ]
    imports = "\n\n".join([imports_for(code), "\n".join(runtime_imports)]).lstrip("\n")
    lines = "\n".join(doc).rstrip().replace("python PROGRAM.py", f"python {MODEL}")
    text = f'"""{lines}\n\nAs emitted: sha256 {"0" * 16}.\n"""\n\n{imports}\n\n{code}'
    return DIGEST.sub(f"As emitted: sha256 {_digest(text)}.", text, count=1)


def above(model_folder: str) -> str:
    """Where the model's data files lie, seen from a folder that takes the place of a file."""
    return (PurePath("..") / model_folder).as_posix()


def is_as_emitted(text: str) -> bool:
    """Whether nobody has changed a model.py since it was written."""
    match = DIGEST.search(text)
    return match is not None and f" {_digest(text)}." in match[0]


def _digest(text: str) -> str:
    """The digest of a model.py without the line that holds it."""
    return hashlib.sha256(DIGEST.sub("", text, count=1).encode()).hexdigest()[:16]


def _module(file: str) -> str:
    path = runtime.paths()[file]
    return f"{PACKAGE}.{path.parent.name}.{path.stem}"


@cache
def vendored() -> dict[str, str]:
    """The files of the runtime as they lie beside a program, by their paths in PACKAGE: those of
    `planner.emit.runtime` under another name, and the version that says which they are."""
    home = Path(runtime.__file__).parent
    texts = {
        path.relative_to(home).as_posix(): path.read_text().replace(runtime.__name__, PACKAGE)
        for path in sorted(home.rglob("*.py"))
    }
    label = f"{version('meshwright')}+{digest_of(texts)}"
    old = f'__version__ = "{runtime.__version__}"'
    return texts | {"__init__.py": texts["__init__.py"].replace(old, f'__version__ = "{label}"')}


def is_as_vendored(texts: dict[str, str]) -> bool:
    """Whether nobody has changed a runtime's files, by their paths, since they were written."""
    return f'+{digest_of(texts)}"\n' in texts.get("__init__.py", "")


def digest_of(texts: dict[str, str]) -> str:
    """Digest of a runtime's files, whatever version they say they are."""
    total = hashlib.sha256()
    for name, text in sorted(texts.items()):
        plain = re.sub(r'^__version__ = ".*"$', "", text, flags=re.MULTILINE)
        total.update(f"{name}\n{len(plain)}\n{plain}".encode())
    return total.hexdigest()[:12]
