"""Train a small CNN on one device, in plain PyTorch. ddp.py is the same training on any number of GPUs and nodes.

python examples/single.py
"""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import data

EPOCHS = 3


def stripes(train: bool) -> data.TensorDataset:
    """Images (N, 1, 28, 28) in noise, whose label says which pair of rows is a little brighter."""
    generator = torch.Generator().manual_seed(int(train))
    labels = torch.randint(10, (4096 if train else 512,), generator=generator)
    images = torch.rand(len(labels), 1, 14, 2, 28, generator=generator)
    images[torch.arange(len(labels)), 0, 2 + labels] += 0.1
    return data.TensorDataset(images.reshape(-1, 1, 28, 28), labels)


def network() -> nn.Sequential:
    """A CNN for ten classes."""
    layers = [nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 12 * 12, 10)]
    return nn.Sequential(*layers)


if __name__ == "__main__":
    # 1. Device and random seed.
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # 2. The model, on the device.
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # 3. The data.
    train_set, test_set = (data.DataLoader(stripes(train), batch_size=64, shuffle=train) for train in (True, False))
    # 4. Epochs, each in another order of the samples.
    for epoch in range(EPOCHS):
        start_s = time.perf_counter()
        for images, labels in train_set:
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        train_s = time.perf_counter() - start_s
        # 5. What the devices have found, 6. is printed once.
        model.eval()
        correct = seen = 0
        with torch.no_grad():
            for images, labels in test_set:
                correct += int((model(images.to(device)).argmax(1) == labels.to(device)).sum())
                seen += len(labels)
        model.train()
        print(f"epoch {epoch + 1}: accuracy {correct / seen:.4f}, {train_s:.2f} s")
