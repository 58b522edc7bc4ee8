from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cluster_ddp.mnist.fast_cpu import FAST, ByteDropout
from cluster_ddp.mnist.model import ConvNet, Net, SmallNet


def test_the_reference_has_the_examples_parameters() -> None:
    assert sum(parameter.numel() for parameter in Net().parameters()) == 1_199_882


@pytest.mark.parametrize(
    ("plain", "layout"),
    [(Net, torch.contiguous_format), (Net, torch.channels_last), (SmallNet, torch.channels_last)],
)
def test_the_fast_model_is_the_plain_one_to_the_bit(plain: type[torch.nn.Module], layout: torch.memory_format) -> None:
    images, labels = torch.randn(16, 1, 28, 28).to(memory_format=layout), torch.arange(16) % 10
    found = []
    for model in (plain, FAST[plain]):
        torch.manual_seed(0)
        net = model().eval()
        output = net(images)
        F.nll_loss(output, labels).backward()
        found.append([output, *(parameter.grad for parameter in net.parameters())])
    assert all(torch.equal(fast, slow) for slow, fast in zip(*found))


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


def test_the_conv_net_has_batch_normalisation_and_no_dropout() -> None:
    layers = (25 + 1) * 16 + 2 * 16, (25 * 16 + 1) * 32 + 2 * 32, (7 * 7 * 32 + 1) * 10
    net = ConvNet()
    assert sum(parameter.numel() for parameter in net.parameters()) == sum(layers)
    images = torch.randn(8, 1, 28, 28)
    assert torch.equal(net(images), net(images))  # without dropout
    assert not torch.equal(net.norm1.running_mean, torch.zeros(16))
    assert not torch.equal(net(images), net.eval()(images))


@pytest.mark.parametrize("plain", [Net, SmallNet, ConvNet])
def test_under_autocast_the_output_is_in_full_precision(plain: type[torch.nn.Module]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = FAST.get(plain, plain)()(torch.randn(3, 1, 28, 28))
    assert output.dtype == torch.float32 and output.shape == (3, 10)
    assert torch.allclose(output.exp().sum(dim=1), torch.ones(3))
