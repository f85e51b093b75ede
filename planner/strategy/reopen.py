"""The model of a strategy file, opened again under the workload that it records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.strategy.strategy import Strategy
from planner.workload.open import open_model


def reopen(strategy: Strategy, source: str | Path) -> Any:
    """The model of a strategy, under the workload it records."""
    w = strategy.workload
    training, routing = w.get("training") or {}, w.get("routing") or {}
    return open_model(
        source,
        strategy.topology["devices"],
        workload=w["kind"],
        batch=w["batch"],
        dims=w["dims"],
        shapes={k: tuple(v) for k, v in w.get("shapes", {}).items()},
        loss=training.get("loss", ""),
        logits=training.get("logits", ""),
        shift_labels=training.get("shift_labels", False),
        ignore_index=training.get("ignore_index"),
        tie=training.get("tie", ()),
        lora=training.get("lora", ""),
        trainable=training.get("trainable", ()),
        freeze=training.get("freeze", ()),
        optimizer=training.get("optimizer", "adamw"),
        lr=training.get("lr", 1e-4),
        tables=training.get("tables", "device"),
        imbalance=tuple(routing["counts"]) if "counts" in routing else routing.get("imbalance"),
        capacity=routing.get("capacity"),
    )
