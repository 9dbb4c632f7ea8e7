"""A clock that runs on no GPU, and made-up figures as the benches write them."""

from __future__ import annotations

from pathlib import Path

from flashnumba.bench.counters import Target, counted
from flashnumba.bench.runner import Clock, Measured, Size

__all__ = [
    "ENVIRONMENT",
    "HostClock",
    "attention_file",
    "backward_file",
    "chain_file",
    "counters_file",
    "decode_file",
    "gemm_file",
    "staged_file",
]

ENVIRONMENT = {"device": "NVIDIA H200", "arch": "90a", "date": "2026-11-29", "torch": "2.11"}
FA2, CUDNN = "torch, FlashAttention-2", "torch, cuDNN"


class HostClock(Clock):
    """Runs every call once; each takes one second less than the one before."""

    def __init__(self):
        super().__init__()
        self.next = 100.0

    def once(self, call):
        return call(), 1.0

    def time(self, calls, once):
        for call in calls[1:]:
            call()
        self.next -= 1.0
        return self.next, ""

    def in_turn(self, calls, others, rounds=6):
        for call in (*calls, *others):
            call()
        return 1.25


def one(name, seconds, ours=True, note="", **figures):
    return Measured(name, seconds, figures, 1e-4 if seconds else None, 2e-4 if seconds else None, note, ours)


def held(sizes, **more):
    return {"environment": ENVIRONMENT, "sizes": [size.record() for size in sizes], **more}


def gemm_file():
    """Two sizes; wgmma takes one of them."""
    sizes = []
    for element, ours in (("float32", ("register_tile",)), ("float16", ("wgmma", "mma"))):
        size = Size({"element": element, "m": 4096, "n": 2048, "k": 8192, "majors": "kn"})
        size.measured.append(one("torch.matmul", 2e-3, ours=False, flops_per_second=7e14, of_cublas=None))
        size.measured += [one(name, 4e-3, flops_per_second=3.5e14, of_cublas=0.5) for name in ours]
        size.measured.append(one("naive", None, note="WRONG: error 3", flops_per_second=None, of_cublas=None))
        sizes.append(size)
    return held(sizes)


def attention_file(cudnn=True):
    """Two lengths of one D, causal and not, and one size in float32."""
    sizes = []
    for causal in (False, True):
        for n in (1024, 4096):
            about = {"element": "float16", "batch": 16384 // n, "heads": 32, "n": n, "d": 64, "causal": causal}
            size = Size(about)
            size.measured.append(one(FA2, 1e-3, ours=False, flops_per_second=3e14, of_fa2=None))
            refused = one(CUDNN, None, ours=False, note="refused: too old", flops_per_second=None)
            there = one(CUDNN, 8e-4, ours=False, flops_per_second=4e14, of_fa2=1.25)
            size.measured += [there if cudnn else refused, one("mma", 9e-4, flops_per_second=3.3e14, of_fa2=1.1)]
            sizes.append(size)
    small = Size({"element": "float32", "batch": 4, "heads": 16, "n": 1024, "d": 64, "causal": False})
    small.measured.append(one("simt", 3e-3, flops_per_second=6e12, of_efficient=0.4))
    return held([*sizes, small])


def staged_file():
    size = Size({"element": "float16", "batch": 4, "heads": 16, "n": 4096, "d": 128, "causal": False})
    size.measured.append(one(FA2, 1e-3, ours=False, flops_per_second=3e14, of_base=None))
    for name, share, bytes_ in (("tile_2", None, 32896), ("quarter_4", 1.02, 16512)):
        more = {"shared": bytes_, "registers": 168, "predicted_blocks": 3, "blocks": 3}
        size.measured.append(one(name, 1e-3, flops_per_second=2.9e14, of_base=share, of_fa2=0.96, **more))
    return held([size])


def chain_file():
    size = Size({"element": "float16", "batch": 4, "heads": 32, "n": 4096, "d": 64, "causal": False})
    size.measured += [
        one(FA2, 1e-3, ours=False, flops_per_second=3e14, of_shared=None),
        one("shared", 1.2e-3, flops_per_second=2.5e14, of_shared=None),
        one("registers", 9e-4, flops_per_second=3.3e14, of_shared=1.32),
    ]
    return held([size])


def backward_file():
    size = Size({"element": "float16", "batch": 4, "heads": 32, "n": 4096, "d": 64, "causal": True})
    size.measured += [
        one(FA2, 1e-3, ours=False, flops_per_second=2.5e14, of_fa2=None, extra_bytes=130 << 20),
        one("mma", 1.2e-3, flops_per_second=2e14, of_fa2=0.8, extra_bytes=6 << 20),
        one("one_pass", 9e-4, flops_per_second=2.6e14, of_fa2=1.04, extra_bytes=None),
    ]
    return held([size])


def counters_file():
    """The stored excerpt of ncu's output, as of two stages."""
    excerpt = (Path(__file__).parent / "ncu_excerpt.csv").read_text()
    return held([counted(target, excerpt) for target in (Target("gemm", 2048), Target("chained_gemm", 2048, 128, 16))])


def decode_file():
    about = {"element": "float16", "batch": 4, "n": 8192, "heads": 64, "kv_heads": 8, "d": 128, "nbytes": 134217728}
    size = Size(about)
    rates = {"bytes_per_second": 3.1e12, "of_copy": 0.74, "of_equal_copy": 0.91, "of_fa2": 1.2}
    size.measured += [
        one("copy of as many bytes", 4e-5, ours=False, bytes_per_second=3.4e12),
        one(FA2, 5e-5, ours=False),
    ]
    size.measured += [one(CUDNN, None, ours=False, note="refused"), one("split", 4.3e-5, **rates)]
    host = [
        {"q": "[1, 4, 64, 64]", "name": "flashnumba.attention", "seconds": 1.2e-5, "note": ""},
        {"q": "[1, 4, 64, 64]", "name": "torch", "seconds": None, "note": "not measured: no"},
    ]
    return held([size], host=host)


def mla_file():
    about = {"batch": 128, "n": 4096, "heads": 16, "tokens": 1, "element": "bfloat16", "nbytes": 603979776}
    decoding = Size({**about, "prefill": False})
    decoding.measured += [
        one(CUDNN, None, ours=False, note="refused"),
        one("flash_mla.decode", 1.6e-4, of_copy=0.9, flops_per_second=1.2e14),
        one("flash_mla.decode, e4m3", 1.25e-4, of_copy=0.65, flops_per_second=1.4e14, of_bfloat16=1.28),
    ]
    prefill = Size({**about, "batch": 1, "tokens": 4096, "prefill": True})
    prefill.measured += [one("flash_mla.prefill", 8e-3, flops_per_second=2.9e14)]
    return held([decoding, prefill])
