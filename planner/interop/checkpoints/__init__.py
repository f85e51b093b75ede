"""Weights of the Hugging Face hub: folders of .safetensors read into a graph's parameters, and
written back as they lay.

`store` reads and writes the files, `match` finds where every parameter lies in them, `convert`
moves the values.
"""
