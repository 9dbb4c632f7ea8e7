"""The table by which attention() chooses a kernel: pinned, in words, and true."""

from __future__ import annotations

import pytest

from flashnumba.attention import BACKENDS, CHOICES, choose, planner
from flashnumba.stages.heads import Shape
from flashnumba.tiles.elements import ITEMSIZE
from flashnumba.tiles.fp8_convert import ELEMENTS


def shape(element="float16", m=4096, n=4096, arch="90a", **sizes):
    sizes = {"batch": 2, "heads": 16, "kv_heads": 16, "d": 128, "multiprocessors": 132, **sizes}
    return Shape(element, m=m, n=n, arch=arch, **sizes)


@pytest.mark.parametrize(
    ("problem", "backend"),
    [
        (shape(), "flash_forward.wgmma"),
        (shape("bfloat16"), "flash_forward.wgmma"),
        (shape(mapped=False), "flash_forward.mma"),
        (shape(arch="90"), "flash_forward.mma"),
        (shape(arch="100a"), "flash_forward.mma"),
        (shape(d=64, n=511, causal=True), "flash_forward.mma"),
        (shape(d=64, n=512, causal=True), "flash_forward.wgmma"),
        (shape(d=32, n=2047), "flash_forward.mma"),
        (shape(d=32, n=2048), "flash_forward.wgmma"),
        (shape(d=64, n=1024), "flash_forward.wgmma"),
        (shape(d=72, n=1024, causal=True), "flash_forward.wgmma"),
        (shape("float32"), "flash_forward.simt"),
        (shape("float32", m=1), "flash_forward.simt"),
        (shape(arch="75"), "flash_forward.mma"),
        (shape("bfloat16", arch="75"), "flash_forward.simt"),
        (shape("bfloat16", arch="80"), "flash_forward.mma"),
        (shape(m=1), "flash_forward.split"),
        (shape(m=1, arch="75"), "flash_forward.mma"),
        (shape(m=1, n=1023), "flash_forward.wgmma"),
        (shape(m=1, n=1024), "flash_forward.split"),
        (shape(m=16, batch=100), "flash_forward.split"),
        (shape(m=17, batch=100), "flash_forward.wgmma"),
        (shape(m=4, heads=32, kv_heads=8, batch=100), "flash_forward.split"),
        (shape(m=5, heads=32, kv_heads=8, batch=100), "flash_forward.wgmma"),
        (shape(m=128, batch=4, heads=16), "flash_forward.split"),
        (shape(m=129, batch=4, heads=16), "flash_forward.wgmma"),
        (shape(m=128, batch=67, heads=1, kv_heads=1), "flash_forward.wgmma"),
        (shape(m=128, batch=66, heads=1, kv_heads=1), "flash_forward.split"),
        (shape(d=256, arch="120", multiprocessors=170), "flash_forward.mma"),
        (shape("float8_e4m3fn"), "fp8.emulated"),
        (shape("float8_e5m2", arch="75", m=1), "fp8.emulated"),
        (shape("float8_e4m3fn", m=1), "fp8.split"),
        (shape("float8_e5m2", arch="89"), "fp8.k32"),
        (shape("float8_e4m3fn", arch="120a", multiprocessors=170), "fp8.k32"),
    ],
)
def test_the_table_is_pinned(problem, backend):
    assert choose(problem, True).backend == backend
    assert choose(problem, False).backend == "numpy"


def test_the_table_in_words():
    assert [(choice.when, choice.backend) for choice in CHOICES] == [
        ("there is no GPU of sm_75 or later", "numpy"),
        ("8 bits an element on sm_80 or later, 1024 keys or more, and few queries, as below", "fp8.split"),
        ("8 bits an element on sm_89 or sm_120, whose mma.sync multiplies them", "fp8.k32"),
        ("8 bits an element on another GPU", "fp8.emulated"),
        (
            "float16 or bfloat16 on sm_80 or later, 1024 keys or more, and few queries: at most 16 rows for each head "
            "of k, or tiles of 128 rows for at most half of the multiprocessors",
            "flash_forward.split",
        ),
        (
            "float16 or bfloat16 on sm_90, rows that begin at multiples of 16 bytes as the copy engine takes them, and "
            "not fewer than 2048 keys with a head dimension of at most 32 or fewer than 512 keys with a head dimension "
            "of at most 64",
            "flash_forward.wgmma",
        ),
        ("float16 on sm_75 or later, bfloat16 on sm_80 or later", "flash_forward.mma"),
        ("anything else", "flash_forward.simt"),
    ]
    assert {choice.backend for choice in CHOICES} <= set(BACKENDS)
    assert choose(shape("float32"), True) is CHOICES[-1], "the last row always holds"


@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "90", "90a", "100a", "120"])
@pytest.mark.parametrize("element", (*ITEMSIZE, *ELEMENTS))
def test_what_is_chosen_can_be_launched_there(element, arch):
    from flashnumba.machine.instruction import runs_on

    for m, n in ((1, 0), (1, 5000), (100, 100), (5000, 5000)):
        for d in (1, 8, 33, 64, 80, 128, 200, 256):
            if element in ELEMENTS:
                problem = shape(element, m, n, arch, d=-(-d // 16) * 16)
            else:
                problem = shape(element, m, n, arch, d=d, vector=ITEMSIZE[element] if d % 8 else 16)
            chosen = choose(problem, True).backend
            assert all(runs_on(arch, launch.kernel.arch) for launch in planner(chosen)(problem).launches)
