"""The five lines of README.md under torchrun, with an installed package: the loss and gradients of one process?

Run it outside of the repository: torchrun --nproc-per-node 2 five_lines.py /path/to/README.md
"""

from __future__ import annotations

import copy
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import cp_styles


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 16), nn.Embedding(64, 16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 11)

    def forward(self, tokens, positions):
        qkv = self.qkv(self.tokens(tokens) + self.places(positions)).unflatten(-1, (3, 2, 8))
        out = nn.functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        return self.head(out.transpose(1, 2).flatten(2))


def main() -> None:
    (lines,) = re.findall(
        r"<!-- example: five lines -->\n```python\n(.*?)```", Path(sys.argv[1]).read_text(), re.DOTALL
    )
    torch.manual_seed(0)
    model = Model().double()
    alone, tokens = copy.deepcopy(model), torch.arange(26).view(2, 13) % 11
    expected = nn.functional.cross_entropy(
        alone(tokens, torch.arange(13))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    expected.backward()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    names = {"model": model, "mesh": mesh, "tokens": tokens}
    exec(lines, names)
    torch.testing.assert_close(names["loss"], expected)
    for (name, mine), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, whole.grad, msg=name)
    if mesh.get_local_rank() == 0:
        print(f"exact on {mesh.size()} ranks, with {cp_styles.__file__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may abort at the interpreter's shutdown, see tutorials/train_llama.py
