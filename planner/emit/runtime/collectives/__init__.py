"""Changes of layout, recomputation, and compiler options of collectives."""
