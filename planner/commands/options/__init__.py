"""The options of every command, and how their values are read. Imported for `plan --help`: argparse
and nothing else."""
