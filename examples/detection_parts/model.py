"""SSD300: torchvision's SSD finds boxes in six maps of an image's features. A ResNet computes the first of them."""

from argparse import Namespace
from pathlib import Path

import torch
from torch import nn
from torchvision.models import get_model
from torchvision.models.detection.anchor_utils import DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD

from cluster_ddp import DataError, World


class ResNetMaps(nn.ModuleList):
    """The six feature maps of an image of 300x300. Their sides are 38, 19, 10, 5, 3 and 1."""

    def __init__(self, name: str, weights: str) -> None:
        super().__init__()
        net = get_model(name, weights=None)
        if weights and not Path(weights).is_file():
            raise DataError(f"Weights of {name}:", f"there is no {weights}.", "docs/examples.md says how to get it")
        if weights:
            net.load_state_dict(torch.load(weights, weights_only=True))
        for layer in (net.layer3[0].conv1, net.layer3[0].conv2, net.layer3[0].downsample[0]):
            layer.stride = (1, 1)  # layer3's map keeps the side of layer2's
        self.append(nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2, net.layer3))
        self.out_channels = [net.layer4[0].conv1.in_channels, 512, 512, 256, 256, 256]
        for inputs, outputs, stride in zip(self.out_channels, self.out_channels[1:], (2, 2, 2, 1, 1)):
            narrow = nn.Conv2d(inputs, outputs // 2, 1, bias=False), nn.GroupNorm(32, outputs // 2), nn.ReLU()
            wide = nn.Conv2d(outputs // 2, outputs, 3, stride, stride - 1, bias=False), nn.GroupNorm(32, outputs)
            self.append(nn.Sequential(*narrow, *wide, nn.ReLU()))  # BatchNorm can't train on one image with a side of 1

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the maps, the largest first."""
        return {str(number): (images := layer(images)) for number, layer in enumerate(self)}


def ssd300(options: Namespace, world: World, classes: int) -> nn.Module:
    """Return an SSD with the same random weights on all ranks. It resizes images, and computes as --amp says."""
    torch.manual_seed(options.seed)
    scales = [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05]  # the default boxes of torchvision's ssd300_vgg16
    boxes = DefaultBoxGenerator([[2], [2, 3], [2, 3], [2, 3], [2], [2]], scales=scales, steps=[8, 16, 32, 64, 100, 300])
    model: nn.Module = SSD(ResNetMaps(options.backbone, options.backbone_weights), boxes, (300, 300), classes + 1)
    if options.amp != "off":
        model.forward = world.autocast(getattr(torch, options.amp))(model.forward)
    return model.to(world.device)
