"""A plan, and what follows from it before any price: layouts, loops, stages, recomputation, and
every collective and FLOP of a step."""
