"""Search from a first choice: repair and descent, neighbourhoods, annealing, and mixtures of what
runs ended with."""
