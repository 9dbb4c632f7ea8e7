# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. Causal load balance: a triangle, dealt out
#
# Under a causal mask half of the scores are not computed. Half the work, then; but is it half the time? A block of
# threads has a tile of rows, the first tile sees almost no keys and the last one all. A grid is done when its last
# block is. So it matters who has how much, and who begins.
#
# ## What you will be able to do
#
# - count the work of every block of a causal grid, for any number of rows and keys;
# - simulate when a GPU is done with it, and say how far from the best possible that is;
# - deal a triangle out in four ways, and read the kernels that do;
# - say why a counter of tickets needs a barrier, and who sets it to zero;
# - say what taller tiles of rows cost and save.

# %%
import matplotlib.pyplot as plt
import numpy as np

from flashnumba import lesson
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.ladder import find, measure
from flashnumba.machine.emulator import Fault, as_python, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import atom_add_acq_rel_gpu_u32, global_address
from flashnumba.machine.numba import cuda, float32, uint32
from flashnumba.machine.occupancy import NOTES, budget, machine_of
from flashnumba.stages import heads
from flashnumba.stages.causal_balance import panels, reference
from flashnumba.stages.causal_balance.mma import make_balanced, plan_balanced, stack_for
from flashnumba.stages.figures import BLUE, GREEN, GREY, ORANGE
from flashnumba.stages.flash_forward import count
from flashnumba.stages.flash_forward.reference import dense, low_precision
from flashnumba.tiles import schedule, scheduled
from flashnumba.tiles.forward import tiles_for
from flashnumba.tiles.sizes import AttentionTiles

lesson.style()
stage = find("causal_balance")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# Lesson 4's kernel gives a block of threads $b_m$ rows; it walks over tiles of $b_n$ keys and stops where its last row
# stops seeing. With $M = N$ and square tiles, row tile $i$ of $n$ computes $i + 1$ tiles:
#
# $$1 + 2 + \dots + n = \tfrac{n(n+1)}{2}, \qquad \text{the mean is } \tfrac{n+1}{2}, \text{ the last has } n.$$
#
# **Predict.** One head of 4096 tokens in tiles of 128: how many tiles of keys do the first and the last block compute?
# And if every multiprocessor had exactly one block: which share of the machine's time is used?

# %%
work = reference.row_work(4096, 4096, 128, 128)
print(f"{len(work)} row tiles; the first has {work[0]}, the last {work[-1]}, together {work.sum()}")
print(f"one block each: {work.mean() / work.max():.0%} of the time is used")

# %% [markdown]
# Half the scores were left out, and nothing was won: the last block takes as long as without a mask. The notes' remedy
# is to give block $i$ the tile $n - 1 - i$ as well:
#
# $$(i + 1) + (n - i) = n + 1 \quad \text{for every } i.$$
#
# **Predict.** Of an odd number of tiles, who is the partner of the middle one?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12, 3.4))
panels.draw_work(axes[0], reference.row_work(1024, 1024, 64, 64))
panels.draw_work(axes[1], reference.row_work(832, 576, 64, 64))
axes[1].set_title("13 row tiles, and keys for the last 9")
plt.show()

# %% [markdown]
# Itself; it goes alone, and has half of what the others have. On the right there are more rows than keys, the first
# rows see nothing, and pairs are not alike any more: the longest still comes first.
#
# ## The reference
#
# How much, who, and when: three short functions each. The work is counted from the last key that a row sees.

# %%
lesson.show_source(reference.row_work, first="row = np.arange")

# %%
lesson.show_source(reference.paired)

# %%
lesson.show_source(reference.longest_first)

# %% [markdown]
# When: a GPU starts blocks in the order of their numbers, each as soon as a multiprocessor has room. That is *list
# scheduling*, studied since 1966. For $P$ machines, whatever the order,
#
# $$\max\Big(\text{longest},\ \tfrac{\text{total}}{P}\Big) \;\le\; \text{best} \;\le\; \text{makespan} \;\le\;
# \tfrac{\text{total}}{P} + \Big(1 - \tfrac1P\Big)\,\text{longest}.$$
#
# The right side is easy to see. The block that ends last waited only while all others were busy; so until it began,
# all machines worked, and after that it alone counts. With the longest first, what ends last is short, and Graham's
# bound is $\tfrac43 - \tfrac1{3P}$ of the best.
#
# **Predict.** Three heads of 8 tiles on 5 multiprocessors, 108 tiles of keys in all, 21.6 for each. Which of the three
# is done first: in order, in pairs, or the longest first?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
steps = reference.row_work(512, 512, 64, 64)
names = ("plain", "paired", "longest first")
figure, ax = plt.subplots(figsize=(11, 4.4))
panels.draw_runs(ax, *panels.simulated(steps, 3, 5, names), 3 * steps.sum() / 5)
plt.show()

# %% [markdown]
# In order, the longest blocks of the last head begin last, and most machines wait for them. Pairs are alike, and that
# is their trouble: twelve equal blocks on five machines are three rounds, and the third has two. The longest first is
# done after 22 steps, which is as good as it gets: short blocks fill the gaps.
#
# **Predict.** The same at full size, 1 to 132 multiprocessors. Where do pairs shine, and where is nothing to be won?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(9, 4.2))
panels.draw_makespans(ax, work, (8, 64))
plt.show()

# %% [markdown]
# With many blocks a multiprocessor any order is good: what is lost at the end is one block, of many. With few, order is
# everything. Pairs shine where their number is just that of the machines (128 pairs of 8 heads, 132 machines) and are
# worst a little before. The longest first is never far off.
#
# "Never far off" is all that can be said. Is it ever worse than the plain order?

# %%
odd = reference.row_work(53, 146, 6, 2)
taken = [
    reference.makespan(reference.block_work(grid(odd, 11), odd), 7)
    for grid in (reference.plain, reference.longest_first)
]
print(f"plain {taken[0]:.0f}, longest first {taken[1]:.0f}")

# %% [markdown]
# By a hundredth, for a shape made up to show it: 53 rows that all see many keys. For squares in whole tiles none was
# found among tens of thousands.
#
# ### Blocks that share
#
# A multiprocessor of an H200 holds two blocks of this kernel at a time. They share its speed; and what does one do when
# the other is gone? If it waits for its own copies and instructions most of the time, it goes on as before, at half of
# the machine's speed; if not, it takes all. `dispatch` has a number for that, `alone`.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
lonely = np.linspace(0.5, 1, 11)
figure, ax = plt.subplots(figsize=(8.5, 3.6))
for name in names:
    costs = reference.block_work(panels.GRIDS[name](work, 8), work)
    spans = [reference.makespan(costs, 132, 2, alone) for alone in lonely]
    ax.plot(lonely, spans, color=panels.COLOURS[name], label=name)
ax.axhline(8 * work.sum() / 132, color=GREY, ls=":", label="total / multiprocessors")
ax.set(xlabel="alone: speed of a multiprocessor with one of two blocks", ylabel="makespan, tiles of keys")
ax.set_title("8 heads of 32 row tiles, 132 multiprocessors, two blocks at a time")
ax.legend()
plt.show()

# %% [markdown]
# There are 256 blocks and room for 264: all begin at once, and no order helps a block that is there already. What
# counts is who sits beside whom. A long one beside a short one is a pair, made by the machine; the longest first puts
# long beside middling. The bench measures `alone` from kernels without a mask, and what it predicts with it is printed
# beside what was measured.
#
# ## The kernels
#
# A kernel asks a *schedule* which tile a number is. Schedules are device functions on integers:

# %%
lesson.show_source(schedule.longest_first)

# %%
lesson.show_source(schedule.paired)

# %% [markdown]
# The same code runs in Python. Two heads of five tiles:

# %%
for name in ("plain", "head_by_head", "paired", "longest_first"):
    chosen = schedule.SCHEDULES[name]
    piece, blocks = as_python(chosen.piece), chosen.blocks(5, 2)
    grid = [[piece(b, 5, 2, 2, 1) for b in range(block, chosen.turns * blocks, blocks)] for block in range(blocks)]
    print(f"{name:14}", " ".join("+".join(f"h{h}t{t}" if t < 5 else "-" for h, t in block) for block in grid))

# %% [markdown]
# `head_by_head` is the usual order without sections: the longest of a head first, one head after the other.
#
# The kernels around it differ in nothing else. One piece a block is one call. Pairs are a loop of two turns whose body
# stands once; unrolled, it would be two programs, and each wants all registers:

# %%
tiles = tiles_for(128, "90a")
lesson.show_source(make_balanced("paired", tiles, "float16"))

# %% [markdown]
# `do` computes a row tile as lesson 4 did, if the number is one. The last way needs no arithmetic about pairs or
# rounds: as many blocks as there is room for stay, and each draws the next piece, the longest left, when it is done.

# %%
persistent = make_balanced("persistent", tiles, "float16")
lesson.show_source(persistent)

# %%
lesson.show_source(persistent, part="draw")

# %% [markdown]
# One thread draws for all. An atomic addition gives every block a number of its own; through shared memory and a
# barrier the other threads get it. Who sets the counter to zero? Not the host: a copy from it would have to be waited
# for, and a CUDA graph, which repeats launches without the host, would not repeat it. A kernel of one line does, on the
# same stream, before:

# %%
lesson.show_source(scheduled.clear)

# %% [markdown]
# ### Sections of heads
#
# Longest first over *all* heads has a price. All heads' last tiles come first, so the keys of all heads are wanted at
# once, and then again for the next tiles.
#
# **Predict.** 16 sequences of 1024 tokens, 32 heads of 64 columns: K and V of all heads are how large? The L2 cache of
# an H200 has 50 MB.

# %%
lesson.show_source(schedule.heads_near)

# %%
near = as_python(schedule.heads_near)
rows = []
for batch, count_, n, d in ((16, 32, 1024, 64), (4, 32, 4096, 64), (1, 32, 16384, 64), (1, 8, 16384, 128)):
    every, section = batch * count_, near(batch * count_, 1, n, 2 * d)
    rows.append((f"{batch} x {count_} x {n} x {d}", f"{every * 4 * n * d / 2**20:g} MB", section, -(-every // section)))
lesson.table(("B x H x N x D", "K and V of all heads", "heads of a section", "sections"), rows)

# %% [markdown]
# So heads go by in sections whose keys the cache holds, as FlashAttention-3 does. Only the last section's end matters
# for the makespan: before that, the next section's blocks fill every gap.
#
# ### Registers
#
# A loop around the piece keeps numbers alive that one piece does not have. Does it cost registers?

# %%
wanted = ("plain", "paired", "longest_first", "persistent", "stack_4", "stack_8")
found = {name: lesson.resources(f"causal_balance.{name} float16 d 64, tiles for sm_90a") for name in wanted}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
held = {n: budget("90", threads=r.threads, registers=r.registers, shared=r.shared) for n, (r, _) in found.items()}
lesson.table(
    ("kernel, D = 64", "threads", "registers a thread", "spilled bytes", "shared, KB", "blocks a multiprocessor"),
    [
        (name, r.threads, r.registers, r.spills, f"{r.shared / 1024:.0f}", b.blocks)
        for (name, (r, _)), b in zip(found.items(), held.values(), strict=True)
    ],
)

# %% [markdown]
# Hardly one. `stack_4` and `stack_8` have 16 rows a warp instead of 32; more on them below.
#
# ## On real data
#
# Each kernel on one head of the real data (on a GPU, on all 36), judged by float64. On the emulator tiles are small, so
# that a head has several.

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
# A row is computed in the same way whoever computes it, so all schedules give the same bits, also the one in which
# blocks race for tickets:

# %%
first, *others = (r.output for r in results if r.rung.name in schedule.SCHEDULES and r.case is results[0].case)
print("the same bits:", all(np.array_equal(first, other) for other in others))

# %% [markdown]
# ## Who reads what
#
# The schedules move the same bytes: each row tile reads its keys once. *How tall* a tile is changes that. The notes let
# a warp compute 16 rows and stack warps along the rows, as many as they can.
#
# **Predict.** From four warps to eight, 64 rows to 128: what becomes of the bytes of K and V, of the number of blocks,
# and of the longest block's share of the whole?

# %%
rows = []
for warps in (2, 4, 8, 16):
    bm = 16 * warps
    shape = heads.Shape("float16", 1, 8, 8, 4096, 4096, 64, True)
    each = reference.row_work(4096, 4096, bm, 128)
    costs = reference.block_work(reference.longest_first(each, 8), each) * bm  # rows x tiles of keys
    span = reference.makespan(costs, 132) / (costs.sum() / 132)
    again = count.fused(shape, bm, 128).again / 2**20
    rows.append((warps, bm, 8 * len(each), f"{again:.0f} MB", f"{costs.max() / costs.sum():.2%}", f"{span:.2f}"))
lesson.table(
    (
        "warps of 16 rows",
        "rows a block",
        "blocks",
        "K and V again",
        "longest block, of all work",
        "makespan / (total / P)",
    ),
    rows,
    "8 heads of 4096 tokens, D = 64, longest first, P = 132 multiprocessors, a block on each.",
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12, 3.6))
heights = np.array([16, 32, 64, 128, 256])
for n, color in ((1024, ORANGE), (4096, BLUE), (16384, GREEN)):
    moved = [count.fused(heads.Shape("float16", 1, 8, 8, n, n, 64, True), int(bm), 128).again for bm in heights]
    axes[0].plot(heights, np.array(moved) / 2**20, "o-", color=color, label=f"{n} tokens")
    ratio = []
    for bm in heights:
        each = reference.row_work(n, n, int(bm), 128)
        costs = reference.block_work(reference.longest_first(each, 8), each)
        ratio.append(reference.makespan(costs, 132) / (costs.sum() / 132))
    axes[1].plot(heights, ratio, "o-", color=color, label=f"{n} tokens")
axes[0].set(yscale="log", ylabel="MB of K and V, read again", title="traffic, 8 heads")
axes[1].set(ylabel="makespan / (total / P)", title="imbalance, longest first, 132 multiprocessors", ylim=(0.9, 7))
for ax in axes:
    ax.set(xscale="log", xlabel="rows a block")
    ax.set_xticks(heights, heights)
    ax.minorticks_off()
axes[0].legend()
plt.show()

# %% [markdown]
# Twice the rows halve the traffic, and halve the number of blocks that a schedule has to play with. Where tokens or
# heads are many, tall is right; where they are few, half of the multiprocessors get nothing, and no order helps. The
# kernel here has 32 rows a warp where registers allow it: 128 rows by four warps, for the traffic of eight.
#
# What was measured on an H200, causal, times as fast as `plain` and (in brackets) what the simulation said:

# %%
measured = lesson.results("balance")
columns = ("plain", "head_by_head", "paired", "longest_first", "persistent", "stack_4", "stack_8")
rows = []
for size in measured["sizes"] if measured else ():
    by_name = {one["name"]: one for one in size["measured"] if one["seconds"]}
    if "plain" in by_name and size["d"] == 64:
        base, said = by_name["plain"]["seconds"], by_name["plain"]["predicted"]
        cells = [
            f"{base / by_name[c]['seconds']:.2f} ({said / by_name[c]['predicted']:.2f})"
            if c in by_name and said and by_name[c]["predicted"] else "-"
            for c in columns[1:]
        ]  # fmt: skip
        fa2 = by_name.get("torch, FlashAttention-2")
        fastest = min(by_name[c]["seconds"] for c in columns if c in by_name)
        beside = f"{fa2['seconds'] / fastest:.2f}" if fa2 else "-"
        rows.append((f"{size['batch']} x {size['heads']} x {size['n']}", f"{base * 1e6:.0f}", *cells, beside))
lesson.table(("B x H x N", "plain, us", *columns[1:], "best, times FA2"), rows, "D = 64. Nothing is fitted.")

# %% [markdown]
# ## Break it
#
# ### A tile left out, a tile twice
#
# Two heads of 96 rows, three tiles each. A schedule that skips one piece leaves rows unwritten; results are full of NaN
# beforehand, so it shows. **Predict.** And one that does a piece twice?

# %%
small = AttentionTiles(32, 32, 32, warps=2)
data = load_minilm()
q, k, v = (x[:1, 2:4, 300:396] for x in (data.q, data.k, data.v))  # [1, 2, 96, 32] each


def go(name: str, broken: str = "", left: int = 0) -> tuple[np.ndarray, int]:
    """Two heads by a schedule on the emulator: (o, bytes stored). ``left`` is what the counter has in it beforehand."""
    plan = plan_balanced(name, heads.Shape("float16", 1, 2, 2, 96, 96, 32, True), small, broken=broken)
    known = {"q": q, "k": k, "v": v, "o": np.full_like(q, np.nan), "lse": np.full(q.shape[:3], np.nan, np.float32)}
    known |= {"scale": np.float32(32**-0.5), "causal": np.int32(1), "counter": np.full(1, left, np.int32)}
    stored = 0
    for one in plan.launches:
        report = launch(one.kernel, one.grid, one.threads, [known[a] for a in one.args], shared=one.shared)
        stored += report.stored
    return known["o"], stored


ideal, low = (f(q, k, v, causal=True)[0] for f in (dense, low_precision))

# %% tags=["break-it"]
for broken in ("", "left_out", "twice"):
    o, stored = go("longest_first", broken)
    print(f"{broken or 'whole'}: {compare(o, ideal, low)}; {stored} bytes stored")

# %% [markdown]
# Done twice, the result is right. Two blocks write the same bytes to the same place, which is a waste and no error, and
# nobody would see it but for the count: 13056 bytes of O and LSE, and a tile's 2176 once more.
#
# ### The partner, off by one

# %% tags=["break-it"]
q, k, v = (x[:1, 2:4, 268:396] for x in (data.q, data.k, data.v))  # four tiles now
plan = plan_balanced("paired", heads.Shape("float16", 1, 2, 2, 128, 128, 32, True), small, broken="partner")
known = {"q": q, "k": k, "v": v, "o": np.full_like(q, np.nan), "lse": np.full(q.shape[:3], np.nan, np.float32)}
known |= {"scale": np.float32(32**-0.5), "causal": np.int32(1)}
(one,) = plan.launches
launch(one.kernel, one.grid, one.threads, [known[a] for a in one.args], shared=one.shared)
unwritten = np.isnan(known["o"]).all(-1)[0]  # [heads, rows]
print("off by one; rows unwritten:", [f"{r.nonzero()[0].min()} to {r.nonzero()[0].max()}" for r in unwritten])
q, k, v = (x[:1, 2:4, 300:396] for x in (data.q, data.k, data.v))

# %% [markdown]
# The shortest tile is missing, and another was done twice. For three tiles the same kernel is only wasteful.
#
# ### No barrier between the turns
#
# A warp that has finished its rows goes on to the second tile and fills Q, K and V; its neighbour still reads them.

# %% tags=["break-it"]
try:
    go("paired", "turn_barrier")
except Fault as fault:
    print(fault)

# %% [markdown]
# ### A ticket without a barrier
#
# Thread 0 draws and writes the ticket. The others read whatever is there.

# %% tags=["break-it"]
try:
    go("persistent", "ticket_barrier")
except Fault as fault:
    print(fault)

# %% [markdown]
# ### A counter that nobody clears
#
# **Predict.** The counter has 4 in it from a launch before. Which rows are computed?

# %% tags=["break-it"]
o, _ = go("persistent", "uncleared", left=4)
written = ~np.isnan(o).all(-1)[0]  # [heads, rows]
print("uncleared; rows written of each head:", [f"{r.nonzero()[0].min()} to {r.nonzero()[0].max()}" for r in written])
o, _ = go("persistent", left=4)
print(f"cleared: {compare(o, ideal, low)}")

# %% [markdown]
# Tickets 0 to 3, the longest tiles of both heads, were never drawn. On a GPU this is the fault that shows at the second
# call and not at the first, if memory happened to be zero.
#
# ## Exercises
#
# ### 1. A ring of GPUs
#
# Causal attention of one long sequence over $R$ GPUs: each keeps some of the rows. Cut the sequence into $2R$ shards
# (row tiles of a triangle, for us) and give each of the $R$ ranks two, so that all have the same work. Zig-zag ring
# attention does. Return the shards of a rank.


# %%
def shards(rank: int, ranks: int) -> tuple[int, int]:
    """The two of ``2 * ranks`` shards that ``rank`` keeps."""
    # your code


# %% tags=["exercise"]
def shards_are_right() -> bool:
    for ranks in (1, 2, 5, 8):
        kept = [tuple(shards(rank, ranks)) for rank in range(ranks)]
        everything = sorted(s for two in kept for s in two)
        triangle = reference.row_work(2 * ranks * 64, 2 * ranks * 64, 64, 64)
        if everything != list(range(2 * ranks)) or len({triangle[a] + triangle[b] for a, b in kept}) > 1:
            return False
    return True


lesson.check("shards", shards_are_right, "It is the notes' pairing, with ranks for blocks.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def shards(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


lesson.check("shards", shards_are_right)

# %% [markdown]
# ### 2. A kernel that draws
#
# `x` is a lower triangle, $N \times N$; what lies above the diagonal is NaN, and must not be read. `out[i]` is the sum
# of row $i$ up to the diagonal. Two warps a block, and few blocks: each draws a row, the longest first, until none is
# left. `counter` is zero. One thread draws, all must know; thread 0 may add the row up alone, or all together.


# %%
@kernel(threads=64)
def triangle_sums(x, out, counter):
    """``x [N, N]`` float32, ``out [N]`` float32, ``counter`` int32 [1], zero."""
    ticket = cuda.shared.array(1, uint32)
    # your code


# %% tags=["exercise"]
def triangle_sums_are_right() -> bool:
    x = np.tril(np.arange(1, 401, dtype=np.float32).reshape(20, 20))
    expected = x.sum(1)
    x[np.triu_indices(20, 1)] = np.nan
    for seed in range(3):
        out, counter = np.full(20, np.nan, np.float32), np.zeros(1, np.int32)
        launch(triangle_sums, 3, 64, (x, out, counter), seed=seed)
        if not np.array_equal(out, expected) or counter[0] != 20 + 3:
            return False
    return True


lesson.check(
    "triangle_sums", triangle_sums_are_right, "Draw, barrier, read the ticket, barrier; row = N - 1 - ticket. Loop."
)


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
@kernel(threads=64)
def triangle_sums(x, out, counter):
    ticket = cuda.shared.array(1, uint32)
    n = x.shape[0]
    row = 0
    while row >= 0:
        if cuda.threadIdx.x == 0:
            ticket[0] = atom_add_acq_rel_gpu_u32(global_address(counter), uint32(1))
        cuda.syncthreads()  # the ticket is there for all
        row = n - 1 - ticket[0]
        cuda.syncthreads()  # all have read it before the next is drawn
        if row >= 0 and cuda.threadIdx.x == 0:
            total = float32(0)
            for column in range(row + 1):
                total += x[row, column]
            out[row] = total


lesson.check("triangle_sums", triangle_sums_are_right)

# %% [markdown]
# The second barrier is needed here, and not in the attention kernel: there, attending has barriers of its own between
# the reading of one ticket and the drawing of the next.
#
# ## Two machines, side by side
#
# The notes pair tiles and stack warps along the rows, 16 rows each. Their waves have 64 lanes, so a block of 256
# threads is four of them; NVIDIA's warps have 32, and there are eight.

# %%
pair = [machine_of("90"), NOTES]
usual, eight = tiles_for(64, "90a"), stack_for(8, 64, "90a")
lesson.table(
    ("", "NVIDIA sm_90", "the notes' machine"),
    [
        ("lanes of a warp", *(m.warp for m in pair)),
        ("warps in a block of 256 threads", *(256 // m.warp for m in pair)),
        ("rows of a block, 16 a warp", *(16 * 256 // m.warp for m in pair)),
        ("row tiles of 4096 tokens", *(4096 // (16 * 256 // m.warp) for m in pair)),
        ("pairs of a head", *(4096 // (16 * 256 // m.warp) // 2 for m in pair)),
        ("blocks of 256 threads and 255 registers at a time", *(m.registers // (256 * 256) for m in pair)),
        ("rows that this lesson's kernel takes", f"{usual.bm} by {usual.warps} warps", "-"),
        ("the same rows by warps of 16", f"{eight.bm} by {eight.warps} warps", "-"),
    ],
)

# %% [markdown]
# Three blocks at a time sit on the notes' multiprocessor, with registers for each; there, pairs that are all alike keep
# it evenly full. Here it is two blocks of four warps, or one of eight. And 32 rows a warp, which the notes' registers
# would not hold, give the traffic of eight warps with four: each operand of K that a warp loads serves twice the rows.
#
# ## Limits
#
# - The simulation knows tiles of keys and a cost a tile of rows. It knows no cache, no memory, no clock that falls when
#   all multiprocessors work. What it predicts is who waits for whom.
# - Blocks begin in the order of their numbers, and spread before they share: that is how GPUs are seen to behave, and
#   no manual promises it. A counter promises it.
# - On the emulator one block runs to its end before the next begins: the first draws every ticket. Who gets which is
#   not shown there, only that everything is done once.
# - Pairs are alike for as many rows as keys and whole tiles; elsewhere nearly.
# - Sections of heads suppose 32 MB of cache, an H200's; smaller caches would want smaller ones.
#
# ## What next
#
# The forward pass is whole. The backward pass has the same triangle, five products instead of two, and gradients that
# several blocks want to add to: there a schedule also decides who waits for whom.
