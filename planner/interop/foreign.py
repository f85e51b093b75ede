"""Configurations of projects that are not read, some of whose keys are called as those of a
launcher that is and mean something else: told by name, not priced by the rest.

Sources: docs of axolotl (067b021, July 2026), examples/v1 of LLaMA-Factory (ff6d4d1, August 2026),
src/nanotron/config of nanotron (2411b02, April 2026), olmo_core/train/train_module of OLMo-core
(fa6c501, June 2026), configs of LitGPT, GPT-NeoX, LLM Foundry and torchtune.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from planner.errors import PlanError
from planner.interop.tables import EXPECTED

OF_HF = (
    "what it says goes into a YAML of accelerate (fsdp_version, parallelism_config, or deepspeed"
    " and its JSON) with per_device_train_batch_size=N gradient_accumulation_steps=N behind it"
)
OF_TITAN = (
    "the nearest that is read is a TOML of torchtitan: its degrees under [parallelism], rows under"
    " [training]"
)
OF_MEGATRON = (
    "the nearest that is read is a list of Megatron's arguments in FILE.args:"
    " --tensor-model-parallel-size, --micro-batch-size, --global-batch-size"
)


@dataclass(frozen=True)
class Project:
    """A project by keys: all of `every` are there, and one of `some` where it has any. instead:
    what to do."""

    name: str
    every: tuple[str, ...]
    some: tuple[str, ...]
    instead: str


PROJECTS = (
    Project(
        "axolotl",
        ("base_model",),
        ("micro_batch_size", "sequence_len", "datasets", "adapter"),
        OF_HF,
    ),
    Project(
        "LLaMA-Factory v1",
        ("micro_batch_size",),
        ("model_class", "cutoff_len", "dist_config"),
        OF_HF,
    ),
    Project("LitGPT", ("micro_batch_size",), ("checkpoint_dir", "lora_query"), OF_HF),
    Project("nanotron", (), ("batch_accumulation_per_replica", "pp_engine"), OF_MEGATRON),
    Project("OLMo-core", ("rank_microbatch_size",), (), OF_TITAN),
    Project("GPT-NeoX", ("pipe_parallel_size",), (), OF_MEGATRON),
    Project("LLM Foundry", ("device_train_microbatch_size",), (), OF_HF),
    Project("torchtune", ("_component_",), ("batch_size",), OF_TITAN),
)


def project_of(names: Collection[str]) -> Project | None:
    """The project that keys are of, None for launchers that are read and for files of nobody."""
    return next(
        (
            p
            for p in PROJECTS
            if all(k in names for k in p.every) and (not p.some or any(k in names for k in p.some))
        ),
        None,
    )


def refuse(names: Collection[str], path: object) -> None:
    """Raises PlanError P190 for a configuration of a project that is not read."""
    project = project_of(names)
    if project is not None:
        raise PlanError(
            "P190",
            f"{path} is a configuration of {project.name}, which is not read",
            help=[project.instead, f"what is read: {EXPECTED} (docs/exchange.md)"],
        )
