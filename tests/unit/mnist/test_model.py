from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cluster_ddp.mnist.model import ByteDropout, Net, SmallNet


def example(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The forward of PyTorch's example, without dropout, in its own order."""
    x = F.max_pool2d(F.relu(net.conv2(F.relu(net.conv1(x)))), 2)
    return F.log_softmax(net.fc2(F.relu(net.fc1(torch.flatten(x, 1)))), dim=1)


def test_the_reference_is_pytorchs_example_to_the_bit() -> None:
    torch.manual_seed(0)
    net, images, labels = Net().eval(), torch.randn(16, 1, 28, 28), torch.arange(16) % 10
    assert sum(parameter.numel() for parameter in net.parameters()) == 1_199_882
    found = []
    for output in (net(images), example(net, images)):
        net.zero_grad()
        F.nll_loss(output, labels).backward()
        found.append([output, *(parameter.grad.clone() for parameter in net.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found))


@pytest.mark.parametrize("p", [0.25, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_the_share_and_the_mean(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(999, 1001, dtype=dtype, requires_grad=True)
    y = ByteDropout(p)(x)
    y.sum().backward()
    kept = (y != 0).float()
    n = x.numel()
    assert abs(float(kept.mean()) - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5  # five standard deviations
    assert y.dtype == dtype and torch.equal(x.grad, y.detach())  # the gradient is dropped and scaled alike
    assert y.unique().tolist() == [0, torch.tensor(1 / (1 - p), dtype=dtype).item()]
    # Neighbours, and rows, know nothing of each other.
    for other in (kept.roll(1, 1), kept.roll(1, 0), kept.roll(8, 1)):
        assert abs(float((kept * other).mean()) - (1 - p) ** 2) < 0.003


def test_dropout_follows_the_seed_and_does_nothing_in_a_test() -> None:
    x, dropout = torch.ones(10, 10), ByteDropout(0.5)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(dropout(x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert dropout.eval()(x) is x


@pytest.mark.parametrize("p", [0.3, 1.0, -0.25])
def test_dropout_of_another_share_is_no_option(p: float) -> None:
    with pytest.raises(AssertionError):
        ByteDropout(p)


@pytest.mark.parametrize("model", [Net, SmallNet])
def test_under_autocast_the_output_is_in_full_precision(model: type[torch.nn.Module]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = model()(torch.randn(3, 1, 28, 28))
    assert output.dtype == torch.float32 and output.shape == (3, 10)
    assert torch.allclose(output.exp().sum(dim=1), torch.ones(3))
