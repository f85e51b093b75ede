"""Running an emitted program in several processes: on this machine, on nodes that join, on listed
hosts, or by scripts for a scheduler.

    job        what is run and by how many processes; refuses counts that do not fit the plan
    processes  starts processes, writes their logs, ends all when one fails or none says anything
    join       nodes find each other at one address and get their ranks
    scripts    SLURM and Open MPI
    kubernetes Jobs and JobSets for GPU nodes and TPU slices

jax.distributed is the engine: every process runs the same program with --coordinator, --processes
and --process. Nothing here imports jax.
"""
