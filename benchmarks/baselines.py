"""Our own cost estimates under `plan check`: python -m benchmarks.baselines checks the committed
plans, --update writes them anew.

A change of a cost model, a rule or the search that moves an estimate fails here until the baselines
are updated, so that it is a diff which a reviewer sees. One markdown table a baseline goes to
stdout, the verdicts to stderr.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import planner
from planner.report.check import markdown
from planner.whatif.gate import check

FOLDER = Path(__file__).with_name("baselines")
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt-tiny": ("zoo:gpt-tiny,hidden=512,seq=256", {"devices": 8, "batch": 32}),
    "llama3-8b": ("zoo:llama3-8b", {"devices": 64, "batch": 512}),
    "llama3-8b-infer": ("zoo:llama3-8b", {"devices": 8, "batch": 8, "workload": "infer"}),
    "resnet-tiny": ("zoo:resnet-tiny", {"devices": 8, "batch": 64, "hardware": "a100-80gb"}),
    "bert-base": ("zoo:bert-base", {"devices": 12, "batch": 48, "hardware": "a100-80gb"}),
    "mixtral-tiny": ("zoo:mixtral-tiny", {"devices": 8, "batch": 64, "hardware": "tpu-v5e"}),
}


def main() -> int:
    """Exit 1 when an estimate is past tolerance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="write the baselines anew")
    args = parser.parse_args()
    failed = 0
    for name, (spec, options) in CASES.items():
        path = FOLDER / f"{name}.plan.json"
        if args.update:
            made = planner.plan(spec, **options)  # type: ignore[arg-type]
            kept = {
                k: v for k, v in made.provenance.items() if k in ("tool", "cost_model", "source")
            }  # no dates or times: only estimates make a diff
            FOLDER.mkdir(exist_ok=True)
            replace(made, provenance=kept, details={}).save(path)
            print(f"wrote {path.relative_to(FOLDER.parent.parent)}", file=sys.stderr)
            continue
        report = check(
            planner.Strategy.load(path), spec, baseline=f"benchmarks/baselines/{path.name}"
        )
        print(markdown(report) + "\n")
        print(f"{'ok' if report.ok else 'FAILED'}  {name}: {report.verdict}", file=sys.stderr)
        failed += not report.ok
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
