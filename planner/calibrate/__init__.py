"""`plan calibrate`: figures of a device file measured on the devices present, or rates of a cluster
fitted to measured training runs.

cases      what is measured: products, passes over memory, tiny kernels, collectives; and the
samples that come back
programs   those cases as JAX programs that all devices run at once (the only module here that
imports jax, in a process of its own)
worker     that process: times the programs in interleaved rounds
measure    starts it
fit        samples -> figures with their standard errors
profile    figures -> a device file that `--hardware` reads; refuses what no device can be
learn      measured runs -> rates beside a device's figures (`plan calibrate --runs`)
"""
