"""Functions that emitted programs carry with them, as source (planner.emit.source reads these files; planning never imports them: they need jax).

    tables       the names every program defines before them
    kernels, nets   one operator each, on local shapes
    exchange     conversions and rematerialisation under shard_map
    stages, pipeline_1f1b, pipeline_gpipe   pipeline stages
    frame        mesh, weights, batches, command line
    train, train_shard_map, train_jit, infer   the step

A program gets those it calls, directly or not, in the order of these files.
"""
