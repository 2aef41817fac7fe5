"""The checks of the command ``doctor``, in the order of its table. Every rank runs all of them."""

from __future__ import annotations

import contextlib
import io
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from importlib import metadata
from itertools import combinations
from socket import gethostname
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cp_styles._lib.compat import start_all_gather, start_all_to_all, wait_tensor
from cp_styles.batch.sharder import BatchSharder
from cp_styles.comm.group_state import state_of
from cp_styles.comm.point_to_point import WIDTH, Mailbox, exchange, gather_numbers
from cp_styles.doctor.ranks import Line, World, Wrong
from cp_styles.explain import explain
from cp_styles.explain.command import format_strategy
from cp_styles.explain.hardware import MACHINES
from cp_styles.explain.text import format_bytes, format_ranges, format_seconds
from cp_styles.functions.attention import context_attention
from cp_styles.layouts import head_tail
from cp_styles.masks import Causal, Dense, SlidingWindow
from cp_styles.strategies import AllGather, Ring, Strategy, Ulysses
from cp_styles.styles import ModuleContextParallel, parallelize_module
from cp_styles.verify import verify

DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
# The largest error of an attention, relative to a norm. Rounding makes 1e-15 and 1e-6, and a key too many 1e-2. Tiles
# of 16 bits are rounded, and so is their sum, which makes the square root of 2 of one device's error.
_LIMITS, _RATIO = {torch.float64: 1e-12, torch.float32: 1e-5}, 1.5
_MOST_ALONE = 16  # with more ranks, several pairs exchange messages at once
_VARIABLES = "NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCH_CUDNN_", "UCX_", "FI_"
_ALONE = Line("there is one rank", skipped=True)


def checks_of(size: int) -> Iterator[tuple[str, Callable[[World], Line]]]:
    """The name and the function of each check of so many ranks."""
    yield from {"store": check_store, "versions": check_versions, "hosts and devices": check_devices}.items()
    yield from {"process group": check_group, "mesh": check_mesh, "agreement of calls": check_agreement}.items()
    yield from {"messages of pairs": check_pairs, "all-gather": partial(check_blocks, False)}.items()
    yield from {"all-to-all": partial(check_blocks, True), "options of explain": check_options}.items()
    for name, dtype in DTYPES.items():
        yield f"kernels {name}", partial(check_kernels, dtype)
    sizes = [each for each in range(2, size) if size % each == 0]
    for strategy in (Ring(), AllGather(), Ulysses(), *(Ulysses(inner=Ring(), size=each) for each in sizes[-1:])):
        for name, dtype in DTYPES.items():
            yield f"{format_strategy(strategy)} {name}", partial(check_attention, strategy, dtype)
    if not sizes:
        yield "ulysses, ring inside", lambda _: Line(f"{size} is no product of two numbers above 1", skipped=True)
    yield "a model, by verify", check_model


def _times(seconds: Sequence[float]) -> str:
    return f"{format_seconds(median(seconds))} (rank {seconds.index(max(seconds))}: {format_seconds(max(seconds))})"


def _by_ranks(texts: Sequence[str]) -> str:
    """The texts of ranks, each once, after the numbers of its ranks if there are several texts."""
    ranks = {text: format_ranges([rank for rank, other in enumerate(texts) if other == text]) for text in texts}
    return texts[0] if len(ranks) == 1 else "\n".join(f"ranks {own}: {text}" for text, own in ranks.items())


def check_store(world: World) -> Line:
    key = f"hello/{world.rank}"
    world.store.set(key, key)
    seconds = world.gather(world.seconds_of(lambda: world.store.get(key), on_device=False))
    return Line(f"round trip {_times(seconds)}", seconds)


def check_versions(world: World) -> Line:
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cp-styles": "a folder"}
    for package in ("cp-styles", "triton", "transformers", "flash-attn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if torch.cuda.is_available():
        found |= {"CUDA": torch.version.cuda, "HIP": torch.version.hip, "cuDNN": torch.backends.cudnn.version()}
        found["NCCL"] = torch.cuda.nccl.version()  # pyright: ignore[reportAttributeAccessIssue]
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    if text != (first := world.gather(text)[0]):
        raise Wrong(f"{text}, and rank 0 has {first}")
    return Line(text, found)


def check_devices(world: World) -> Line:
    device = "cpu"
    if world.device.type == "cuda":
        if (count := torch.cuda.device_count()) <= world.device.index:
            raise RuntimeError(f"LOCAL_RANK={world.device.index}, and torch sees {count} GPUs: start fewer processes")
        torch.cuda.set_device(world.device)
        found = torch.cuda.get_device_properties(world.device)
        device = f"{found.name}, {format_bytes(found.total_memory)}, capability {found.major}.{found.minor}"
    facts = gethostname(), device, f"{os.cpu_count()} processors", f"threads of a rank: {torch.get_num_threads()}"
    variables = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)]
    world.hosts, texts = zip(*world.gather([facts[0], "; ".join((*facts, *variables))]), strict=True)
    return Line(f"ranks: {world.size}, hosts: {len({*world.hosts})}\n{_by_ranks(texts)}", texts)


def check_group(world: World) -> Line:
    if dist.group.WORLD is None:  # ranks that are threads have one
        # NCCL's own timeout ends a process without a word about the check, so the deadline of the check comes first.
        backend, times = ("nccl", 4) if world.device.type == "cuda" else ("gloo", 1)
        options: dict[str, Any] = {"rank": world.rank, "world_size": world.size}
        options["store"] = dist.PrefixStore("group", world.store)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, timeout=timedelta(seconds=times * world.seconds), **options)
    numbers = torch.zeros(8, dtype=torch.int64, device=world.device)
    seconds = world.gather(world.seconds_of(lambda: dist.all_reduce(numbers)))
    return Line(f"{dist.get_backend()}, all-reduce of 64 B {_times(seconds)}", seconds)


def check_mesh(world: World) -> Line:
    shapes = {("cp",): (world.size,)} | ({} if world.size % 2 else {("dp", "cp"): (2, world.size // 2)})
    meshes = [init_device_mesh(world.device.type, shape, mesh_dim_names=names) for names, shape in shapes.items()]
    for mesh, axis in [(each, axis) for each in meshes for axis in each.mesh_dim_names or ()]:
        total = torch.full((1,), world.rank, device=world.device)
        dist.all_reduce(total, group=mesh.get_group(axis))
        ranks, of_group = mesh[axis].mesh.tolist(), dist.get_process_group_ranks(mesh.get_group(axis))
        if not ranks == of_group == sorted(ranks) or total.item() != sum(ranks):
            raise RuntimeError(f"{mesh}, {axis}: its group has the ranks {of_group}, and their sum is {total.item()}")
    world.mesh, tables = meshes[0], [torch.atleast_2d(mesh.mesh).tolist() for mesh in meshes]
    rows = [" ".join(f"[{format_ranges(row)}]" for row in table) for table in tables]
    return Line("; ".join(f"{' x '.join(names)}: {row}" for names, row in zip(shapes, rows, strict=True)), tables)


def check_agreement(world: World) -> Line:
    group, expected = world.mesh.get_group(), [[rank] * WIDTH for rank in range(world.size)]

    def agree() -> None:
        if (rows := [*gather_numbers([world.rank] * WIDTH, group)]) != expected:
            raise RuntimeError(f"each rank gave its number, and these have come: {rows}")

    world.deadline += 75  # next to NCCL, gloo tries to connect for a minute
    idle = world.gather(world.seconds_of(agree, on_device=False))
    if world.size > 1 and not isinstance(state_of(group).mailbox, Mailbox):
        raise Wrong("the ranks agree over NCCL: set GLOO_SOCKET_IFNAME to the interface between the machines")
    if world.device.type == "cpu" or world.size == 1:
        return Line(f"over gloo {_times(idle)}", idle)
    numbers = torch.zeros(world.nbytes, dtype=torch.uint8, device=world.device)
    works = [dist.all_reduce(numbers, async_op=True) for _ in range(20)]
    busy = world.gather(world.seconds_of(agree, on_device=False))
    for work in works:
        work.wait()  # pyright: ignore[reportOptionalMemberAccess]
    return Line(f"over gloo {_times(idle)}; next to NCCL {_times(busy)}", [idle, busy])


def rounds_of(size: int) -> list[list[tuple[int, int]]]:
    """Pairs that exchange messages at once: each pair alone, or of many ranks the neighbours and the most distant."""
    if size <= _MOST_ALONE:
        return [[pair] for pair in combinations(range(size), 2)]
    neighbours = [[(rank, (rank + 1) % size) for rank in range(first, size - size % 2, 2)] for first in (0, 1)]
    return [*neighbours, [(rank, rank + size // 2) for rank in range(size // 2)]]


def check_pairs(world: World) -> Line:
    if world.size == 1:
        return _ALONE
    sent = torch.full((world.nbytes,), world.rank % 256, dtype=torch.uint8, device=world.device)
    received, group, links = torch.empty_like(sent), world.mesh.get_group(), []

    def swap(peer: int, nbytes: int) -> None:
        exchange([(peer, sent[:nbytes])], [(peer, received[:nbytes])], group).wait()

    for pairs in rounds_of(world.size):
        gather_numbers([0] * WIDTH, group)  # the last round has ended on all ranks
        for pair in [pair for pair in pairs if world.rank in pair]:
            peer = sum(pair) - world.rank
            latency = world.seconds_of(partial(swap, peer, 8), 10)
            seconds = world.seconds_of(partial(swap, peer, world.nbytes), 3)
            if not bool((received == peer % 256).all()):
                raise RuntimeError(f"a message of rank {peer} has come with other bytes")
            links.append((*pair, latency, world.nbytes / max(seconds - latency, seconds / 2)))
    world.links = [(*link,) for own in world.gather([x for x in links if x[0] == world.rank]) for link in own]
    _, _, latencies, rates = zip(*world.links, strict=True)
    low, mid, high = (f"{format_bytes(find(rates))}/s" for find in (min, median, max))
    latency = " to ".join(format_seconds(find(latencies)) for find in (min, max))
    slowest = "{}-{}".format(*min(world.links, key=lambda link: link[3]))
    text = f"{format_bytes(world.nbytes)} both ways {mid} ({low}, pair {slowest}, to {high}), latency {latency}"
    return Line(f"{text}; pairs: {len(rates)}", world.links)


def check_blocks(differ: bool, world: World) -> Line:
    """A block of each rank on every rank. Blocks that ``differ`` by receiver travel by an all-to-all."""
    if world.size == 1:
        return _ALONE
    count, name = max(world.nbytes // 8 // world.size, 1), world.mesh.get_group().group_name
    sent, sizes = torch.full((count * world.size,), world.rank, device=world.device), [count] * world.size
    start = partial(start_all_gather, sent[:count], world.size, name)
    start = partial(start_all_to_all, sent, sizes, sizes, name) if differ else start
    wanted = torch.arange(world.size, device="cpu").repeat_interleave(count)
    if not torch.equal(wait_tensor(start()).cpu(), wanted):
        raise RuntimeError("blocks have come with other numbers than the ranks have sent")
    seconds = world.gather(world.seconds_of(lambda: wait_tensor(start()), 5))
    nbytes = 8 * count * (world.size - 1)
    return Line(f"{format_bytes(nbytes)} to each {_times(seconds)}, {format_bytes(nbytes / max(seconds))}/s", seconds)


def check_options(world: World) -> Line:
    """The options of ``python -m cp_styles explain`` for this machine."""
    if world.size == 1:
        return _ALONE
    device = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    options = [f"--hardware {name}" for name in MACHINES if name in device.lower()]
    options.append(f"--node-ranks {max(Counter(world.hosts).values())}")
    for kind, near in (("", True), ("far-", False)):
        if links := [x for x in world.links if (world.hosts[x[0]] == world.hosts[x[1]]) is near]:
            latency, rate = (median(link[at] for link in links) for at in (2, 3))
            options.append(f"--{kind}bandwidth {rate:.2e} --{kind}latency {latency:.1e}")
    return Line(" ".join(options), options)


def check_kernels(dtype: torch.dtype, world: World) -> Line:
    dense = Dense(torch.ones(512, 512, dtype=torch.bool, device="cpu"))
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 128, "dtype": dtype, "device": world.device.type}
    masks: dict[str, list[str]] = {}
    for mask, length in ((Causal(), 8192), (SlidingWindow(99, 0), 1024), (dense, 512)):
        runs = explain(length, ranks=2, mask=mask, **shape).runs.values()
        kernels = ", ".join(dict.fromkeys(call.kernel for run in runs for call in run.forward.calls))
        masks.setdefault(kernels, []).append(type(mask).__name__)
    texts = world.gather("; ".join(f"{kernels} ({', '.join(names)})" for kernels, names in masks.items()))
    return Line(_by_ranks(texts), texts)


def check_attention(strategy: Strategy, dtype: torch.dtype, world: World) -> Line:
    """A causal attention with output and gradients, against plain operations in float64 on each rank alone."""
    kv_heads = min(max(2, -(-world.size // 2)), 32)
    scores = 2**26 if world.device.type == "cuda" else 2**19
    length = max(2 * world.size, math.isqrt(scores // (2 * kv_heads))) + 5
    generator, layout = torch.Generator("cpu").manual_seed(0), head_tail(length, world.size)
    heads = 2 * kv_heads, kv_heads, kv_heads, 2 * kv_heads
    drawn = [torch.randn(1, n, length, 64, generator=generator, device="cpu") for n in heads]
    whole = [x.to(world.device, dtype) for x in drawn]

    def cut(x: torch.Tensor) -> torch.Tensor:
        return layout.shard(x, 2, world.rank)

    def run(attend: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = attend(*leaves)
        return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, tensors[3]))]

    exact, alone = run(attend_alone, [x.double() for x in whole]), run(attend_alone, whole)
    options = {"mesh": world.mesh, "mask": Causal(), "layout": layout, "strategy": strategy}
    found, errors = run(partial(context_attention, **options), list(map(cut, whole))), []
    for name, mine, one, right in zip(("out", "dq", "dk", "dv"), found, alone, exact, strict=True):
        error, usual = ((x - cut(right)).norm().item() / right.norm().item() for x in (mine, cut(one)))
        limit = _LIMITS.get(dtype, _RATIO * usual)
        errors.append((error <= limit, -error / max(limit, 1e-99), f"error {error:.1e} of {name}, at most {limit:.1e}"))
    good, ratio, text = min(errors)
    ranks = world.gather([ratio, f"rank {world.rank}: {text}"])
    if not good:
        raise Wrong(f"{strategy}, {dtype}: {text}")
    return Line(min(ranks)[1], ranks)


def attend_alone(q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> torch.Tensor:
    """Causal attention of twice as many query heads as key heads: plain operations in float64, else torch's kernel."""
    k, v = (x.repeat_interleave(2, 1) for x in (k_BGSD, v_BGSD))  # not all kernels of torch take groups
    if q_BHSD.dtype != torch.float64:
        return F.scaled_dot_product_attention(q_BHSD, k, v, is_causal=True)
    scores = q_BHSD @ k.mT / math.sqrt(q_BHSD.shape[3])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v


class Model(nn.Module):
    """A small language model. The style makes its attention causal."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(64, 32), nn.Embedding(length, 32), nn.Linear(32, 64)
        self.layers = nn.Sequential(*(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2)))

    def forward(self, tokens_BS: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(tokens_BS) + self.places(positions_BS)))


def check_model(world: World) -> Line:
    if world.size == 1:
        return _ALONE
    length, generator = 8 * world.size + 5, torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (2, length), generator=generator, device="cpu").to(world.device)
    model = Model(length)
    for parameter in model.parameters():  # equal on all ranks, without a seed of the process
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    parallelize_module(model.to(world.device), world.mesh, ModuleContextParallel(mask=Causal()))

    def step(model: nn.Module, tokens: torch.Tensor, mesh: Any) -> torch.Tensor:
        sharder = BatchSharder(mesh)
        batch = sharder(tokens)
        loss = batch.loss(model(batch.tokens, batch.positions))
        loss.backward()
        sharder.sum_gradients(model)
        return loss

    # verify prints on the first rank alone. The remaining ranks may be threads of its process.
    with contextlib.nullcontext() if world.rank else contextlib.redirect_stdout(io.StringIO()):
        report = verify(model, world.mesh, tokens, step)
    return Line(report.line.partition(": ")[2], report.worst)
