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
# # 10. Sparsity: who decides what is left out
#
# Most weights of a long attention are so small that they do not show. A GPU cannot skip single weights, but it can skip
# tiles. Who says which? The scores themselves, while going, by the maxima so far; a prediction, from one mean token for
# each block; or whoever calls.
#
# ## What you will be able to do
#
# - say how large the error can be that a threshold allows, and why thresholds go down with the length;
# - make a vote of warps that costs nothing where nobody is left out;
# - predict a mask of blocks, and say when the prediction must not be trusted;
# - tell why leaving out nine tenths does not make it ten times as fast.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

from flashnumba import lesson
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.data.structured import KINDS, structured
from flashnumba.ladder import find, measure
from flashnumba.machine.emulator import Fault
from flashnumba.sparse import PUBLISHED, calibrate
from flashnumba.stages import heads
from flashnumba.stages.sparsity import (
    SPARGE,
    every_head,
    mma,
    panels,
    predict,
    problem,
    reference,
    sla_reference,
    sla_stage,
    wgmma,
)
from flashnumba.tiles import skip, sparse, specialised_lists
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.specialised_tiles import SpecialisedTiles

lesson.style()
stage = find("sparsity")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# ### Structure
#
# Normal random numbers have none: every key is about as good as any other. Trained heads look at the first tokens, at
# their neighbourhood, at what is about the same thing. Four kinds of heads, drawn from these:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
q4, k4, v4 = structured(1024, 64, heads=4)
figure, axes = plt.subplots(1, 4, figsize=(14, 3.4))
for h, (name, ax) in enumerate(zip(KINDS, axes, strict=True)):
    s = reference.scores(q4[:, h : h + 1], k4[:, h : h + 1], causal=True)[0, 0]
    ax.imshow(np.maximum((s - s.max(-1, keepdims=True)) / np.log(10), -6), cmap="viridis")
    ax.set_title(name)
plt.show()

# %% [markdown]
# ### While going: a threshold
#
# Online softmax has of each row the maximum so far. A tile is left out if in none of its rows
#
# $$\max_j S_{ij} - m_i \ge \ln \lambda .$$
#
# Each weight left out is below $\lambda$ of the row's greatest, so all of them together are below (keys left out)
# $\cdot\,\lambda$ of the sum: for twice the keys take half the threshold. That is BLASST.
#
# **Predict.** Can a tile that is left out have held the maximum? Is the first tile ever left out?

# %%
rng = np.random.default_rng(0)
lengths, shares = (256, 512, 1024), {}
for n in lengths:
    s = reference.scores(q4[..., :n, :], k4[..., :n, :], causal=True)
    shares[n] = [
        1 - reference.skip(s, 64, 32, t).sum() / reference.skip(s, 64, 32, 0.0).sum() for t in panels.THRESHOLDS
    ]
lesson.table(
    ("tokens", *(f"{t:g}" for t in panels.THRESHOLDS)), [(n, *(f"{x:.0%}" for x in shares[n])) for n in lengths],
    "Share of the visible tiles of 64 x 32 that a threshold leaves out, all four heads.",
)  # fmt: skip

# %%
figure, ax = plt.subplots(figsize=(8, 3.2))
for n in lengths:
    ax.semilogx(panels.THRESHOLDS, shares[n], "o-", ms=4, label=f"{n} tokens")
ax.set(xlabel="threshold", ylabel="left out", ylim=(0, 1))
ax.legend()
plt.show()
normal = [rng.standard_normal((1, 4, 1024, 64)) for _ in range(2)]
s = reference.scores(*normal)
print(f"normal numbers, threshold 0.01: {1 - reference.skip(s, 64, 32, 0.01).mean():.0%} left out")

# %% [markdown]
# No and no: a maximum is 0 below itself, and before the first tile there is no maximum to be below. Of normal numbers
# nothing is left out; whoever measures sparsity on them measures nothing.
#
# ### From a share to a threshold
#
# $\lambda N = \alpha\, e^{\beta s}$, with two numbers fitted to a model's data. TensorRT-LLM publishes some:

# %%
for what, published in PUBLISHED.items():
    print(what, {f"{s:.0%}": f"{published.threshold(s, 65536):.1e}" for s in (0.3, 0.5, 0.7, 0.9)}, "at 65536 keys")
samples = [tuple(x[..., :n, :] for x in (q4, k4, v4)) for n in (512, 1024)]
ours = calibrate(samples, trials=(0.003, 0.01, 0.03, 0.1, 0.3), backend="numpy")
print(f"our four heads: alpha {ours.alpha:.3g}, beta {ours.beta:.3g}")

# %% [markdown]
# ### Beforehand: a prediction
#
# SpargeAttn takes the mean token of each block of Q and of K. Where a block's tokens are alike, the means' score stands
# for all pairs; of their softmax the largest are kept. Where they are not alike, nothing is predicted and all is
# computed. Nothing is merged: the attention that follows is over the real tokens.

# %%
lesson.show_source(reference.predict)

# %% [markdown]
# ## The reference
#
# Tile by tile, as the kernel goes; what is left out does not move the maximum:

# %%
lesson.show_source(reference.skip)

# %% [markdown]
# And the tokens of a block are alike if the mean cosine of their pairs is large. **Predict.** A block of tokens $x$ and
# $-x$ in turn: what is its mean token, what its mean cosine, and what would be predicted without the test?

# %%
lesson.show_source(reference.alikeness)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
data = load_minilm()
figure, axes = plt.subplots(1, 2, figsize=(12, 3.2), sharey=True)
for ax, name, size in zip(axes, "qk", (32, 16), strict=True):
    cosines = reference.alikeness(getattr(data, name)[0].astype(np.float64), size)  # [heads, blocks]
    ax.plot(cosines.T, lw=0.8)
    ax.axhline(SPARGE["alike"], color="black", lw=1, ls=":")
    ax.set(xlabel=f"block of {size} tokens of {name}", ylim=(0, 1), title="mean cosine, a line a head")
plt.show()

# %% [markdown]
# ### What they choose
#
# Zero twice, and weights like those of any other block: the test is what keeps such blocks. (Dotted: what counts as
# alike below.)
#
# The real head of the lessons before: its weights, and the tiles that each school computes.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
q, k, v = (getattr(data, name)[:1, 2:3].astype(float) for name in "qkv")  # [1, 1, 512, 32]
figure, axes = plt.subplots(1, 3, figsize=(16, 4.4))
panels.draw_weights(axes[0], q, k)
panels.draw_map(axes[1], q, k, SPARGE)
panels.draw_curves(axes[2], q, k, v)
plt.show()

# %% [markdown]
# On this head, for the same share left out, a threshold costs less than a prediction: it has seen the scores, and has
# paid for them. A warp's own decision leaves out more than a block's, as fewer rows have to agree. Keeping the sum of
# what is left out changes little here; it keeps rows from adding up to more than they should.

# %%
every, rows = lesson.results("every_head") or {"heads": []}, []
for share in every_head.SHARES:
    of = [row["methods"] for row in every["heads"] if row["share"] == share]
    errors = [[one[name][1] for one in of] for name in every_head.METHODS if of]
    rows.append((f"{share:.0%}", *(f"{np.median(x):.0%} ({min(x):.1%} to {max(x):.0%})" for x in errors)))
lesson.table(("left out", *every_head.METHODS), rows, "Error of O of all 36 real heads: median, least, most.")

# %% [markdown]
# Heads differ more than methods do. Of short sequences like these few heads let half of the tiles go for 1 %; a method
# that is chosen by one picture is chosen badly. (SLA comes further below; its linear part is fitted to half of a head's
# rows here, and the others are asked.)

# %% [markdown]
# ## The kernels
#
# ### A vote that nobody waits for
#
# The test stands between $QK^T$ and the exponentials. Four lanes share a row and need not tell each other their maxima:
# if none of them needs the tile, the row does not.

# %%
tiles = AttentionTiles(32, 32, 16, warps=2, slots=2, lazy=True)
lesson.show_source(skip.make_needs(tiles))

# %% [markdown]
# How many rows a decision is about is all that tells BLASST's test from the warp's:

# %%
lesson.show_source(sparse.unit_rows)

# %% [markdown]
# All warps of a block have to agree. A barrier in the middle of each step would cost every step. So a warp that needs
# the tile says so and goes on (`bar.arrive`); only one that could do without waits (`bar.sync`). **Predict.** Who waits
# if nothing is left out?

# %%
lesson.show_source(skip.make_agree(tiles, "block"))

# %% [markdown]
# On Hopper the same vote sits in the kernel of warpgroups ({mod}`flashnumba.tiles.specialised_consumer`). A product
# there is of 64 rows, so 64 rows agree, by a barrier that also carries their votes (`bar.red`). The producer orders V
# when it has heard that somebody wants it. What is left out is then a product and a maximum, and a consumer that leaves
# a tile out must not start its next product while another still multiplies: two at a time come in together, and leave
# the tensor cores idle together.
#
# ### Small blocks for a mask, many keys for the tensor cores
#
# A mask leaves out the more, the smaller its blocks; a product of wgmma is the better, the more keys it has. A kernel
# with a list need not choose: the copy engine is told where each piece goes, so a tile is *gathered*, here two blocks
# of 64 keys that lie anywhere, and who multiplies sees a tile of 128. **Predict.** Under a causal mask a row sees the
# first so many keys of a tile. What does it see of one that is gathered, and what if a list has an odd number of
# blocks?

# %%
pairs = specialised_lists.make_keys(SpecialisedTiles(64, 128, block=64))
lesson.show_source(pairs.find)

# %% [markdown]
# Lists are in order, so what it sees of a gathered tile is again the first so many columns, and the mask of a tile
# needs one number a row as before. Where a list has no block left, the copy engine is sent beyond the last key: there
# it reads zeros, and no row sees them.
#
# How long a row tile takes is in its list. So blocks stay on their multiprocessors and draw the next row tile from a
# counter, which the kernel that packs the lists has set to zero.
#
# ### Decoding
#
# In decoding bytes are everything, so several tiles of K come first, are voted on, and then V of those that are needed
# while the next K is on its way ({mod}`flashnumba.tiles.sparse_split`).
#
# ### The largest without sorting
#
# The largest numbers of a row are those whose bits are at least some $t$. Thirty halvings or fewer find $t$, by a
# warp, with no barrier:

# %%
lesson.show_source(predict.make_choose, first="def select", last="below, many = middle")

# %%
names = ("blasst float16 d 128, tiles for sm_90a", "block_sparse float16 d 128, tiles for sm_90a",
         "blocks_wgmma float16 d 128", "choose float16")  # fmt: skip
found = {name: lesson.resources(f"sparsity.{name}") for name in names}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
lesson.table(
    ("kernel, on sm_90a", "threads", "registers a thread", "spilled bytes", "shared, KB"),
    [(name, r.threads, r.registers, r.spills, f"{r.shared / 1024:.0f}") for name, (r, _) in found.items()],
)

# %% [markdown]
# ### The third school: the small ones together
#
# What is left out so far is lost. SLA sorts tiles into three classes, by the same pooled guess: softmax attention for
# the *critical* ones, nothing for the *negligible* ones, and for the *marginal* ones linear attention. Their weights
# are small and alike, so that a matrix of low rank will do, and that costs a state for each tile of keys,
# $h_j = \phi(K_j)^T V_j$ and $z_j$, whatever the number of rows:
#
# $$O = O^s + \frac{\phi(Q) H}{\phi(Q) Z} W, \qquad H_i = \sum_{j\ \mathrm{marginal}} h_j$$
#
# Each row tile sums the states of its own list. One by one that would read more memory than dense attention takes time;
# but a sum over lists is a product with a matrix of ones and zeros, and tensor cores have it almost for nothing. The
# projection $W$ is learned, together with the model: SLA is for fine-tuning. It may as well be multiplied with $V$
# first, where a tile of values is at hand. Kernels do that, and attention goes straight on from $O^s$ to $O$ in
# registers ({mod}`flashnumba.stages.sparsity.sla_linear`). Gradients are kernels too, without atomics
# (`flashnumba.torch.sla.SparseLinearAttention` is a module). Here $W$ is fitted to every second row of a head, and the
# others are asked.
#
# **Predict:** of which heads does the linear part take back more, of those that look at few tokens or at many?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 1, figsize=(5, 4.2))
sla_stage.draw_classes(axes, *(x[0, 2].astype(np.float64) for x in (data.q, data.k)))
plt.show()


# %%
def fitted(layer: int, head: int, critical: float) -> tuple[float, float]:
    """Relative errors of the softmax part alone, and with a fitted linear part; tiles of 16 tokens."""
    q, k, v = (x[layer, head].astype(np.float64) for x in (data.q, data.k, data.v))
    dense = sla_reference.attend(q, k, v, sla_reference.classify(q, k, 1.0, 0.0, block=16), block=16).o
    found = sla_reference.attend(q, k, v, sla_reference.classify(q, k, critical, 0.0, block=16), block=16)
    known = np.arange(len(q)) % 2 == 0
    w = np.linalg.lstsq(found.o_l[known], (dense - found.o_s)[known], rcond=None)[0]
    both = found.o_s + found.o_l @ w
    return tuple(np.linalg.norm((o - dense)[~known]) / np.linalg.norm(dense[~known]) for o in (found.o_s, both))


rows = []
for layer in range(2):
    for head in (0, 2, 6):
        errors = [fitted(layer, head, critical) for critical in (0.05, 0.25)]
        rows.append((f"layer {data.layers[layer]}, head {head}", *(f"{x:.0%}" for pair in errors for x in pair)))
lesson.table(
    ("real head", "5 %: softmax part", "with linear part", "25 %: softmax part", "with linear part"), rows,
    "Error of O in rows that W was not fitted to, by the share of critical tiles.",
)  # fmt: skip

# %% [markdown]
# Where attention is spread out, the linear part takes back a half or two thirds of the error; where it is sharp, there
# is nothing of low rank left to find, and a fit to half of the rows can even do harm. Without fine-tuning none of these
# errors would do for a model: SLA's authors train for 2000 steps, and then keep 5 %.

# %% [markdown]
# ## On real data
#
# Each kernel on a case of its own, as each leaves out something else. The judge is float64 over what is left.

# %%
with lesson.timed(f"all on the {machine}"):
    results = [
        measure(stage, rung, case, machine)
        for case in stage.cases(machine, False)
        for rung in stage.rungs
        if rung.takes(case)
    ]
lesson.table(
    ("kernel", "machine", "problem", "largest error", "budget", "verdict"),
    [
        (r.rung.name, r.machine, r.case.size, r.comparison.error, r.comparison.budget, r.verdict) for r in results
    ],
)  # fmt: skip

# %% jupyter={"source_hidden": true} tags=["hide-input"]
stage.draw(results)

# %% [markdown]
# ## Who reads what
#
# **Predict.** $QK^T$ is half of the products. If all else is left out, how much faster can a threshold be? And a list?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
left = np.linspace(0, 0.95, 60)
figure, ax = plt.subplots(figsize=(8, 3.2))
ax.semilogy(left, 1 / (1 - left), label="nothing of a tile is read: a list")
ax.semilogy(left, 1 / (1 - left / 2), label="K is read and multiplied: a threshold")
ax.set(xlabel="share of tiles left out", ylabel="times dense, at most")
ax.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
ax.legend()
plt.show()

# %%
measured = lesson.results("sparsity")
for size in (measured or {}).get("sizes", []):
    kind = (
        "decoding" if "nbytes" in size else "SLA" if size.get("method") == "sla" else "causal" if size["causal"] else ""
    )
    print(f"\n{size['n']} tokens, {size['heads']} heads{', ' if kind else ''}{kind}")
    for m in size["measured"]:
        if m["seconds"]:
            left, gain = m.get("skipped"), m.get("of_dense")
            words = [f"{left:.0%} left out"] if left is not None else []
            if gain:
                words += [f"{1 / gain:.1%} of dense" if "prediction" in m["name"] else f"{gain:.2f} x dense"]
            print(f"  {m['name']:28} {m['seconds'] * 1e3:8.3f} ms  {', '.join(words)}")

# %% [markdown]
# A threshold reads all of K and multiplies all of it: a bit more than twice as fast is its end. Before that nothing is
# busy all the time: where 90 % is left out, tensor cores and shared memory work for little more than half of it, and
# what is done once a tile (copies, maxima, the vote) is waited for, as two warps a scheduler hide no more. That is the
# kernel with `mma`. The one with `wgmma` is 1.66 to 1.74 times as fast as its dense kernel at 90 %, where 1.82 is what
# the products that are left allow; the card then draws about its limit of 700 W. A list reads nothing of what is left
# out and comes near the ideal, with `wgmma` 1.84 to 1.90 times dense at 50 % and 7 to 8.6 times at 90 %; what it pays
# is the prediction, a pass over Q and K, and the mass that was guessed wrong.
#
# Which one when: a threshold if the error has to be bounded; a prediction if the sequence is so long that $QK^T$ itself
# is too much; and a mask if you know more than both.
#
# ## Break it

# %%
rng = np.random.default_rng(1)
about = 8 * np.eye(3, 32)
q = (np.repeat(about, [16, 16, 18], 0) + 0.1 * rng.standard_normal((50, 32)))[None, None].astype(np.float16)
k = (np.repeat(about[[2, 0, 1, 0, 2]], 16, 0) + 0.1 * rng.standard_normal((80, 32)))[None, None].astype(np.float16)
v = rng.standard_normal((1, 1, 80, 32)).astype(np.float16)
threshold = 0.02
s = reference.scores(q, k)
wanted = reference.skip(s, tiles.bm, tiles.bn, threshold)
kept = reference.expand(wanted, tiles.bm, tiles.bn, *s.shape[-2:])
ideal, rounded_o = reference.attend(s, v, kept)[0], reference.low_precision(q, k, v, kept)[0]


def go(broken: str = "") -> str:
    made_for = heads.prepare_heads(q, k, v, causal=False, scale=None, machine="emulator", stream=None)
    plan = mma.plan_skip(made_for.shape, vote="block", noted=True, tiles=tiles, broken=broken)
    made = problem.run(made_for, plan, {"limit": problem.limit_of(threshold)})
    verdict = compare(made_for.finish()[0], ideal, rounded_o)
    out, should = int((made["tile_map"] == sparse.SKIPPED).sum()), int((~wanted).sum())
    return f"{out} tiles left out, {should} should be; {'within' if verdict.ok else 'ABOVE'} the budget"


print(f"whole: {go()}")

# %% [markdown]
# **Rows beyond the last vote** (their scores are zero), **a warp does not ask the others**, and **the barrier of the
# vote is missing**. **Predict.** Which of them only costs time?

# %% tags=["break-it"]
for broken in ("padding", "alone", "vote_barrier"):
    try:
        print(f"{broken}: {go(broken)}")
    except Fault as fault:
        print(f"{broken}: {fault}")

# %% [markdown]
# And a list of three blocks, gathered in pairs. **Where there is no fourth, the third comes once more; and no tile of a
# list is masked.** Here the last block has 22 keys. **Predict.** What does each of them do to a row's weights?

# %%
q, k, v = (rng.standard_normal((1, 1, n, 64)).astype(np.float16) for n in (70, 150, 150))
blocks = np.ones((1, 1, 1, 3), bool)
s = reference.scores(q, k)
ideal, rounded_o = reference.attend(s, v, s == s)[0], reference.low_precision(q, k, v, s == s)[0]


def gather(broken: str = "") -> str:
    made_for = heads.prepare_heads(q, k, v, causal=False, scale=None, machine="emulator", stream=None)
    gathered = SpecialisedTiles(64, 128, block=64)
    plan = wgmma.plan_blocks(replace(made_for.shape, arch="90a"), tiles=gathered, broken=broken)
    problem.run(made_for, plan, {"limit": -np.inf, "mask": blocks.astype(np.uint8)})
    verdict = compare(made_for.finish()[0], ideal, rounded_o)
    return f"off by {verdict.error:.4f}, {'within' if verdict.ok else 'ABOVE'} the budget of {verdict.budget:.4f}"


print(f"whole: {gather()}")

# %% tags=["break-it"]
for broken in ("none", "loose"):
    print(f"{broken}: {gather(broken)}")

# %% [markdown]
# ## Exercises
#
# ### 1. The threshold for an error
#
# At least a share `mass` of each row's weights has to stay, of `n` keys. Which threshold is safe, whatever the scores?


# %%
def safe_threshold(mass: float, n: int) -> float:
    """The largest threshold that the bound allows."""
    # your code


# %% tags=["exercise"]
def safe_threshold_is_right() -> bool:
    values = [safe_threshold(mass, n) for mass, n in ((0.99, 1000), (0.9, 64))]
    return bool(np.allclose(values, [1e-5, 0.1 / 64], rtol=0.02))


lesson.check(
    "safe_threshold", safe_threshold_is_right, "All n keys lose at most n * threshold of a sum that is at least 1."
)


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def safe_threshold(mass: float, n: int) -> float:
    return (1 - mass) / n


lesson.check("safe_threshold", safe_threshold_is_right)

# %% [markdown]
# The bound is far from what happens: most of what is left out is far below the threshold. Calibration asks the data
# instead.
#
# ### 2. A list from a mask
#
# One row of a mask as the kernel wants it: the numbers of the blocks, in order, and how many.


# %%
def packed(mask: np.ndarray) -> tuple[np.ndarray, int]:
    """``mask`` bool ``[C]``; int32 ``[C]``, of which the first count."""
    # your code


# %% tags=["exercise"]
def packed_is_right() -> bool:
    row = np.array([1, 0, 0, 1, 1, 0, 1], bool)
    numbers, count = packed(row)
    return count == 4 and list(numbers[:count]) == [0, 3, 4, 6] and numbers.shape == row.shape


lesson.check("packed", packed_is_right, "Each kept block goes to the place that is the number of kept ones before it.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def packed(mask: np.ndarray) -> tuple[np.ndarray, int]:
    numbers = np.zeros(len(mask), np.int32)
    before = np.cumsum(mask) - mask  # what a ballot and a population count say in the kernel
    numbers[before[mask]] = np.flatnonzero(mask)
    return numbers, int(mask.sum())


lesson.check("packed", packed_is_right)

# %% [markdown]
# ## Two machines, side by side
#
# | | the notes | the papers |
# | --- | --- | --- |
# | BLASST | no cost where nothing is left out | 0.99 x of dense in decoding on an H200; the vote is paid in each tile |
# | who decides | each warp, after pooling and classes | BLASST: a tile's rows. SpargeAttn: pooling, then a warp |
# | similar tokens | are merged | are averaged to predict, and never merged |
# | V of what is left out | is not read | in decoding; prefill reads it (here, by wgmma, it does not) |
#
# The notes make one method of three. Here they stand apart: the threshold of BLASST, the warp's skip of SpargeAttn, and
# its prediction. By wgmma it is a warpgroup that decides.
#
# ## Limits
#
# - The structured heads stand for no model. How good a model stays is for its own tests to say.
# - A NaN in a key of a tile that is left out is not seen.
# - Rows of a mask without any block give 0.
# - A prediction takes blocks of at least 64 rows and keys, and up to 6144 blocks of keys; as many as shared memory has
#   room for, where that is less: 3840 and more.
#
# ## What next
#
# Caches of latent keys and values: FlashMLA.
