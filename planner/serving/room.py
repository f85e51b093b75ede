"""How many sequences fit under a plan."""

from __future__ import annotations

from planner.serving.joint import Joint, Priced
from planner.serving.sizes import Sizes

GUESSES, MOST_SEQUENCES = 8, 1 << 20


def most_sequences(joint: Joint, pair: Priced) -> int:
    """The greatest concurrency that fits under the plan's splits, a multiple of a wave.

    Memory grows with it almost along a line: each guess is on the line through what is known to fit
    and what is known not to, until they are neighbours.
    """
    limit, wave, service = joint.request.limit_bytes, pair.wave, joint.step.service
    assert pair.prompts.best is not None and pair.step.best is not None
    first, best = joint.phase(pair.prompts.base, pair.prompts.best), pair.step.best
    graphs = Sizes(joint, service.length, service.prompt)
    sizes = {service.concurrency: pair.memory_bytes}
    low = high = service.concurrency  # low fits, high does not once they differ
    for _ in range(GUESSES):
        if high > low:
            share = (limit - sizes[low]) / (sizes[high] - sizes[low])
            guess = int((low + share * (high - low)) // wave) * wave
            guess = min(max(guess, low + wave), high - wave)
        else:
            growth = (sizes[low] - pair.weights_bytes) / low
            guess = max(
                low + wave, int((limit - pair.weights_bytes) / growth // wave) * wave + wave
            )
            guess = min(guess, MOST_SEQUENCES // wave * wave)
        if guess <= low or guess in sizes:
            break
        base = graphs.facts("step", guess, service.length)
        sizes[guess] = joint.peak_bytes(first, joint.phase(base, best), pair.wave)
        if sizes[guess] <= limit:
            low = guess
            high = high if high > low else low
        else:
            high = guess
    return low
