"""What is run: the model at a batch, its loss, what trains, where embedding tables lie."""
