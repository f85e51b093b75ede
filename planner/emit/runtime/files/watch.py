"""What a training program tells of its steps while they run: lines on the terminal and in a file,
the loss on data that is not trained on, and a trace of a few steps."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import jax
import numpy as np

from planner.emit.runtime.files.feed import next_batch, open_data
from planner.emit.runtime.files.frame import at_least, say
from planner.emit.runtime.files.start import lost_at
from planner.emit.runtime.files.tables import BATCH, ITEM, ITEMS, MESH, MODEL_FLOPS, PEAK_FLOPS
from planner.emit.runtime.step.one_step import named, step_text
from planner.emit.runtime.step.schedule import learning_rate
from planner.emit.runtime.step.step_shard_map import make_loss

WATCH_OPTIONS = (
    (
        "--log",
        {"type": Path, "metavar": "FILE.jsonl", "help": "append a line of JSON for each step"},
    ),
    (
        "--eval-every",
        {
            "type": at_least(0),
            "default": 0,
            "metavar": "STEPS",
            "help": "take the loss on --eval-data",
        },
    ),
    ("--eval-data", {"metavar": "WHERE", "help": "what is not trained on, as for --data"}),
    (
        "--eval-batches",
        {"type": at_least(1), "default": 8, "metavar": "N", "help": "of it, the same each time"},
    ),
    (
        "--profile",
        {"type": Path, "metavar": "FOLDER", "help": "write jax's trace of steps 3 to 5 of the run"},
    ),
)
PROFILED = (2, 5)


def figures(i, seen, seconds, args):
    """What is known of step i by name. seen: its loss, and the norm of its gradients. MFU is of the
    planned device's peak, and counts half the products of causal attention."""
    row = {"step": i} | named(seen) | {"learning_rate": float(rate_of(i)), "seconds": seconds}
    if ITEMS:
        row[f"{ITEM}_per_s"] = ITEMS / seconds
    if MODEL_FLOPS and not args.virtual_devices:
        row["mfu"] = MODEL_FLOPS / seconds / (PEAK_FLOPS * math.prod(MESH.values()))
    return row


def rate_of(i):
    """The learning rate of the step with this number, counted from 0."""
    return learning_rate(np.float32(i + 1))


def write_line(path, row):
    """Append a line of JSON to a file, by the first process alone; null is what is no number."""
    if jax.process_index() == 0:
        row = {k: None if v != v or v in (math.inf, -math.inf) else v for k, v in row.items()}
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def watcher(args, saved):
    """told(i, seen): read the results of step i, which were left to the devices until now, and say
    them; whether training has come to nothing. And restart(): a step's seconds are those since the
    last was read, or since this was called."""
    since = [time.perf_counter()]
    lost = [False]

    def told(i, seen):
        jax.block_until_ready(seen)
        now = time.perf_counter()
        seconds, since[0] = now - since[0], now
        say(step_text(i, seen, seconds))
        if args.log:
            write_line(args.log, figures(i, seen, seconds, args))
        lost[0] = lost[0] or lost_at(i, seen, saved)
        return lost[0]

    def restart():
        since[0] = time.perf_counter()

    return told, restart


def evaluator(args, frozen, mesh):
    """evaluate(i, params): say the mean loss of --eval-batches batches of --eval-data."""
    if args.eval_every <= 0:
        return None
    if not args.eval_data:
        raise SystemExit("--eval-every needs --eval-data")
    data, loss_of_batch = open_data(args.eval_data), make_loss(mesh)
    count = min(max(args.eval_batches, 1), data[0] // BATCH)

    def evaluate(i, params):
        batches = (next_batch(data, k, args.seed, mesh) for k in range(count))
        loss = float(np.mean([float(loss_of_batch(params, frozen, b)) for b in batches]))
        say(f"step {i}  evaluation {loss:.6f}")
        if args.log:
            write_line(args.log, {"step": i, "evaluation_loss": loss})

    return evaluate


def profile(args, ran, steps, params):
    """Begin or end the trace when so many of a run's steps were run."""
    first, last = PROFILED[0], min(PROFILED[1], steps)
    if not args.profile or ran not in (first, last) or last <= first:
        return
    jax.block_until_ready(params)
    if ran == first:
        jax.profiler.start_trace(args.profile)
    else:
        jax.profiler.stop_trace()
        say(f"a trace of steps {first + 1} to {last} is in {args.profile}")
