"""How long reading takes and what it leaves: `python -m benchmarks.read_time --models DIR [--batch
N] [--dim NAME=VALUE]`.

One row per file: nodes in the file and in the canonical graph, weights, trainable elements, and
seconds inside the process (best of `--repeat`), the import of onnx apart. Dims that a file has and
that are not given take 16, and are printed.
"""

from __future__ import annotations

import argparse
import collections
import time
from pathlib import Path
from typing import Any

from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read


def measure(path: Path, batch: int | None, dims: dict[str, int], repeat: int) -> dict[str, Any]:
    """Node counts, operators left and the best read time of one file. Raises PlanError."""
    import onnx

    proto = onnx.load(path, load_external_data=False)
    stored = {t.name for t in proto.graph.initializer}
    symbols = {
        d.dim_param
        for i in proto.graph.input
        if i.name not in stored
        for d in i.type.tensor_type.shape.dim
        if d.dim_param
    }
    used = {s: dims.get(s, 16) for s in sorted(symbols) if s != "batch"}
    best, graph = float("inf"), None
    for _ in range(repeat):
        start = time.perf_counter()
        graph = read(path, batch=batch, dims=used)
        best = min(best, time.perf_counter() - start)
    assert isinstance(graph, Graph)
    ops = collections.Counter(n.op for n in graph.nodes)
    return {
        "file": path.name,
        "nodes_in_file": len(proto.graph.node),
        "nodes": len(graph.nodes),
        "weights": len(graph.weights),
        "trainable_elements": sum(graph.tensors[w].elements for w in graph.trainable),
        "batch": graph.dims["batch"],
        "dims": used,
        "read_time_s": best,
        "ops": dict(ops.most_common()),
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", type=Path, required=True, help="a folder of .onnx files, or one file"
    )
    parser.add_argument("--batch", type=int)
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ops", action="store_true", help="list the operators left")
    args = parser.parse_args()
    dims = {k: int(v) for k, _, v in (d.partition("=") for d in args.dim)}
    start = time.perf_counter()

    print(f"import onnx: {time.perf_counter() - start:.3f} s")
    print(
        f"{'file':<52}{'nodes':>7}{'left':>6}{'weights':>8}{'trainable':>15}{'batch':>6}{'read s':>8}"
        "  dims"
    )
    for path in sorted(args.models.glob("*.onnx")) if args.models.is_dir() else [args.models]:
        try:
            row = measure(path, args.batch, dims, args.repeat)
        except PlanError as error:
            print(f"{path.name:<52}{error.code}: {error.what}")
            continue
        print(
            f"{row['file']:<52}{row['nodes_in_file']:>7}{row['nodes']:>6}{row['weights']:>8}{row['trainable_elements']:>15,}{row['batch']:>6}{row['read_time_s']:>8.3f}"
            f"  {row['dims'] or ''}"
        )
        if args.ops:
            print("    " + ", ".join(f"{op} {n}" for op, n in row["ops"].items()))


if __name__ == "__main__":
    main()
