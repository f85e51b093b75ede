"""Options of the command line that stand in for constants of a training program."""

from __future__ import annotations

import math

SETTINGS = (
    ("--lr", "LEARNING_RATE", {"type": float, "metavar": "RATE", "help": "learning rate"}),
    (
        "--warmup",
        "WARMUP_STEPS",
        {"type": int, "metavar": "STEPS", "help": "over which the learning rate rises in a line"},
    ),
    (
        "--schedule",
        "SCHEDULE",
        {
            "choices": ("constant", "cosine", "linear"),
            "help": "of the learning rate after the warm-up, up to the last of --steps",
        },
    ),
    (
        "--lr-end-fraction",
        "END_FRACTION",
        {"type": float, "metavar": "F", "help": "of the learning rate: what a schedule ends at"},
    ),
    (
        "--clip",
        "CLIP_NORM",
        {
            "type": float,
            "metavar": "NORM",
            "help": "scale gradients down to this norm of all together; 0: do not",
        },
    ),
    (
        "--weight-decay",
        "WEIGHT_DECAY",
        {"type": float, "metavar": "D", "help": "of what is not in NO_DECAY, times the rate"},
    ),
    ("--momentum", "MOMENTUM", {"type": float, "metavar": "M", "help": "of gradients of matrices"}),
    ("--beta1", "BETA1", {"type": float, "metavar": "B", "help": "of the mean of gradients"}),
    ("--beta2", "BETA2", {"type": float, "metavar": "B", "help": "of the second moment"}),
    ("--eps", "EPSILON", {"type": float, "metavar": "E", "help": "beside the root of it"}),
)


def setting_options():
    """The options of SETTINGS whose constants this program has, with these as defaults."""
    constants = globals()
    return tuple(
        (option, how | {"help": f"{how['help']} (default %(default)s)", "default": constants[name]})
        for option, name, how in SETTINGS
        if name in constants
    )


def set_constants(args):
    """Put what the command line says in the place of constants, before a step is compiled."""
    values = {"STEPS": args.steps, "NORM_LOGGED": bool(getattr(args, "log", None))}
    for option, name, _ in SETTINGS:
        if name in globals():
            values[name] = getattr(args, option[2:].replace("-", "_"))
            if isinstance(values[name], int | float) and not 0 <= values[name] < math.inf:
                raise SystemExit(
                    f"{option} {values[name]}: a finite number of at least 0 is wanted"
                )
            if name in ("BETA1", "BETA2", "MOMENTUM") and values[name] >= 1:
                raise SystemExit(f"{option} {values[name]}: it has to be below 1")
    globals().update(values)
