"""Time and memory models of devices, links and operators; knows nothing of the search."""
