"""Module paths of nodes, from whatever the exporter left: metadata, or names with slashes."""

from __future__ import annotations

import re
from typing import Any

_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'")


def node_scope(node: Any) -> str:
    """Module path such as 'model.layers.3.mlp', or ''."""
    namespace = ""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            parts = _QUOTED.findall(entry.value)
            return parts[-2] if len(parts) > 1 else ""
        if entry.key == "namespace":
            namespace = entry.value
    if namespace:
        parts = [part.split(":", 1)[0] for part in namespace.split("/")]
        return parts[-2] if len(parts) > 1 else ""
    if "/" in node.name:
        return ".".join(p for p in node.name.split("/")[:-1] if p)
    return ""
