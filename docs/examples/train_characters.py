"""Train one small transformer on characters several times, alike but for who computes its attention.

A decoder of four layers with four heads of 64 columns each reads windows of 256 characters of "As You Like It"
(as_you_like_it.txt beside this file) and learns to say each next one. The runs:

- ``flashnumba``: causal attention by flashnumba.torch, forward and gradients;
- ``torch``: the same weights and batches, attention by torch's FlashAttention-2 (on a CPU by what torch takes there);
- ``torch again``: the same once more: that backward adds with atomics, in whatever order they come;
- ``torch, other seed``: other weights and other batches, to see how far apart two honest runs are;
- ``flashnumba, repeatable`` and ``flashnumba, repeatable again``: with ``torch.use_deterministic_algorithms`` for what
  is not attention, to see whether the same bits come out.

Weights are float32; under autocast the products, and so q, k and v, are bfloat16::

    python docs/examples/train_characters.py                 # on a GPU: writes docs/results/training.json
    python docs/examples/train_characters.py --smoke         # anywhere, in seconds: a smaller model, a few steps
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashnumba.torch import attention

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by torch.use_deterministic_algorithms
torch.utils.deterministic.fill_uninitialized_memory = False  # no kernel here reads what nobody has written

HERE = Path(__file__).resolve().parent
TEXT = HERE / "as_you_like_it.txt"
RESULT = HERE.parent / "results" / "training.json"


@dataclass(frozen=True)
class Settings:
    """What the runs share: the model's sizes, the batches, the optimiser."""

    steps: int = 600
    layers: int = 4
    heads: int = 4
    head_dim: int = 64
    context: int = 256
    batch: int = 32
    rate: float = 1e-3
    warmup: int = 50
    decay: float = 0.1


@dataclass(frozen=True)
class Run:
    """One training: its name, who computes attention, the seed of weights and batches, and whether torch's operators
    are to give the same bits every time."""

    name: str
    attention: str
    seed: int = 0
    repeatable: bool = False


RUNS = (
    Run("flashnumba", "flashnumba"),
    Run("torch", "torch"),
    Run("torch again", "torch"),
    Run("torch, other seed", "torch", seed=1),
    Run("flashnumba, repeatable", "flashnumba", repeatable=True),
    Run("flashnumba, repeatable again", "flashnumba", repeatable=True),
)
PAIRS = (
    ("flashnumba", "torch"),
    ("torch", "torch again"),
    ("torch", "torch, other seed"),
    ("flashnumba, repeatable", "flashnumba, repeatable again"),
)
"""Of which runs the distance is told."""

ATTENTION = {
    "flashnumba": lambda q, k, v: attention(q, k, v, causal=True),
    "torch": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
}


# -- the model ---------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    """Attention, then a perceptron, each on a normed input and added to it."""

    def __init__(self, settings: Settings, how: str) -> None:
        super().__init__()
        self.heads, self.attend = settings.heads, ATTENTION[how]
        width = settings.heads * settings.head_dim
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width]
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))  # [batch, tokens, 3, heads, head_dim]
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # views: both attentions take strides
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class Characters(nn.Module):
    """Embeddings of characters and places, blocks, and a score for each character that may follow."""

    def __init__(self, settings: Settings, how: str, characters: int) -> None:
        super().__init__()
        width = settings.heads * settings.head_dim
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(settings.context, width)
        self.blocks = nn.Sequential(*(Block(settings, how) for _ in range(settings.layers)))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, characters)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, tokens] -> [batch, tokens, characters]
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        return self.scores(self.norm(self.blocks(x)))


# -- one run -----------------------------------------------------------------------------------------------------------
def windows(text: Tensor, settings: Settings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A batch: windows of the text that begin anywhere, and the same one character later."""
    starts = torch.randint(len(text) - settings.context, (settings.batch, 1), generator=generator)
    both = text[(starts + torch.arange(settings.context + 1)).to(text.device)]
    return both[:, :-1], both[:, 1:]


def train(run: Run, settings: Settings, text: Tensor, characters: int, device: str) -> dict[str, Any]:
    """Train once; the loss of each step in nats a character, and the seconds of a step."""
    torch.use_deterministic_algorithms(run.repeatable, warn_only=True)
    torch.manual_seed(run.seed)
    model = Characters(settings, run.attention, characters).to(device)
    batches = torch.Generator().manual_seed(run.seed)
    optimiser = torch.optim.AdamW(model.parameters(), settings.rate, betas=(0.9, 0.95), weight_decay=settings.decay)

    def rate(step: int) -> float:
        """Up in a line, down in half a cosine."""
        down = 0.5 * (1 + math.cos(math.pi * step / settings.steps))
        return min(1.0, (step + 1) / settings.warmup) * down

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)

    def loss_of(tokens: Tensor, following: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            scores = model(tokens)
        return functional.cross_entropy(scores.float().flatten(0, 1), following.flatten())

    loss_of(*windows(text, settings, torch.Generator())).backward()  # kernels are compiled before the clock runs
    optimiser.zero_grad()
    losses = []
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(settings.steps):
        loss = loss_of(*windows(text, settings, batches))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        losses.append(loss.detach())
    wait()
    seconds = time.perf_counter() - start
    return {**asdict(run), "seconds": seconds, "loss": torch.stack(losses).tolist()}


# -- all of them -------------------------------------------------------------------------------------------------------
def distances(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of pairs of runs at how many steps their losses have the same bits, and how far apart they are at one step."""
    by_name = {run["name"]: run["loss"] for run in runs}
    found = []
    for one, other in PAIRS:
        apart = [abs(x - y) for x, y in zip(by_name[one], by_name[other], strict=True)]
        equal, mean = apart.count(0.0), sum(apart) / len(apart)
        found.append(
            {"one": one, "other": other, "steps": len(apart), "equal": equal, "mean": mean, "largest": max(apart)}
        )
    return found


def where(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    if device == "cuda":
        from flashnumba.bench.environment import environment

        return environment("training")
    return {"device": "CPU", "torch": torch.__version__}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Parse the command line, train, write what came out and return it."""
    parser = argparse.ArgumentParser(description="Train a small transformer with flashnumba's attention and torch's.")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true", help="a smaller model and a few steps, on the CPU too")
    parser.add_argument("--out", type=Path, help=f"{RESULT.name} in docs/results unless --smoke")
    given = parser.parse_args(arguments)
    settings = Settings(steps=given.steps)
    if given.smoke:
        settings = replace(settings, steps=4, layers=1, heads=2, head_dim=16, context=32, batch=2, warmup=1)
    text = TEXT.read_text(encoding="ascii")
    alphabet = sorted(set(text))
    tokens = torch.tensor([alphabet.index(c) for c in text], device=given.device)
    fa2 = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if given.device == "cuda" else nullcontext()
    runs, before = [], torch.are_deterministic_algorithms_enabled()
    with fa2:
        for run in RUNS:
            runs.append(train(run, settings, tokens, len(alphabet), given.device))
            print(f"{run.name:28} {runs[-1]['seconds']:6.1f} s   last loss {runs[-1]['loss'][-1]:.4f}", flush=True)
    torch.use_deterministic_algorithms(before)
    held = {
        "environment": where(given.device), "settings": asdict(settings), "characters": len(text),
        "alphabet": len(alphabet), "distances": distances(runs), "runs": runs,
    }  # fmt: skip
    for pair in held["distances"]:
        print(f"{pair['one']} and {pair['other']}: at most {pair['largest']:.3g} apart, {pair['mean']:.3g} on average")
    out = given.out or (None if given.smoke else RESULT)
    if out is not None:
        for run in runs:
            run["loss"] = [round(loss, 5) for loss in run["loss"]]
        out.write_text(json.dumps(held) + "\n", encoding="utf-8")
    return held


if __name__ == "__main__":
    main()
