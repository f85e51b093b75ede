"""The canonical model: nodes, tensors, weights, repeated blocks, and the same graph at another
batch."""
