"""Attention over a sequence that is cut over all processes, with the functions of torch's context-parallel API.

    torchrun --nproc-per-node 4 tutorials/context_parallel_drop_in.py

The steps are those of the PyTorch tutorial "Introduction to Context Parallel": the attention of one device, the same
in a context_parallel block, the results put together, and then with the other rotate method. Only the import differs.
The program exits with an error if the results differ from those of one device.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

# In place of torch.distributed.tensor.experimental:
from cp_styles.torch_api import context_parallel, context_parallel_unshard, set_rotate_method


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--length", type=int, default=64, help="any: nothing has to divide it")
    arguments = parser.parse_args(argv)

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("cp",))

    # The same tensors on every process, as the tutorial has them: batch 8, 8 heads of 32.
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    shape = (8, 8, arguments.length, 32)
    qkv = [torch.randn(shape, dtype=dtype, requires_grad=True, device=device) for _ in range(3)]
    grad = torch.randn(shape, dtype=dtype, device=device)  # of some loss; that of a sum would hide most mistakes
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        out.backward(grad)

    largest = 0.0
    for rotate_method in ("allgather", "alltoall"):
        set_rotate_method(rotate_method)
        cp_qkv = [tensor.detach().clone() for tensor in qkv]
        cp_grad = grad.clone()
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(mesh, buffers=(*cp_qkv, cp_grad), buffer_seq_dims=(2, 2, 2, 2)),
        ):
            held = cp_qkv[0].shape[2]  # the buffers are this process' parts here
            for tensor in cp_qkv:
                tensor.requires_grad_()
            cp_out = F.scaled_dot_product_attention(*cp_qkv, is_causal=True)
            cp_out.backward(cp_grad)
        # And whole again; what was computed from them is still in parts.
        found = context_parallel_unshard(mesh, [cp_out, *(tensor.grad for tensor in cp_qkv)], [2] * 4)
        errors = [
            float((mine - whole).norm() / whole.norm())
            for mine, whole in zip(found, [out.detach(), *(tensor.grad for tensor in qkv)], strict=True)
        ]
        largest = max(largest, *errors)
        sys.stdout.write(  # in one piece: the processes share the terminal
            f"process {rank} of {world_size}, {rotate_method}: {held} of {cp_qkv[0].shape[2]} positions, "
            f"relative errors of out, dq, dk, dv: {', '.join(f'{each:.1e}' for each in errors)}\n"
        )
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    # float64: rounding gives 1e-15. bfloat16: two results that are each right to its 8 bits.
    return int(largest > (1e-12 if dtype == torch.float64 else 2e-2))


if __name__ == "__main__":
    sys.exit(main())
