"""Search from a first choice: repair and descent, neighbourhoods, and mixtures of what
descents ended with."""
