"""What each command of `plan` does; planner.cli imports one module of these per run."""
