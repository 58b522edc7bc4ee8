"""What `fast_cpu` does to a model's layers, and to memory."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cluster_ddp.mnist.model import ByteDropout, ChannelsLastMaxPool2d, Net, SmallNet, fast_cpu


@pytest.mark.quick
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("model", [Net, SmallNet])
def test_the_fast_model_is_the_plain_one_to_the_bit(model: type[nn.Module], layout: torch.memory_format) -> None:
    """In a test; in a training dropout draws other random numbers. The weights keep their names."""
    images, labels = torch.randn(16, 1, 28, 28).to(memory_format=layout), torch.arange(16) % 10
    plain = model().eval()
    fast = fast_cpu(model()).eval()
    fast.load_state_dict(plain.state_dict())
    found = []
    for net in (plain, fast):
        output = net(images)
        F.nll_loss(output, labels).backward()
        found.append([output, *(parameter.grad for parameter in net.parameters())])
    if model is Net or layout == torch.channels_last:
        assert all(torch.equal(*pair) for pair in zip(*found))
    else:  # a layer after the pooling has its input in another layout: other roundings
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found))


def test_it_replaces_the_layers_that_it_knows_wherever_they_are() -> None:
    inner = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.3), nn.MaxPool2d(2, return_indices=True), nn.AlphaDropout(0.5))
    model = nn.Sequential(nn.MaxPool2d(3, stride=2, padding=1), inner.eval(), nn.Dropout(1.0))
    assert fast_cpu(model) is model
    kinds = [type(layer) for layer in (model[0], *model[1], model[2])]
    kept = [nn.Dropout, nn.MaxPool2d, nn.AlphaDropout, nn.Dropout]
    assert kinds == [ChannelsLastMaxPool2d, ByteDropout, *kept]
    assert model[0].training and not model[1][0].training
    images = torch.randn(2, 3, 9, 9)
    assert torch.equal(model[0](images), nn.MaxPool2d(3, stride=2, padding=1)(images))
    assert torch.equal(model[0](images[0]), nn.MaxPool2d(3, stride=2, padding=1)(images[0]))  # without a batch


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


STEPS = """
import os, resource, sys, torch
from cluster_ddp.mnist.model import keep_freed_memory
if sys.argv[1] == "keep": keep_freed_memory(os.environ)
def step():
    blocks = [torch.ones(12 << 20) for _ in range(2)]  # 48 MiB each: over what malloc keeps by itself
for _ in range(5): step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10): step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str, **env: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how],
        env=dict(os.environ) | {"OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library's malloc")
def test_what_a_step_frees_the_next_one_gets_without_the_system() -> None:
    plain = page_faults("plain")
    assert plain > 10 * 2 * 20  # 12,288 of 4 KiB for each block, or 24 large ones
    assert page_faults("keep") < plain / 2  # usually none; but a small block may lie in the way of a large one
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > plain / 3  # a setting of the user's own stays
