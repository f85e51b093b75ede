"""The same graph at another batch, and which dims follow it."""
