"""Recognises what exporters spread out, innermost patterns first."""

from __future__ import annotations

from planner.reader.draft.draft import Draft
from planner.reader.draft.flatten import unflatten
from planner.reader.draft.simplify import drop_dead, fold_transposes, shorten_views, sink_expands
from planner.reader.fuse.activations import gelus, rotaries, silus
from planner.reader.fuse.affine_norms import affine_norms, means
from planner.reader.fuse.attention import attentions, repeated_heads
from planner.reader.fuse.experts import experts
from planner.reader.fuse.experts_build import stored_parts
from planner.reader.fuse.experts_one_by_one import experts_each
from planner.reader.fuse.matcher import Finder
from planner.reader.fuse.norms import group_norms, norms
from planner.reader.fuse.rows import bags
from planner.reader.fuse.windows import windows


def fuse(draft: Draft, as_written: bool = False) -> None:
    """Activations, norms, rotary embeddings, attention, routed experts; then the views they leave
    behind. as_written: the model runs as it is, and not in a program of ours, whose kernels of
    attention and experts are others than the compiler makes of what is written out."""
    finder = Finder(draft) if as_written else windows(Finder(draft))
    kernels = () if as_written else ((attentions,), (repeated_heads,), (experts, experts_each))
    for patterns in (
        (silus, gelus, bags, means),
        (affine_norms,),
        (norms, group_norms),
        (rotaries,),
        *kernels,
    ):
        for pattern in patterns:
            pattern(finder)
        finder = finder.applied()
    stored_parts(draft)
    unflatten(draft)
    for rewrite in (sink_expands, shorten_views, fold_transposes):
        if rewrite(draft):
            drop_dead(draft)
