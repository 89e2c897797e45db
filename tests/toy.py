"""A network without batch statistics and kinks: other ranks or threads change only the rounding."""

from torch import Tensor, nn


class Plain(nn.Module):
    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 5, stride=2)
        self.head = nn.Linear(width * 14 * 14, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.conv(images).tanh().flatten(1))


class Rich(nn.Module):
    """With what a network may remember: batch statistics and dropout."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 5, stride=2)
        self.norm = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width * 14 * 14, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(self.conv(images)).relu()
        return self.head(self.dropout(hidden.flatten(1)))
