"""SSD300 of torchvision's parts, its optimizer and learning rate."""

import argparse
import contextlib
import functools
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torchvision.models import get_model
from torchvision.models.detection import ssd300_vgg16
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.ops import Conv2dNormActivation

import cluster_ddp


class ResNetMaps(nn.Module):
    """The six feature maps of an image of 300x300 for SSD, with sides of 38, 19, 10, 5, 3 and 1."""

    def __init__(self, name: str, weights: str) -> None:
        super().__init__()
        net = get_model(name, weights=None)
        if weights:
            net.load_state_dict(torch.load(weights, weights_only=True))
        for layer in net.layer3[0].modules():
            if isinstance(layer, nn.Conv2d):
                layer.stride = (1, 1)  # layer3's map keeps the side of layer2's
        self.trunk = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, net.layer3)
        self.out_channels = [net.layer4[0].conv1.in_channels, 512, 512, 256, 256, 256]
        sizes = zip(self.out_channels, self.out_channels[1:], (2, 2, 2, 1, 1))
        self.extra = nn.ModuleList(self.smaller(*size) for size in sizes)

    @staticmethod
    def smaller(inputs: int, outputs: int, stride: int) -> nn.Module:
        """Halve the side, or take 2 off it with a stride of 1."""
        norm = functools.partial(nn.GroupNorm, 32)  # BatchNorm can't train on one image with a side of 1
        narrow = Conv2dNormActivation(inputs, outputs // 2, kernel_size=1, norm_layer=norm)
        wide = Conv2dNormActivation(outputs // 2, outputs, stride=stride, padding=stride - 1, norm_layer=norm)
        return nn.Sequential(narrow, wide)

    def forward(self, images: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
        """Return the maps, the largest first."""
        maps = [self.trunk(images)]
        for layer in self.extra:
            maps.append(layer(maps[-1]))
        return OrderedDict((str(number), one) for number, one in enumerate(maps))


def ssd300(backbone: str, classes: int, weights: str = "") -> nn.Module:
    """Return an SSD, which resizes images itself.

    Args:
        backbone: resnet18 to resnet152, or vgg16.
        classes: number of classes, without the background.
        weights: a file with torchvision's weights of the ResNet.
    """
    if backbone == "vgg16":
        vgg: nn.Module = ssd300_vgg16(weights=None, weights_backbone=None, num_classes=classes + 1)
        return vgg
    ratios = [[2], [2, 3], [2, 3], [2, 3], [2], [2]]
    scales = [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05]  # the default boxes of torchvision's ssd300_vgg16
    boxes = DefaultBoxGenerator(ratios, scales=scales, steps=[8, 16, 32, 64, 100, 300])
    model: nn.Module = SSD(ResNetMaps(backbone, weights), boxes, (300, 300), num_classes=classes + 1)
    return model


def new_optimizer(options: argparse.Namespace, model: nn.Module, lr: float) -> torch.optim.SGD:
    """Return SGD. As SSD's authors do, biases get twice the learning rate, and no weight decay."""
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": biases, "lr": 2 * lr, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=lr, momentum=options.momentum, weight_decay=options.weight_decay)


def new_scheduler(
    options: argparse.Namespace, optimizer: torch.optim.Optimizer, updates: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return warm-up and decay, for so many updates per epoch."""
    warmup = options.warmup_steps
    milestones = [max(1, epoch * updates - warmup) for epoch in options.decay_at]  # they count from the warm-up's end
    decay = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
    return cluster_ddp.with_warmup(optimizer, decay, steps=warmup) if warmup else decay


def autocast(options: argparse.Namespace, world: cluster_ddp.World) -> contextlib.AbstractContextManager[Any]:
    """Return the context that --amp asks for."""
    return contextlib.nullcontext() if options.amp == "off" else world.autocast(getattr(torch, options.amp))
