"""What a training program does when it is run."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from planner.emit.runtime.files.checkpoint import export, open_checkpoints, restore, save
from planner.emit.runtime.files.feed import next_batch, open_data
from planner.emit.runtime.files.frame import (
    at_least,
    command_line,
    computed,
    initial_values,
    make_mesh,
    place,
    say,
    specs_of,
    stored_weights,
)
from planner.emit.runtime.files.settings import set_constants, setting_options
from planner.emit.runtime.files.start import begin
from planner.emit.runtime.files.tables import FROZEN, PARAMS
from planner.emit.runtime.files.watch import WATCH_OPTIONS, evaluator, profile, watcher
from planner.emit.runtime.step.step_device import make_step

TRAINING_OPTIONS = (
    (
        "--data",
        {
            "metavar": "WHERE",
            "help": (
                "folder with .safetensors or INPUT.npy shards, or FILE.py:function that returns a"
                " dataset; default: seeded random"
            ),
        },
    ),
    (
        "--checkpoints",
        {"metavar": "DIR", "help": "save here, and go on from the last checkpoint that is here"},
    ),
    (
        "--resume-from",
        {
            "type": int,
            "metavar": "N",
            "help": (
                "with --checkpoints: go on from checkpoint N instead of the last; those behind it"
                " are renamed, not overwritten"
            ),
        },
    ),
    (
        "--save-every",
        {
            "type": at_least(1),
            "default": 100,
            "metavar": "STEPS",
            "help": "with --checkpoints; the last step is saved too (default 100)",
        },
    ),
    (
        "--keep",
        {
            "type": at_least(1),
            "default": 3,
            "metavar": "N",
            "help": "checkpoints to keep (default 3)",
        },
    ),
    (
        "--export",
        {
            "type": Path,
            "metavar": "FILE.safetensors",
            "help": "write the parameters by name when done",
        },
    ),
)


def refuse_no_folder(*paths):
    """End now where a file could not be written at the end."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise SystemExit(f"{path}: there is no folder {path.parent}")


def main():
    """Train up to --steps steps."""
    args = command_line((*TRAINING_OPTIONS, *WATCH_OPTIONS, *setting_options()))
    set_constants(args)
    refuse_no_folder(args.log, args.export)
    mesh = make_mesh()
    data = open_data(args.data)
    weights = stored_weights(args, PARAMS, FROZEN)
    frozen = place(computed(initial_values(FROZEN, args.seed, weights)), specs_of(FROZEN), mesh)
    saved = open_checkpoints(args.checkpoints, args.keep)
    done, params, state = restore(saved, mesh, args.resume_from) or begin(args, weights, mesh)
    if done:
        say(f"going on after step {done - 1}, saved in {args.checkpoints}")
    if done >= args.steps:
        say(f"--steps {args.steps} are done: more of them go on from here")
    step, evaluate = make_step(mesh), evaluator(args, frozen, mesh)
    batch = next_batch(data, done, args.seed, mesh) if done < args.steps else None
    told, restart = watcher(args, saved)
    unread: list = []  # steps whose results are still to be read, which would wait for them
    for i in range(done, args.steps):
        profile(args, i - done, args.steps - done, params)
        params, state, *seen = step(params, state, frozen, batch, jnp.float32(i + 1))
        if i + 1 < args.steps:  # while the step runs
            batch = next_batch(data, i + 1, args.seed, mesh)
        unread.append((i, seen))
        saves = saved and ((i + 1) % args.save_every == 0 or i + 1 == args.steps)
        evaluates = evaluate and (i + 1) % args.eval_every == 0
        while len(unread) > (0 if saves or evaluates or i + 1 == args.steps else 1):
            lost = told(*unread.pop(0))
        if saves and not lost:
            save(saved, i + 1, params, state)
        if evaluates:
            evaluate(i, params)
        if saves or evaluates:
            restart()
    profile(args, args.steps - done, args.steps - done, params)
    if saved:
        saved.close()  # waits for a save that is being written
    if args.export:
        export(args.export, params, state)


if __name__ == "__main__":
    main()
