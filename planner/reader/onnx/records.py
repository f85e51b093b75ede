"""What a file says of its leaves beside their values: the exporter's records, and names.

torch's dynamo exporter records of an initializer whether it was a parameter or a buffer, and of a
constant that its optimiser computed which initializers it was computed from. Where there is no
record (TorchScript, other exporters) the last part of a name says what modules usually keep under
it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_FOLDED = "pkg.onnxscript.optimizer.folded_from"
PARAMETER, BUFFER = "PARAMETER", "BUFFER"
_QUOTED = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_LEARNED = re.compile(
    r"(weight|bias)(_[gv]|_orig)?|original\d|(\w*_)?(cls|class|dist|distillation|mask|register|reg|query|prompt|storage|latent)_?tokens?(_?\d+)?|(patch|pixel)_pos|class_embedding|image_newline"
    r"|(\w*_)?(abs_?)?pos(ition)?(al)?_?(emb|embed|embeds|embedding|embeddings|encodings?_learned)(_?table|_\w)?|(\w*_)?rel(ative)?_pos(ition)?(_bias(_table)?|_[hwd]|_emb\w*)?"
    r"|(\w*_)?layer_?scale(_\d+)?|(lambda|gamma|ls)_?\d*|(\w*_)?(logit|q|k|v|head|attn|res|skip)_scale|(logit|attn|output)_bias|scale|temperature|temp|tau"
    r"|scale_shift_table|latents?|queries|query_(embed|pos)\w*|(soft_)?prompts?(_embeddings?)?|probe|sinks?|attention_sinks?|alpha_[np]|A_log|D|dt_bias|time_(decay|first|mix_\w+|maa_\w+)"
)
"""Last parts of names under which modules keep parameters that no matrix product, norm or lookup
takes."""
_VIEW = re.compile(
    r"(embedding|expand|unsqueeze|squeeze|view|reshape|slice|select|permute|transpose|flatten|index_select|index|t)(_\d+)?"
)
"""Names of constants that an optimiser computed from a parameter without arithmetic: torch's names
of such operations."""

_EXP = re.compile(r"exp(_\d+)?")
"""Likewise those that are exponentials."""


@dataclass
class Records:
    """kinds: initializer -> PARAMETER, BUFFER, ..; computed: constants that were computed from
    learned initializers; folded: those of them whose initializers are gone -> these."""

    kinds: dict[str, str] = field(default_factory=dict)
    folded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    computed: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Any) -> Records:
        """The records of a GraphProto."""
        records = cls()
        origins: dict[str, list[str]] = {}
        for value in graph.value_info:
            for entry in value.metadata_props:
                if entry.key == _KIND:
                    records.kinds[value.name] = entry.value
                elif entry.key == _FOLDED:
                    origins[value.name] = [a or b for a, b in _QUOTED.findall(entry.value)]
        stored = {tensor.name for tensor in graph.initializer}
        for name, parts in origins.items():
            learned = [p for p in parts if records.learned(p)]
            lost = tuple(p for p in learned if p not in stored)
            if learned:
                records.computed.add(name)
            if lost and name in stored:
                records.folded[name] = lost
        return records

    def learned(self, name: str) -> bool:
        """Whether a leaf is a parameter by its record, or by its name where it has none."""
        kind = self.kinds.get(name)
        if kind is not None:
            return kind == PARAMETER
        return (
            "/" not in name
            and ":" not in name
            and _LEARNED.fullmatch(name.rpartition(".")[2]) is not None
        )

    def named(self, name: str) -> bool:
        """Whether a leaf may be a parameter for all that is known: by its record or its name, or
        since a module holds it and nothing says that it is a buffer."""
        return self.learned(name) or (
            "." in name and ":" not in name and "/" not in name and not self.buffer(name)
        )

    def buffer(self, name: str) -> bool:
        """Whether the file says that a leaf is no parameter."""
        return self.kinds.get(name, PARAMETER) != PARAMETER

    def logarithm_of(self, name: str) -> str:
        """The one parameter whose exponential a constant is, '' where it is none."""
        parts = self.folded.get(name, ())
        return parts[0] if len(parts) == 1 and _EXP.fullmatch(name) else ""

    def view_of(self, name: str) -> str:
        """The one parameter that a constant holds rows or copies of, '' where it is none or was
        computed with."""
        parts = self.folded.get(name, ())
        return (
            parts[0]
            if len(parts) == 1
            and _VIEW.fullmatch(name)
            and "rel" not in parts[0].rpartition(".")[2]
            else ""
        )  # tables of relative positions repeat rows
