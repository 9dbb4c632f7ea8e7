"""Host microseconds of calls on small CUDA tensors, ours and torch's: ``python -m tests.torch_face.host_time``.

Many calls in a row and one wait at the end; on tensors this small the GPU is done long before the next call.
"""

from __future__ import annotations

import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashnumba
from flashnumba import torch as face


def microseconds(call, count=500):
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    passed = time.perf_counter() - start
    torch.cuda.synchronize()
    return passed / count * 1e6


def main():
    q, k, v = (torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    do = torch.randn_like(q)
    o, lse = flashnumba.attention(q, k, v, return_lse=True)
    asks = [x.clone().requires_grad_() for x in (q, k, v)]
    ours, theirs = face.attention(*asks), scaled_dot_product_attention(*asks)

    def backward_of(o):
        return lambda: torch.autograd.grad(o, asks, do, retain_graph=True)

    for name, call in {
        "flashnumba.attention": lambda: flashnumba.attention(q, k, v),
        "flashnumba.attention_backward": lambda: flashnumba.attention_backward(do, q, k, v, o, lse),
        "flashnumba.torch.attention, nothing asked": lambda: face.attention(q, k, v),
        "torch, nothing asked": lambda: scaled_dot_product_attention(q, k, v),
        "flashnumba.torch.attention, recorded": lambda: face.attention(*asks),
        "torch, recorded": lambda: scaled_dot_product_attention(*asks),
        "flashnumba.torch.attention, backward": backward_of(ours),
        "torch, backward": backward_of(theirs),
    }.items():
        print(f"{microseconds(call):8.1f} us  {name}", flush=True)


if __name__ == "__main__":
    main()
