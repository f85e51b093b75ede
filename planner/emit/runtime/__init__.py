"""Functions that emitted programs carry with them, as source (planner.emit.source reads these
files; planning never imports them: they need jax).

    files/tables     the names that every program defines before these functions
    kernels          one operator each, on local shapes
    collectives      changes of layout and recomputation under shard_map; which collectives are
                     sent together
    pipeline         loss and gradients through pipeline stages, a file a schedule
    step             loss and gradients without stages, how gradients are reduced, the optimizers,
                     and the step that is compiled
    files            mesh, weights, batches, checkpoints, the command line, and main
    serve            a program that generates

A program gets those it calls, directly or not, in the order in which
planner.emit.program_text names the files. Some files hold functions under the names of others: a
program takes one of them.
"""
