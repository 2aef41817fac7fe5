"""The backward of a causal tile in ranges of its rows, beside that of all rows at once.

    python tests/benchmarks/causal_tile.py

Processor time of one thread, 8 heads of 64 in float32, medians in turns. What does not depend on the machine is the
ratio, which is 1 where CpuFlashKernel takes all rows at once.
"""

from __future__ import annotations

import statistics
import time

import torch

from cp_styles.kernels.sdpa import CPU_FLASH, SdpaKernel

ROWS = 256, 320, 384, 448, 512, 576, 640, 768, 1024


def seconds(backward, rows: int, kv_heads: int) -> float:
    torch.manual_seed(0)
    q, grad = (torch.randn(1, rows, 8, 64).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, kv_heads, rows, 64) for _ in range(2))
    options = {"causal": True, "bias": None, "scale": 0.125}
    out, lse = CPU_FLASH.forward(q, k, v, **options)
    start = time.process_time()
    backward(CPU_FLASH, grad, q, k, v, out, lse, **options)
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    ways = SdpaKernel.backward, type(CPU_FLASH).backward
    print("| rows | 8 key heads: ms at once | in ranges | ratio | 2 key heads: ms at once | in ranges | ratio |")
    print("|---" * 7 + "|")
    for rows in ROWS:
        cells = []
        for kv_heads in (8, 2):
            turns = [[seconds(way, rows, kv_heads) for way in ways] for _ in range(max(9, 8_000_000 // rows**2))]
            whole, ranges = (1000 * statistics.median(times) for times in zip(*turns, strict=True))
            cells += [f"{whole:.2f}", f"{ranges:.2f}", f"{ranges / whole:.2f}"]
        print(f"| {rows} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
