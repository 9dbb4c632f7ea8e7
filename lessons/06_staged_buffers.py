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
# # 6. Staged buffers: one ring of slots for both products
#
# Copies take time; products take time; the art is to have both at once. A tile that is copied ahead needs a place to
# wait in, and places are what a multiprocessor is short of. This lesson makes the places small, and uses each of them
# for everything: four slots, a quarter of a tile each, through which Q, K and V pass one slice after the other.
#
# ## What you will be able to do
#
# - cut both products of attention along the axis that they sum over, and count what a slot must hold;
# - write a schedule as a table, and prove from the table alone that it is right;
# - say how many copies may be in flight when a step begins, and why one wait and one barrier a step are enough;
# - compute how many blocks a multiprocessor holds, from registers and shared memory, on three machines;
# - tell what a missing wait, a missing barrier and a slot that is filled too early look like.

# %%

import matplotlib.pyplot as plt
import numpy as np

from flashnumba import lesson
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.ladder import find, measure
from flashnumba.machine.emulator import Fault, launch
from flashnumba.machine.function import named_values
from flashnumba.machine.occupancy import MACHINES, NOTES, budget, draw_budget, machine_of
from flashnumba.machine.timeline.picture import draw as draw_timeline
from flashnumba.stages.figures import BLUE, GREEN, ORANGE, RED
from flashnumba.stages.flash_forward.reference import dense, low_precision
from flashnumba.stages.staged_buffers import budget as formulas
from flashnumba.stages.staged_buffers import panels, reference
from flashnumba.stages.staged_buffers.mma import KERNELS, TRACED, make_staged, tiles_for
from flashnumba.stages.staged_buffers.slices import StagedTiles, make_slice_steps
from flashnumba.stages.traced import record
from flashnumba.tiles.swizzle import place_of

lesson.style()
stage = find("staged_buffers")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# A block of FlashAttention owns rows of Q and walks along tiles of K and V. For each tile it computes
#
# $$S = Q K^T = \sum_{p} Q_{:,p}\, K_{:,p}^T, \qquad O \mathrel{+}= P V = \sum_{p} P_{:,p}\, V_{p,:}$$
#
# Both are sums, the first over parts $p$ of the head dimension, the second over parts of the keys. A part of K is some
# *columns* of all keys of the tile, a part of V some *keys* with all columns. One step needs one part and no more. So
# shared memory need not hold tiles; it may hold **slices**, and both products may use the same places:
#
# $$Q_0 \ldots Q_{c-1},\; K_{0,0} \ldots K_{0,c-1},\; V_{0,0} \ldots V_{0,c-1},\; K_{1,0} \ldots$$
#
# Slice $i$ of this sequence lies in slot $i \bmod n$, where $n$ is the number of slots. Q comes first, by the same
# slots, goes into registers and stays there: no shared memory is kept for it.
#
# **Predict.** D = 128, 64 keys a tile, 2 bytes a number. How large is a tile of K? A quarter of K along D? A quarter of
# V along the keys?

# %%
lesson.table(
    ("D", "keys a tile", "tile of K", "quarter of K: keys x D/4", "quarter of V: keys/4 x D"),
    [
        (d, bn, f"{formulas.slot_bytes('tile', d, bn)} bytes", f"{bn} x {d // 4} = {bn * d // 4 * 2} bytes",
         f"{bn // 4} x {d} = {bn // 4 * d * 2} bytes")
        for d, bn in ((64, 64), (128, 64), (128, 128), (192, 64))
    ],
)  # fmt: skip

# %% [markdown]
# The two quarters are always equal, since it is the same product of three numbers. One size of slot fits all.
#
# Here is the ring with four quarters. A slice is pale from the step in which its copy begins, and full in the step that
# computes with it. Below, two whole tiles do the same, one for K and one for V.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(2, 1, figsize=(12.5, 5), height_ratios=(1.7, 1))
panels.draw_schedule(axes[0], 4, "quarter", 2)
panels.draw_schedule(axes[1], 2, "tile", 3)
plt.show()

# %% [markdown]
# With four slots a copy has three steps to arrive in. At any moment one slot is computed with, and three are on their
# way. Two whole tiles leave a copy one step, four times as long.
#
# ### The budget
#
# Why care for 16 KB? Because a multiprocessor has one register file and one shared memory for all its blocks. The more
# blocks, the more there is to do while one of them waits. A block of $T$ threads with $R$ registers each takes
# $4 R T$ bytes of registers, so
#
# $$\text{blocks} = \min\Big(\Big\lfloor\frac{\text{register file}}{4 R T}\Big\rfloor,\;
#   \Big\lfloor\frac{\text{shared memory}}{\text{slots} \times \text{bytes a slot}}\Big\rfloor\Big)$$
#
# The notes that this project began with reckon like this: 256 threads of 256 registers are 256 KB; the chip has 768 KB;
# so three blocks fit, *if* each takes no more than $64 / 3 = 21$ KB of the 64 KB of shared memory.
#
# **Predict.** D = 128, 64 keys: which of two whole tiles, four whole tiles and four quarters allow three blocks there?

# %%
KB = 1024
rows = []
for name, (stages, cut) in KERNELS.items():
    bytes_ = formulas.ring_bytes(stages, cut, 128, 64)
    found = formulas.budget(256, 256, bytes_, 768 * KB, 64 * KB)
    rows.append((name, f"{bytes_ // KB} KB", found.by_registers, found.by_shared, found.blocks))
lesson.table(
    ("slots", "shared memory", "blocks by registers", "by shared memory", "blocks"), rows, "The notes' machine."
)

# %% [markdown]
# Two whole tiles cost a third of the parallelism there, and three or four cost two thirds. Four quarters cost nothing.
#
# ## The reference
#
# The schedule is a table first. A row says which slice is computed with and where it lies, which slice begins to be
# copied and where to, and how many groups of copies may still be in flight after the row's wait.

# %%
lesson.show_source(reference.schedule)

# %%
shown = reference.schedule(4, "quarter", 2)[2:12]
lesson.table(
    ("step", "slot", "computes with", "copies", "into slot", "in flight after the wait", "order"),
    [
        (r.step, r.slot, r.compute or "-", r.copy or "-", r.into, "-" if r.wait is None else r.wait, ", ".join(r.order))
        for r in shown
    ],
)

# %% [markdown]
# Step $i$ starts to copy slice $i + n - 1$, into slot $(i - 1) \bmod n$: the slot that the step before has just
# finished with. That is why **one** barrier is enough. Every warp comes to the barrier of step $i$ after its own work
# on slice $i - 1$; behind it the slot is free. And every warp has waited for its own part of slice $i$ before; behind
# it the slice is there for all. Two questions, one barrier.
#
# **Predict.** How many groups may be in flight after the wait of step $i$, with $n$ slots? Before it, $i + n - 1$ have
# been started. (With one slot there is no such luxury: copy, wait, barrier, compute, barrier.)
#
# The table can be proved right without running anything. Copies may end as late as the wait for them; warps may be as
# late as the last barrier lets them. Under these two rules:

# %%
lesson.show_source(reference.check, first="for row in rows", last="reading.add")

# %%
for name, (stages, cut) in KERNELS.items():
    rows = reference.schedule(stages, cut, 50)
    reference.check(rows)
    computed = sum(row.compute is not None for row in rows)
    print(f"{name}: {computed} steps, no slot is overwritten too early, nothing is used before it is there")

# %% [markdown]
# And attention can go by the table. This reference has nothing of Q, K or V at hand but what lies in `slots`:

# %%
lesson.show_source(reference.attention, first="for step in schedule", last="acc = acc + np.array_split")

# %%
data = load_minilm()
q, k, v = (x[0, 2] for x in (data.q, data.k, data.v))  # layer 0, head 2 of a real transformer: [512, 32] each
exact, _ = dense(q[:100], k, v, causal=True)
for name in ("tile_1", "tile_3", "quarter_4"):
    o, _ = reference.attention(q[:100], k, v, *KERNELS[name], causal=True)
    print(f"{name}: differs from attention by {np.abs(o - exact).max():.1e}")

# %% [markdown]
# ## The kernels
#
# Eight kernels, `tile_1` to `tile_4` and `quarter_1` to `quarter_4`, come from one factory. It asks for the table, and
# takes from it what repeats from tile to tile: slots, copies, waits, as constants. This is the walk along the keys:

# %%
quarter = make_staged(tiles_for(128, "90a"), 4, "quarter", "float16")
lesson.show_source(quarter, part="attend", first="for j in range(int64(0), last)", last="v_at += bn")

# %%
walk = dict(named_values(quarter.function))["attend"]
v_step = dict(named_values(walk.function))["v_step"]
lesson.show_source(v_step, part="begin")

# %% [markdown]
# `copies_first`, `meets` and the rest are read off the table's `order`. A step of V computes exponentials, too: those
# of the *next* sixteen keys, beside the product with the sixteen before them, so that tensor cores and the unit for
# exponentials work at the same time.

# %%
lesson.show_source(v_step)

# %% [markdown]
# ### Q in registers
#
# **Predict.** A warp owns 16 rows, D = 128, 64 keys a tile. O and S are float32, Q is 16 bits. How many registers do
# they take in each of 32 threads? Would 32 rows a warp fit into 255?

# %%
lesson.table(
    ("D", "rows a warp", "O", "S", "Q", "together"),
    [
        (d, rows, rows * d // 32, rows * 64 // 32, rows * d // 64, formulas.registers_held(d, 64, rows))
        for d, rows in ((64, 16), (64, 32), (128, 16), (128, 32), (256, 16))
    ],
)

# %%
steps = make_slice_steps(tiles_for(128, "90a"), 4, "float16")
lesson.show_source(steps.load_q)

# %%
lesson.show_source(steps.multiply_qk)

# %% [markdown]
# ### Where a slice lies
#
# A slice lies in **strips** of 16 columns, the depth of one product on tensor cores. A strip's rows are 32 bytes, two
# chunks of 16. `ldmatrix` reads one chunk of eight rows at a time, and these eight must lie in eight different groups
# of four banks. In plain order rows 0 and 4 share a group, so in rows 4 to 7 of each eight the two chunks are
# exchanged.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(11, 2.4), sharey=True)
for ax, swizzled in zip(axes, (False, True), strict=True):
    row, chunk = np.mgrid[:8, :2]
    offset = place_of(row, chunk, 2, swizzled)
    for r, c in np.ndindex(8, 2):
        y, x = offset[r, c] // 128, offset[r, c] // 16 % 8
        ax.add_patch(
            plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color=ORANGE if c == 0 else BLUE, alpha=0.35 + 0.5 * (c == 0))
        )
        ax.text(x, y, f"r{r} c{c}", ha="center", va="center", fontsize=8)
    ax.set(xlim=(-0.5, 7.5), ylim=(1.5, -0.5), xlabel="banks", yticks=(0, 1), yticklabels=("rows 0-3", "rows 4-7"))
    ax.set_xticks(range(8), [f"{4 * i}-{4 * i + 3}" for i in range(8)], fontsize=8)
    groups = offset[:, 0] // 16 % 8
    most = np.bincount(groups).max()
    ax.set_title(f"{'exchanged' if swizzled else 'in order'}: c0 of eight rows meets a bank {most} times")
plt.show()

# %% [markdown]
# Since a strip has no more than two chunks a row, a lane's address is one number for all strips and slices, and what
# comes on top is a constant in the instruction. That matters: a step of a quarter has 16 products a warp, and 20
# instructions to find an address would show.
#
# ## On real data
#
# Each kernel on some rows of one head of the real data (on a GPU, on all 36), judged by a softmax of all scores in
# float64.

# %%
with lesson.timed(f"all on the {machine}"):
    results = [
        measure(stage, rung, case, machine)
        for case in stage.cases(machine, False)
        for rung in stage.rungs
        if rung.takes(case)
    ]
lesson.table(
    ("kernel", "machine", "queries x keys x D", "largest error", "budget", "verdict"),
    [(r.rung.name, r.machine, r.case.size, r.comparison.error, r.comparison.budget, r.verdict) for r in results],
)

# %%
stage.draw(results)

# %% [markdown]
# The errors of the kernels on one case are the same number. They differ in *when* slices come and in nothing that is
# computed, so their results have the same bits.
#
# ## Who reads what
#
# ### When a copy has time
#
# A small model. All slices of a tile together take 2 units of products. A copy takes a latency, during which nothing
# else is held up, and then passes at the speed of memory, here 1.2 units a tile, one slice after the other. Threads
# wait where a slice is not there yet.
#
# **Predict.** Which is better off as the latency grows: two whole tiles, or four quarters at half the shared memory?


# %%
def unit_time(stages: int, cut: str, latency: float, tiles: int = 40) -> float:
    """Units of time a tile in the long run, by the table: 2 would be products alone."""
    parts = reference.CUTS[cut]
    now, memory_free, there = 0.0, 0.0, {}
    for row in reference.schedule(stages, cut, tiles):
        for action in row.order:
            if action == "copy" and row.copy:
                memory_free = max(memory_free, now) + 1.2 / (2 * parts)
                there[row.copy] = memory_free + latency
            elif action == "wait":
                now = max(now, there[row.compute])
            elif action == "compute":
                now += 1 / parts
    return now / tiles


latencies = np.linspace(0, 3, 31)
figure, axes = plt.subplots(1, 2, figsize=(12.5, 3.6), sharey=True)
for ax, cut in zip(axes, reference.CUTS, strict=True):
    for stages, color in zip(reference.STAGES, (RED, ORANGE, GREEN, BLUE), strict=True):
        times = [unit_time(stages, cut, latency) for latency in latencies]
        label = f"{cut}_{stages}, {formulas.ring_bytes(stages, cut, 128, 64) // KB} KB at D = 128"
        ax.plot(latencies, times, color=color, label=label)
    ax.axhline(2, color="black", lw=0.8, ls=":")
    ax.set(xlabel="latency of a copy", ylabel="time a tile", ylim=(1.8, 8))
    ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# With one slot every copy is waited for in full. Two whole tiles hide a latency of 0.4: the copy of a tile begins with
# a product of 1 unit and passes in 0.6. Four quarters hide 0.6, as three steps take 0.75 and a quarter passes in 0.15:
# more, with **half the memory**. Beyond that they pay dearly, as each of eight steps waits; what is left, other blocks
# must hide. The latency of memory is some hundreds of cycles; a product of 64 keys, while three blocks take turns at
# the tensor cores, takes longer.
#
# ### The same, seen
#
# The kernels of this stage can leave marks, from which `flashnumba timeline` draws who copies, waits and computes when:
# on a GPU by its clock, on the emulator by a stated cost model. Without being asked they leave none. Three blocks walk
# along three tiles of keys each.


# %%
def traced(name: str, resident: int):
    some = (part[None, None] for part in (q[:192], k[:192], v[:192]))
    sizes = {} if machine == "cuda" else {"multiprocessors": 1, "resident": resident}
    return record(f"staged_buffers.{name}", TRACED[name], *some, machine=machine, **sizes)


with lesson.timed(f"four times on the {machine}"):
    records = {(name, n): traced(name, n) for name in ("tile_2", "quarter_4") for n in (1, 3)}
lesson.table(
    ("cycles by the model, three blocks", "one after the other", "all three at once"),
    [(name, *(f"{records[name, n].cycles:.0f}" for n in (1, 3))) for name in ("tile_2", "quarter_4")],
)

# %% [markdown]
# One block alone, with two whole tiles:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw_timeline([records["tile_2", 1].of([0])])

# %% [markdown]
# And three blocks of four quarters, which a multiprocessor of the notes' machine has room for:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw_timeline([records["quarter_4", 3]])

# %% [markdown]
# The problem is small, so most of a lone block's time is waiting for the first copies to come, and what it waits for
# in the middle of its work, the other two fill. The model gives a copy a latency of 600 cycles, far more than a
# step of a quarter takes on its own; beside two other blocks it is not.
#
# ### Registers and shared memory
#
# What the compiler gave these kernels, and how many blocks an H200 holds:

# %%
names = [
    f"staged_buffers.{name} float16 d 128, tiles for sm_90a" for name in ("tile_2", "tile_4", "quarter_2", "quarter_4")
]
found = {name: lesson.resources(name) for name in names}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
budgets = {n: budget("90", threads=r.threads, registers=r.registers, shared=r.shared) for n, (r, _) in found.items()}
lesson.table(
    ("kernel", "threads", "registers a thread", "shared, KB", "spilled bytes", "blocks", "limit"),
    [
        (
            name.split()[0].split(".")[1], r.threads, r.registers, f"{r.shared / 1024:.1f}", r.spills, b.blocks,
            ", ".join(b.limited_by),
        )
        for (name, (r, _)), b in zip(found.items(), budgets.values(), strict=True)
    ],
)  # fmt: skip

# %% jupyter={"source_hidden": true} tags=["hide-input"]
registers = max(r.registers for r, _ in found.values())
figure, axes = plt.subplots(1, 3, figsize=(15, 3))
figure.get_layout_engine().set(wspace=0.06)
three = [
    budget(NOTES, threads=256, registers=256, shared=formulas.ring_bytes(4, "quarter", 128, 64)),
    budget("80", threads=128, registers=registers, shared=formulas.ring_bytes(4, "quarter", 128, 64)),
    budget("90", threads=128, registers=registers, shared=formulas.ring_bytes(4, "quarter", 128, 64)),
]
draw_budget(three, axes)
for ax in axes[1:]:
    ax.set_yticklabels([])
plt.show()

# %% [markdown]
# Registers decide on all three, and shared memory is left over on two. On an H200 whole tiles would do as well: its
# 228 KB hold four of them for each of three blocks. Where shared memory is short, they would not:

# %%
lesson.table(
    ("blocks a multiprocessor", *(MACHINES[m].name for m in ("notes", "75", "89", "80", "90"))),
    [
        (name, *(
            budget(m, threads=256 if m == "notes" else 128, registers=256 if m == "notes" else registers,
                   shared=formulas.ring_bytes(stages, cut, 128, 64)).blocks
            for m in ("notes", "75", "89", "80", "90")
        ))
        for name, (stages, cut) in KERNELS.items()
    ],
    "D = 128, 64 keys a tile; 0: such a block cannot be launched.",
)  # fmt: skip

# %% [markdown]
# What was measured on an H200:

# %%
held = lesson.results("staged")
rows = []
for size in held["sizes"] if held else ():
    for one in size["measured"]:
        if size["n"] == 4096 and one["ours"] and one["seconds"]:
            share = "-" if one["of_base"] is None else f"{one['of_base']:.2f}"
            rate, taken = f"{one['flops_per_second'] / 1e12:.0f}", f"{one['shared'] / 1024:.0f}"
            mask = "causal" if size["causal"] else "all"
            rows.append((size["d"], mask, one["name"], rate, share, taken, one["predicted_blocks"], one["blocks"]))
heads = ("4096 tokens, D", "mask", "kernel", "TFLOP/s", "times tile_2", "KB", "blocks predicted", "by the driver")
lesson.table(heads, rows)

# %% [markdown]
# The budget is right: as many blocks as predicted, for every kernel. One and two quarters show what a latency costs
# that nothing hides. And four quarters are the fastest of the eight at every size that was measured, up to 15 % ahead
# of two whole tiles, with half their shared memory. Occupancy is not the reason, as all have the same number of blocks;
# nor is it the number of slots, as four whole tiles gain little or nothing. What differs is that copies, loads and
# waits come in small portions, spread over the products of three blocks. Is that what helps?
#
# ### What the hardware counts
#
# `flashnumba bench counters` asks the GPU, by Nsight Compute, about one launch of each kernel. First the two things
# that this lesson has computed: how many warps a multiprocessor holds, and bank conflicts.

# %%
held = lesson.results("counters")
counted = [
    (size["d"], m)
    for size in (held["sizes"] if held else ())
    if size["stage"] == "staged_buffers"
    for m in size["measured"]
    if m["seconds"]
]
places = [m["multiprocessors"] * m["predicted_blocks"] for _, m in counted]
lesson.table(
    ("D", "kernel", "warps predicted", "on average", "blocks", "places for them", "dealt out evenly, warps",
     "ldmatrix, thousands", "cycles each", "conflicts of loads", "of stores"),
    [
        (
            d, m["name"], m["predicted_warps"], f"{m['warps']:.1f}", m["blocks"], room,
            f"{m['blocks'] / m['multiprocessors'] * m['threads'] / 32:.1f}" if m["blocks"] <= room else "-",
            m["ldmatrix"] // 1000,
            f"{(m['load_wavefronts'] - m['load_conflicts']) / m['ldmatrix']:.2f}",
            f"{m['load_conflicts_share']:.2%}", f"{m['store_conflicts_share']:.0%}",
        )
        for (d, m), room in zip(counted, places, strict=True)
    ],
    "2048 tokens, 16 heads, no mask. Cycles each: of loads from shared memory without conflicts, for an ldmatrix. "
    "Conflicts: share of the cycles of loads, and of stores.",
)  # fmt: skip

# %% [markdown]
# **Warps.** A multiprocessor holds as many as predicted, but not all the time. At D = 128 there are more blocks than
# places: the first wave fills the GPU, and the rest leaves most of it empty. At D = 64 there are fewer, and an even
# share is below the prediction from the start. The average counts all of that.
#
# **Banks.** `ldmatrix` reads four matrices, and without conflicts it takes four cycles (what is above four is O, on its
# way out). Kernels of one cut load from the same addresses of a slot, so conflicts that come from addresses would be
# the same in each. Some have next to none; so the exchange of chunks leaves none. What others have depends on *when*
# accesses come: two want the same cycle, most likely a load and a copy that arrives. (A second run had nearly the
# same numbers, but not the same; conflicts by addresses would be equal to the last one.) Stores are O's way out: few,
# by the same code in all kernels, and with another share in each. That, too, must be a matter of who comes when.
#
# Then what warps wait for. A kernel's counter says how many warps wait for a reason whenever one issues; times
# instructions, that is cycles of warps in all, and comparable between kernels.

# %%
WAITS = {
    "shared memory, exponentials": ("short_scoreboard", "mio_throttle"), "copies": ("long_scoreboard",),
    "barrier": ("barrier",), "fixed latencies": ("wait",), "tensor cores": ("math_pipe_throttle",),
}  # fmt: skip
waits = {
    (d, m["name"]): {
        what: m["instructions"] / 1e6 * sum(m[f"stall_{why}"] for why in reasons) for what, reasons in WAITS.items()
    }
    for d, m in counted
}
lesson.table(
    ("D", "kernel", "million instructions", "issue", "tensor cores work", *WAITS, "short scoreboard", "mio throttle"),
    [
        (
            d, m["name"], f"{m['instructions'] / 1e6:.1f}", f"{m['issue']:.0%}", f"{m['tensor']:.0%}",
            *(f"{cycles:.0f}" for cycles in waits[d, m["name"]].values()),
            f"{m['stall_short_scoreboard']:.1f}", f"{m['stall_mio_throttle']:.1f}",
        )
        for d, m in counted
    ],
    "Waiting, by what for: million cycles of warps. Last, warps that wait whenever one issues: for a result of shared "
    "memory or an exponential (short scoreboard), and for a place in the queue to them (mio throttle).",
)  # fmt: skip

# %% jupyter={"source_hidden": true} tags=["hide-input"]
shown = [key for key in waits if key[1] in ("tile_2", "tile_3", "tile_4", "quarter_3", "quarter_4")]
if shown:
    figure, ax = plt.subplots(figsize=(11, 3.2))
    left = np.zeros(len(shown))
    for what, color in zip(WAITS, (RED, ORANGE, "#8d6e63", "#b0bec5", GREEN), strict=True):
        cycles = np.array([waits[key][what] for key in shown])
        ax.barh(range(len(shown)), cycles, left=left, color=color, label=what)
        left += cycles
    ax.set_yticks(range(len(shown)), [f"D = {d}, {name}" for d, name in shown])
    ax.set(ylim=(len(shown) - 0.5, -0.5), xlabel="waiting, million cycles of warps")
    ax.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(WAITS))
    plt.show()

# %% [markdown]
# Four quarters execute *more* instructions than two whole tiles, and wait more at barriers, as there are four times as
# many. They gain where whole tiles wait most: for shared memory. Behind the barrier of a step, all warps of a block
# want the fragments of a whole tile, and loads stand in a queue that is full; with quarters a quarter of them is wanted
# at a time, and other work comes between. A third and a fourth whole tile make the wait for copies shorter and leave
# that queue as it is, which is why they gain so little. One and two quarters wait for copies above all, as the model
# of the latency has it.
#
# So the guess was right that small portions help, and half wrong about which: it is the loads from shared memory more
# than the copies into it. The counters show where the time goes; that bursts of loads are the reason is our reading.

# %% [markdown]
# ## Break it
#
# A small kernel for the emulator: 32 rows by two warps. The factory can be asked for a table with a fault in it.

# %%
small = StagedTiles(64, 32, 64, 2)


def emulate(name: str, broken: str = "", **options):
    """32 queries and 100 keys of the real head by one kernel: o, and what the comparison says of it."""
    stages, cut = KERNELS[name]
    made = make_staged(small, stages, cut, "float16", even=False, broken=broken)
    x, y, z = (part[None, None] for part in (q[:32], k[:100], v[:100]))
    o, lse = np.full(x.shape, np.nan, x.dtype), np.full(x.shape[:3], np.nan, np.float32)
    args = (x, y, z, o, lse, np.float32(32**-0.5), np.int32(0))
    launch(made, 1, small.threads, args, shared=small.shared(stages, cut), **options)
    return compare(o[0, 0], dense(q[:32], k[:100], v[:100])[0], low_precision(q[:32], k[:100], v[:100])[0])


print(emulate("quarter_4"))

# %% [markdown]
# ### One wait too few
#
# Three groups may be in flight after the wait instead of two.
#
# **Predict.** The table's proof and the emulator are two judges who know nothing of each other. At which step will each
# of them object, and to what?


# %% tags=["break-it"]
def both(name: str, broken: str) -> None:
    stages, cut = KERNELS[name]
    try:
        reference.check(reference.damaged(reference.schedule(stages, cut, 2), broken, stages))
    except reference.Broken as objection:
        print(f"table: {objection}\n")
    try:
        print(emulate(name, broken))
    except Fault as fault:
        print(fault)


both("quarter_4", "wait")

# %% [markdown]
# ### No barrier

# %% tags=["break-it"]
both("quarter_4", "barrier")

# %% [markdown]
# ### A slot that is filled one step too early
#
# The copy goes into the slot that is being computed with, rather than the one before it.

# %% tags=["break-it"]
both("tile_3", "early")

# %% [markdown]
# ### Another order in the slot
#
# The writer of K leaves the exchange of chunks out, and the reader expects it. No access is out of order, so neither
# judge of schedules can see it; the comparison does.

# %% tags=["break-it"]
print("quarter_4:", emulate("quarter_4", "swizzle"))

# %% [markdown]
# ## Exercises
#
# ### 1. What may be in flight
#
# For step $i \ge 0$ of a ring of $n \ge 2$ slots and $t$ slices in all: which slice is copied, to which slot, and how
# many groups may be in flight after the wait that comes before it?


# %%
def ring_step(i: int, n: int, t: int) -> tuple[int | None, int, int]:
    """(slice that begins to be copied, or None at the end; the slot for it; groups in flight after the wait)"""
    # your code


# %% tags=["exercise"]
def ring_step_is_right() -> bool:
    for n in (2, 3, 4):
        order = reference.slices("quarter", 3)
        for row in reference.schedule(n, "quarter", 3):
            if row.compute is not None:
                coming = None if row.copy is None else order.index(row.copy)
                if ring_step(row.step, n, len(order)) != (coming, row.into, row.wait):
                    return False
    return True


lesson.check("ring_step", ring_step_is_right, "Slice i + n - 1; the slot of slice i - 1; all but slices up to i.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def ring_step(i: int, n: int, t: int) -> tuple[int | None, int, int]:
    coming = i + n - 1
    return (coming if coming < t else None), coming % n, n - 2


lesson.check("ring_step", ring_step_is_right)

# %% [markdown]
# ### 2. The budget, turned round
#
# Given a machine, registers a thread and threads a block: how many slots may the ring have at most, without a block
# less than registers allow? Use `registers` and `shared` of the machine (32-bit registers; bytes), and the formulas
# without units of allocation. At most 64 slots are asked for.


# %%
def most_slots(m, registers: int, threads: int, cut: str, d: int, bn: int) -> int:
    """``m`` is a :class:`flashnumba.machine.occupancy.Machine`; 0 if no slot fits."""
    # your code


# %% tags=["exercise"]
def most_slots_is_right() -> bool:
    for m in (NOTES, machine_of("80"), machine_of("90")):
        for cut in reference.CUTS:
            for d, registers_, threads in ((64, 128, 128), (128, 168, 128), (128, 256, 256), (256, 255, 128)):

                def blocks(n, m=m, cut=cut, d=d, registers_=registers_, threads=threads):
                    bytes_ = formulas.ring_bytes(n, cut, d, 64)
                    return formulas.budget(registers_, threads, bytes_, 4 * m.registers, m.shared)

                fits = [n for n in range(1, 65) if blocks(n).blocks == blocks(n).by_registers]
                if most_slots(m, registers_, threads, cut, d, 64) != max(fits, default=0):
                    return False
    return True


lesson.check("most_slots", most_slots_is_right, "Blocks by registers first; each has a share of the shared memory.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def most_slots(m, registers: int, threads: int, cut: str, d: int, bn: int) -> int:
    blocks = m.registers // (registers * threads)
    if not blocks:
        return 64
    return min(64, m.shared // blocks // formulas.slot_bytes(cut, d, bn))


lesson.check("most_slots", most_slots_is_right)

# %% [markdown]
# ## Two machines, side by side

# %%
pair = [NOTES, machine_of("90")]
four = formulas.ring_bytes(4, "quarter", 128, 64)
lesson.table(
    ("", "the notes' machine", "NVIDIA sm_90"),
    [
        ("threads a wave or warp", *(m.warp for m in pair)),
        ("register file of a multiprocessor, KB", *(4 * m.registers // KB for m in pair)),
        ("shared memory of it, KB", *(m.shared // KB for m in pair)),
        ("bytes of shared memory for each byte of registers", *(f"{m.shared / (4 * m.registers):.2f}" for m in pair)),
        ("three blocks: KB of shared memory each", *(f"{m.shared_within(3) / KB:.1f}" for m in pair)),
        ("four quarters, D = 128, 64 keys: KB", *(four // KB for _ in pair)),
        ("slots of 5.25 KB in 21 KB, as the notes cut them", 4, "-"),
        ("asynchronous copies", "inline assembly, counted waits", "cp.async, counted groups"),
    ],
)

# %% [markdown]
# The notes' machine has three times the registers and little shared memory, so there the ring of quarters decides how
# many blocks run. An H200 has shared memory to spare: there small slots bring no block more, and what they save pays
# where something else asks for it: a larger D, a smaller GPU, a second tensor to keep at hand.
#
# ## Limits
#
# - 16 rows a warp: every warp reads all of K and V from shared memory, for 16 rows. Kernels with 32 rows a warp read
#   half as much for a row (lesson 4), and their O and Q do not fit beside each other at D = 128.
# - A barrier a step: eight for a tile in quarters where whole tiles have two.
# - The head dimension is computed in multiples of 64, to be cut into four pieces of 16 or more.
# - The model of latency above knows one block. Its numbers are made up; the shape of its curves is not.
# - Times on the emulator say nothing.
#
# ## What next
#
# All blocks were alike here. Under a causal mask they are not: the last tile of rows has all keys to visit, the first
# has few. The next stage deals the work out evenly.
