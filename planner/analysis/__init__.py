"""What is true of a graph on every mesh: its rules, gradients, repeated blocks, what its backward
pass reads, and what axes of a mesh do for it. planner.analysis.facts joins them."""
