"""A torch module of one's own, exported to ONNX and planned: what to copy for another module.

    python examples/export_torch.py -o mine.onnx         # needs torch and onnxscript, which
                                                         planning does not
    plan mine.onnx --devices 8 --batch 64

The batch of the example input (2 here) is no limit: `plan --batch N` traces another one through the
graph. A module in training mode keeps its dropout, of which torch warns; `model.eval()` is for
inference.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 5000, 256, 8, 6, 128, 2


class Block(nn.Module):
    """Attention with query, key and value in one product, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, WIDTH] to the same."""
        b, s, d = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, s, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(b, s, d)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.between(x)))))


class Model(nn.Module):
    """A GPT as many write it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [batch, length] to logits [batch, length, VOCABULARY]."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    """Writes the file, and its weights beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", dest="output", type=Path, default=Path("mine.onnx"))
    args = parser.parse_args()
    model, example = Model().train(), torch.zeros(BATCH, LENGTH, dtype=torch.long)
    torch.onnx.export(
        model, (example,), args.output, input_names=["ids"], output_names=["logits"], dynamo=True
    )
    print(f"next: plan {args.output} --devices 8 --batch 64")


if __name__ == "__main__":
    main()
