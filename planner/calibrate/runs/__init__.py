"""Measured training runs: a row of a file of runs as a model and a plan (`rows`), and a few rates
of a cluster fitted to them (`fit`)."""
