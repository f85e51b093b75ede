"""Recognises what exporters spread out, innermost patterns first."""

from __future__ import annotations

from planner.reader.draft import Draft
from planner.reader.finder import Finder
from planner.reader.flatten import unflatten
from planner.reader.fuse_attention import attentions, repeated_heads
from planner.reader.fuse_moe import experts
from planner.reader.fuse_moe_each import experts_each
from planner.reader.fuse_norm import group_norms, norms
from planner.reader.fuse_point import gelus, rotaries, silus
from planner.reader.fuse_rows import bags
from planner.reader.moe_build import stored_parts
from planner.reader.tidy import drop_dead, fold_transposes, shorten_views, sink_expands


def fuse(draft: Draft) -> None:
    """Activations, norms, rotary embeddings, attention, routed experts; then the views they leave behind."""
    finder = Finder(draft)
    for patterns in ((silus, gelus, bags), (norms, group_norms), (rotaries,), (attentions,), (repeated_heads,), (experts, experts_each)):
        for pattern in patterns:
            pattern(finder)
        finder = finder.applied()
    stored_parts(draft)
    unflatten(draft)
    for each in (sink_expands, shorten_views, fold_transposes):
        if each(draft):
            drop_dead(draft)
