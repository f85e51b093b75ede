"""Exact solving: elimination of one variable after the other, and what closes the gap that memory
leaves or makes an elimination small enough."""
