"""How one tensor or one operator may be cut: layouts, rules, splits, and the collectives from one
layout to another."""
