"""Lower bounds: Lagrangian prices of memory on an elimination, and message passing; each message
passing in numpy for few nodes, in numpy for many, and compiled."""
