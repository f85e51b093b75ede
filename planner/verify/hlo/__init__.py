"""What is read from the text that compilers write of a program (HLO): collectives, products,
buffers, and the passes that changed them."""
