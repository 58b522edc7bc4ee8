"""A small GPT under FSDP2: each rank keeps a part of the weights, gradients and optimizer state.

python examples/gpt_fsdp.py                                    generated sentences, on one CPU or GPU
torchrun --nproc-per-node 2 examples/gpt_fsdp.py --strategy fsdp
cluster-ddp memory examples/gpt_fsdp.py:gpt_6_7b --gpus 8 --gpus-per-node 4 --gpu-gb 80 --mixed bf16
cluster-ddp submit --nodes 2 --gpus-per-node 4 -- python examples/gpt_fsdp.py --strategy hsdp --text book.txt

It prints tokens per second and, on a GPU whose peak is known, the model FLOPs utilization of PaLM (arXiv:2204.02311,
appendix B): tokens/s x (6 x parameters + 12 x layers x width x length) / (peak x GPUs). It takes bf16 on GPUs.
docs/how-to/large-model.md says what each part is for.
"""

import argparse
import contextlib
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp

# FLOP/s in bf16 without sparsity, by NVIDIA's data sheets; H100 is the SXM one.
PEAKS = {"A100": 312e12, "H100 80GB HBM3": 989e12, "H200": 989e12}


class Block(nn.Module):
    """Attention to what came before, and an MLP: the layer that the model repeats."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, length, width) to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (N, heads, length, width / heads)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        y: torch.Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return y


class GPT(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)  # small: they are the output's weights, too
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits (N, length, 256) of bytes (N, length), int64."""
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def gpt_6_7b() -> GPT:
    """The shape of GPT-3 6.7B, with an alphabet of bytes."""
    return GPT(layers=32, width=4096, heads=32, length=2048)


def load(path: Path | None, length: int) -> tuple[TensorDataset, ...]:
    """Pieces of a text to train on, and a tenth to validate on: inputs and targets (N, length), int64."""
    draw = random.Random(0)  # the same sentences on every rank
    words = [("The", "A", "My"), ("cat", "dog", "poet"), ("sees", "hears", "likes"), ("rain", "music", "tea")]
    text = path.read_text() if path else "".join(" ".join(map(draw.choice, words)) + ". " for _ in range(1000))
    pieces = torch.tensor(list(text.encode())).unfold(0, length + 1, length)
    parts = pieces.split([len(pieces) - len(pieces) // 10, len(pieces) // 10])
    return tuple(TensorDataset(part[:, :-1], part[:, 1:]) for part in parts)


def train(options: argparse.Namespace, world: cluster_ddp.World) -> None:
    """Train; print losses and speed after each epoch."""
    torch.manual_seed(options.seed)
    train_set, val_set = load(options.text, options.length)
    on_gpu, is_ddp = world.device.type == "cuda", options.strategy == "ddp"
    with world.empty_init():  # rank 0 builds it in its host's memory: no GPU ever holds the whole model
        model = GPT(options.layers, options.width, options.heads, options.length)
    world.seed_rank(options.seed)  # dropout differs between ranks
    mixed = torch.bfloat16 if on_gpu and not is_ddp else None
    model = world.wrap(model, strategy=options.strategy, blocks=Block, mixed=mixed)
    autocast = world.autocast() if on_gpu and is_ddp else contextlib.nullcontext()
    shard = world.shard(train_set, batch_size=options.batch_size, shuffle_seed=options.seed, drop_last=True)
    val_shard = world.shard(val_set, batch_size=options.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = cluster_ddp.Meter(world)
    state = {"model": model, "optimizer": optimizer, "meters": {"loss": losses}}
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, **state)
    for epoch in checkpoint.epochs(options.epochs):
        start, tokens = time.perf_counter(), 0
        for inputs, targets in shard:
            with autocast:
                loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            world.clip_grad_norm(model, 1.0)
            optimizer.step()
            losses.add(loss * len(inputs), len(inputs))
            tokens += inputs.numel() * world.world_size
            checkpoint.step()
        train_loss, tokens_per_s = losses.mean(), tokens / (time.perf_counter() - start)
        losses.reset()
        val_loss = validate(model, val_shard, world)
        world.print(f"epoch {epoch + 1}: loss {train_loss:.4f}, validation loss {val_loss:.4f}")
        world.print(f"{tokens_per_s:.0f} tokens/s{utilization(model, options, tokens_per_s, world)}")
    world.print(f"weights: {world.weights_digest(model)[:16]}")


@torch.no_grad()
def validate(model: nn.Module, shard: cluster_ddp.Shard, world: cluster_ddp.World) -> float:
    """The mean loss of all pieces, over all ranks. Each rank has as many batches: a forward pass is a collective."""
    model.eval()
    total = count = 0.0
    for inputs, targets in shard:
        total += F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten()).item() * len(inputs)
        count += len(inputs)
    model.train()
    return world.mean(total, count)


def utilization(model: nn.Module, options: argparse.Namespace, tokens_per_s: float, world: cluster_ddp.World) -> str:
    """The model FLOPs utilization, as text; "" on a device whose peak is not known."""
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    peak = next((flops for part, flops in PEAKS.items() if part in name), None)
    parameters = sum(one.numel() for one in model.parameters())
    flops_per_token = 6 * parameters + 12 * options.layers * options.width * options.length
    return f", MFU {tokens_per_s * flops_per_token / peak / world.world_size:.1%}" if peak else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=("ddp", "fsdp", "hsdp"), default="fsdp")
    parser.add_argument("--text", type=Path, help="file to learn from; default: generated sentences")
    numbers = {"layers": 4, "width": 128, "heads": 4, "length": 64, "batch-size": 16, "epochs": 3, "seed": 1}
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number, help=f"default: {number}")
    options = parser.parse_args()
    with cluster_ddp.distributed() as world:
        train(options, world)
