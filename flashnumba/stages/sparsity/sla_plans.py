"""Which kernels SLA launches, with what arguments: the forward, the gradients, and what they leave for one another.

Forward: ``states``, ``classify`` (or, for a map of the caller's, ``row lists``), ``gather``, ``attend``.
Backward: ``key lists``, ``rows``, ``gather`` transposed, ``keys``, ``dq``, ``dk dv``, ``project``, ``add up``.

Tiles have 64 or 128 columns (:data:`~.sla_pieces.DIMENSIONS`), and any head dimension up to that lies in one of them:
columns that are not there are zeros in each tile, and so in states and sums.

Of fewer heads of keys than of queries ``states`` and ``keys`` have one for each head of keys, and all that is a row
tile's one for each head of queries. ``gather`` sees the row tiles of a group one after the other, as one head: the
gradient's product with W transposed is then a sum over the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashnumba.machine.numba import types
from flashnumba.stages.gemm.waves import multiprocessors
from flashnumba.stages.heads import Launch, Plan, Shape
from flashnumba.stages.sparsity import (
    sla_backward,
    sla_copies,
    sla_forward,
    sla_gather,
    sla_linear_backward,
    sla_states,
)
from flashnumba.stages.sparsity.sla_lists import (
    CLASSIFY_THREADS,
    KEY_THREADS,
    classify_held,
    classify_rows,
    classify_shared,
    make_classify,
    make_key_lists,
    make_row_lists,
)
from flashnumba.stages.sparsity.sla_pieces import DIMENSIONS, width_of
from flashnumba.stages.sparsity.sla_reference import BLOCK
from flashnumba.tiles.forward import tier

if TYPE_CHECKING:
    from flashnumba.machine.compiler import CompileCase

__all__ = ["DEFAULT", "Options", "compile_cases", "plan_backward", "plan_forward", "signature", "sizes", "tiles_of"]

CLAIMED = ("90a", "80", "86", "89", "100a", "120a")
"""What kernels are compiled for."""
OF_SM_90 = ("sparsity.sla attend", "sparsity.sla dk dv", "sparsity.sla gather", "sparsity.sla gather back",
            "sparsity.sla rows backward", "sparsity.sla classify")  # fmt: skip
"""Those that are others on sm_90, at D = 128."""
OF_GROUPS = ("sparsity.sla classify", "sparsity.sla attend", "sparsity.sla key lists", "sparsity.sla dq",
             "sparsity.sla dk dv")  # fmt: skip
"""Those that are others where heads of queries share one of keys."""
OF_COLUMNS = ("sparsity.sla states", "sparsity.sla attend", "sparsity.sla rows backward", "sparsity.sla keys backward",
              "sparsity.sla dq", "sparsity.sla dk dv", "sparsity.sla project")  # fmt: skip
"""Those that are others where a head dimension is not their tiles'."""
PARTS = 264
"""Blocks that share out dproj: two for each multiprocessor of an H200."""
OF_INPUT = ("q", "k", "v", "do", "o", "dq", "dk", "dv")
SCALARS = {
    "scale": types.float32, "causal": types.int32, "rows": types.int64, "keys": types.int64, "critical": types.int64,
    "negligible": types.int64, "unit": types.float32, "eps": types.float32,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How SLA is computed, checked by :func:`flashnumba.stages.sparsity.sla.check_options`.

    Attributes:
        critical, negligible: shares of a row's tiles.
        feature_map, form, eps: as :mod:`~flashnumba.stages.sparsity.sla_reference` says them.
        projected: there is a projection; without one it is the identity.
    """

    critical: float = 0.05
    negligible: float = 0.10
    feature_map: str = "softmax"
    form: str = "paper"
    eps: float = 0.0
    projected: bool = True


DEFAULT = Options()
"""The authors' shares, and the paper's form."""


def sizes(shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Elements and shape of everything that kernels leave for one another, by name."""
    b, h, kv, m, n, element = shape.batch, shape.heads, shape.kv_heads, shape.m, shape.n, shape.element
    (i, j), d = tiles_of(shape), width_of(shape.d)
    parts = min(PARTS, b * kv * j)
    return {
        "dv_l": (element, (b, kv, n, d)),
        "q_means": ("float32", (b, h, d, i)), "k_means": ("float32", (b, kv, d, j)), "classes": ("int8", (b, h, i, j)),
        "lists": ("int32", (b, h, i, j)), "counts": ("int32", (b, h, i)),
        "key_lists": ("int32", (b, kv, j, h // kv * i)), "key_counts": ("int32", (b, kv, j)),
        "weights": (element, (b, h, i, -(-j // 8) * 8)),
        **dict.fromkeys(("states", "dstates"), (element, (b, kv, j, d * (d + 1)))),
        **dict.fromkeys(("sums", "dsums"), (element, (b, h, i, d * (d + 1)))),
        **dict.fromkeys(("lse", "origin", "bias", "share", "delta"), ("float32", (b, h, m))),
        "parts": ("float32", (parts, d, d)), "dproj": ("float32", (shape.d, shape.d)), "proj": (element, (d, d)),
    }  # fmt: skip


def tiles_of(shape: Shape) -> tuple[int, int]:
    """Row tiles and key tiles of a head."""
    return -(-shape.m // BLOCK), -(-shape.n // BLOCK)


def plan_forward(shape: Shape, options: Options = DEFAULT, *, given: bool = False) -> Plan:
    """The forward; ``given``: the map is the caller's."""
    element, arch, all_heads, of_keys = shape.element, tier(shape.arch), shape.batch * shape.heads, kv_heads_of(shape)
    (i, j), d, how = tiles_of(shape), width_of(shape.d), columns_of(shape)
    attend, lists = sla_forward.forward_tiles(d, shape.arch, **how), ("lists", "counts", "weights")
    resident = sla_states.states_blocks(d, options.projected, **how) * multiprocessors()
    launches = [
        Launch(
            sla_states.make_states(d, element, options.feature_map, options.projected, not given, arch, **how),
            min(sla_states.states_items(i * all_heads, j * of_keys, not given), resident), 128,
            sla_states.states_shared(d, options.projected), ("q", "k", "v", "proj", "q_means", "k_means", "states"),
        ),
    ]  # fmt: skip
    if given:
        of_map = ("classes", *lists, "unit")
        launches.append(Launch(make_row_lists(element, options.form, arch), i * all_heads, 32, 0, of_map))
    else:
        rows, numbers = classify_rows(j), ("rows", "keys", "critical", "negligible", "unit", "causal")
        blocks = (4 if rows <= 8 else 3) if shape.arch == "90a" else 2  # a multiprocessor, by registers
        classify = make_classify(
            d, element, options.form, rows, classify_held(j), blocks, arch, grouped=shape.group > 1
        )
        of_map = ("q_means", "k_means", "classes", *lists, *numbers)
        grid = -(-i // rows) * all_heads
        launches.append(Launch(classify, grid, CLASSIFY_THREADS, classify_shared(j, d), of_map))
    launches += [
        sla_gather.plan_gather(shape, False),
        Launch(
            sla_forward.make_attend(attend, element, options.feature_map, arch, grouped=shape.group > 1, **how),
            i * all_heads, attend.threads, attend.shared,
            ("q", "k", "v", "o", "lse", "origin", "bias", "share", "lists", "counts", "sums", "scale", "eps", "causal"),
        ),
    ]  # fmt: skip
    return Plan(tuple(launches), scratch_of(shape, launches))


def plan_backward(shape: Shape, options: Options = DEFAULT) -> Plan:
    """The gradients, from what the forward has kept."""
    element, arch, all_heads, kv_heads = shape.element, tier(shape.arch), shape.batch * shape.heads, kv_heads_of(shape)
    (i, j), d, how, grouped = tiles_of(shape), width_of(shape.d), columns_of(shape), shape.group > 1
    of_rows, of_keys = sla_backward.dq_tiles(d, shape.arch), sla_backward.dkdv_tiles(d, shape.arch)
    statistics = ("delta", "origin", "bias")
    of_rows_blocks = 3 if d > 64 and shape.arch == "90a" else 0  # where shared memory admits so many
    key_blocks, parts, linear = -(-j // KEY_THREADS) * kv_heads, min(PARTS, j * kv_heads), sla_linear_backward
    launches = [
        Launch(make_key_lists(grouped=grouped), key_blocks, KEY_THREADS, 0, ("classes", "key_lists", "key_counts")),
        Launch(
            linear.make_rows(d, element, options.feature_map, of_rows_blocks, arch, **how), i * all_heads, 128,
            linear.rows_shared(d),
            ("do", "o", "q", "sums", "share", "dq", "dsums", "delta"),
        ),
        sla_gather.plan_gather(shape, True),
        Launch(
            linear.make_keys(d, element, options.feature_map, options.projected, arch, **how), j * kv_heads, 128,
            linear.keys_shared(d, options.projected), ("k", "v", "proj", "dstates", "dk", "dv", "dv_l"),
        ),
        Launch(
            sla_backward.make_dq(of_rows, element, arch, grouped=grouped, **how), i * all_heads, of_rows.threads,
            of_rows.shared,
            ("q", "k", "v", "do", "dq", *statistics, "lists", "counts", "scale", "causal"),
        ),
        Launch(
            sla_backward.make_dkdv(of_keys, element, arch, grouped=grouped, **how), j * kv_heads, of_keys.threads,
            of_keys.shared,
            ("q", "k", "v", "do", "dk", "dv", *statistics, "key_lists", "key_counts", "scale", "causal"),
        ),
    ]  # fmt: skip
    if options.projected:
        launches += [
            Launch(
                linear.make_project(d, element, arch, **how), parts, 128, linear.project_shared(d),
                ("v", "dv_l", "parts"),
            ),
            Launch(linear.make_add_up(), -(-shape.d * shape.d // 128), 128, 0, ("parts", "dproj")),
        ]  # fmt: skip
    return Plan(tuple(launches), scratch_of(shape, launches))


def kv_heads_of(shape: Shape) -> int:
    """Heads of keys, of all batches."""
    return shape.batch * shape.kv_heads


def columns_of(shape: Shape) -> dict[str, int]:
    """How kernels are told the head dimension, where it is not their tiles'."""
    return {} if shape.d in DIMENSIONS else {"columns": shape.d}


def scratch_of(shape: Shape, launches: list[Launch]) -> dict[str, tuple[int, ...]]:
    known, aliases = sizes(shape), sla_gather.ALIASES
    names = [aliases.get(name, name) for launch in launches for name in launch.args]
    return {name: known[name][1] for name in names if name in known}


def signature(shape: Shape, args: tuple[str, ...]) -> tuple[Any, ...]:
    """Numba types of a kernel's arguments: the caller's arrays of any strides, the others packed."""
    plain = {"float16": types.float16, "bfloat16": types.uint16}[shape.element]
    known = {name: types.Array(plain, 4, "A") for name in OF_INPUT} | SCALARS
    known |= sla_gather.numba_types()
    for name, (kind, size) in sizes(shape).items():
        of = plain if kind == shape.element else getattr(types, kind)
        known[name] = types.Array(of, len(size), "A" if name == "proj" else "C")
    known |= {name: known[array] for name, array in sla_gather.ALIASES.items() if name not in known}
    return tuple(known[a] for a in args)


def compile_cases() -> Iterator[CompileCase]:
    """Kernels as they are launched, for the compiler's tables and gates: all of them at D = 128, those whose registers
    depend on D at 64; those that are others for fewer columns at 96 and 40, for groups of heads at 96 and 128."""
    from flashnumba.machine.compiler import CompileCase

    def cases(
        element: str, d: int, chosen_for: tuple[str, ...], only: tuple[str, ...] = (), group: int = 1
    ) -> Iterator[CompileCase]:
        shape = Shape(element, 1, group, 1, 4096, 4096, d, arch=chosen_for[0])
        for launch in (*plan_forward(shape).launches, *plan_backward(shape).launches):
            name = launch.kernel.name
            if (only and name not in only) or (not only and name in OF_SM_90):
                continue
            of = f"{element} d {d}{f', groups of {group}' if group > 1 else ''}"
            title = f"{name} {of}, tiles for sm_{chosen_for[0]}"
            wanted = signature(shape, launch.args)
            yield CompileCase(title, launch.kernel, wanted, launch.threads, launch.shared, chosen_for=chosen_for)

    others = tuple(arch for arch in CLAIMED if arch != "90a")
    yield from cases("float16", 128, CLAIMED)
    yield from cases("float16", 128, ("90a",), OF_SM_90)
    yield from cases("bfloat16", 128, ("90a",), OF_SM_90)
    yield from cases("float16", 128, others, OF_SM_90)
    of_both = "sparsity.sla states", "sparsity.sla rows backward", "sparsity.sla dq"
    yield from cases("float16", 64, CLAIMED, (*OF_SM_90[:2], *of_both))
    for chosen_for in (("90a",), others):
        yield from cases("float16", 96, chosen_for, OF_COLUMNS, group=2)
        yield from cases("float16", 128, chosen_for, OF_GROUPS, group=2)
    yield from cases("float16", 40, CLAIMED, ("sparsity.sla states", "sparsity.sla attend", "sparsity.sla dk dv"))
    wanted = sla_copies.copy_signature("float16")
    yield CompileCase("sparsity.sla copy float16", sla_copies.copy_columns, wanted, sla_copies.COPY_THREADS)
