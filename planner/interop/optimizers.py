"""Optimizers as the files of launchers call them: what of them is not priced as it is said."""

from __future__ import annotations

from costmodels.optimizers import OPTIMIZERS
from planner.interop.keys import Keys
from planner.interop.unset import Unset

ADAM = ("adam", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adam_pax", "fusedadam")
"""Names of AdamW's state in float32, of which fused kernels and weight decay change nothing."""
DIST_MUON = "dist_muon"
"""Megatron-LM's Muon that deals whole parameters out over the replicas."""
MUON = ("muon", DIST_MUON, "adaptive_muon")
"""Names of Muon: Megatron-LM's, MaxText's, Levanter's, DeepSpeed's and torch's."""


def notes_of(keys: Keys, *places: str) -> list[str]:
    """What to say of the optimizer that a file names at one of some places. Muon is noted in the
    keys, too: it is priced without being asked for."""
    values = (keys.at(place) for place in places)
    name = next((v for v in values if isinstance(v, str) and not isinstance(v, Unset)), "")
    word = name.lower().rpartition(".")[2]
    if not word or word in ADAM:
        return []
    if word in MUON:
        keys.optimizer = "muon"
        return [f"the optimizer is {name}, which --optimizer muon prices"]
    if word in OPTIMIZERS:
        return [f"the optimizer is {name}: --optimizer {word} prices its state"]
    return [f"the optimizer is {name}: its state is priced as AdamW's in float32"]
