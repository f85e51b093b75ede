"""What a program that generates does."""
