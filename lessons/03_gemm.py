# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. Matrix products: where does an element come from when it is used again?
#
# Attention is two matrix products with a softmax between them, and nearly all of its arithmetic is in the products. A
# product uses every number it reads many times over. Its speed depends on one thing: where the number comes from the
# second time.
#
# ## What you will be able to do
#
# - say what arithmetic intensity is, compute it for a tile, and read from a roofline what limits a kernel;
# - follow six kernels from one thread an element to tensor cores, and say what each one changed and what that bought;
# - count the bytes that each asks of memory, and check the count on the emulator;
# - find the bank of a 16-byte chunk, with and without the swizzle, and count the cycles of an `ldmatrix`;
# - draw how a ring of slots hides the way from memory, with `cp.async` and with a producer of its own;
# - read what the emulator says when a barrier or a wait is missing, and know which fault it cannot see.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap

from flashnumba import lesson
from flashnumba.commands.walkthrough import unable
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.ladder import find, measure
from flashnumba.machine.emulator import Fault, launch
from flashnumba.machine.emulator.accesses import record
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions.fragments import a_map, b_map, c_map
from flashnumba.machine.numba import cuda, float32, uint32
from flashnumba.machine.occupancy import NOTES, budget, draw_budget, machine_of
from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE, RED
from flashnumba.stages.gemm import mma, multistage, reference, simt, warp_specialised, wgmma
from flashnumba.stages.gemm.matmul import KERNELS, matmul
from flashnumba.stages.gemm.problem import Shape
from flashnumba.tiles.raster import make_raster
from flashnumba.tiles.swizzle import place_of

lesson.style()
stage = find("gemm")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# $A$ is $M \times K$, $B$ is $K \times N$, and
#
# $$C_{ij} = \sum_{k} A_{ik} B_{kj}.$$
#
# That is $MNK$ multiplications and as many additions, $2MNK$ operations, on $MK + KN$ numbers. Each element of $A$ is
# used $N$ times and each of $B$ is used $M$ times.
#
# Cut $C$ into tiles of $b_m \times b_n$. A tile of $C$ needs $b_m$ rows of $A$ and $b_n$ columns of $B$. Cut these
# along $k$ too, and the tile is a sum of products of small matrices:
#
# $$C_{IJ} = \sum_{L} A_{IL} B_{LJ}$$
#
# The formula is the same, with matrices in place of numbers. What changes is the traffic. If the small matrices lie in
# a fast memory while they are multiplied, an element of $A$ is fetched once for $b_n$ elements of $C$, and one of $B$
# once for $b_m$. For each element of $C$ and each step of $k$ the slow memory must deliver
#
# $$\Big(\frac{1}{b_n} + \frac{1}{b_m}\Big)\, s \quad\text{bytes,}$$
#
# with $s$ bytes an element. The operations done for one byte are the **arithmetic intensity**. A step of $k$ is two
# operations, so a square tile of $t \times t$ has the intensity $t / s$: twice the tile, half the traffic.
#
# A machine has a balance of its own: operations a second over bytes a second. Below it, memory sets the pace; above it,
# arithmetic does. An H200 does 67 TFLOP/s of float32 and 989 TFLOP/s of float16 on tensor cores, and its memory moves
# 4.8 TB/s (NVIDIA's figures).
#
# **Predict.** How large must a square tile be so that memory is not the limit, in float32 on CUDA cores? In float16 on
# tensor cores?

# %%
PEAK = {"float32": 67e12, "float16": 989e12}  # operations a second, float16 dense on tensor cores
MEMORY = 4.8e12  # bytes a second
ITEMSIZE = {"float32": 4, "float16": 2}
lesson.table(
    ("", "operations a byte, the machine", "smallest square tile", "its sums in float32, KB"),
    [
        (element, peak / MEMORY, round(peak / MEMORY * s), round((peak / MEMORY * s) ** 2 * 4 / 1024))
        for (element, peak), s in zip(PEAK.items(), ITEMSIZE.values(), strict=True)
    ],
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(8.5, 4))
tile = 2.0 ** np.arange(0, 11)
for (element, s), color in zip(ITEMSIZE.items(), (BLUE, GREEN), strict=True):
    ax.loglog(tile, tile / s, "o-", ms=4, color=color, label=f"t x t tiles, {element}")
    ax.axhline(PEAK[element] / MEMORY, color=color, ls="--", lw=1)
    ax.text(1, PEAK[element] / MEMORY * 1.12, f"an H200 needs {PEAK[element] / MEMORY:.0f} in {element}", color=color)
ax.axvspan(256, 1024, color="#eceff1", lw=0)
ax.text(512, 0.32, "sums do not fit\ninto the registers", ha="center", fontsize=9, color=GREY)
ax.set_xscale("log", base=2)
ax.set_xticks(tile, [f"{t:.0f}" for t in tile])
ax.set(xlabel="tile size t", ylabel="operations a byte", title="arithmetic intensity of a tile", xlim=(0.9, 1024))
ax.legend(fontsize=9, loc="lower right", bbox_to_anchor=(0.78, 0))
plt.show()

# %% [markdown]
# In float32 a tile of 64 x 64 will do. In float16 a tile of 412 x 412 would be needed, and its sums alone take 663 KB,
# where a multiprocessor has 256 KB of registers. So **no tile is large enough** for tensor cores, if everything comes
# from device memory. The way out is a second level: neighbouring blocks share rows of $A$ and columns of $B$ through
# the L2 cache. We come back to it at the roofline.
#
# ## The reference
#
# The product in float64, all at once; and the order in which a blocked product takes its tiles; and their sum.

# %%
lesson.show_source(reference.naive)

# %%
lesson.show_source(reference.tiles, first="for row in range")

# %%
lesson.show_source(reference.blocked, first="(m, k), n")

# %% [markdown]
# Every kernel from `shared_tile` on is this loop. They differ in who has the tile.
#
# ## The kernels
#
# ### `naive`: one thread an element
#
# The formula as it stands. Each thread has an element of $C$ and walks along a row of $A$ and down a column of $B$.
#
# (Real source has words that this lesson does not need. `short`, `swapped`, `before`, `after`, `unmasked`,
# `everything`, and later `barrier`, `meets`, `waits_full`, `fences`, `fresh`, `early` and their like are constants that
# plant a fault, as *Break it* does; here each has the value that makes the kernel right. `down_a` and `down_b` say that
# an operand is stored column by column.)

# %%
naive = simt.plan_naive(Shape.packed("float32", 64, 64, 32)).kernel
lesson.show_source(naive)

# %%
lesson.show_source(naive, part="product")

# %% [markdown]
# ### `coalesced`: the lanes the other way round
#
# **Changed:** two lines. The lanes of a warp take neighbours of a *row* of $C$ instead of a column.

# %%
coalesced = simt.plan_coalesced(Shape.packed("float32", 64, 64, 32)).kernel
lesson.show_source(coalesced, first="row = ", last="col = ")

# %% [markdown]
# **Predict.** Both operands are row-major. Memory hands out sectors of 32 bytes. How many sectors does a warp ask for
# in one step of $k$, before and after?
#
# Before: 32 rows of $A$, 32 sectors, of each of which one float is used; and one element of $B$. That is 33 sectors for
# 32 elements of $C$, **33 bytes** a step and element. After: one element of $A$, and 32 neighbours of $B$ in 4 sectors:
# **5 bytes**. **Bought:** nearly seven times less traffic, for two lines.
#
# ### `shared_tile`: fetch once, use 32 times
#
# **Changed:** a block of 32 x 32 threads loads a tile of $A$ and one of $B$ into shared memory. Each thread loads one
# element of each and then reads 64.

# %%
shared_tile = simt.make_shared_tile("float32", 32)
lesson.show_source(shared_tile)

# %%
lesson.show_source(shared_tile, part="fill")

# %% [markdown]
# Two barriers: nobody reads a tile before it is whole, and nobody overwrites it while it is read. **Bought:** an
# element is fetched once for 32 elements of $C$, a quarter of a byte a step and element instead of 5.
#
# Now *shared* memory sets the pace. A multiplication takes two reads of it. A multiprocessor reads 32 floats in a clock
# and multiplies 128. So this kernel can use an eighth of the arithmetic at most, about 8 of 67 TFLOP/s.
#
# ### `register_tile`: the same step once more, from shared memory to registers
#
# **Changed:** a thread has a patch of $t_m \times t_n$ elements of $C$. It reads $t_m$ floats of $A$ and $t_n$ of $B$
# and multiplies each with each. It is a blocked product again, whose fast memory is the registers.
#
# **Predict.** A patch of 16 x 8, and loads of 4 floats: how many loads for how many multiplications?

# %%
register_tile = simt.plan_of(Shape.packed("float32", 4096, 4096, 4096), simt.LARGE).kernel
lesson.show_source(register_tile, part="take")

# %%
lesson.show_source(register_tile, part="multiply")

# %%
lesson.show_source(register_tile, first="for _ in range", last="frag, 1)")

# %% [markdown]
# Six loads for 128 multiplications, where `shared_tile` has 256. `all_but_the_last` is `take` and `multiply` in turn
# for the steps of a tile: `take` loads the fragments of the next step while `multiply` works on those of this one;
# `fetch_a` and `fetch_b` bring the next tile into registers meanwhile, and `put_a` and `put_b` lay it down in the
# *other* of two places in shared memory, so that one barrier a tile is enough. **Bought:** blocks of 128 x 128 ask for
# 1/16 byte a step and element, and the multiplications have few loads in their way: 50.7 TFLOP/s on an H200, where
# cuBLAS has 51.4. (Speeds here are of products of 4096 x 4096 x 4096.)
#
# ### `mma`: tensor cores
#
# **Changed:** `mma.sync` multiplies 16 x 16 by 16 x 8 in one instruction of a warp, 2048 multiplications, 64 a lane.
# The operands are float16 or bfloat16, the sums float32. Each lane holds a few elements of each operand, its
# *fragment*; `ldmatrix` brings four 8 x 8 matrices from shared memory into that order.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), width_ratios=(16, 8, 8))
for ax, (name, places, size) in zip(
    axes,
    (("A", a_map("m16n8k16"), (16, 16)), ("B", b_map("m16n8k16"), (16, 8)), ("C", c_map("m16n8k16"), (16, 8))),
    strict=True,
):
    owner = np.empty(size, int)
    lane = np.arange(32).reshape(-1, *[1] * (places.ndim - 2))
    owner[places[..., 0], places[..., 1]] = np.broadcast_to(lane, places.shape[:-1])
    ax.imshow(owner // 4, cmap="Pastel1", vmin=0, vmax=8, aspect="auto", extent=(0, size[1], size[0], 0))
    for (row, col), number in np.ndenumerate(owner):
        mine = {"color": RED, "fontweight": "bold"} if number == 5 else {}
        ax.text(col + 0.5, row + 0.5, number, ha="center", va="center", fontsize=8, **mine)
    each = places[0].size // 2
    ax.set_title(f"{name}: {size[0]} x {size[1]}, {each} elements a lane", fontsize=10)
    ax.set(xticks=range(0, size[1] + 1, 4), yticks=range(0, 17, 4))
    ax.set(xlabel="k" if name == "A" else "column", ylabel="k" if name == "B" else "row")
plt.show()

# %% [markdown]
# The number is the lane that holds the element; lane 5 is red. Lanes hold pairs of neighbouring $k$, as 32-bit
# registers. A warp works through its tile in such pieces:

# %%
mma_large = mma.plan_of(Shape.packed("float16", 4096, 4096, 4096), mma.LARGE).kernel
lesson.show_source(mma_large, part="multiply")

# %% [markdown]
# And the loop. `start_tile` starts the copies of a tile by `cp.async`, from memory to shared memory past the registers;
# `wait_next` waits until the next tile has come; `fill` and `read` are slots of a ring, of which more below.

# %%
lesson.show_source(mma_large, first="for _ in range((k + bk - 1)", last="multiply(acc, fa, fb, s & 1)")

# %% [markdown]
# A warp has 64 x 64 of $C$, a block 128 x 256. **Bought:** 479 TFLOP/s, nine times the CUDA cores.
#
# ### `wgmma`: one warpgroup does nothing but load
#
# **Changed:** `wgmma` multiplies 64 x 16 by 16 x 256 in one instruction of four warps, straight from shared memory: no
# `ldmatrix`, no fragments of operands. Copies are made by the copy engine (TMA), for a whole tile at a time, at the
# request of one thread. So the warpgroups have roles. The producer:

# %%
wgmma_large = wgmma.plan_of(Shape.packed("float16", 4096, 4096, 4096), wgmma.LARGE).kernel
lesson.show_source(wgmma_large, part="run.produce", first="while tile <", last="tile = uint32(tile")

# %% [markdown]
# and two consumers, each with 64 rows of the block's 128:

# %%
lesson.show_source(wgmma_large, part="run.consume", first="while tile <", last="tile = uint32(tile")

# %% [markdown]
# Two barriers a slot carry it: `full` says that the bytes have come, `empty` that the products are done with them.
# `wgmma` only *starts* the products of a slot: `wgmma_fence` lets no product start before the sums' registers hold what
# was last written to them, `wgmma_commit` closes the group, and `all_but_one` waits until the group *before* is done,
# whose slot can then be let go. A block stays for many tiles of $C$, and the producer does not wait while the consumers
# store one. **Bought:** 736 TFLOP/s, where cuBLAS has 771.
#
# ### All six
#
# **Predict.** Which column explains which step?


# %%
def shared_reads(rows: int, cols: int) -> float:
    """Elements read from shared memory for a multiplication, by whoever has ``rows`` x ``cols`` of C."""
    return (rows + cols) / (rows * cols)


OWNER = {
    "naive": ("a thread", (1, 1)), "coalesced": ("a thread", (1, 1)),
    "shared_tile": ("a thread", (1, 1)), "register_tile": ("a thread", (16, 8)), "mma": ("a warp", (64, 64)),
    "wgmma": ("a warpgroup", (64, 256)),
}  # fmt: skip
ELEMENT = {rung.name: "float32" if rung.tier == "simt" else "float16" for rung in stage.kernels}
TRAFFIC = {rung.name: rung.traffic.per_step(ITEMSIZE[ELEMENT[rung.name]]) for rung in stage.kernels}
lesson.table(
    ("kernel", "element", "tile of C", "bytes from memory", "sums are with", "each has of C", "elements it reads"),
    [
        (
            rung.name, ELEMENT[rung.name], str(rung.traffic), TRAFFIC[rung.name], OWNER[rung.name][0],
            "{} x {}".format(*OWNER[rung.name][1]), shared_reads(*OWNER[rung.name][1]),
        )
        for rung in stage.kernels
    ],
    "Bytes for an element of C and a step of k, by count. Elements for a multiplication, from shared memory; in the "
    "first two, from memory.",
)  # fmt: skip

# %% [markdown]
# The first two steps are in the bytes from memory, and in nothing else. `register_tile` and `mma` ask less of memory
# *and* of shared memory. The last step is in neither column: it is the instruction, and who has to wait for whom.
#
# ## On real data
#
# Scores of one head of a trained transformer, $Q K^T$ in float16 ($K^T$ is column-major: columns are packed); and
# softmax weights times $V$ in float32, cut to sizes that fit no tile. Each result is compared with float64. The budget
# is twice what the same mathematics loses in float32 and in rounding the result, plus four float32 steps. (A budget of
# 0.2 is not loose: these scores, not yet divided by $\sqrt D$, reach some hundreds, where neighbours in float16 are
# 0.25 apart.)

# %%
with lesson.timed(f"all on the {machine}"):
    results = [
        measure(stage, rung, case, machine, unable(rung, machine))
        for case in stage.cases(machine, False)
        for rung in stage.rungs
        if rung.takes(case)
    ]
lesson.table(
    ("kernel", "machine", "M x N x K", "largest error", "budget", "verdict"),
    [
        (r.rung.name, r.machine, r.case.size, r.comparison.error, r.comparison.budget, r.verdict)
        for r in results
        if r.comparison
    ],
)

# %%
stage.draw(results)

# %% [markdown]
# Above left is the step from `naive` to `coalesced`: what one warp loads (dark) and the sectors that memory hands out
# for it (pale). Above right is the whole ladder, on a logarithmic scale. The banks below left have a section of their
# own. Below right: all rungs make the same error, since all add in float32 and round once.

# %% [markdown]
# ## Who reads what
#
# The emulator can write down every access. Below, $A$ is 64 x 32 and $B$ is 32 x 64, float32; the register tile has 64
# x 64 here, so that the picture stays small.
#
# **Predict.** Take the elements of $A$ and $B$ that *one block* reads. How often does it read each?

# %%
shape = Shape.packed("float32", 64, 64, 32)
a, b, c = np.ones((64, 32), np.float32), np.ones((32, 64), np.float32), np.empty((64, 64), np.float32)
plans = {
    "naive": simt.plan_naive(shape),
    "coalesced": simt.plan_coalesced(shape),
    "shared_tile": replace(simt.plan_shared_tile(shape), kernel=shared_tile, grid=4, threads=1024),
    "register_tile": simt.plan_of(shape, simt.MEDIUM),
}
with lesson.timed("four kernels, all accesses written down"):
    runs = {
        name: record(plan.kernel, plan.grid, plan.threads, (a, b, c), shared=plan.shared, checks=False)
        for name, plan in plans.items()
    }


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def often(run, array: str, like: np.ndarray, *, store: bool = False) -> np.ndarray:
    """How often block 0 reads (or writes) each element."""
    entries = run.of(array, store=store, block=0)
    change = np.zeros(like.size + 1, np.int64)
    np.add.at(change, entries["offset"] // like.itemsize, 1)
    np.add.at(change, (entries["offset"] + entries["nbytes"]) // like.itemsize, -1)
    return change.cumsum()[:-1].reshape(like.shape)


figure, axes = plt.subplots(1, 4, figsize=(13, 4.3))
reads = ListedColormap(["#eceff1", "#a6cee3", "#5aa0cf", "#08519c"])
levels = BoundaryNorm([-0.5, 0.5, 1.5, 16, 64], 4)
for ax, (name, run) in zip(axes, runs.items(), strict=True):
    gap = 4
    for array, like, left, top in (("a", a, 0, 32 + gap), ("b", b, 32 + gap, 0), ("c", c, 32 + gap, 32 + gap)):
        counts = often(run, array, like, store=array == "c")
        colors = {"cmap": reads, "norm": levels}
        if array == "c":
            colors = {"cmap": ListedColormap(["#eceff1", GREEN]), "vmin": 0, "vmax": 1}
        where = (left, left + like.shape[1], top + like.shape[0], top)
        ax.imshow(counts, extent=where, interpolation="nearest", **colors)
        reads_each = "once each" if counts.max() == 1 else f"{counts.max()} times each"
        some = f"{(counts > 0).sum()} written" if array == "c" else reads_each
        below = top - 1.5 if array == "b" else where[2] + 5
        ax.text(left + like.shape[1] / 2, below, f"{array.upper()}: {some}", ha="center", fontsize=8)
    ax.set(xlim=(-1, 102), ylim=(107, -7), xticks=[], yticks=[], title=name)
    ax.spines[:].set_visible(False)
plt.show()

# %% [markdown]
# Blue is what block 0 reads, darker for oftener; green is what it writes. `naive` and `coalesced` read the same element
# 8 or 32 times, once for each thread that needs it. From `shared_tile` on, a block reads what it needs **once**, and
# the larger its piece of $C$, the less that is for each element of $C$. `mma` and `wgmma` do the same with 128 x 256.
#
# ### Bytes by count
#
# **Predict.** Each kernel computes the same 64 x 64 x 32. How many bytes does each ask for? For the first two, count
# sectors, as memory does.

# %%
rows = []
for name, run in runs.items():
    useful = run.report.loaded
    sectors = 32 * int(run.sectors("a").sum() + run.sectors("b").sum())
    moved = sectors if name in ("naive", "coalesced") else useful
    tile = {"register_tile": 2 / 64 * 4}.get(name, TRAFFIC[name])
    rows.append((name, "float32", "64 x 64 x 32", useful, moved, moved / (64 * 64 * 32), tile))

left, right = np.ones((128, 64), np.float16), np.ones((64, 256), np.float16)
shape = Shape.packed("float16", 128, 256, 64)
for name, plan in {"mma": mma.plan_of(shape, mma.LARGE), "wgmma": wgmma.plan_of(shape, wgmma.LARGE)}.items():
    args = plan.arguments(left, right, np.empty((128, 256), np.float16))
    loaded = launch(plan.kernel, plan.grid, plan.threads, args, shared=plan.shared, checks=False).loaded
    rows.append((name, "float16", "128 x 256 x 64", loaded, loaded, loaded / (128 * 256 * 64), TRAFFIC[name]))
lesson.table(
    ("kernel", "element", "M x N x K", "bytes asked for", "bytes moved", "an element and step", "by formula"), rows
)

# %% [markdown]
# Counted and computed agree. "Moved" is in whole sectors for the first two kernels, whose lanes leave sectors half used
# or ask for one element together. What this comes to at 4096 cubed:

# %%
SIZE = 4096
lesson.table(
    ("4096 cubed", "element", "GB from memory, by count", "ms for that at 4.8 TB/s", "ms for the arithmetic"),
    [
        (name, ELEMENT[name], t * SIZE**3 / 1e9, t * SIZE**3 / MEMORY * 1e3, 2 * SIZE**3 / PEAK[ELEMENT[name]] * 1e3)
        for name, t in TRAFFIC.items()
    ],
)

# %% [markdown]
# ### Banks
#
# Shared memory has 32 banks of 4 bytes. In one cycle each gives one word, 128 bytes together. `ldmatrix` reads 8 x 8
# matrices: eight rows of a tile, 16 bytes of each. If the eight rows lie in different banks, that takes one cycle; if
# they all lie in the same four, it takes eight.
#
# **Predict.** Rows of a tile are 64 bytes long (32 steps of $k$), 128 bytes (64 steps), or 512 (256 columns of $B$).
# The tile is stored row by row. How many cycles does each take?
#
# The swizzle moves chunk $c$ of row $r$ to another place in the same row, a different one in neighbouring rows.
# `swizzle_of` says how many rows fill the banks once, and which bits of the row's number are exchanged: 1 row and 7 for
# rows of 128 bytes and more, 2 rows and 3 for 64 bytes.

# %%
lesson.show_source(place_of)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(2, 3, figsize=(13, 5.6), sharey=True)
chunk = 1
for column, (chunks, what) in enumerate(
    ((4, "64 bytes: A in mma"), (8, "128 bytes: wgmma"), (32, "512 bytes: B in mma"))
):
    for line, swizzled in enumerate((False, True)):
        ax = axes[line, column]
        group = place_of(np.arange(8), chunk, chunks, swizzled) // 16 % 8
        busy = np.bincount(group, minlength=8)
        for row, g in enumerate(group):
            ax.barh(row, 4, left=4 * g, height=0.8, color=RED if busy[g] > 1 else BLUE, edgecolor="white", lw=0.5)
        for g in range(8):
            ax.text(4 * g + 2, 8.25, busy[g] or "", ha="center", va="center", fontsize=9)
            ax.axvline(4 * g, color="#cfd8dc", lw=0.6, zorder=0)
        cycles = f"{busy.max()} cycle{'s' if busy.max() > 1 else ''}"
        ax.set(xlim=(0, 32), ylim=(8.8, -0.6), xticks=range(0, 33, 4), yticks=range(8))
        ax.set_title(f"rows of {what}\n{'swizzled' if swizzled else 'in order'}: {cycles}", fontsize=10)
        if line:
            ax.set_xlabel("bank")
        if column == 0:
            ax.set_ylabel("row of the 8 x 8 matrix")
plt.show()

# %% [markdown]
# Eight rows, at chunk 1 of each, as one matrix of `ldmatrix` reads them (and `wgmma`, by itself); the numbers below are
# requests to each group of four banks. In order they collide (red): 4 cycles, 8 and 8. Swizzled it is always one, and
# no byte of shared memory is spent. (`shared_tile` and `register_tile` have *padding* instead: rows a little longer
# than the tile. It would do for `mma` too, 16 bytes a row; but the copy engine and `wgmma` know swizzles, not padding.)
#
# **Predict.** `mma` reads as many matrices of $A$ as of $B$. How many times as long does it read, if both lie in order?
#
# A GPU can be asked. It counts cycles of shared memory ("wavefronts"), and how many of them were further ones because
# of a bank. `mma` can be made without the swizzle and is right then, too:

# %%
held = lesson.results("counters")
by_map = {
    name: np.mean([np.bincount(place_of(np.arange(8), 1, n, on) // 16 % 8).max() for n in (4, 32)])
    for name, on in (("mma", True), ("mma, chunks in order", False))
}
rows = [
    (
        m["name"], f"{by_map[m['name']]:.0f}", f"{m['load_wavefronts'] / m['ldmatrix'] / 4:.2f}",
        f"{m['load_conflicts_share']:.1%}", f"{m['tensor']:.0%}", f"{m['seconds'] * 1e6:.0f}",
    )
    for size in (held["sizes"] if held else ())
    if size["stage"] == "gemm"
    for m in size["measured"]
    if m["name"] in by_map and m["seconds"]
]  # fmt: skip
lesson.table(
    (
        "kernel",
        "cycles a matrix, by the map",
        "cycles of loads a matrix, counted",
        "of them conflicts",
        "tensor pipe",
        "us",
    ),
    rows,
    "ldmatrix reads four matrices. C goes to memory by way of shared memory, which is in the count and not in the map."
    if rows
    else "No figures of gemm in docs/results/counters.json: flashnumba bench counters makes them, with Nsight Compute.",
)

# %% [markdown]
# The map says $(4 + 8) / 2 = 6$ cycles a matrix for the tiles in order, and one for those that are swizzled. The third
# column is the hardware's own count of the second, and what is above the map is C. The product is the same in both;
# without the swizzle the tensor cores wait for shared memory.
#
# ### A ring of slots
#
# A copy takes a while to arrive. If a block waited for each, its tensor cores would rest. So shared memory is cut into
# slots, and copies are started several tiles ahead.
#
# **Predict.** A copy takes 1.5 times as long as the products of a tile. What share of the time do the tensor cores work
# with one slot, two, and four?


# %%
def ring(slots: int, tiles: int, arrive: float, multiply: float) -> np.ndarray:
    """When the copy of each tile starts, when its products begin, and when they end: ``[tiles, 3]``."""
    times = np.zeros((tiles, 3))
    for t in range(tiles):
        start = times[t - slots, 2] if t >= slots else 0.0  # the slot is free
        begin = max(start + arrive, times[t - 1, 2] if t else 0.0)
        times[t] = start, begin, begin + multiply
    return times


# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(3, 1, figsize=(12, 5.2), sharex=True, height_ratios=(1.3, 1.7, 2.6))
for ax, slots in zip(axes, (1, 2, 4), strict=True):
    times = ring(slots, 12, 1.5, 1)
    for t, (start, begin, end) in enumerate(times):
        ax.barh(t % slots, 1.5, left=start, color="#f6dfae", edgecolor="white", height=0.7)
        ax.barh(t % slots, end - begin, left=begin, color=BLUE, edgecolor="white", height=0.7)
        if end < 15:
            ax.text((begin + end) / 2, t % slots, t, ha="center", va="center", color="white", fontsize=8)
    steady = (times[11, 2] - times[7, 2]) / 4
    name = f"{slots} slot{'s' if slots > 1 else ''}"
    ax.set_title(f"{name}: tensor cores work {1 / steady:.0%} of the time", fontsize=10)
    ax.set_yticks(range(slots), [f"slot {s}" for s in range(slots)])
    ax.set(xlim=(0, 15), ylim=(slots - 0.5, -0.5))
axes[0].barh([-5], [1], color="#f6dfae", label="copy on its way")
axes[0].barh([-5], [1], color=BLUE, label="products of tile")
axes[0].legend(fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 0.95))
axes[-1].set_xlabel("time, in products of one tile")
plt.show()

# %% [markdown]
# A model, not a measurement: a slot is filled again as soon as its products are done, and copies do not slow one
# another down. With one slot the two take turns. Four slots leave a tile three products' time to arrive. `mma` has
# four.
#
# In `mma` the threads that multiply also start the copies, and all meet at one barrier a tile. `wgmma` separates the
# two. The gain shows at the *end* of a tile of $C$, when sums are rounded and stored:


# %%
def roles(ahead: bool, results: int = 3, depth: int = 6, slots: int = 4) -> list[tuple[str, int, float, float]]:
    """(what, which tile of C, from, to) in units of one slot's products.

    Args:
        ahead: whether the producer goes on to the next tile of C by itself.
        results, depth: tiles of C, and slots of k for each.
    """
    copy, arrive, store = 0.8, 1.5, 2.0  # what the wire is busy for, until it is there, and storing a tile of C
    wire, done, stored, done_at, events = 0.0, 0.0, 0.0, [], []
    for i in range(results * depth):
        of = i // depth
        start = max(wire, done_at[i - slots] if i >= slots else 0.0, 0.0 if ahead else stored)
        wire = start + copy
        begin = max(start + arrive, done, stored if i % depth == 0 else 0.0)
        done = begin + 1
        done_at.append(done)
        events += [("copies", of, start, wire), ("products", of, begin, done)]
        if i % depth == depth - 1:
            stored = done + store
            events.append(("store", of, done, stored))
    return events


# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(2, 1, figsize=(12, 4), sharex=True)
lanes, colors = ["copies", "products", "store"], (BLUE, ORANGE, GREEN)
for ax, ahead in zip(axes, (False, True), strict=True):
    events = roles(ahead)
    for what, of, start, end in events:
        ax.barh(lanes.index(what), end - start, left=start, color=colors[of], edgecolor="white", height=0.75)
    end = max(event[3] for event in events)
    who = "a producer that runs ahead" if ahead else "one tile of C after the other"
    ax.set_title(f"{who}: products {18 / end:.0%} of {end:.1f}", fontsize=10)
    ax.set_yticks(range(3), ["producer: copies", "consumers: products", "consumers: store"])
    ax.set_ylim(2.5, -0.5)
for of, color in enumerate(colors):
    axes[0].barh([-5], [1], color=color, label=f"tile {of} of C")
axes[0].legend(fontsize=9, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.95))
axes[1].set_xlabel("time, in products of one slot")
plt.show()

# %% [markdown]
# A model again, with four slots, and six slots of $k$ for a tile of $C$ (at 4096 cubed there are 64, so the share that
# is gained is smaller). Below, the slots are full when a tile has been stored, and the next products begin at once. In
# the kernel the store is short, too: the consumers lay a tile down in shared memory, and the copy engine takes it from
# there.
#
# ### Neighbours share through L2
#
# 132 blocks work at a time. If they lie side by side in $C$, they read the same rows of $A$ and the same columns of
# $B$, and L2 fetches these once. The order of the tiles decides; here is the kernels' own, run on the emulator:


# %%
def walk(height: int, rows: int, cols: int, blocks: int = 132) -> np.ndarray:
    """(row, column) of the tiles that the first blocks compute, where bands have ``height`` rows: ``[blocks, 2]``."""
    raster = make_raster(height)

    @kernel(threads=1024)
    def places(out):
        row, col = raster(cuda.threadIdx.x, uint32(rows), uint32(cols))
        out[cuda.threadIdx.x, 0] = row
        out[cuda.threadIdx.x, 1] = col

    out = np.empty((blocks, 2), np.int32)
    launch(places, 1, blocks, (out,))
    return out


def lines_read(tiles: np.ndarray) -> int:
    """Rows of A and columns of B that blocks of 128 x 256 read between them."""
    return 128 * len(np.unique(tiles[:, 0])) + 256 * len(np.unique(tiles[:, 1]))


# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 3, figsize=(12.5, 4.2))
for ax, height in zip(axes, (1, 8, 16), strict=True):
    tiles = walk(height, 64, 32)
    ax.plot(tiles[:, 1] + 0.5, tiles[:, 0] + 0.5, color=GREY, lw=0.7)
    ax.plot(tiles[:, 1] + 0.5, tiles[:, 0] + 0.5, "s", ms=4.5, color=BLUE)
    ax.set(xlim=(0, 32), ylim=(20, 0), xlabel="column of tiles", yticks=range(0, 21, 4), xticks=range(0, 33, 8))
    name = "row by row" if height == 1 else f"bands of {height} rows"
    ax.set_title(f"{name}\n{lines_read(tiles)} rows of A and columns of B", fontsize=10)
axes[0].set_ylabel("row of tiles")
plt.show()

# %% [markdown]
# The first 132 tiles of 8192 x 8192, each 128 x 256. In bands of 16 rows they need half of what they need row by row.
# `mma` takes bands of 8, `wgmma` of 16.
#
# ### The roofline
#
# A kernel with intensity $I$ can do at most $\min(\text{peak},\; I \cdot \text{bandwidth})$. What was measured on an
# H200:

# %%
MEASURED = {  # TFLOP/s, 4096 cubed; taken anew from docs/results/gemm.json where that file is there
    "naive": 0.503, "coalesced": 1.88, "shared_tile": 6.5, "register_tile": 50.7, "mma": 479.0, "wgmma": 736.0,
}  # fmt: skip
CUBLAS = {"float32": 51.4, "float16": 771.0}
held = lesson.results("gemm")
for size in held["sizes"] if held else ():
    if {size["m"], size["n"], size["k"]} != {SIZE} or size["majors"] != "kn" or size["element"] not in CUBLAS:
        continue
    for m in size["measured"]:
        if m.get("flops_per_second") and ELEMENT.get(m["name"], size["element"]) == size["element"]:
            if m["name"] in ELEMENT:
                MEASURED[m["name"]] = m["flops_per_second"] / 1e12
            elif m["name"] == "torch.matmul":
                CUBLAS[size["element"]] = m["flops_per_second"] / 1e12


def roof(name: str) -> float:
    """TFLOP/s that memory and arithmetic admit, by count."""
    return min(PEAK[ELEMENT[name]], 2 / TRAFFIC[name] * MEMORY) / 1e12


lesson.table(
    ("4096 cubed", "element", "operations a byte, by count", "TFLOP/s at most, by count", "measured", "of cuBLAS"),
    [
        (
            name, ELEMENT[name], 2 / t, roof(name), f"{MEASURED[name]:.3g}" if name in MEASURED else "-",
            f"{MEASURED[name] / CUBLAS[ELEMENT[name]]:.0%}" if name in MEASURED else "-",
        )
        for name, t in TRAFFIC.items()
    ],
)  # fmt: skip

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(11, 5.4))
for element, color in (("float32", BLUE), ("float16", GREEN)):
    ax.loglog([PEAK[element] / MEMORY, 3000], [PEAK[element] / 1e12] * 2, color=color, lw=2, zorder=1)
    ax.plot([0.02, PEAK[element] / MEMORY], [PEAK[element] / 1e12] * 2, color=color, lw=0.8, ls=":")
    ax.text(0.022, PEAK[element] / 1e12 * 1.1, f"{element}: {PEAK[element] / 1e12:.0f} TFLOP/s", color=color)
ridge = max(PEAK.values()) / MEMORY
ax.plot([0.02, ridge], [0.02 * MEMORY / 1e12, ridge * MEMORY / 1e12], color=GREY, lw=2, zorder=1)
ax.text(0.9, 2.5, "memory: 4.8 TB/s", rotation=36, color=GREY, ha="center", va="center")
shared = {name: 132 * 128 * 256 / lines_read(walk(height, 32, 16)) for name, height in (("mma", 8), ("wgmma", 16))}
for name, t in TRAFFIC.items():
    color, x = (BLUE if ELEMENT[name] == "float32" else GREEN), 2 / t
    got = MEASURED.get(name)
    ax.plot(x, roof(name), "o", ms=8, mfc="white", mec=color, zorder=2)
    if got:
        if name in shared:
            ax.plot([x, shared[name]], [got, got], color=color, lw=1, ls="--")
            ax.plot(shared[name], got, "D", ms=7, color=color, zorder=3)
        ax.plot(x, got, "o", ms=8, color=color, zorder=3)
    beside = ((10, -4), "left") if name == "register_tile" else ((-9, 2), "right")
    ax.annotate(
        f"{name} {got:.3g}" if got else name, (x, got or roof(name)), xytext=beside[0], textcoords="offset points",
        ha=beside[1], fontsize=9,
    )  # fmt: skip
for marker, label in (("o", "measured, bytes by count"), ("D", "measured, bytes shared through L2, at best")):
    ax.plot([], [], marker, color=GREY, label=label)
ax.plot([], [], "o", mfc="white", mec=GREY, label="the most that the count admits")
ax.set(xlabel="operations a byte", ylabel="TFLOP/s", title="roofline of an H200, 4096 cubed", xlim=(0.02, 3000))
ax.set_ylim(0.1, 2000)
ax.legend(fontsize=9, loc="lower right")
plt.show()

# %% [markdown]
# Read it from the left. If memory moved all that is counted, `naive` could not reach 1 % of the float32 peak,
# `coalesced` 3 %, and `shared_tile` a little more than half. `shared_tile` is far below its roof, since that is not the
# roof it meets: shared memory leaves it an eighth of the peak, 8 TFLOP/s, and it has 6.5. `register_tile` is to the
# right of the ridge: memory is no longer its limit, and it has 76 % of the peak, where cuBLAS has 77 %.
#
# `naive`, `mma` and `wgmma` lie **above** the roof of their count. A point above a roof says that memory did not move
# what was counted: a cache served a part. For `naive` nobody planned it: a sector of which one step of $k$ uses one
# float is asked for again in the next seven, and may still be there. For `mma` and `wgmma` it is the plan: with tiles
# in bands, 132 blocks read between them what the diamonds say (if they keep in step), and there memory is no limit.
# What keeps `mma` below `wgmma` is the instruction: on Hopper, `mma.sync` does not reach the rate of `wgmma` (W. Luo
# and others, *Benchmarking and Dissecting the Nvidia Hopper GPU Architecture*, 2024).
#
# And on this computer's GPU, if it has one:

# %%
if machine == "cuda":
    from flashnumba.bench.timing import time_gpu

    rng, rows = np.random.default_rng(0), []
    numbers = rng.standard_normal((2, SIZE, SIZE), np.float32)
    for name in KERNELS:
        if unable(next(rung for rung in stage.kernels if rung.name == name), machine):
            continue
        there = tuple(cuda.to_device(x.astype(ELEMENT[name])) for x in (*numbers, numbers[0]))
        seconds = time_gpu(lambda a, b, c, name=name: matmul(a, b, c, kernel=name), [there], runs=5)
        rows.append((name, ELEMENT[name], seconds * 1e3, 2 * SIZE**3 / seconds / 1e12))
    print(lesson.table(("4096 cubed", "element", "ms", "TFLOP/s"), rows))
else:
    print("no GPU here")

# %% [markdown]
# ### Registers and occupancy
#
# **Predict.** Registers hold the sums: a tile of 128 x 256 takes 128 KB of the 256 KB. How many blocks of `mma` fit on
# a multiprocessor?

# %%
names = {
    "naive": "gemm.naive float32 4096 kn, sm_75 on", "coalesced": "gemm.coalesced float32 4096 kn, sm_75 on",
    "shared_tile": "gemm.shared_tile float32 4096 kn, sm_75 on",
    "register_tile": "gemm.register_tile float32 4096 kn, sm_75 on",
    "mma": "gemm.mma float16 4096 kn by 16 bytes, sm_80 on", "wgmma": "gemm.wgmma float16 8192 kn",
}  # fmt: skip
found = {name: lesson.resources(case) for name, case in names.items()}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
budgets = {
    name: budget("90", threads=r.threads, registers=r.registers, shared=r.shared) for name, (r, _) in found.items()
}
lesson.table(
    ("kernel", "threads", "registers a thread", "spilled bytes", "shared KB", "blocks that fit", "limit", "warp slots"),
    [
        (
            name, r.threads, r.registers, r.spills, r.shared / 1024, b.blocks, ", ".join(b.limited_by),
            f"{b.occupancy:.0%}",
        )
        for (name, (r, _)), b in zip(found.items(), budgets.values(), strict=True)
    ],
)  # fmt: skip

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(2, 2, figsize=(12, 6))
chosen = ["shared_tile", "register_tile", "mma", "wgmma"]
draw_budget([budgets[name] for name in chosen], axes.flat)
for ax, name in zip(axes.flat, chosen, strict=True):
    ax.set_title(f"{name}\n{ax.get_title(loc='left')}", fontsize=10)
for ax in axes[:, 1]:
    ax.set_yticklabels([])
plt.show()

# %% [markdown]
# The fast kernels have *few* warps, 8 to 12 where 64 would fit. High occupancy is one way to hide a wait: another warp
# has work. A ring of slots is another way, and it leaves the registers to the sums. One block of `mma` is all that
# fits, and it is enough. (`wgmma` is compiled for 168 registers a thread; at its start the producer gives most of its
# own to the consumers, which then have 240.)
#
# ## Break it
#
# ### A barrier
#
# `shared_tile` without the barrier before the products.
#
# **Predict.** Which thread will complain first, and about which element?

# %%
heads = load_minilm()
q, k = (np.concatenate([x[0, h, :64] for h in range(8)], 1) for x in (heads.q, heads.k))  # 8 heads side by side
a16, b16 = q.astype(np.float16), k.astype(np.float16).T  # [64, 256] and [256, 64]
a32, b32 = a16.astype(np.float32), b16.astype(np.float32)


def run(plan, a: np.ndarray, b: np.ndarray, *, checks: bool = True):
    """Launch a plan on the emulator and compare its result with float64."""
    c = np.full((len(a), b.shape[1]), np.nan, a.dtype)
    args = plan.arguments(a, b, c)
    launch(plan.kernel, plan.grid, plan.threads, args, shared=plan.shared, checks=checks)
    return compare(c, reference.naive(a, b), reference.low_precision(a, b))


def fault_of(plan, a: np.ndarray, b: np.ndarray) -> None:
    try:
        print("no fault;", run(plan, a, b))
    except Fault as fault:
        print(fault)


# %% tags=["break-it"]
fault_of(simt.plan_shared_tile(Shape.packed("float32", 64, 64, 256, "k", "k"), "before"), a32, b32)

# %% [markdown]
# A thread writes an element of `a_tile` that another has read already, and no barrier lies between: the reader may have
# had what lay there before.
#
# ### A wait
#
# `mma` without the wait for its copies. The barrier is still there.
#
# **Predict.** All threads meet, so why is that not enough?

# %% tags=["break-it"]
half = Shape.packed("float16", 64, 64, 256, "k", "k")
small = multistage.Tiles(32, 32, 32, 16, 16, slots=3)
fault_of(mma.plan_of(half, small, "wait"), a16, b16)

# %% [markdown]
# A barrier orders what *threads* did. A copy by `cp.async` is not done by a thread: it was started by one and comes
# when it comes. With checks off the emulator lets the copies arrive late, as a GPU may, and the result is made of what
# lay in the slot before:

# %% tags=["break-it"]
print(run(mma.plan_of(half, small, "wait"), a16, b16, checks=False))

# %% [markdown]
# The same in `wgmma`: its consumers do not wait at `full`.

# %% tags=["break-it"]
one = warp_specialised.Tiles(128, 64, slots=2)
fault_of(wgmma.plan_of(half, one, 1, "full"), a16, b16)

# %% [markdown]
# And a wait that never ends: the producer expects 16 bytes too few.

# %% tags=["break-it"]
fault_of(wgmma.plan_of(half, one, 1, "bytes"), a16, b16)

# %% [markdown]
# The groups in turn: the consumers wait at `full`, to which more bytes came than were announced; the producer waits at
# `empty`, for consumers that never come so far; the rest of its warpgroup has returned. On a GPU this program hangs.
#
# ### A wrong answer that is no fault
#
# Copies write $B$ swizzled, and fragments are read as if it were not.
#
# **Predict.** What will the emulator say?

# %% tags=["break-it"]
fault_of(mma.plan_of(half, small, "swizzle"), a16, b16)

# %% [markdown]
# Nothing: each byte had been copied, and waited for, before it was read. It is another byte than was meant. Only the
# comparison with float64 finds it. (If *both* sides leave out the swizzle the result is right, and only the clock
# tells.)
#
# ## Exercises
#
# ### 1. The bank of a chunk
#
# Rows of 128 bytes have eight chunks of 16. Which is the first of the four banks (0 to 31) in which chunk `chunk` of
# row `row` lies, swizzled?


# %%
def first_bank(row: int, chunk: int) -> int:
    """``row`` from 0 on, ``chunk`` 0 to 7."""
    # your code


# %% tags=["exercise"]
def banks_are_right() -> bool:
    pairs = [(row, chunk) for row in range(24) for chunk in range(8)]
    return all(first_bank(row, chunk) == place_of(row, chunk, 8) // 4 % 32 for row, chunk in pairs)


lesson.check("first_bank", banks_are_right, "The chunk lies at chunk ^ (row & 7), and a chunk is four banks wide.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def first_bank(row: int, chunk: int) -> int:
    return 4 * (chunk ^ (row & 7))


lesson.check("first_bank", banks_are_right)

# %% [markdown]
# Column `chunk` of eight neighbouring rows: `row & 7` takes each value once, so `chunk ^ (row & 7)` does too.
#
# ### 2. The bytes of a tile
#
# A block has a tile of `bm` x `bn` of $C$; at the edge, what is left of it. It reads the rows of $A$ and the columns of
# $B$ that exist, each once, and writes its part of $C$. How many bytes does the whole product read and write?


# %%
def bytes_moved(m: int, n: int, k: int, bm: int, bn: int, itemsize: int) -> tuple[int, int]:
    """(read, written)."""
    # your code


# %% tags=["exercise"]
def bytes_are_right() -> bool:
    if bytes_moved(8, 8, 8, 8, 8, 4) is None:
        return False
    for m, n, k, plan_for, bm, bn in (
        (40, 50, 12, lambda s: replace(simt.plan_shared_tile(s), kernel=shared_tile, grid=4, threads=1024), 32, 32),
        (64, 96, 32, lambda s: simt.plan_of(s, simt.SMALL), 32, 32),
        (100, 64, 64, lambda s: mma.plan_of(s, mma.SMALL), 64, 64),
        (200, 72, 64, lambda s: wgmma.plan_of(s, warp_specialised.Tiles(128, 64, slots=2)), 128, 64),
    ):
        element = "float32" if bm == 32 else "float16"
        plan = plan_for(Shape.packed(element, m, n, k))
        some = (np.ones(size, element) for size in ((m, k), (k, n), (m, n)))
        seen = launch(plan.kernel, plan.grid, plan.threads, plan.arguments(*some), shared=plan.shared, checks=False)
        if bytes_moved(m, n, k, bm, bn, ITEMSIZE[element]) != (seen.loaded, seen.stored):
            print(f"{m} x {n} x {k} by {bm} x {bn}: the emulator counted {seen.loaded} and {seen.stored}")
            return False
    return True


lesson.check("bytes_moved", bytes_are_right, "All of A is read once for each column of tiles; round up.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def bytes_moved(m: int, n: int, k: int, bm: int, bn: int, itemsize: int) -> tuple[int, int]:
    down, across = -(-m // bm), -(-n // bn)
    return (m * k * across + k * n * down) * itemsize, m * n * itemsize


lesson.check("bytes_moved", bytes_are_right)

# %% [markdown]
# ### 3. The inner product of a register tile
#
# Each of 64 threads has a patch of 4 x 4 of a $C$ of 32 x 32. Write the loop over $k$: read four elements of $A$ and
# four of $B$ **once**, multiply each with each, 16 sums. (Here they come from memory, so that the emulator counts the
# reads; in the real kernel they come from shared memory, four a load.)

# %%
PATCH, SUMS = 4, 16


@kernel(threads=64)
def patches(a, b, c):
    """``a [32, K]``, ``b [K, 32]``, ``c [32, 32]`` float32; one block."""
    acc = cuda.local.array(SUMS, float32)
    left, right = cuda.local.array(PATCH, float32), cuda.local.array(PATCH, float32)
    row, col = cuda.threadIdx.x // 8 * PATCH, cuda.threadIdx.x % 8 * PATCH
    for i in range(SUMS):
        acc[i] = float32(0)
    # your code
    for i in range(PATCH):
        for j in range(PATCH):
            c[row + i, col + j] = acc[i * PATCH + j]


# %% tags=["exercise"]
def patches_are_right() -> bool:
    some_a, some_b = a32[:32, :24].copy(), b32[:24, :32].copy()
    c = np.full((32, 32), np.nan, np.float32)
    seen = launch(patches, 1, 64, (some_a, some_b, c))
    right = compare(c, reference.naive(some_a, some_b), reference.low_precision(some_a, some_b)).ok
    least = 64 * 24 * 8 * 4
    if right and seen.loaded > least:
        print(f"right, but {seen.loaded} bytes were read where {least} are enough")
    return right and seen.loaded == least


lesson.check("patches", patches_are_right, "for k: fill left and right, then two loops over i and j.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
@kernel(threads=64)
def patches(a, b, c):
    acc = cuda.local.array(SUMS, float32)
    left, right = cuda.local.array(PATCH, float32), cuda.local.array(PATCH, float32)
    row, col = cuda.threadIdx.x // 8 * PATCH, cuda.threadIdx.x % 8 * PATCH
    for i in range(SUMS):
        acc[i] = float32(0)
    for k in range(a.shape[1]):
        for i in range(PATCH):
            left[i] = a[row + i, k]
            right[i] = b[k, col + i]
        for i in range(PATCH):
            for j in range(PATCH):
                acc[i * PATCH + j] += left[i] * right[j]
    for i in range(PATCH):
        for j in range(PATCH):
            c[row + i, col + j] = acc[i * PATCH + j]


lesson.check("patches", patches_are_right)

# %% [markdown]
# Eight reads for 16 multiplications, half a read each, where one element a thread takes two.
#
# ## Two machines, side by side
#
# The machine of the notes that this project began with, a Hygon DCU (lesson 1), has a matrix instruction as well,
# `mmac`, 16 x 16 x 16 for a wave of 64 lanes. The notes lay out three blocks of 256 threads on a compute unit, and a
# ring of four slots in the 21 KB of shared memory that each then has.

# %%
pair = [machine_of("90"), NOTES]
thirds = [m.shared_within(3) // 1024 for m in pair]  # KB
lesson.table(
    ("", "NVIDIA sm_90 (mma.sync)", "the notes' machine (mmac)"),
    [
        ("lanes of a matrix instruction", 32, 64),
        ("its M x N x K", "16 x 8 x 16", "16 x 16 x 16"),
        ("multiplications a lane", 16 * 8 * 16 // 32, 16**3 // 64),
        ("registers of a multiprocessor, KB", *(4 * m.registers // 1024 for m in pair)),
        ("tiles of 128 x 128 whose sums take half of them", *(m.registers // 2 // 128**2 for m in pair)),
        ("largest block, KB of shared memory", *(m.block_shared // 1024 for m in pair)),
        ("blocks, and KB for each", f"1 of mma, {mma.LARGE.shared / 1024:.0f}", f"3, {thirds[1]}"),
        ("slots, and KB of each", f"{mma.LARGE.slots}, {mma.LARGE.slot_bytes // 1024}", f"4, {thirds[1] / 4}"),
        ("steps of 16 k in a slot", mma.LARGE.bk // 16, "1: what one mmac takes"),
    ],
)

# %% [markdown]
# The notes' machine has three times the registers, so more of $C$ stays on the chip, and less than a third of the
# shared memory, so a slot is short: a step of one `mmac`, where `mma` has two steps of 16 and `wgmma` four. There the
# wait is hidden by three blocks with short rings; an H200 hides it with one block and a longer ring.
#
# ## Limits
#
# - Bytes are counted as a kernel asks for them. L1 and L2 make a GPU's real traffic smaller, for `naive` too; the
#   emulator has no caches.
# - The two schedules are models with times that were chosen, not measured.
# - `register_tile` has 99 % of cuBLAS in float32; `mma` has 62 % and `wgmma` 96 % of it in float16, at 4096 cubed on
#   one H200. Other sizes and other cards differ.
# - `wgmma` needs sm_90a, and lines that start at multiples of 16 bytes. `mma` takes any alignment, more slowly.
# - Small products leave multiprocessors without a tile. Smaller tiles help; splitting $k$ among blocks, which would
#   help more, is not done here.
# - The emulator multiplies as the hardware does, but in its own order of additions: results agree within the budget.
#
# ## What next
#
# Attention is $\operatorname{softmax}(Q K^T)\, V$: this lesson's product, lesson 2's state, and a second product whose
# operand is the result of the first. The next lesson puts them into one kernel, in which the scores never leave the
# chip.
