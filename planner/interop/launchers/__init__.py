"""One module per launcher: how its settings are written from a plan and read back."""
