"""A character-level language model: a whole training with AdamW, a cosine schedule, clipping and a validation loss.

python examples/char_lm.py                                     generated sentences, on one CPU or GPU
torchrun --nproc-per-node 2 examples/char_lm.py
cluster-ddp submit --nodes 2 --gpus-per-node 2 -- python examples/char_lm.py --text book.txt --epochs 20

docs/how-to/whole-training.md shows how a loop in plain PyTorch became this one, and why.
"""

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import cluster_ddp


class CharModel(nn.Module):
    """Predicts each character from those before it: an embedding, a GRU and a linear layer."""

    def __init__(self, characters: int, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.linear = nn.Linear(width, characters)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits (N, length, characters) of inputs (N, length), int64."""
        logits: torch.Tensor = self.linear(self.gru(self.embedding(inputs))[0])
        return logits


def load(path: Path | None, length: int = 64) -> tuple[str, TensorDataset, TensorDataset]:
    """A text's characters; its pieces to train on, and a tenth to validate on: inputs and targets (N, length)."""
    draw = random.Random(0)  # the same sentences on every rank
    words = [("The", "A", "My"), ("cat", "dog", "poet"), ("sees", "hears", "likes"), ("rain", "music", "tea")]
    text = path.read_text() if path else "".join(" ".join(map(draw.choice, words)) + ". " for _ in range(2000))
    characters = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(characters)}
    pieces = torch.tensor([numbers[character] for character in text]).unfold(0, length + 1, length)
    parts = pieces.split([len(pieces) - len(pieces) // 10, len(pieces) // 10])
    train_set, val_set = (TensorDataset(part[:, :-1], part[:, 1:]) for part in parts)
    return characters, train_set, val_set


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of a batch."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(options: argparse.Namespace, world: cluster_ddp.World) -> None:
    """Train, validate after each epoch, and keep the best weights."""
    torch.manual_seed(options.seed)
    characters, train_set, val_set = load(options.text)
    model = world.wrap(CharModel(len(characters)))
    shard = world.shard(train_set, batch_size=options.batch_size, shuffle_seed=options.seed, drop_last=True)
    val_shard = world.shard(val_set, batch_size=options.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * len(shard))
    losses = cluster_ddp.Meter(world)
    meters, identity = {"loss": losses}, {"characters": characters}
    checkpoint = cluster_ddp.Checkpointer(
        world, shard=shard, model=model, optimizer=optimizer, scheduler=scheduler, meters=meters, identity=identity
    )
    for epoch in checkpoint.epochs(options.epochs):
        for inputs, targets in shard:
            loss = loss_of(model, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.add(loss * len(inputs), len(inputs))
            checkpoint.step()
        train_loss, val_loss = losses.mean(), validate(model.module, val_shard, world)
        losses.reset()
        world.print(f"epoch {epoch + 1}: loss {train_loss:.4f}, validation loss {val_loss:.4f}")
        world.log("validation", epoch=epoch + 1, loss=val_loss, train_loss=train_loss)
        checkpoint.best("loss", val_loss, mode="min")


@torch.no_grad()
def validate(model: nn.Module, shard: cluster_ddp.Shard, world: cluster_ddp.World) -> float:
    """The mean loss of all samples, over all ranks."""
    model.eval()
    total = count = 0.0
    for inputs, targets in shard:
        total += loss_of(model, inputs, targets).item() * len(inputs)
        count += len(inputs)
    model.train()
    return world.mean(total, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="file to learn from; default: generated sentences")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of 64 characters per rank and step")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at the start")
    parser.add_argument("--seed", type=int, default=1, help="random seed for weights and shuffling")
    options = parser.parse_args()
    with cluster_ddp.distributed() as world:
        train(options, world)
