"""Train a small Llama on long sequences under context x tensor parallelism, and compare it with one process.

    torchrun --nproc-per-node 4 tutorials/train_llama.py
    torchrun --nproc-per-node 4 tutorials/train_llama.py --cp 4 --tp 1 --strategy hybrid --documents --layout by_work
    torchrun --nproc-per-node 8 tutorials/train_llama.py --cp 4 --tp 2 --device cuda --dtype bfloat16 --seq-len 16384

The step is proved first, on a short sequence. Every rank trains on its part of every sequence. Then rank 0 alone trains
the same model on the same data, whole, and the two are compared: losses and parameters. Exits with 1 if they differ by
more than rounding can explain. For sequences that are too long for one process: --no-compare.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import VOCABULARY, packed_documents
from llama import CoreAttention, Llama, LlamaConfig, parallel_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from cp_styles import (
    AllGather,
    AttentionContextParallel,
    Causal,
    Documents,
    Mask,
    Ring,
    SequenceLayout,
    SequenceScope,
    Ulysses,
    by_work,
    contiguous,
    global_loss,
    global_token_count,
    head_tail,
    imbalance,
    next_token_labels,
    per_document_head_tail,
    striped,
    sum_gradients,
)
from cp_styles.batch import document_positions, shard_batch
from cp_styles.strategies import Strategy
from cp_styles.testing import CommunicationTrace
from cp_styles.verify import verify

# Each is given how many ranks exchange heads; only the hybrid asks.
STRATEGIES: dict[str, Callable[[int], Strategy]] = {
    "ring": lambda size: Ring(),
    "allgather": lambda size: AllGather(),
    "ulysses": lambda size: Ulysses(),
    "hybrid": lambda size: Ulysses(inner=Ring(), size=size),
}
# Each is given the lengths of the documents; those that know nothing of them see one long sequence.
LAYOUTS: dict[str, Callable[[int, int, tuple[int, ...]], SequenceLayout]] = {
    "head_tail": lambda length, cp, documents: head_tail(length, cp),
    "contiguous": lambda length, cp, documents: contiguous(length, cp),
    "striped": lambda length, cp, documents: striped(length, cp),
    "by_work": lambda length, cp, documents: by_work(length, cp, mask=Causal() & Documents(documents)),
    "per_document_head_tail": lambda length, cp, documents: per_document_head_tail(length, cp, documents=documents),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
CONFIG = LlamaConfig(VOCABULARY)
MiB = 2**20
PROOF = 512  # tokens of the sequence on which the step is proved

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


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Arguments(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence (default 2)")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share heads and features (default 2)")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens of a whole sequence (default 2048)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ring", help="hybrid: Ulysses with a ring inside")
    parser.add_argument(
        "--ulysses-size",
        type=int,
        help="of hybrid: how many cp ranks exchange heads (default: the most that leave a ring)",
    )
    parser.add_argument("--layout", choices=LAYOUTS, default="head_tail", help="how a sequence is cut over cp")
    parser.add_argument(
        "--documents",
        action="store_true",
        help="every file is a document: attention stays inside it, and positions begin anew (default: a sequence "
        "attends over all that is in it)",
    )
    parser.add_argument("--steps", type=int, default=20)
    # float64: rounding is then so small that a wrong position, label or weight anywhere cannot hide in it.
    parser.add_argument("--dtype", choices=DTYPES, default="float64")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train on one process too and compare; what one process cannot hold cannot be compared",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/train_llama.png"), help="where the picture goes")
    args = parser.parse_args(argv)
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
    if args.seq_len < 2 * args.cp * args.tp:
        parser.error(f"--seq-len {args.seq_len} is too short for {world} processes: at least {2 * args.cp * args.tp}")
    if args.seq_len % args.tp:
        parser.error(
            f"--seq-len {args.seq_len} is no multiple of --tp {args.tp}: try {args.seq_len // args.tp * args.tp}"
        )
    sizes = [size for size in range(2, args.cp) if args.cp % size == 0]
    if args.strategy == "hybrid":
        if not sizes:
            parser.error(
                f"--strategy hybrid cuts --cp in two levels, and {args.cp} is no product of two numbers above 1: "
                "try --cp 4, or --strategy ring or ulysses"
            )
        if args.ulysses_size is None:
            args.ulysses_size = sizes[-1]
        if args.ulysses_size not in sizes:
            parser.error(f"--ulysses-size {args.ulysses_size} leaves no ring on --cp {args.cp}: try one of {sizes}")
    elif args.ulysses_size is not None:
        parser.error(f"--ulysses-size is for --strategy hybrid, not {args.strategy}: leave it out")
    if args.layout == "per_document_head_tail" and not args.documents:
        parser.error("--layout per_document_head_tail cuts documents: add --documents, or use --layout head_tail")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch sees no CUDA device here: use --device cpu")
    if args.out.suffix != ".png":
        parser.error(f"--out {args.out} must end in .png")
    return args


def layout_of(args: argparse.Namespace, documents: Documents | None, length: int, cp: int) -> SequenceLayout:
    """How a sequence is cut over ``cp`` ranks, in units of as many tokens as there are tp ranks.

    These cut every part once more. A document may begin inside a unit. The cut, and nothing else, takes it to begin
    with the unit.
    """
    lengths = (length,) if documents is None else documents.lengths
    ends = [end // args.tp for end in itertools.accumulate(lengths)]
    in_units = tuple(stop - start for start, stop in itertools.pairwise([0, *ends]) if stop > start)
    cut = LAYOUTS[args.layout](length // args.tp, cp, in_units)
    return SequenceLayout.from_chunks([(start * args.tp, stop * args.tp) for start, stop in own] for own in cut.chunks)


@dataclass
class Batch:
    """One sequence and what is known of it; ``tensors`` are whole, or one rank's part of them."""

    tensors: dict[str, torch.Tensor]
    documents: Documents | None
    scope: SequenceScope | None = None


@dataclass
class Run:
    """What a training leaves behind: the loss of every step, the trained parameters, whole, and what it took."""

    losses: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    sent_bytes: int = 0
    calls: dict[str, int] = field(default_factory=dict)


def train(
    title: str, model: Llama, batches: list[Batch], step: Callable[[Llama, Batch], torch.Tensor], tokens: int
) -> Run:
    """The training itself, the same for both runs: ``step`` makes the loss of a batch and leaves the gradients.

    What the last step sends is counted; to count is to slow down, so not all of them are.
    """
    from tqdm import tqdm

    run = Run()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    # A step of a long sequence takes minutes: its layers move the bar, forward and backward.
    look = "{desc}: {percentage:3.0f}%|{bar}| {n:.2f}/{total} steps [{elapsed}<{remaining}{postfix}]"
    with tqdm(total=len(batches), desc=title, bar_format=look, disable=not is_first()) as bar:

        def advance(*_: object) -> None:
            bar.update(0.5 / len(model.layers))

        def follow(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            advance()
            inputs[0].register_hook(advance)

        for layer in model.layers:
            layer.register_forward_hook(follow)
        for batch in batches:
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


def train_in_parallel(args: argparse.Namespace, mesh: DeviceMesh, batches: list[Batch], proof: Batch) -> Run:
    """Prove the step on the batch ``proof``, and train."""
    strategy = STRATEGIES[args.strategy](args.ulysses_size)
    model = parallelize_module(new_model(args), mesh, parallel_plan(AttentionContextParallel(strategy=strategy)))

    def cut(batch: Batch, cp: DeviceMesh) -> Batch:
        layout = layout_of(args, batch.documents, batch.tensors["tokens"].shape[1], cp.size())
        seq_dims = {"tokens": 1, "labels": 1, "positions": 0}
        part = shard_batch(batch.tensors, layout, cp.get_local_rank(), seq_dims=seq_dims)
        return Batch(part, batch.documents, SequenceScope(layout, mask=batch.documents))

    def step(model: Llama, part: Batch, cp: DeviceMesh) -> torch.Tensor:
        with part.scope:
            logits = model(part.tensors["tokens"], part.tensors["positions"])
        labels = part.tensors["labels"]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = global_loss(losses, global_token_count(labels, cp), cp)
        loss.backward()
        sum_gradients(model, cp)
        return loss

    verify(model, mesh, proof, lambda model, batch, mesh: step(model, cut(batch, mesh["cp"]), mesh["cp"]))
    cp = mesh["cp"]
    mine = [cut(batch, cp) for batch in batches]
    title = f"cp {args.cp} x tp {args.tp}"
    return train(title, model, mine, lambda model, part: step(model, part, cp), args.seq_len)


class OneByOne(CoreAttention):
    """The attention of packed documents on one process: of each document alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: tuple[int, ...] = ()

    def forward(self, q_BHLD: torch.Tensor, k_BGLD: torch.Tensor, v_BGLD: torch.Tensor) -> torch.Tensor:
        documents = zip(*(x.split(self.lengths, 2) for x in (q_BHLD, k_BGLD, v_BGLD)), strict=True)
        return torch.cat([super(OneByOne, self).forward(*qkv) for qkv in documents], 2)


def train_alone(args: argparse.Namespace, batches: list[Batch]) -> Run:
    model, attention = new_model(args), OneByOne()
    if args.documents:
        for layer in model.layers:
            layer.attention.core = attention

    def step(model: Llama, batch: Batch) -> torch.Tensor:
        if batch.documents is not None:
            attention.lengths = batch.documents.lengths
        logits = model(batch.tensors["tokens"], batch.tensors["positions"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch.tensors["labels"].flatten())
        loss.backward()
        return loss

    return train("one process", model, batches, step, args.seq_len)


def batch_of(args: argparse.Namespace, tokens_S: torch.Tensor, ids_S: torch.Tensor) -> Batch:
    """A whole sequence. No label crosses the end of a file, with --documents or not."""
    documents = Documents.from_ids(ids_S) if args.documents else None
    positions = document_positions(ids_S) if args.documents else torch.arange(len(ids_S), device=args.device)
    tokens, labels = tokens_S[None], next_token_labels(tokens_S[None], document_ids=ids_S[None])
    return Batch({"tokens": tokens, "labels": labels, "positions": positions}, documents)


def read_batches(args: argparse.Namespace) -> tuple[list[Batch], Batch]:
    """One whole sequence a step, and the end of the last one for the proof.

    Rank 0 reads: another machine may have another Python, and so another library.
    """
    tokens, ids = packed_documents(args.steps, args.seq_len) if is_first() else torch.zeros(2, args.steps, args.seq_len)
    data = torch.stack([tokens, ids]).long().to(args.device)
    dist.broadcast(data, 0)
    batches = [batch_of(args, *row) for row in data.unbind(1)]
    short = min(args.seq_len, max(PROOF, 2 * args.cp * args.tp) // args.tp * args.tp)
    return batches, batch_of(args, *data[:, -1, -short:])


def parameter_difference(run: Run, reference: Run | None) -> tuple[float, str]:
    """The largest relative difference of a parameter on any rank, and its name; ``reference`` is rank 0's."""
    differences = []
    for name, parameter in run.parameters.items():
        expected = torch.empty_like(parameter)
        if reference is not None:
            expected.copy_(reference.parameters[name])
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
    args: argparse.Namespace,
    run: Run,
    reference: Run | None,
    ranks: list[dict[str, object]],
    last: Batch,
    worst: tuple[float, str],
) -> bool:
    """Print the tables, save the picture, and say whether this was the same training, on one process or on all."""
    tolerance = TOLERANCE[args.dtype]
    title = f"cp {args.cp} x tp {args.tp}"
    differences = []
    if reference is None:
        print(f"\nstep   loss, {title}")
        for step, found in enumerate(run.losses, 1):
            print(f"{step:>4} {found:>19.12f}")
    else:
        print(f"\nstep   loss, one process   loss, {title:<12} relative difference")
        for step, (found, expected) in enumerate(zip(run.losses, reference.losses, strict=True), 1):
            differences.append(abs(found - expected) / abs(expected))
            print(f"{step:>4} {expected:>19.12f} {found:>19.12f} {differences[-1]:>17.1e}")
    print("\nthe last step, and the peak of all of them\nrank  cp  tp  tokens  sent (MiB)  peak memory (MiB)  calls")
    for rank in ranks:
        print("{rank:>4} {cp:>3} {tp:>3} {tokens:>7} {sent:>11.2f} {peak:>18.0f}  {calls}".format(**rank))
    layout = layout_of(args, last.documents, args.seq_len, args.cp)
    mask: Mask = Causal() if last.documents is None else Causal() & last.documents
    print(f"\n{title} took {run.seconds:.1f} s for {args.steps} steps")
    if last.documents is not None:
        print(f"the last step's sequence packs {len(last.documents.lengths)} documents")
    print(f"the busiest cp rank has {imbalance(layout, mask):.2f} times the mean work in attention")
    from picture import save_picture

    how = f"{title}, {args.strategy}, {args.layout}{', documents' * args.documents}"
    save_picture(args.out, run.losses, reference and reference.losses, layout, mask, how)
    print(f"picture: {args.out}")
    checks = [(f"parameter ({worst[1]})", worst[0])]
    if reference is not None:
        checks.insert(0, ("loss", max(differences)))
    parity = True
    for what, difference in checks:
        holds = difference <= tolerance  # False for nan as well
        parity &= holds
        print(f"largest relative difference, {what}: {difference:.1e} ({'' if holds else 'NOT '}within {tolerance})")
    if reference is None:
        print("the ranks agree; not compared with one process" if parity else "THE RANKS DISAGREE")
    else:
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
    # All wait while rank 0 trains alone, which on long sequences takes longer than what torch waits by itself.
    dist.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo", timeout=timedelta(days=1))
    mesh = init_device_mesh(args.device, (args.cp, args.tp), mesh_dim_names=("cp", "tp"))
    batches, proof = read_batches(args)
    run = train_in_parallel(args, mesh, batches, proof)
    layout = layout_of(args, batches[-1].documents, args.seq_len, args.cp)
    mine = {
        "rank": dist.get_rank(),
        "cp": mesh["cp"].get_local_rank(),
        "tp": mesh["tp"].get_local_rank(),
        "tokens": layout.lengths[mesh["cp"].get_local_rank()],
        "sent": run.sent_bytes / MiB,
        "peak": peak_memory(args.device),
        "calls": ", ".join(f"{count} {name}" for name, count in sorted(run.calls.items())),
    }
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    reference = None
    if args.compare and is_first():
        torch.set_num_threads(cores)  # the others wait
        reference = train_alone(args, batches)
    # Without one process to compare with, rank 0 stands for it: the ranks must still be the same.
    worst = parameter_difference(run, reference or (run if is_first() else None))
    verdict = torch.ones((), dtype=torch.int64, device=args.device)
    if is_first():
        verdict.fill_(report(args, run, reference, ranks, batches[-1], worst))
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
