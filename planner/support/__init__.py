"""What every room may lean on: files that are whole or not there, text for terminals, command
lines."""
