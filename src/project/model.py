"""Networks: plain torch modules from images (B, 3, H, W) to logits (B, num_classes)."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn


class SpeedNet(nn.Module):
    """The network of the CIFAR-10 speedruns (https://arxiv.org/abs/2404.00498).

    A frozen whitening convolution, three groups of two convolutions, the largest value of each
    channel, and a linear head. Wants images of 16 pixels or more, and SGD at a large rate.

    Args:
        num_classes: number of logits.
        widths: channels of each group; each halves height and width.
    """

    def __init__(self, num_classes: int, widths: Sequence[int] = (64, 256, 256)) -> None:
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        self.groups = nn.Sequential(*itertools.starmap(_group, itertools.pairwise([24, *widths])))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self.to(memory_format=torch.channels_last)  # a quarter faster on CPUs, and fit for bf16

    @torch.no_grad()
    def initialise(self, images: Tensor) -> None:
        """Makes the first convolution whiten 2×2 patches of normalised `images` (N, 3, H, W).

        Its filters are the eigenvectors of the patches' second moments, the largest first, each
        over the square root of its eigenvalue + 5e-4; then their negatives.
        """
        patches = F.unfold(images, 2).transpose(1, 2).flatten(0, 1).double()
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / (values + 5e-4).sqrt()).T.flip(0).view(12, 3, 2, 2)
        self.whiten.weight.copy_(torch.cat([filters, -filters]))

    def forward(self, images: Tensor) -> Tensor:
        """Maps float images (B, 3, H, W) to logits (B, num_classes)."""
        features = self.groups(F.gelu(self.whiten(images)))
        # A 3×3 max-pool for images of 32 pixels. nn.AdaptiveMaxPool2d would do, but has no
        # deterministic backward on GPUs.
        largest = F.max_pool2d(features, features.shape[-2:]).flatten(1)
        return self.head(largest) * (1 / 9)


def _group(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        _dirac_conv(in_channels, out_channels),
        nn.MaxPool2d(2),
        _unscaled_norm(out_channels),
        nn.GELU(),
        _dirac_conv(out_channels, out_channels),
        _unscaled_norm(out_channels),
        nn.GELU(),
    )


def _dirac_conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    """A 3×3 convolution whose first filters hand their input on."""
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[:in_channels])
    return conv


def _unscaled_norm(channels: int) -> nn.BatchNorm2d:
    """BatchNorm whose scale stays 1; quick averages, since training is short."""
    norm = nn.BatchNorm2d(channels, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


def resnet18(num_classes: int) -> nn.Module:
    """torchvision's ResNet-18 with a stem for small images: 3×3, stride 1, no max-pool."""
    net = torchvision.models.resnet18(num_classes=num_classes)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()  # type: ignore[assignment]
    return net


class CNN(nn.Module):
    """A small plain CNN: per width a 3×3 convolution, BatchNorm, ReLU and 2×2 max-pool.

    Args:
        num_classes: number of logits.
        widths: output channels of each convolution; each halves height and width.
    """

    def __init__(self, num_classes: int, widths: Sequence[int] = (32, 64, 128)) -> None:
        super().__init__()
        blocks = [_block(i, o) for i, o in itertools.pairwise([3, *widths])]
        self.features = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps float images (B, 3, H, W) to logits (B, num_classes)."""
        return self.head(self.features(images))


def _block(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )
