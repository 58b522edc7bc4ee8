from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cluster_ddp.mnist.model import ConvNet, Net, SmallNet


def test_the_reference_has_the_examples_parameters() -> None:
    assert sum(parameter.numel() for parameter in Net().parameters()) == 1_199_882


def test_the_reference_computes_what_the_example_computes_to_the_bit() -> None:
    """PyTorch's example has relu before the pooling."""
    net, images, labels = Net().eval(), torch.randn(16, 1, 28, 28), torch.arange(16) % 10

    def example(x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(net.conv2(F.relu(net.conv1(x)))), 2)
        return F.log_softmax(net.fc2(F.relu(net.fc1(torch.flatten(x, 1)))), dim=1)

    found = []
    for forward in (net, example):
        net.zero_grad()
        output = forward(images)
        F.nll_loss(output, labels).backward()
        found.append([output, *(parameter.grad.clone() for parameter in net.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found))


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
        output = plain()(torch.randn(3, 1, 28, 28))
    assert output.dtype == torch.float32 and output.shape == (3, 10)
    assert torch.allclose(output.exp().sum(dim=1), torch.ones(3))
