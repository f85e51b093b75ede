"""Plans priced as a training framework runs them (runtime profiles `megatron` and `fsdp`): what is
read from a plan's flow for costmodels.frameworks."""
