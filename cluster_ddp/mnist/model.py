"""The CNNs, in plain PyTorch. `fast_cpu` has the same functions, faster on CPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """The CNN of PyTorch's MNIST example (github.com/pytorch/examples/tree/main/mnist): 1,199,882 parameters.

    Two convolutions, two fully connected layers; float32 (N, 1, 28, 28) -> log-probabilities, float32 (N, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1: nn.Module = nn.Dropout(0.25)
        self.dropout2: nn.Module = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = F.relu(self.fc1(x))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


class SmallNet(nn.Module):
    """A sixteenth of `Net`'s arithmetic: half the channels, max-pooling after each convolution, no dropout.

    float32 (N, 1, 28, 28) -> log-probabilities, float32 (N, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.fc1 = nn.Linear(800, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


class ConvNet(nn.Module):
    """Two 5x5 convolutions, each with batch normalisation, ReLU and max-pooling, and a linear layer. No dropout.

    float32 (N, 1, 28, 28) -> log-probabilities, float32 (N, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=2)
        self.norm2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return F.log_softmax(self.fc(torch.flatten(x, 1)).float(), dim=1)  # in full precision under autocast, too
