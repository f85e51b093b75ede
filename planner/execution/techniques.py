"""Whether the decisions of a strategy file can be at all: files are edited by hand, and an
impossible split would be emitted as wrong numbers.

check_mesh      axes, device count and techniques
check_splits    every node's split, against its operator's rule
"""

from __future__ import annotations

RECOMPUTE = ("none", "block-keep", "block")
"""What a plan may compute again: nothing, blocks with the results of collectives kept, or blocks
whole. The dearer in memory first."""
WEIGHTS = ("parameters", "embeddings")
"""Of OFFLOAD what is kept with gradients and state: without pipeline stages, one microbatch at a
time."""
IN_LOOPS = ("activations", "parameters")
"""Of OFFLOAD what is sent and brought by loops over recomputed blocks: without pipeline stages."""


OFFLOAD = ("optimizer", "activations", "parameters", "embeddings")
"""What may wait in the host's memory: the optimizer's state (moments and master copies), from one
step to the next; what is handed from block to recomputed block, from the forward to the backward
pass; weights of recomputed blocks, with their gradients; tables that are looked up alone, with
theirs."""
