"""Operators on local shapes, one function each."""
