"""The longest sequence whose training step fits into a memory limit, with 1, 2, 4 ... ranks that share it.

    torchrun --nproc-per-node 4 tutorials/longest_sequence.py
    torchrun --nproc-per-node 8 tutorials/longest_sequence.py --limit 512 --width 512 --checkpoint

All processes take part in each measurement. If cp of them share a sequence, the others train on other sequences (data
parallel). A measurement is one step, forward and backward, of the small Llama of train_llama.py in float32. It counts
the bytes of all tensors that are alive at once, parameters and gradients included, on the rank that has most. Bytes are
counted, not measured, so every machine gives the same result. The lengths are multiples of 8 cp.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import VOCABULARY
from llama import Llama, LlamaConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint
from train_llama import LAYOUTS, Arguments
from train_llama import STRATEGIES as PLAIN

from cp_styles import AttentionContextParallel, Ring, SequenceLayout, global_loss, sum_gradients
from cp_styles.strategies import Strategy
from cp_styles.testing import MemoryTrace

MiB = 2**20
STRATEGIES = {"ring-keep-0": lambda size: Ring(keep=0), **PLAIN}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=128, help="MiB of tensors a rank (default 128)")
    parser.add_argument("--strategy", choices=STRATEGIES, action="append", help="this one; may be repeated (all)")
    parser.add_argument("--layout", choices=("head_tail", "contiguous", "striped", "by_work"), default="head_tail")
    parser.add_argument("--width", type=int, default=128, help="of the model (default 128)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default 2)")
    parser.add_argument("--heads", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--kv-heads", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--checkpoint", action="store_true", help="recompute every layer in the backward")
    parser.add_argument("--out", type=Path, default=Path("runs/longest_sequence.png"), help="where the picture goes")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 tutorials/longest_sequence.py")
    if args.width % (2 * args.heads) or args.heads % args.kv_heads:
        parser.error("--width must be a multiple of 2 x --heads, and --heads of --kv-heads")
    return args


def step_bytes(
    config: LlamaConfig, strategy: Strategy, mesh: DeviceMesh, layout: SequenceLayout, *, recompute: bool = False
) -> int:
    """Bytes of tensors that one training step holds at most, on the rank of all that holds most.

    ``mesh`` has the axes "dp" and "cp" and all ranks. ``recompute``: every layer is recomputed in the backward.
    Communication: that of the step, and an all-reduce of one number.
    """
    cp = mesh["cp"]
    rank = cp.get_local_rank()
    with MemoryTrace() as trace:
        model = Llama(config)
        for parameter in model.parameters():
            parameter.detach().fill_(0.01)  # the same on all ranks; what they are makes no difference here
        style = AttentionContextParallel(strategy=strategy, layout=layout, verified=True)  # by train_llama.py
        parallelize_module(model, cp, {"layers.*.attention.core": style})
        for layer in model.layers if recompute else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        tokens = torch.zeros(1, layout.lengths[rank], dtype=torch.int64)
        logits = model(tokens, layout.positions(rank))
        losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
        del logits
        world = dist.group.WORLD  # dp and cp
        loss = global_loss(losses, layout.length * mesh["dp"].size(), world)
        del losses
        loss.backward()
        sum_gradients(model, world)
    peak = torch.tensor(trace.peak)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def longest(measure: Callable[[int], int], limit: float, unit: int, guess: int) -> int:
    """The largest multiple of ``unit`` for which ``measure`` gives at most ``limit``; 0 where there is none.

    Bytes grow nearly in a straight line with the length: it, and not the middle as in a bisection, says where to look.
    """
    measured: dict[int, int] = {}
    fits, too_long, tokens = 0, 0, max(guess // unit, 1) * unit
    while not too_long or too_long - fits > unit:
        measured[tokens] = measure(tokens)
        if measured[tokens] <= limit:
            fits = tokens
        else:
            too_long = tokens
        near = sorted(measured, key=lambda length: abs(measured[length] - limit))[:2]
        slope = (measured[near[0]] - measured[near[-1]]) / (near[0] - near[-1]) if len(near) == 2 else 0
        slope = slope or measured[near[0]] / near[0]
        tokens = (near[0] + int((limit - measured[near[0]]) / slope)) // unit * unit
        if tokens == fits:  # is it the last one?
            tokens += unit
        elif not fits < tokens < (too_long or tokens + 1):
            tokens = ((fits + too_long) // 2 if too_long else 2 * fits) // unit * unit
    return fits


def main() -> int:
    args = parse()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group("gloo")
    world, limit = dist.get_world_size(), args.limit * MiB
    config = LlamaConfig(VOCABULARY, args.width, args.layers, args.heads, args.kv_heads, hidden=args.width * 11 // 4)
    sizes = [2**power for power in range(world.bit_length()) if world % 2**power == 0]
    meshes = {cp: init_device_mesh("cpu", (world // cp, cp), mesh_dim_names=("dp", "cp")) for cp in sizes}

    def measure(name: str, cp: int, length: int) -> int:
        start = time.perf_counter()
        layout = LAYOUTS[args.layout](length, cp, (length,))
        peak = step_bytes(config, STRATEGIES[name](cp // 2), meshes[cp], layout, recompute=args.checkpoint)
        if dist.get_rank() == 0:
            verdict = "fits" if peak <= limit else "does not fit"
            took = time.perf_counter() - start
            print(f"{name}, cp {cp}: {length:,} tokens, {peak / MiB:.2f} MiB, {verdict} ({took:.1f} s)", flush=True)
        return peak

    found: dict[str, dict[int, int]] = {}
    guess = 64  # a rank
    for name in args.strategy or STRATEGIES:
        found[name] = {}
        for cp in sizes:
            if name == "hybrid" and cp < 4:  # two levels of at least two ranks
                continue
            length = longest(partial(measure, name, cp), limit, 8 * cp, guess * cp)
            if not length:
                raise SystemExit(f"longest_sequence.py: not even {8 * cp} tokens fit into --limit {args.limit:g}")
            found[name][cp], guess = length, length // cp
    if dist.get_rank() == 0:
        report(args, found)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def report(args: argparse.Namespace, found: dict[str, dict[int, int]]) -> None:
    """Print the table and save the picture."""
    sizes = sorted({cp for lengths in found.values() for cp in lengths})
    print(f"\nthe longest sequence within {args.limit:g} MiB a rank, in tokens (times that of one rank)")
    print(f"{'':<12}" + "".join(f"{f'cp {cp}':>18}" for cp in sizes))
    for name, lengths in found.items():
        alone = lengths.get(1) or next(iter(found.values()))[sizes[0]]  # a hybrid has none: the first strategy's
        cells = (f"{lengths[cp]:,} ({lengths[cp] / alone:.2f})" if cp in lengths else "" for cp in sizes)
        print(f"{name:<12}" + "".join(f"{cell:>18}" for cell in cells))
    from picture import save_longest

    save_longest(args.out, found, f"Longest sequence within {args.limit:g} MiB of tensors a rank")
    print(f"picture: {args.out}")


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without Python's shutdown, see train_llama.py
