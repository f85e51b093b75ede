"""Precision recipes as the files of launchers say them.

WRITTEN are the keys of each recipe; what of them a file has is read back by `read`. A recipe that a
launcher has no keys for is none that `--for` plans (planner.pins.launcher_space) or `plan export`
writes. Keys as in the sources that the modules of launchers name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from planner.errors import PlanError
from planner.interop.keys import Keys

SUMS = "grad_reduce_in_bf16"
"""Megatron-LM's argument; without it gradients of bf16 are kept and sent in float32."""
_EIGHT = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
WRITTEN: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "megatron": {
        "bf16-mixed": {"bf16": True, SUMS: True},
        "bf16-fp32-grads": {"bf16": True, SUMS: False},
        "fp16": {"fp16": True},
        "fp8": {"bf16": True, **_EIGHT, SUMS: True},
        "fp8-fp32-grads": {"bf16": True, **_EIGHT, SUMS: False},
        "fp32": {"bf16": False},
    },
    "maxtext": {
        "bf16-mixed": {"dtype": "bfloat16", "weight_dtype": "float32"},
        "bf16-pure": {"dtype": "bfloat16", "weight_dtype": "bfloat16"},
        "fp8": {"dtype": "bfloat16", "weight_dtype": "float32", "quantization": "fp8"},
        "fp32": {"dtype": "float32", "weight_dtype": "float32"},
    },
    "torchtitan": {
        "bf16-mixed": {"mixed_precision_param": "bfloat16"},
        "fp8": {"mixed_precision_param": "bfloat16", "converters": ["quantize.linear.float8"]},
        "fp32": {"mixed_precision_param": "float32"},
    },
    "hf": {
        "bf16-mixed": {"mixed_precision": "bf16"},
        "fp16": {"mixed_precision": "fp16"},
        "fp8": {"mixed_precision": "fp8"},
        "fp32": {"mixed_precision": "no"},
    },
    "levanter": {
        "bf16-mixed": {"mp": "p=f32,c=bfloat16"},
        "bf16-pure": {"mp": "p=bfloat16,c=bfloat16"},
        "fp32": {"mp": "f32"},
    },
}
"""Launcher -> recipe -> key -> value, of what training computes in."""
IN_SOME_FORMS = {"torchtitan": ("fp8",)}
"""Of those the ones that a launcher has no words for in each form of its files: torchtitan's Python
takes converters where a model is registered, not in a configuration."""
_BFLOAT = ("bf16", "bfloat16")
_NEMO = {
    **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("16", "16-mixed", "16-true", "fp16"), "fp16"),
    **dict.fromkeys(("32", "32-true"), "fp32"),
}
"""`trainer.precision` of NeMo's YAML."""


def words(launcher: str, recipe: str) -> Mapping[str, object]:
    """The keys that say a recipe, none for "" (nothing is said). Raises PlanError P192."""
    if not recipe:
        return {}
    known = WRITTEN[launcher]
    if recipe not in known:
        raise PlanError(
            "P192",
            f"no settings of {launcher} are known for the precision {recipe}",
            help=[f"plan with --precision {' or '.join(known)}"],
        )
    return known[recipe]


def read(launcher: str, keys: Keys, notes: list[str]) -> str:
    """The recipe that a file says, "" where it says none; notes: what is priced otherwise."""
    return _READ[launcher](keys, notes)


def _megatron(keys: Keys, notes: list[str]) -> str:
    """Also Megatron-Bridge's names of recipes (mixed_precision), and its grad_reduce_in_fp32."""
    named = keys.word("", "mixed_precision") or _NEMO.get(keys.word("", "precision"), "")
    half, brain = keys.flag(False, "fp16"), keys.flag(False, "bf16")
    eight = keys.word("", "fp8_format", "fp8") not in ("", "none", "false")
    scaling = keys.word("delayed", "fp8_recipe")
    four = keys.word("", "fp4_format", "fp4") not in ("", "none", "false") or "fp4" in named
    if four:
        notes.append("four-bit products are priced as eight-bit ones")
    elif eight and scaling != "tensorwise":
        notes.append(f"fp8_recipe {scaling} is priced as tensorwise scaling")
    keys.get("accumulate_allreduce_grads_in_fp32")  # bf16 turns it on, whatever a file says
    narrow = keys.flag(False, SUMS) or not keys.flag(True, "grad_reduce_in_fp32")
    if eight or four or "fp8" in named:
        return "fp8" if narrow else "fp8-fp32-grads"
    if half or named.startswith("fp16"):
        return "fp16"
    if brain or named.startswith("bf16"):
        return "bf16-mixed" if narrow else "bf16-fp32-grads"
    return "fp32" if "bf16" in keys or named == "fp32" else ""


def _maxtext(keys: Keys, notes: list[str]) -> str:
    quantized = keys.word("", "quantization")
    compute, stored = keys.word("", "dtype"), keys.word("float32", "weight_dtype")
    if "fp8" in quantized:
        return "fp8"
    if quantized not in ("", "none"):
        notes.append(f"quantization {quantized} is left out: products are priced in bfloat16")
    if not compute and "weight_dtype" not in keys:
        return ""
    if compute == "float32":
        return "fp32"
    return "bf16-pure" if stored in _BFLOAT else "bf16-mixed"


def _torchtitan(keys: Keys, notes: list[str]) -> str:
    converters = str(keys.get("converters") or "").lower()
    if "fp4" in converters:
        notes.append("four-bit products are priced as eight-bit ones")
    elif re.search(r"mxfp8|\.mx\b", converters):
        notes.append("MXFP8 is priced as tensorwise scaling")
    if re.search(r"float8|fp8|fp4|\.mx\b", converters):
        return "fp8"
    compute = keys.word("", "mixed_precision_param")
    return {"float32": "fp32", "": ""}.get(compute, "bf16-mixed")


def _hf(keys: Keys, notes: list[str]) -> str:
    """accelerate's word, or the flags of TrainingArguments."""
    recipes = {"bf16": "bf16-mixed", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}
    recipes["false"] = "fp32"  # what YAML makes of a bare no
    word = keys.word("", "mixed_precision")
    if word in recipes:
        return recipes[word]
    flags = [name for name in ("bf16", "fp16") if keys.flag(False, name)]
    return recipes[flags[0]] if flags else "fp32" if "bf16" in keys else ""


def _levanter(keys: Keys, notes: list[str]) -> str:
    """A policy of jmp: one type for all, or p=parameters,c=computation."""
    policy = keys.word("", "mp")
    if not policy:
        return ""
    parts = dict(part.split("=", 1) for part in policy.split(",") if "=" in part)
    compute = parts.get("c", parts.get("compute", policy))
    stored = parts.get("p", parts.get("params", policy))
    if compute not in (*_BFLOAT, "float16", "f16", "half"):
        return "fp32"
    if compute not in _BFLOAT:
        notes.append(f"mp {policy} is priced as bfloat16: half of the bytes, as many FLOPs")
    return "bf16-pure" if stored in _BFLOAT else "bf16-mixed"


_READ: Mapping[str, Callable[[Keys, list[str]], str]] = {
    "megatron": _megatron,
    "maxtext": _maxtext,
    "torchtitan": _torchtitan,
    "hf": _hf,
    "levanter": _levanter,
}
