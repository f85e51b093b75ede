"""Serving a decoder: the pass over the prompts and the step of generation, planned together for one
layout of the weights.

cached   how a model's cache of keys and values is wired             phases   the two graphs, made
from one file
joint    the search: replicas, tensor split, layouts for both        result   what was found, and
its file
report   the summary and the page                                    program  one program with a
loop that generates
"""

from planner.serving.report import summary
from planner.serving.result import PRINTERS, Serving

PRINTERS.append(summary)

__all__ = ["Serving"]
