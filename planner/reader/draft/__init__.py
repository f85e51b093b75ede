"""The graph while it is built: types, folded constants, simplifications."""
