"""Networks: plain torch modules from images (B, 3, H, W) to logits (B, num_classes)."""

from collections.abc import Sequence

from torch import Tensor, nn


class CNN(nn.Module):
    """A small plain CNN: per width a 3×3 convolution, BatchNorm, ReLU and 2×2 max-pool.

    Args:
        num_classes: number of logits.
        widths: output channels of each convolution; each halves height and width.
    """

    def __init__(self, num_classes: int, widths: Sequence[int] = (32, 64, 128)) -> None:
        super().__init__()
        blocks = [_block(i, o) for i, o in zip([3, *widths], widths, strict=False)]
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
