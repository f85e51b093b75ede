"""What is meant where a model is named and there is no file of that name."""

from __future__ import annotations

from planner.errors import PlanError
from planner.support.hub_cache import hub_folder, is_hub_name


def refuse_name(name: str) -> None:
    """Raises PlanError P101 for a name of the hub, or of a preset without `zoo:`; other names of
    files that are not there are left to whoever opens them."""
    from models_zoo import preset_named

    plain = name.partition(",")[0]
    preset = preset_named(plain)
    ships = [f"its shapes ship: zoo:{preset}"] if preset else []
    if is_hub_name(plain):
        raise PlanError(
            "P101",
            f"there is no file {plain!r}, and no config.json of it in {hub_folder()}",
            help=[
                *ships,
                f"`hf download {plain} config.json` fetches what is read of it: plan {plain} goes"
                " on from there, with no weights",
            ],
        )
    if preset:
        raise PlanError("P101", f"there is no file {name!r}", help=ships)
