"""A training step around its gradients: clipping, and the update of every parameter."""

from __future__ import annotations

from planner.emit.runtime.files.frame import specs_of
from planner.emit.runtime.files.tables import GRADIENTS
from planner.emit.runtime.step.clip import clipping, measures_norm, update_at
from planner.emit.runtime.step.gradients_once import gradients
from planner.emit.runtime.step.state_device import updated_all


def one_step(params, state, frozen, batch, count):
    """(parameters, optimizer state, loss) after one step, with clipping the global norm of the
    gradients too."""
    loss, grads = gradients(params, frozen, batch)
    factor, *norm = clipping(grads)
    return *updated_all(params, state, grads, update_at(count, factor)), loss, *norm


def results():
    """How many numbers a step returns behind parameters and state."""
    return 1 + measures_norm()


def state_specs():
    """How what is carried from step to step beside the parameters is cut."""
    return specs_of(GRADIENTS)


def state_beside(mesh, about=None):
    """What a run carries from step to step that belongs to no parameter. about: what the checkpoint
    that it goes on from says."""
    return {}


def noted(state):
    """What a checkpoint says of that."""
    return {}


def named(seen):
    """What a step returned behind parameters and state, by name."""
    return dict(zip(("loss", "gradient_norm"), map(float, seen), strict=False))


def step_text(i, seen, seconds):
    """The line of a step on the terminal."""
    return f"step {i}  loss {float(seen[0]):.6f}  {1e3 * seconds:.1f} ms"
