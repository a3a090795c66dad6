"""A kernel that reads past its input, for `make sanitize` to see that the sanitizer sees it. A program of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def stray_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(x_ptr + i))


if __name__ == "__main__":
    stray_kernel[(1,)](torch.zeros(64, device="cuda"), torch.zeros(4096, device="cuda"), SIZE=4096)
    torch.cuda.synchronize()
