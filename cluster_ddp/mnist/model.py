"""The CNNs.

All map float32 images (N, 1, 28, 28) to log-probabilities of the ten digits, float32 (N, 10).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """The CNN of PyTorch's MNIST example (github.com/pytorch/examples/tree/main/mnist): 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.pool = nn.MaxPool2d(2)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.conv1(x))
        # Pool before relu: the same values and gradients, on a quarter of the memory.
        x = F.relu(self.pool(self.conv2(x)).flatten(1))
        x = F.relu(self.fc1(self.dropout1(x)))
        return _log_probabilities(self.fc2(self.dropout2(x)))


class SmallNet(nn.Module):
    """A sixteenth of `Net`'s arithmetic: half the channels, max-pooling after each convolution, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(800, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.pool(self.conv1(x)))
        x = F.relu(self.pool(self.conv2(x)).flatten(1))
        return _log_probabilities(self.fc2(F.relu(self.fc1(x))))


class ConvNet(nn.Module):
    """Two 5x5 convolutions, each with batch normalisation, ReLU and max-pooling, and a linear layer. No dropout."""

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
        return _log_probabilities(self.fc(x.flatten(1)))


def _log_probabilities(scores: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(scores.float(), dim=1)  # in full precision under autocast on the CPU, too
