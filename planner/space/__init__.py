"""All ways to cut a graph over one mesh, priced by planner.pricing, as the one problem in integers
that every solver sees (planner.solvers.problem)."""
