"""Networks: what makes each the network that it is called."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from project.model import CNN, SpeedNet, resnet18

NETS = [SpeedNet, resnet18, CNN]


@pytest.fixture(scope="module")
def images(thousand_images):
    return thousand_images.float().div(255).sub(0.5).div(0.25)


@pytest.fixture
def net(images):
    torch.manual_seed(0)
    net = SpeedNet(10)
    net.initialise(images)
    return net


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("size", [32, 64])
def test_images_become_logits_of_each_class(make, size):
    assert make(num_classes=7)(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_the_first_convolution_whitens_patches(net, images):
    """Its outputs are uncorrelated, each of power eigenvalue / (eigenvalue + 5e-4)."""
    out = net.whiten(images).detach().transpose(0, 1).flatten(1).double()
    power = out[:12] @ out[:12].T / out.shape[1]
    patches = images.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    values = torch.linalg.eigvalsh(patches.T.double() @ patches.double() / len(patches)).flip(0)
    torch.testing.assert_close(power, torch.diag(values / (values + 5e-4)), atol=1e-4, rtol=1e-4)
    assert torch.equal(net.whiten.weight[12:], -net.whiten.weight[:12])


def test_the_speednet_has_the_layers_of_the_speedrun(net):
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    shapes = [(24, 3, 2, 2), (64, 24, 3, 3), (64, 64, 3, 3), (256, 64, 3, 3), (256, 256, 3, 3)]
    shapes += [(256, 256, 3, 3), (256, 256, 3, 3)]
    assert [tuple(conv.weight.shape) for conv in convs] == shapes
    assert [conv.bias is None for conv in convs] == [False] + [True] * 6
    assert tuple(net.head.weight.shape) == (10, 256)
    assert net.head.bias is None
    kinds = ["Conv2d", "MaxPool2d", "BatchNorm2d", "GELU", "Conv2d", "BatchNorm2d", "GELU"]
    assert [[type(layer).__name__ for layer in group] for group in net.groups] == [kinds] * 3
    frozen = {name for name, parameter in net.named_parameters() if not parameter.requires_grad}
    norms = {f"groups.{group}.{layer}.weight" for group in range(3) for layer in (2, 5)}
    assert frozen == {"whiten.weight"} | norms


def test_the_first_filters_hand_their_input_on(net):
    conv = net.groups[0][0]
    features = torch.randn(2, 24, 9, 9)
    torch.testing.assert_close(conv(features)[:, :24], features)


def test_the_head_sees_the_largest_of_3_by_3_and_is_scaled(net, images):
    net.eval()
    features = net.groups(F.gelu(net.whiten(images[:8])))
    assert features.shape[-2:] == (3, 3)
    expected = net.head(nn.MaxPool2d(3)(features).flatten(1)) * (1 / 9)
    assert torch.equal(net(images[:8]), expected)


def test_widths_are_an_argument():
    assert SpeedNet(10, widths=(8, 16)).head.in_features == 16


def test_the_resnet_keeps_the_size_of_small_images():
    net = resnet18(10)
    stem = net.maxpool(net.relu(net.bn1(net.conv1(torch.randn(1, 3, 32, 32)))))  # type: ignore
    assert stem.shape == (1, 64, 32, 32)
    assert sum(p.numel() for p in net.parameters()) == 11_173_962
