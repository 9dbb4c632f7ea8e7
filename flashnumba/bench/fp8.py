"""FP8 attention on a GPU beside the same structure in float16, in one run: prefill, decoding, and conversions.

**Prefill.** Kernels of the stage fp8 beside ``flash_forward.mma`` on the numbers as float16, and beside torch's
FlashAttention-2. Scales are of tensors. ``k32`` reads a v that lies by columns already; what turning one takes is
measured too. On sm_90 mma.sync has no FP8, and what its kernels can gain is bounded: :func:`instructions` says by
what.

**Decoding** is bytes. ``fp8.split`` beside ``flash_forward.split``: half the bytes of K and V, so up to twice as fast.
Several sets of inputs are used in turn, as in the decode bench.

**Conversions** of 2^26 float32: to e4m3 and e5m2 by every way, and to signed bytes.

Each kernel is first compared, on some rows, with attention in float64 of what its codes stand for; the budget is that
of the rounding-exact reference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from flashnumba.bench.attention import Problem
from flashnumba.bench.decode import IN_TURN, GraphClock
from flashnumba.bench.environment import environment as base_environment
from flashnumba.bench.environment import place, torch_on_gpu
from flashnumba.bench.heads import FA2, Judge, Place, calls_of, launches, peer, places, settings, shape_of
from flashnumba.bench.runner import Candidate, Clock, Measured, Runner, Size

__all__ = [
    "BASE",
    "DECODE_BASE",
    "DecodeProblem",
    "conversions",
    "environment",
    "instructions",
    "measure",
    "measure_decode",
]

BASE, DECODE_BASE = "flash_forward.mma, float16", "flash_forward.split, float16"
TORCH = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
CONVERTED = 1 << 26


@dataclass(frozen=True)
class DecodeProblem:
    """One query for each of ``heads`` heads of ``batch`` sequences of ``n`` keys."""

    batch: int
    n: int
    heads: int = 64
    kv_heads: int = 8
    d: int = 128

    @property
    def elements(self) -> int:
        """Of K and V."""
        return 2 * self.batch * self.kv_heads * self.n * self.d


@dataclass(frozen=True)
class Coded:
    """q, k and v in 8 bits, torch tensors, and their scales, by name."""

    fmt: str
    arrays: tuple[Any, Any, Any]
    scales: dict[str, float]

    def calls(self, name: str, machine: str, *, causal: bool = False) -> Callable[[], Any]:
        """Prepared launches of a kernel of the stage fp8 on these."""
        from flashnumba.stages.fp8.mma import PLANS
        from flashnumba.stages.fp8_heads import prepare_fp8

        problem = prepare_fp8(
            *self.arrays, fmt=None, **self.scales, causal=causal, scale=None, machine=machine, stream=None
        )
        plan = PLANS[name](problem.shape)
        return calls_of(plan, problem.heads(v_by_columns=plan.v_by_columns), machine)


def coded(torch: Any, fmt: str, arrays: Sequence[Any]) -> Coded:
    """Tensors in 8 bits, with a scale each."""
    codes, scales = [], {}
    for name, x in zip("qkv", arrays, strict=True):
        scale = float(x.abs().max()) / LARGEST[fmt]
        codes.append((x.float() / scale).clamp(-LARGEST[fmt], LARGEST[fmt]).to(getattr(torch, TORCH[fmt])))
        scales[f"{name}_descale"] = scale
    return Coded(fmt, tuple(codes), scales)


class CodedJudge(Judge):
    """A judge of attention of codes: float64 of what they stand for, and the budget of the rounded reference."""

    def __init__(
        self, torch: Any, given: Coded, places: Sequence[Place], weights: str, *, causal: bool = False
    ) -> None:  # fmt: skip
        from flashnumba.stages.flash_forward.blas import THREADS
        from flashnumba.stages.flash_forward.reference import dense
        from flashnumba.stages.fp8 import codec, reference

        self.torch, self.element, self.known = torch, "bfloat16", []
        q, k, v = (x.view(torch.uint8) for x in given.arrays)
        for where in places:
            end = where.rows.stop + k.shape[2] - q.shape[2] if causal else k.shape[2]
            rows = where.of(q).astype(np.uint8)
            keys, values = (x[where.batch, where.kv_head, :end].cpu().numpy() for x in (k, v))
            pairs = zip((rows, keys, values), given.scales.values(), strict=True)
            exact = dense(*(codec.decode(codes, given.fmt) * scale for codes, scale in pairs), causal=causal)
            with THREADS:  # products of a tile are too small to share out
                low = reference.attention(rows, keys, values, given.fmt, **given.scales, causal=causal, weights=weights)
            self.known.append((where, (*exact, *low)))


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return base_environment("fp8") | settings(torch_on_gpu("fp8"))


def measure(
    problem: Problem, *, names: Collection[str] = (), clock: Clock | None = None, until: float = float("inf"),
    machine: str = "cuda", report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Prefill of one problem; arguments as of :func:`flashnumba.bench.attention.measure`.

    Args:
        names: of ``k32`` and ``emulated``, these alone.

    Raises:
        RuntimeError: no GPU, or no torch that uses it.
    """
    from flashnumba.stages import fp8_heads
    from flashnumba.stages.flash_forward.mma import plan_mma

    torch, device, _ = place("fp8", machine)
    random = torch.Generator(device=device).manual_seed(0)
    sizes = (problem.batch, problem.heads, problem.n, problem.d)
    q, k, v = (torch.randn(sizes, generator=random, device=device, dtype=torch.float16) for _ in range(3))
    size = Size({**asdict(problem), "what": "prefill"})
    runner = Runner(
        size, lambda seconds: {"flops_per_second": problem.flops / seconds}, {"of_float16": BASE, "of_fa2": FA2},
        clock=clock or Clock(), until=until, report=report,
    )  # fmt: skip
    rows = places(problem.batch, problem.heads, problem.n)
    judge = Judge(torch, q, k, v, "float16", rows, causal=problem.causal)
    runner.run(peer(torch, FA2, [(q, k, v)], causal=problem.causal), judge)
    plan = partial(plan_mma, shape_of(q, k, v, causal=problem.causal, machine=machine))
    runner.run(Candidate(BASE, partial(launches, plan, [(q, k, v)], causal=problem.causal, machine=machine)), judge)
    for fmt in TORCH:
        given = coded(torch, fmt, (q, k, v))
        for name, weights in (("emulated", "float16"), ("k32", "e4m3")):
            if not names or name in names:
                judge = CodedJudge(torch, given, rows[::4], weights, causal=problem.causal)
                prepare = partial(lambda g, n: [g.calls(n, machine, causal=problem.causal)], given, name)
                runner.run(Candidate(f"fp8.{name}, {fmt}", prepare), judge)
    turned = given.arrays[2]
    runner.run(Candidate("v turned by columns, once", lambda: [partial(fp8_heads.by_columns, turned)], ours=False))
    return size


def measure_decode(
    problem: DecodeProblem, *, clock: Clock | None = None, until: float = float("inf"), in_turn: int = IN_TURN,
    machine: str = "cuda", report: Callable[[Size, Measured], None] = lambda size, measured: None,
) -> Size:  # fmt: skip
    """Decoding of one problem: bytes a second are those of K and V that are read.

    Args:
        clock: a :class:`flashnumba.bench.decode.GraphClock` if None.
        in_turn: bytes of K and V as float16 in all sets of inputs, at least.
    """
    from flashnumba.stages.flash_forward.split import plan_split

    torch, device, _ = place("fp8", machine)
    random = torch.Generator(device=device).manual_seed(0)

    def draw(heads: int, rows: int) -> Any:
        return torch.randn((problem.batch, heads, rows, problem.d), generator=random, device=device).half()

    sets = [
        (draw(problem.heads, 1), *(draw(problem.kv_heads, problem.n) for _ in range(2)))
        for _ in range(-(-in_turn // (2 * problem.elements)))
    ]
    size = Size({**asdict(problem), "what": "decode"})
    runner = Runner(
        size, lambda seconds: {"elements_per_second": problem.elements / seconds},
        {"of_float16": DECODE_BASE, "of_fa2": FA2}, clock=clock or GraphClock(), until=until, report=report,
    )  # fmt: skip
    group = problem.heads // problem.kv_heads
    ends = sorted({(0, 0), (problem.batch - 1, problem.kv_heads - 1)})
    where = [Place(b, h, slice(h * group, (h + 1) * group), slice(0, 1)) for b, h in ends]
    judge = Judge(torch, *sets[0], "float16", where)
    runner.run(peer(torch, FA2, sets), judge)
    plan = partial(plan_split, shape_of(*sets[0], machine=machine))
    runner.run(Candidate(DECODE_BASE, partial(launches, plan, sets, machine=machine)), judge)
    for fmt in TORCH:
        given = [coded(torch, fmt, arrays) for arrays in sets]
        judge = CodedJudge(torch, given[0], where, "float16")
        prepare = partial(lambda all_sets: [one.calls("split", machine) for one in all_sets], given)
        runner.run(Candidate(f"fp8.split, {fmt}", prepare), judge)
    return size


def conversions(count: int = CONVERTED, clock: Clock | None = None, machine: str = "cuda") -> list[dict[str, Any]]:
    """Seconds that converting ``count`` float32 takes, by what and how."""
    from flashnumba.machine import launcher
    from flashnumba.stages.fp8 import convert

    torch, device, _ = place("fp8", machine)
    x = torch.randn(count, device=device)
    codes = torch.empty(count, dtype=torch.uint8, device=device)
    rows: list[dict[str, Any]] = []
    clock = clock or Clock()
    for element, ways in (
        ("float8_e4m3fn", ("instructions", "integers", "by_float16")), ("float8_e5m2", tuple(convert.ENCODERS)),
        ("int8", tuple(convert.INT8)),
    ):  # fmt: skip
        for way in ways:
            kernel = convert.make_encode(element, way)
            grid = -(-count // (4 * convert.THREADS))
            call = partial(launcher.launch, kernel, grid, convert.THREADS, (x, codes), machine=machine)
            call()
            seconds, _ = clock.time([call], clock.once(call)[1])
            rows.append({"to": element, "way": way, "seconds": seconds, "bytes_per_second": 5 * count / seconds})
    return rows


def instructions(d: int = 128) -> list[dict[str, Any]]:
    """Instructions of the kernels' main loops for each product 16 deep, for sm_89 and sm_90; none where nothing
    disassembles them."""
    from flashnumba.stages.fp8 import count

    rows = []
    try:
        for arch in ("89", "90a"):
            for name, element in (("mma", "float16"), ("emulated", "float8_e4m3fn"), ("emulated", "float8_e5m2"),
                                  ("k32", "float8_e4m3fn"), ("k32", "float8_e5m2")):  # fmt: skip
                found = count.in_loop(name, element, d, arch)
                per = {opcode: round(found.per(opcode, d), 3) for opcode in found.opcodes}
                about = {"arch": arch, "kernel": f"{name} {element}", "rows": found.rows, "keys": found.keys}
                rows.append(about | per)
    except RuntimeError:
        return []
    return rows
