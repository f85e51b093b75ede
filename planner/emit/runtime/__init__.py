"""Functions that emitted programs carry with them, as source (planner.emit.source reads these
files; planning never imports them: they need jax).

    tables       the names every program defines before them
    kernels, nets   one operator each, on local shapes
    exchange     conversions and rematerialisation under shard_map
    stages, pipeline_1f1b, pipeline_gpipe, pipeline_interleaved   pipeline stages
    frame        mesh, weights, synthetic batches, command line
    adamw, sgd   the optimizer
    fused        collectives sent together
    once, accumulate, counted, infer, step   gradients and the step, one file a back end
    feed, checkpoint   batches of real data; saving, resuming, exporting
    main_train, main_infer   what a program does when it is run

A program gets those it calls, directly or not, in the order of these files.
"""
