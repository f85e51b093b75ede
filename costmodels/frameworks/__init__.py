"""Step time and peak memory of training frameworks' programs (runtime profiles `megatron` and
`fsdp`), from records of what one device does and holds: no graph and no plan."""
