"""The command `plan`: options and dispatch. Nothing heavy is imported until a command runs, so that
`plan --help` is instant.

stdout is data, stderr is talk. Exit codes: 0 fine, 1 a finding, 2 usage or bad input, 3 no plan
fits, 130 interrupted (best plan written).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from planner.commands.options import exchange, plans, programs, tools
from planner.errors import PlanError, closest
from planner.support.command_line import Parser
from planner.support.gc_pause import seldom_collecting
from planner.support.model_folder import model_file

INTERRUPTED = 130
START = """plan spreads a deep-learning model over many devices; it searches here and needs none of them.

  plan zoo:llama3-8b --devices 64               try it: a model that ships, on 64 H100
  plan model.onnx --devices 8 --batch 64        a model of yours, exported to ONNX
  plan show model.plan.json --html report.html  the plan as a page
  plan explain model.plan.json                  why it is as it is
  plan emit model.plan.json -o program.py       the sharded JAX program
  plan verify model.plan.json                   compile that program here and check it

plan --help: every option and command   plan hardware: machines   python -m models_zoo: models"""  # noqa: E501
Add = Callable[[argparse.ArgumentParser], None]


def _typed_here(word: str) -> str:
    """How an option of other tools is typed here; `--zero 3` is pinned, `--pin zero=3`."""
    from planner.commands.options.other_names import typed_here
    from planner.execution.techniques import BY_NAME
    from planner.pins.dialects import key_meant
    from planner.pins.pins import AXES

    if typed := typed_here(word):
        return typed
    name, _, value = word.removeprefix("--").partition("=")
    key = key_meant(name)
    return (
        f"--pin {name.replace('-', '_')}={value or 'VALUE'}"
        if key in (*BY_NAME, "sp", "ddp") or AXES.fullmatch(key)
        else ""
    )


class Version(argparse.Action):
    """Prints the version and leaves; looked up when asked for alone, as it takes longer than all
    other options together."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, 0, default=argparse.SUPPRESS, help=help)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """The version of the installed package."""
        print(f"plan {_version()}")
        parser.exit()


class Completion(argparse.Action):
    """Prints a completion script and leaves, as --version does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """The script of a shell, from the parsers of all verbs."""
        import models_zoo
        from planner.commands.completion import SHELLS, script

        if values not in SHELLS:
            raise PlanError(
                "P003",
                f"--completion {values!r}: unknown shell",
                help=[f"one of {', '.join(SHELLS)}"],
            )
        verbs = {
            verb: (about, {o: a.help or "" for a in options_of(verb) for o in a.option_strings})
            for verb, (_, _, about, _) in VERBS.items()
        }
        sys.stdout.write(
            script(values, verbs, [f"zoo:{name}" for name in models_zoo.presets()], _values())
        )
        parser.exit()


def _values() -> dict[str, list[str]]:
    """Option -> what ships to be named by it."""
    from costmodels.hardware.device import device_names, topology_names
    from costmodels.optimizers import OPTIMIZERS
    from costmodels.precision import recipe_names
    from costmodels.runtimes import runtime_names
    from planner.pins.launcher_space import SPACES

    return {
        "--hardware": list(device_names()),
        "--topology": list(topology_names()),
        "--runtime": list(runtime_names()),
        "--for": list(SPACES),
        "--precision": list(recipe_names()),
        "--optimizer": list(OPTIMIZERS),
    }


def options_of(verb: str) -> list[argparse.Action]:
    """The options of a verb."""
    return [a for a in parser(verb)._actions if a.option_strings]


SERVING = ("serve", "serving", "infer", "inference")
"""Words that people try for what `plan MODEL --workload infer` does."""
# verb -> (module:function under planner.commands, options, one line, example)
VERBS: dict[str, tuple[str, Add, str, str]] = {
    "make": (
        "make:run",
        plans.make,
        "search for the best way to spread a model, print a summary, write MODEL.plan.json",
        "plan model.onnx --devices 64",
    ),
    "show": (
        "show:run",
        plans.show,
        "a saved plan: its summary, or as a page, trace or picture",
        "plan show model.plan.json --html report.html",
    ),
    "explain": (
        "explain:explain",
        plans.explain,
        "why this plan; with a node: its split, costs and runner-up",
        "plan explain model.plan.json mlp.up_proj",
    ),
    "diff": (
        "diff:diff",
        plans.diff,
        "what changed between two plans, and why",
        "plan diff old.json new.json",
    ),
    "check": (
        "check:run",
        plans.check,
        "the gate for continuous integration: exit 1 past tolerance",
        "plan check model.onnx --against model.plan.json",
    ),
    "emit": (
        "emit:run",
        programs.emit,
        "write the sharded JAX program of a plan",
        "plan emit model.plan.json --backend shard_map -o model.py",
    ),
    "annotate": (
        "exchange:annotate",
        exchange.annotate,
        "the ONNX file with the plan as its multi-device annotations",
        "plan annotate model.plan.json --model model.onnx -o out.onnx",
    ),
    "export": (
        "exchange:export",
        exchange.export,
        "a plan as another launcher's settings, and what that rounds and costs",
        "plan export model.plan.json --to megatron -o parallel.yaml",
    ),
    "import": (
        "exchange:import_",
        exchange.import_,
        "a configuration of Megatron, MaxText, torchtitan or Hugging Face as a priced plan",
        "plan import megatron.yaml --model model.onnx --devices 64 -o mine.json",
    ),
    "tune": (
        "tune:run",
        exchange.tune,
        "a launcher's configuration in, better ones that it can say out",
        "plan tune megatron.yaml --model model.onnx --devices 64",
    ),
    "launch": (
        "launch:run",
        programs.launch,
        "run the program in several processes, or write scripts for a cluster",
        "plan launch model.plan.json --local 2 -- --steps 10",
    ),
    "weights": (
        "weights:run",
        programs.weights,
        (
            "a Hugging Face checkpoint for a program's --weights, and what was trained back into"
            " its files"
        ),
        "plan weights zoo:llama3-8b --from DIR -o llama.safetensors",
    ),
    "verify": (
        "verify:verify",
        programs.verify,
        "compile and run the program on virtual devices, predicted beside actual",
        "plan verify model.plan.json",
    ),
    "compare": (
        "compare:compare",
        plans.compare,
        "all solvers and the baselines in one table",
        "plan compare model.onnx --devices 64",
    ),
    "sweep": (
        "sweep:run",
        plans.sweep,
        "a row per device count, hardware, size and batch; what a run costs",
        "plan sweep model.onnx --devices 64..512 --batch 512 --tokens 2T",
    ),
    "ops": (
        "ops:ops",
        tools.ops,
        "operator coverage before planning; --parameters: what trains",
        "plan ops model.onnx",
    ),
    "hardware": (
        "hardware:hardware",
        tools.hardware,
        "the devices and machines that ship, with their figures and sources",
        "plan hardware h100-sxm",
    ),
    "calibrate": (
        "calibrate:run",
        tools.calibrate,
        "measure the devices here, or learn from measured runs: a file for --hardware",
        "plan calibrate -o mine.toml",
    ),
    "cache": (
        "cache:run",
        tools.cache,
        "what earlier runs left in the cache of searches, and its size; --clear removes it",
        "plan cache",
    ),
    "solve": (
        "solve:solve",
        tools.solve,
        "solve a bare strategy-selection problem",
        "plan solve problem.json --time-limit 60 -o choice.json",
    ),
}


def parser(verb: str) -> Parser:
    """The parser of one verb."""
    _, add, about, example = VERBS[verb]
    epilog = f"example: {example}"
    if verb == "make":
        about = f"plan FILE: {about}."
        rows = "\n".join(f"  plan {name:<9} {text}" for name, (_, _, text, _) in VERBS.items())
        epilog += f"\n\ncommands (plan COMMAND --help tells more):\n{rows}"
    p = Parser("plan" if verb == "make" else f"plan {verb}", about, epilog, _typed_here)
    add(p)
    if verb == "make":
        p.add_argument("--version", action=Version, help="print the version and leave")
        p.add_argument(
            "--completion",
            action=Completion,
            metavar="SHELL",
            help="print the completion script of bash, zsh or fish: plan --completion bash > FILE",
        )
    return p


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("meshwright")
    except PackageNotFoundError:  # a checkout that is not installed
        return "(not installed)"


def choose_verb(argv: Sequence[str]) -> tuple[str, list[str]]:
    """(verb, its arguments): verbs win over file names. A word that is neither gets a
    suggestion."""
    if argv and argv[0] in VERBS:
        return argv[0], list(argv[1:])
    word = argv[0] if argv else ""
    if (
        word
        and not word.startswith("-")
        and not any(c in word for c in "./:\\")
        and not os.path.exists(word)
    ):
        from models_zoo import preset_named, presets

        models, plain = presets(), word.partition(",")[0]
        near = preset_named(plain) or closest(plain, [*VERBS, *models])
        near = near and f"did you mean {'zoo:' + near if near not in VERBS else near!r}?"
        if word in SERVING:
            near = "plan MODEL --workload infer --prompt 2048 --generate 256 --concurrency 64"
        raise PlanError(
            "P001",
            f"{word!r} is no file and no command of this version",
            help=[h for h in (near, f"commands: {', '.join(VERBS)}") if h],
        )
    return "make", list(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Never raises for bad input."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            verb, rest = choose_verb(argv)
            p = parser(verb)
            if not argv:
                print(START)
                return 0
            args = p.read(rest)
            if getattr(args, "model", None):
                args.model = model_file(args.model)
            module, _, name = VERBS[verb][0].partition(":")
            with seldom_collecting():
                code: int = getattr(importlib.import_module(f"planner.commands.{module}"), name)(
                    args
                )
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # the reader of stdout has left: nobody to tell
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except PlanError as e:
            return _failed(e)
        except KeyboardInterrupt as e:  # its text: what is left, where a verb says so
            print(f"\ninterrupted: {str(e) or 'nothing was written'}", file=sys.stderr)
            return INTERRUPTED
        except (
            OSError
            # what the system says of a file that was named (too long a name, a disk that is full),
            # or of the stream that a result goes to
        ) as e:
            if os.environ.get("MESHWRIGHT_DEBUG"):
                raise
            if e.filename is None:
                os.dup2(
                    os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
                )  # what is left for it would fail once more at the end
            what = (
                f"{str(e.filename)!r} cannot be used"
                if e.filename is not None
                else "a file or stream cannot be used"
            )
            return _failed(
                PlanError(
                    "P006",
                    f"{what}: {e.strerror or e}",
                    help=["another file or folder, or room on the disk"],
                )
            )
        except (
            Exception
        ) as e:  # nobody meant it to be raised: a fault of this program, reported as one
            if os.environ.get("MESHWRIGHT_DEBUG"):
                raise
            return _failed(_missing(e) or _internal(e))
    except SystemExit as e:  # --help and --version
        return int(e.code or 0)


def _failed(error: PlanError) -> int:
    from planner.support import console
    from planner.support.emphasis import emphasised

    text = str(error)
    if console.colour(sys.stderr):
        head, sep, rest = text.partition(":")
        text = f"{emphasised('31;1', head)}{sep}{rest}"
    console.say(text)
    return error.exit_code


OWN = ("planner", "costmodels", "models_zoo")
PACKAGES = {"yaml": "pyyaml", "jaxlib": "jax", "google": "protobuf"}
"""Modules that their package is not named like."""


def _missing(error: Exception) -> PlanError | None:
    """An import that failed, where it is of another's package."""
    root = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
    if not root or root in OWN:
        return None
    package = PACKAGES.get(root, root)
    gone = isinstance(error, ModuleNotFoundError)
    what = (
        f"the package {package!r} {'is not installed' if gone else 'cannot be imported'}, and this"
        " command needs it"
    )
    return PlanError(
        "P078",
        what,
        detail=[] if gone else [str(error)[:300]],
        help=[
            f"pip install {'' if gone else '--force-reinstall '}{package}",
            "pip install meshwright brings all that it needs",
        ],
    )


def _internal(error: Exception) -> PlanError:
    """A mistake of ours, told without a traceback."""
    frame: Any = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = (
        f"{os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}"
        if frame is not None
        else ""
    )
    help = [
        "this is a mistake in the planner, not in your input",
        "run again with MESHWRIGHT_DEBUG=1 for the traceback and report it",
    ]
    return PlanError(
        "P000", f"internal error: {type(error).__name__}: {error}", detail=[where], help=help
    )


def entry() -> NoReturn:
    """The process `plan`. What a search made is not looked through for cycles once more when the
    collector is set back, nor while the interpreter ends: each took a twentieth of a plan."""
    with seldom_collecting():
        code = main()
        gc.freeze()
    sys.exit(code)


if __name__ == "__main__":
    entry()
