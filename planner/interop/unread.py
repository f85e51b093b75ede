"""Keys of a configuration that nobody reads, those first that may change time or memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.interop.keys import plain

NO_EFFECT = re.compile(
    r"""
    (\w*_)?( lr | min_lr | learning_rate | warmup | decay | weight_decay | clip | beta[12s]? | eps
           | epsilon | momentum | seed | init | split | splits | path | dir | directory | name
           | file | files | project | entity | tokenizer | url | urls | tags | host | port | address
           | addr | timeout | interval | iters | samples | epochs | steps | freq | dropout | rank
           ) (_\w*)?
    | (\w*_)?( log | logs | logging | logger | wandb | tensorboard | profile | profiler | metrics
             | save | load | ckpt | checkpoint | checkpointing | eval | validation | validator
             | dataset | datasets | data | dataloader | vocab | merge | hf | hub | nccl | nvte
             | nvlink | cuda_device | env | xla | rng | rerun | exit | straggler | test | goodput
             ) (_\w*)?
    | use_mcore_models | num_workers | mock_data | finetune | norm_epsilon | rotary\w* | swiglu
    | normalization | position_embedding_type | max_position_embeddings | disable_bias_linear
    | untie_embeddings_and_output_weights | untie_embeddings | transformer_impl | id | type | mode
    | kv_channels | trust_remote_code | report_to | run | debug | machine_rank | num_machines
    | compute_environment | main_training_function | same_network | use_cpu | rdzv_backend
    | nnodes | nproc_per_node | distributed_backend | manual_gc\w* | optim | push_to_hub
    """,
    re.X | re.I,
)
"""Names of keys of data, logging, saving and learning, and of what the model has in any case."""
SECTIONS = frozenset(
    {"dataset", "data", "dataloader", "tokenizer", "validation", "validator"}
    | {"logger", "logging", "metrics", "profiler", "wandb", "tracker", "exp_manager", "run"}
    | {"checkpoint", "scheduler", "lr_scheduler", "env_vars", "rerun_state_machine"}
)
"""Tables of which all is so."""
LISTED = 12


def told(unread: Sequence[str]) -> str:
    """Such keys, those first that may matter, the rest by their number."""
    rest = [k for k in unread if _has_no_effect(k)]
    matter = [k for k in unread if k not in set(rest)]
    listed = matter[:LISTED]
    parts = [", ".join(listed)] if listed else []
    others = len(matter) - len(listed)
    parts += [f"{others} more"] if others else []
    parts += [f"{len(rest)} of data, logging, saving and learning"] if rest else []
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _has_no_effect(key: str) -> bool:
    *sections, name = key.split(".")
    return bool(SECTIONS.intersection(map(plain, sections)) or NO_EFFECT.fullmatch(plain(name)))
