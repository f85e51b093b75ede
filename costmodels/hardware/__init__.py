"""Devices and machines as data, and what reads and shows them."""
