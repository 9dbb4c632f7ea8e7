"""Inputs for instruction conformance, and the emulation run on them.

For every instruction that only works on registers or on addressed memory, the operands as declared say what to feed it.
Inputs are laid out ``[groups, lanes]`` for a scalar and ``[groups, lanes, count]`` for a fragment; a group is a warp
or a warpgroup. Memory is ``[groups, BYTES]``, and address operands are offsets into the group's part of it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from flashnumba.machine import instructions as _every_family  # noqa: F401  (fills the registry)
from flashnumba.machine.instruction import REGISTRY, Fragment, Instruction, Scalar
from flashnumba.machine.instructions.formats import FORMS, encode
from flashnumba.machine.instructions.fragments import to_fragments

BYTES = 1024
"""Memory of one group."""

DTYPES = {"f32": "float32", "f64": "float64", "u16": "uint16", "u32": "uint32", "i32": "int32", "u64": "uint64",
          "i64": "int64", "pred": "bool", "b32": "uint32"}  # fmt: skip


def recorded_instructions() -> list[Instruction]:
    """The instructions that need a vector: all but those that wait for or order other threads.

    Shuffles and votes, which the emulator runs thread by thread, are among them.
    """
    return [i for i in REGISTRY.values() if i.effect != "control" or (i.family == "warp" and i.returns)]


def lanes_of(declared: Instruction) -> int:
    return 128 if declared.group == "warpgroup" else 32


def space_of(declared: Instruction) -> str:
    """ "shared", "global" or "": an address operand is called ``addr``, 32 bits for shared memory, 64 for global."""
    addresses = [o for o in declared.operands if isinstance(o, Scalar) and o.name == "addr"]
    return {"u32": "shared", "u64": "global"}[addresses[0].type] if addresses else ""


def dtype_of(kind: str) -> np.dtype:
    """NumPy dtype of a register; generic 32-bit ones are recorded as uint32."""
    return np.dtype(DTYPES[kind])


# -- inputs ------------------------------------------------------------------------------------------------------------
def f32_pool(count: int, rng: np.random.Generator) -> np.ndarray:
    """float32 values on which conversions and approximations may go wrong."""
    special = np.array(
        [0x00000000, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
         0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x3F800000, 0xBF800000], np.uint32
    ).view(np.float32)  # fmt: skip
    halfway = []
    for form, top in (("f16", 65504.0), ("bf16", 3.2e38), ("e4m3", 448.0), ("e5m2", 57344.0)):
        size = np.uint8 if FORMS[form].itemsize == 1 else np.uint16
        codes = rng.integers(0, 127 if size is np.uint8 else 0x7BFF, 16).astype(size)
        pair = [c.view(FORMS[form]).astype(np.float64) for c in (codes, codes + size(1))]
        middle = ((pair[0] + pair[1]) / 2).astype(np.float32)
        edge = np.float32([top, top * (1 + 2.0**-4), top * (1 + 2.0**-12), 2.0**-9, 2.0**-10, 2.0**-24, 2.0**-25])
        for values in (middle, edge):
            around = [values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))]
            halfway += around + [-around[0]]
    fixed = np.concatenate([special, *halfway])
    rest = count - fixed.size
    bits = rng.integers(0, 1 << 32, rest // 4, dtype=np.uint32).view(np.float32)
    spread = np.ldexp(rng.uniform(-2, 2, rest // 4), rng.integers(-30, 30, rest // 4)).astype(np.float32)
    near_one = (1 + rng.normal(0, 1, rest // 4) * 2.0 ** -rng.integers(1, 22, rest // 4)).astype(np.float32)
    moderate = rng.normal(0, 40, rest - bits.size - spread.size - near_one.size).astype(np.float32)
    return rng.permutation(np.concatenate([fixed, bits, spread, near_one, moderate]))


def u16_pool(count: int, rng: np.random.Generator) -> np.ndarray:
    """All FP8 codes in both bytes, the 16-bit formats' special codes, random ones."""
    code = np.arange(256)
    special = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFE00,
               0x7FFF, 0xFFFF, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0]  # fmt: skip
    fixed = np.concatenate([code << 8 | (code * 37 + 11) % 256, np.array(special)])
    return rng.permutation(np.concatenate([fixed, rng.integers(0, 1 << 16, count - fixed.size)])).astype(np.uint16)


def _matrices(rng: np.random.Generator, regime: int, k: int, a_form: str, b_form: str) -> tuple[np.ndarray, ...]:
    """One warp's A [16, k], B [k, 8] and C [16, 8] in float64, made to strain one part of the arithmetic."""

    def spread(shape: tuple[int, int], low: float, high: float) -> np.ndarray:
        return rng.choice([-1, 1], shape) * rng.uniform(1, 2, shape) * np.exp2(np.floor(rng.uniform(low, high, shape)))

    low = {"f16": -14, "bf16": -40, "e4m3": -6, "e5m2": -14}
    high = {"f16": 15, "bf16": 40, "e4m3": 8, "e5m2": 15}
    a, b, c = rng.normal(size=(16, k)), rng.normal(size=(k, 8)), rng.normal(size=(16, 8))
    if regime == 1:
        c = np.zeros((16, 8))
    elif regime == 2:  # every exponent the formats have
        a, b = spread((16, k), low[a_form], high[a_form]), spread((k, 8), low[b_form], high[b_form])
        c = spread((16, 8), low[a_form] + low[b_form], high[a_form] + high[b_form])
    elif regime == 3:  # the products cancel but for their last bits
        a[:, k // 2 :], b[k // 2 :] = a[:, : k // 2], -b[: k // 2] * (1 + 2.0**-6)
        c *= 2.0**-16
    elif regime == 4:  # a large accumulator pushes products over the edge
        c = spread((16, 8), 10, 24)
    elif regime == 5:  # one large product pushes the accumulator over the edge
        a[:, 3], b[3] = spread((16, 1), 4, high[a_form])[:, 0], spread((1, 8), 4, high[b_form])[0]
        c = spread((16, 8), -20, 4)
    elif regime == 6:  # subnormal operands
        a, b = a * 2.0 ** {"f16": -17, "bf16": -128, "e4m3": -8, "e5m2": -15}[a_form], spread((k, 8), 0, high[b_form])
        c = spread((16, 8), *((-130, -110) if a_form == "bf16" else (-24, 0)))
    elif regime == 7:  # zeros of both signs beside large numbers
        a = np.where(rng.random((16, k)) < 0.6, rng.choice([0.0, -0.0], (16, k)), a * 2.0 ** low[a_form])
        b = spread((k, 8), low[b_form], high[b_form])
        c = np.where(rng.random((16, 8)) < 0.7, rng.choice([0.0, -0.0], (16, 8)), c * 2.0**-40)
        a[:4] = -0.0
    elif regime == 8:  # infinity and NaN
        a[rng.random((16, k)) < 0.02], b[rng.random((k, 8)) < 0.02] = np.inf, -np.inf
        a[rng.random((16, k)) < 0.01], c[rng.random((16, 8)) < 0.1] = np.nan, np.inf
        a[3] = 0.0
    elif regime == 9:  # about the largest float32
        c = (
            rng.choice([-1, 1], (16, 8))
            * np.float64(np.float32(3.4028235e38))
            * (1 - rng.integers(0, 4, (16, 8)) / 2**24)
        )
        a, b = a * 2.0 ** (high[a_form] - 3), b * 2.0 ** (high[b_form] - 3)
        if a_form == "bf16":
            a, b = a * 2.0**28, b * 2.0**28
    elif regime == 10:  # the smallest of everything
        a, b = a * 2.0 ** (low[a_form] - 1), b * 2.0 ** (low[b_form] - 1)
        if a_form == "bf16":
            a, b = a * 2.0**-32, b * 2.0**-32
        c *= 2.0 ** rng.integers(-150, -126, (16, 8))
    return a, b, c


def mma_inputs(declared: Instruction, rng: np.random.Generator) -> dict[str, np.ndarray]:
    shape, a_form, b_form = re.search(r"(m16n8k\d+)\.row\.col\.f32\.(\w+)\.(\w+)\.", declared.ptx).groups()
    k, made = int(shape.split("k")[1]), {"acc": [], "a": [], "b": []}
    for group in range(22):
        with np.errstate(over="ignore"):
            a, b, c = (m.astype(np.float32) for m in _matrices(rng, group % 11, k, a_form, b_form))
        made["acc"].append(to_fragments(c, "c", shape))
        for name, matrix, form in (("a", a, a_form), ("b", b, b_form)):
            codes = encode(matrix, form)
            if FORMS[form].itemsize == 1:  # encode() saturates; infinities must reach the machine
                codes = np.where(np.isinf(matrix), np.uint8(0x7C if form == "e5m2" else 0x7E), codes)
            made[name].append(to_fragments(codes, name, shape).view(np.uint32)[..., 0])
    return {name: np.stack(values) for name, values in made.items()}


def inputs_of(declared: Instruction) -> dict[str, np.ndarray]:
    """The recorded inputs of an instruction, by operand; the same every time."""
    rng = np.random.default_rng([ord(x) for x in declared.name])
    if declared.name.startswith("mma_"):
        return mma_inputs(declared, rng)
    lanes, space = lanes_of(declared), space_of(declared)
    groups = 2 if space else 4 if declared.group != "thread" else 32
    return {o.name: _operand(declared, o, groups, lanes, rng) for o in declared.operands if _is_read(o)}


def _is_read(operand: Scalar | Fragment) -> bool:
    return not (isinstance(operand, Fragment) and operand.role == "out")


def _operand(
    declared: Instruction, operand: Scalar | Fragment, groups: int, lanes: int, rng: np.random.Generator
) -> np.ndarray:
    shape = (groups, lanes, operand.count) if isinstance(operand, Fragment) else (groups, lanes)
    size, dtype = int(np.prod(shape)), dtype_of(operand.type)
    if operand.name == "addr":
        width = access_width(declared)
        slots = np.stack([rng.permutation(BYTES // 16)[:lanes] for _ in range(groups)])
        return (16 * slots + width * rng.integers(0, 16 // width, (groups, lanes))).astype(dtype)
    if operand.name in ("mask", "members"):
        return np.full(shape, 0xFFFFFFFF, dtype)
    if operand.type == "pred":
        return rng.random(shape) < 0.5
    if (
        operand.type in ("u32", "i32")
        and declared.group == "warp"
        and isinstance(operand, Scalar)
        and operand.name != "x"
    ):
        return rng.integers(0, 32, shape).astype(dtype)  # a lane, a distance
    if dtype == np.float32:
        # One pool for all, so that the file holds it once; operands differ by where they start.
        values = f32_pool(1024, np.random.default_rng(32))
    elif dtype == np.uint16:
        values = u16_pool(1024, np.random.default_rng(16))
    elif dtype == np.uint32:
        pool = u16_pool(1024, np.random.default_rng(16)).astype(np.uint32)
        values = pool | np.roll(pool, 333) << np.uint32(16)
    else:
        values = rng.integers(0, 1 << 63, 1024, dtype=np.uint64).astype(dtype)
    start = 211 * [o.name for o in declared.operands].index(operand.name)
    return np.roll(np.resize(values, size), start).reshape(shape)


def access_width(declared: Instruction) -> int:
    """Bytes that one address stands for."""
    if declared.group != "thread":
        return 16
    data = [o for o in declared.operands if o.name != "addr"]
    kinds = [data[0].type] * getattr(data[0], "count", 1) if data else [declared.returns]
    return sum(dtype_of(kind).itemsize for kind in kinds)


def memory_before(groups: int) -> np.ndarray:
    """Contents of memory before the instruction, ``[groups, BYTES]``."""
    return np.random.default_rng(1024).integers(0, 256, (2, BYTES), dtype=np.uint8)[:groups]


# -- the emulation -----------------------------------------------------------------------------------------------------
class PlainMemory:
    """What an emulation asks of memory, over one array of bytes and with no checks but bounds and alignment."""

    def __init__(self, data: np.ndarray):
        self.data = data

    def _index(self, addresses: Any, nbytes: int) -> np.ndarray:
        addresses = np.asarray(addresses).astype(np.int64)
        assert (
            (addresses % nbytes == 0).all() and (addresses >= 0).all() and (addresses + nbytes <= self.data.size).all()
        )
        return addresses[..., None] + np.arange(nbytes)

    def read_shared(self, addresses: Any, nbytes: int) -> np.ndarray:
        return self.data[self._index(addresses, nbytes)]

    def write_shared(self, addresses: Any, data: np.ndarray) -> None:
        self.data[self._index(addresses, data.shape[-1])] = data

    read_global, write_global = read_shared, write_shared


def emulated(
    declared: Instruction, inputs: dict[str, np.ndarray], before: np.ndarray | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """The emulation's outputs for recorded inputs, group by group, and memory afterwards."""
    if declared.effect == "control":
        return launched(declared, inputs), None
    names = ["result"] if declared.returns else []
    names += [o.name for o in declared.operands if isinstance(o, Fragment) and o.role != "in"]
    order = [o.name for o in declared.operands if _is_read(o)]
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in names}
    after = None if before is None else before.copy()
    for group in range(len(next(iter(inputs.values())))):
        given = [inputs[name][group].copy() for name in order]
        if after is not None:
            given.insert(0, PlainMemory(after[group]))
        made = declared.emulate(*given)
        for name, value in zip(names, made if isinstance(made, tuple) else (made,), strict=False):
            outputs[name].append(np.asarray(value))
    return {name: np.stack(values) for name, values in outputs.items()}, after


def launched(declared: Instruction, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As :func:`emulated`, by a launch of the recording kernel: for an emulation that works thread by thread."""
    from flashnumba.machine.emulator import launch
    from flashnumba.machine.function import Kernel
    from tests.machine.conformance import record

    lanes, groups = lanes_of(declared), len(next(iter(inputs.values())))
    function, parameters = record.kernel_of(declared, numba=False)
    outputs = {f"out_{name}": array for name, array in record.outputs_of(declared, groups).items()}
    given = {f"in_{name}": values for name, values in inputs.items()} | outputs
    launch(Kernel(function, threads=lanes), groups, lanes, [given[name] for name in parameters])
    return {name.removeprefix("out_"): array for name, array in outputs.items()}
