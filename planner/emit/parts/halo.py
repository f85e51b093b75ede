"""Windows over images that stay cut: each device brings in the rows that its own windows reach into its neighbours' pieces."""
