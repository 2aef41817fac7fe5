"""Train a small Llama on long sequences under context x tensor parallelism, and hold it against one process.

    torchrun --nproc-per-node 4 tutorials/train_llama.py
    torchrun --nproc-per-node 8 tutorials/train_llama.py --cp 4 --tp 2 --device cuda --dtype bfloat16 --seq-len 16384

Every rank trains on its part of every sequence. Then rank 0 alone trains the same model on the same data, whole, and
the two are compared: losses and parameters. Exits with 1 if they differ by more than rounding can explain.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import VOCABULARY, packed_documents
from llama import Llama, LlamaConfig, parallel_plan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from tqdm import tqdm

from cp_styles import (
    AllGather,
    AttentionContextParallel,
    Ring,
    SequenceLayout,
    contiguous,
    global_loss,
    global_token_count,
    head_tail,
    next_token_labels,
    shard_batch,
    sum_gradients,
)
from cp_styles.testing import CommunicationTrace

STRATEGIES = {"ring": Ring, "allgather": AllGather}
LAYOUTS = {"head_tail": head_tail, "contiguous": contiguous}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIG = LlamaConfig(VOCABULARY)
MiB = 2**20

# How far losses and parameters may be from those of one process, relative (of parameters: of their norm). Summing in
# another order costs a few epsilons a step, and every step starts from the last one's difference; seen were, after 20
# steps, 8e-15, 1e-6 and 8e-3, after 100 in float64 2e-14. A wrong label or position at one shard boundary, or a
# gradient that is not summed, is above 1e-4: float64 shows everything, bfloat16 only the gross.
TOLERANCE = {"float64": 1e-12, "float32": 1e-4, "bfloat16": 5e-2}


class Arguments(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line from one rank. torchrun ends all ranks when the first one exits: let the one that speaks be it."""
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)
        else:
            print(f"{self.prog}: {message}", file=sys.stderr, flush=True)
        sys.exit(2)


def parse() -> argparse.Namespace:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence (default 2)")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share heads and features (default 2)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a whole sequence (default 2048)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ring")
    parser.add_argument("--layout", choices=LAYOUTS, default="head_tail")
    parser.add_argument("--steps", type=int, default=20)
    # float64: rounding is then so small that a wrong position, label or weight anywhere cannot hide in it.
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/train_llama.png"), help="where the picture goes")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 tutorials/train_llama.py")
    world = int(os.environ["WORLD_SIZE"])
    for name in ("cp", "tp", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.cp * args.tp != world:
        parser.error(
            f"--cp {args.cp} x --tp {args.tp} needs {args.cp * args.tp} processes, there are {world}: "
            f"start it with torchrun --nproc-per-node {args.cp * args.tp}"
        )
    if CONFIG.kv_heads % args.tp or CONFIG.vocabulary % args.tp or CONFIG.hidden % args.tp:
        parser.error(f"--tp {args.tp} does not divide the model's {CONFIG.kv_heads} key/value heads: try 1, 2 or 4")
    if args.seq_len < 2 * args.cp * args.tp or any(n % args.tp for n in layout_of(args).lengths):
        unit = 2 * args.cp * args.tp
        parser.error(
            f"--seq-len {args.seq_len} does not give every one of {args.cp} cp ranks a multiple of {args.tp} tokens: "
            f"try {max(1, round(args.seq_len / unit)) * unit}"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device here: use --device cpu")
    if args.out.suffix != ".png":
        parser.error(f"--out {args.out} must end in .png")
    return args


def layout_of(args: argparse.Namespace) -> SequenceLayout:
    return LAYOUTS[args.layout](args.seq_len, args.cp)


@dataclass
class Run:
    """What a training leaves behind: the loss of every step, the trained parameters, whole, and what it took."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    sent_bytes: int = 0
    calls: dict[str, int] = field(default_factory=dict)


def train(
    title: str, model: Llama, batches: list[dict[str, torch.Tensor]], step: Callable[..., torch.Tensor], tokens: int
) -> Run:
    """The training itself, the same for both runs: ``step`` makes the loss of a batch and leaves the gradients.

    What the last step sends is counted; to count is to slow down, so not all of them are.
    """
    run = Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    with tqdm(batches, desc=title, unit="step", disable=not is_first()) as bar:
        for batch in bar:
            optimizer.zero_grad()
            if batch is batches[-1]:
                with CommunicationTrace() as trace:
                    loss = step(model, batch)
                run.sent_bytes, run.calls = trace.sent_bytes, dict(trace.calls)
            else:
                loss = step(model, batch)
            optimizer.step()
            run.losses.append(loss.item())
            rate = tokens * len(run.losses) / (time.perf_counter() - start)
            bar.set_postfix_str(f"loss {run.losses[-1]:.3f}, {rate:,.0f} tokens/s")
    run.seconds = time.perf_counter() - start
    for name, parameter in model.named_parameters():
        run.parameters[name] = (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()
    return run


def new_model(args: argparse.Namespace) -> Llama:
    """The same on every rank and every machine: drawn on the CPU from one seed."""
    torch.manual_seed(0)
    return Llama(CONFIG).to(DTYPES[args.dtype]).to(args.device)


def train_in_parallel(args: argparse.Namespace, mesh: DeviceMesh, batches: list[dict[str, torch.Tensor]]) -> Run:
    cp = mesh["cp"]
    layout, rank = layout_of(args), cp.get_local_rank()
    attention = AttentionContextParallel(strategy=STRATEGIES[args.strategy](), layout=layout)
    model = parallelize_module(new_model(args), mesh, parallel_plan(attention))
    positions = layout.positions(rank, args.device)
    mine = [shard_batch(batch, layout, rank, seq_dims={"tokens": 1, "labels": 1}) for batch in batches]

    def step(model: Llama, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["tokens"], positions)
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        loss = global_loss(losses, global_token_count(batch["labels"], cp), cp)
        loss.backward()
        sum_gradients(model, cp)
        return loss

    return train(f"cp {args.cp} x tp {args.tp}", model, mine, step, args.seq_len)


def train_alone(args: argparse.Namespace, batches: list[dict[str, torch.Tensor]]) -> Run:
    positions = torch.arange(args.seq_len, device=args.device)

    def step(model: Llama, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["tokens"], positions)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        return loss

    return train("one process", new_model(args), batches, step, args.seq_len)


def read_batches(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """One whole sequence a step. Rank 0 reads: another machine may have another Python, and so another library."""
    tokens, ids = packed_documents(args.steps, args.seq_len) if is_first() else torch.zeros(2, args.steps, args.seq_len)
    data = torch.stack([tokens, ids]).long().to(args.device)
    dist.broadcast(data, 0)
    tokens, labels = data[0], next_token_labels(data[0], document_ids=data[1])
    return [{"tokens": tokens[row : row + 1], "labels": labels[row : row + 1]} for row in range(args.steps)]


def parameter_difference(run: Run, reference: Run | None) -> tuple[float, str]:
    """The largest relative difference of a parameter on any rank, and its name; ``reference`` is rank 0's."""
    differences = []
    for parameter in run.parameters.values():
        expected = torch.empty_like(parameter)
        if reference is not None:
            expected.copy_(reference.parameters[list(run.parameters)[len(differences)]])
        dist.broadcast(expected, 0)
        differences.append((parameter - expected).norm() / expected.norm())
    largest = torch.stack(differences).double()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # a rank that has drifted from the others shows up here
    worst = int(largest.argmax())
    return float(largest[worst]), list(run.parameters)[worst]


def peak_memory(device: str) -> float:
    """MiB: on CUDA what tensors took at most, on the CPU what the whole process did."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / MiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MiB if sys.platform == "darwin" else 1024)


def report(
    args: argparse.Namespace, run: Run, reference: Run, ranks: list[dict[str, object]], worst: tuple[float, str]
) -> bool:
    """Print the tables, save the picture, and say whether this was the same training."""
    tolerance = TOLERANCE[args.dtype]
    title = f"cp {args.cp} x tp {args.tp}"
    print(f"\nstep   loss, one process   loss, {title:<12} relative difference")
    differences = []
    for step, (found, expected) in enumerate(zip(run.losses, reference.losses, strict=True), 1):
        differences.append(abs(found - expected) / abs(expected))
        print(f"{step:>4} {expected:>19.12f} {found:>19.12f} {differences[-1]:>17.1e}")
    print("\nrank  cp  tp  tokens  sent a step (MiB)  peak memory (MiB)  calls a step")
    for rank in ranks:
        print("{rank:>4} {cp:>3} {tp:>3} {tokens:>7} {sent:>18.2f} {peak:>18.0f}  {calls}".format(**rank))
    print(f"\none process took {reference.seconds:.1f} s, {title} {run.seconds:.1f} s for {args.steps} steps")
    from picture import save_picture

    save_picture(args.out, run.losses, reference.losses, layout_of(args), f"{title}, {args.strategy}, {args.layout}")
    print(f"picture: {args.out}")
    parity = True
    for what, difference in (("loss", max(differences)), (f"parameter ({worst[1]})", worst[0])):
        holds = difference <= tolerance  # False for nan as well
        parity &= holds
        print(f"largest relative difference, {what}: {difference:.1e} ({'' if holds else 'NOT '}within {tolerance})")
    print("PARITY: the same training as on one process" if parity else "PARITY MISSED")
    return parity


def is_first() -> bool:
    return dist.get_rank() == 0


def main() -> int:
    args = parse()
    cores, local_ranks = os.cpu_count() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Ranks that compete for cores with more threads than there are cores lose more than they win.
    torch.set_num_threads(max(1, cores // local_ranks))
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(args.device, (args.cp, args.tp), mesh_dim_names=("cp", "tp"))
    batches = read_batches(args)
    run = train_in_parallel(args, mesh, batches)
    mine = {
        "rank": dist.get_rank(),
        "cp": mesh["cp"].get_local_rank(),
        "tp": mesh["tp"].get_local_rank(),
        "tokens": layout_of(args).lengths[mesh["cp"].get_local_rank()],
        "sent": run.sent_bytes / MiB,
        "peak": peak_memory(args.device),
        "calls": ", ".join(f"{count} {name}" for name, count in sorted(run.calls.items())),
    }
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    reference = None
    if is_first():
        torch.set_num_threads(cores)  # the others wait
        reference = train_alone(args, batches)
    worst = parameter_difference(run, reference)
    verdict = torch.ones((), dtype=torch.int64, device=args.device)
    if reference is not None:
        verdict.fill_(report(args, run, reference, ranks, worst))
    dist.broadcast(verdict, 0)
    dist.destroy_process_group()
    return 0 if verdict.item() else 1


if __name__ == "__main__":
    status = main()
    # Without Python's shutdown: a thread of gloo that lets go of the last collective's tensor meanwhile aborts the
    # process (pytorch pull request 179291), destroyed groups or not. Seen once in some forty runs on a busy machine.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
