"""The CNNs, and how they are drawn on."""

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
        self.dropout1 = ByteDropout(0.25)
        self.dropout2 = ByteDropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the ten digits."""
        x = F.relu(self.conv1(x))
        # The example has relu before the maximum, which gives the same values and gradients on four times the memory.
        x = F.relu(_pooled(self.conv2(x)).flatten(1))
        x = F.relu(self.fc1(self.dropout1(x)))
        return _log_probabilities(self.fc2(self.dropout2(x)))


class SmallNet(nn.Module):
    """A fifteenth of `Net`'s arithmetic: half the channels, the maximum after each convolution, no dropout.

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
        x = F.relu(_pooled(self.conv1(x)))
        x = F.relu(_pooled(self.conv2(x)).flatten(1))
        return _log_probabilities(self.fc2(F.relu(self.fc1(x))))


class ByteDropout(nn.Module):
    """Dropout (Srivastava et al. 2014) that on the CPU draws one random byte for each value.

    torch's draws a double: a fifth of the step's time of `Net` (torch 2.15, CPU). On a GPU it is torch's.

    Args:
        p: probability of zero, a multiple of 1/256.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        assert (256 * p).is_integer() and 0 <= p < 1
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape and dtype."""
        if not self.training or x.device.type != "cpu":
            return F.dropout(x, self.p, self.training)
        words = torch.empty(-(-x.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = words.view(torch.uint8)[: x.numel()] >= int(256 * self.p)
        return x * kept.view(x.shape).to(x.dtype).mul_(1 / (1 - self.p))


def _pooled(x: torch.Tensor) -> torch.Tensor:
    """The maximum of each 2 x 2 values.

    On the CPU in channels_last, there and back, whatever the input's layout: the same bits, but contiguous it takes
    sixteen times as long, and of a contiguous gradient three times (torch 2.15).
    """
    if x.device.type != "cpu":
        return F.max_pool2d(x, 2)
    maxima = F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2)
    if maxima.requires_grad:
        maxima.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
    return maxima


def _log_probabilities(scores: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(scores.float(), dim=1)  # in full precision under autocast, too
