"""The number of devices is a matter of speed: steps, losses and scores are the same."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision.transforms.functional as TF
from PIL import Image
from torch import Tensor
from torchvision.datasets import ImageFolder

import laws
from conftest import TINY, chosen, outcome, unless
from step_trace import read_trace, step_losses
from toy import spaced

from project.model import CNN

DOUBLE = ["trainer.precision=64-true"]
AUGMENT = ["data.augment.flip=true", "data.augment.cutout=8"]
OF_CNN = [
    "model._target_=project.model.CNN",
    "~model.width",
    "+model.widths=[8,16]",
]
TRACE = [f"+callbacks.{name}._target_=step_trace.{name}" for name in ("StepTrace", "Inputs")]
TRAININGS = {  # of 12 steps if nothing else is said, 7 of them an epoch
    "float64": [*DOUBLE, *AUGMENT],
    "accumulation": [*DOUBLE, *AUGMENT, "trainer.accumulate_grad_batches=4"],
    "float32": ["trainer.max_steps=20"],
    "BatchNorm": [*DOUBLE, *OF_CNN],
    "gradients": [*OF_CNN, "+callbacks.gradients._target_=step_trace.Gradients"],
}
SCORINGS = [  # images, images a batch, precision
    (count, batch_size, precision)
    for count in (1, 2, 7, 101)
    for batch_size in (1, 10, 500)
    for precision in ("32-true", "64-true")
]
SCORINGS += [(10_000, 500, "32-true"), (10_000, 333, "64-true")]
QUICK = [(1, 10, "64-true"), (7, 1, "64-true"), (101, 10, "32-true")]


def name_of(scoring: tuple[int, int, str]) -> str:
    return "{} by {} in {}".format(*scoring)


def on_more_ranks(test: Any) -> Any:
    ranks = [pytest.param(n, marks=unless(n == 2)) for n in (2, 3, 4)]
    return pytest.mark.parametrize("ranks", ranks, scope="module")(test)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: Any) -> Path:
    """Of a network that takes images for all classes, with running statistics of its own."""
    torch.manual_seed(1)
    net = CNN(10, widths=[8, 16])
    for name, buffer in net.named_buffers():
        if "running" in name:
            low, high = (-0.2, 0.2) if "mean" in name else (0.05, 0.5)
            buffer.uniform_(low, high)
    net.head.weight.data *= 10
    path = tmp_path_factory.mktemp("weights") / "net.pt"
    torch.save(net.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def launch(many_images: Path, weights: Path, tmp_path_factory: Any) -> Callable[..., Path]:
    """Runs all trainings and some scorings on so many ranks, in one launch."""
    score = f"""experiment=quickstart model.widths=[8,16] fit=false weights={weights}
        data=imagefolder data.root={many_images} data.val_fraction=0 label_smoothing=0.1
        data.source._target_=toy.some_of_folder +callbacks.matrix._target_=step_trace.Matrix"""

    def launch(num_ranks: int, scorings: list[Any]) -> Path:
        own = [*TINY, "data.batch_size=48", "test=false", *TRACE]
        cases = {name: [*own, *words] for name, words in TRAININGS.items()}
        for count, batch_size, precision in filter(None, scorings):
            what = f"+data.source.num_test={count} data.eval_batch_size={batch_size}"
            name = name_of((count, batch_size, precision))
            cases[name] = f"{score} {what} trainer.precision={precision}".split()
        few = "+data.source.num_test=101 data.eval_batch_size=10 trainer.limit_test_batches=2"
        cases["cut"] = f"{score} {few}".split()
        common = [f"trainer.devices={num_ranks}", "logger=none"]
        both = {name: {"words": [*words, *common], "stops": []} for name, words in cases.items()}
        folder = tmp_path_factory.mktemp(f"on-{num_ranks}") / "runs"
        laws.launch(folder, laws.regimes, num_ranks, inplace=num_ranks == 1, cases=both)
        return folder

    return launch


@pytest.fixture(scope="module")
def one(launch: Callable[..., Path], request: Any) -> Path:
    """All runs on one rank."""
    return launch(1, chosen(request.session.items, "scoring"))


@pytest.fixture(scope="module")
def more(launch: Callable[..., Path], request: Any, ranks: int) -> Path:
    """And on more."""
    return launch(ranks, chosen(request.session.items, "scoring", ranks=ranks))


# Training


def steps(folder: Path, accumulate: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Rows and images of each step, of all ranks and accumulated batches, in the order of rows."""
    ranks = [torch.load(path) for path in sorted(folder.glob("trace/inputs-*.pt"))]
    batches = [[torch.cat(part) for part in zip(*b, strict=True)] for b in zip(*ranks, strict=True)]
    windows = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    whole = [[torch.cat(part) for part in zip(*window, strict=True)] for window in windows]
    return [(rows[order], images[order]) for rows, images in whole for order in [rows.argsort()]]


def losses(folder: Path) -> list[float]:
    """The loss of each step over all ranks and accumulated batches."""
    count = len([*folder.glob("trace/inputs-*.pt")])
    return step_losses([read_trace(folder, rank) for rank in range(count)])


@on_more_ranks
def test_a_step_has_the_same_images_augmented_alike(one, more):
    expected, seen = steps(one / "float64"), steps(more / "float64")
    accumulated = steps(more / "accumulation", 4)
    assert len(expected) == len(seen) == len(accumulated) == 12
    for step, others in zip(expected, zip(seen, accumulated, strict=True), strict=True):
        assert all(torch.equal(step[0], other[0]) for other in others)
        assert all(torch.equal(step[1], other[1]) for other in others)


@on_more_ranks
def test_losses_are_the_same_but_for_rounding(one, more):
    assert losses(more / "float64") == pytest.approx(losses(one / "float64"), rel=1e-9)
    assert losses(more / "accumulation") == pytest.approx(losses(one / "float64"), rel=1e-9)
    assert losses(more / "float32") == pytest.approx(losses(one / "float32"), rel=1e-5)
    assert len(losses(more / "float32")) == 20


@on_more_ranks
def test_but_batch_norm_sees_a_ranks_share(one, more):
    torch.manual_seed(0)  # as the run; its first step, by the plain network
    net, own = CNN(10, widths=[8, 16]).double(), []
    for path in sorted((more / "BatchNorm/trace").glob("inputs-*.pt")):
        rows, images = torch.load(path)[0]
        own.append(F.cross_entropy(net(images), rows % 10).item())  # shapes come in turn
    expected, seen = (torch.tensor(losses(folder / "BatchNorm")) for folder in (one, more))
    assert seen[0].item() == pytest.approx(sum(own) / len(own), rel=1e-6)
    difference = (seen / expected - 1).abs()
    print(f"BatchNorm: losses differ by {difference.mean():.1%} on average, {difference.max():.1%}")
    assert 1e-3 < difference.mean() < 1e-2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sync_batchnorm_sees_all_shares(tmp_path):
    words = [
        *TINY,
        *OF_CNN,
        *DOUBLE,
        "trainer=gpu",
        "+trainer.sync_batchnorm=true",
        "test=false",
        *TRACE,
    ]
    for n in 1, 2:
        cases = {"run": {"words": [*words, f"trainer.devices={n}"], "stops": []}}
        laws.launch(tmp_path / str(n), laws.regimes, n, "cuda", cases=cases)
    assert losses(tmp_path / "2/run") == pytest.approx(losses(tmp_path / "1/run"), rel=1e-6)


@on_more_ranks
def test_the_optimizer_gets_the_mean_of_the_ranks_own_gradients(more, ranks):
    steps = torch.load(more / "gradients/trace/gradients.pt")
    num_weights = len([*CNN(10, widths=[8, 16]).parameters()])
    assert [len(step) for step in steps] == [num_weights] * 12
    for each, got in itertools.chain.from_iterable(steps):
        assert len(each) == ranks
        assert each.unique(dim=0).shape[0] == ranks  # they are not the same
        if ranks == 2:  # one sum
            assert torch.equal(got, (each[0] + each[1]) / 2)
        bound = (ranks - 1) * torch.finfo(torch.float32).eps * each.abs().double().mean(0)
        assert ((got - each.double().mean(0)).abs() <= bound).all()


# Scoring


@functools.cache
def plain_loop(images: Path, weights: Path, scoring: tuple[int, int, str]) -> tuple[Tensor, float]:
    """Confusion matrix and mean loss: files, one process, no Trainer, in double one by one."""
    count, batch_size, precision = scoring
    is_double = precision == "64-true"
    net = CNN(10, widths=[8, 16]).eval().to(torch.float64 if is_double else torch.float32)
    net.load_state_dict(torch.load(weights))
    samples = spaced(ImageFolder(images / "test").samples, count)
    matrix, loss, size = torch.zeros(10, 10, dtype=torch.int64), 0.0, 1 if is_double else batch_size
    for start in range(0, count, size):
        paths, labels = zip(*samples[start : start + size], strict=True)
        batch = [TF.to_tensor(Image.open(path)) for path in paths]
        batch = torch.stack([TF.normalize(image, [0.5] * 3, [0.5] * 3) for image in batch])
        with torch.no_grad():
            logits = net(batch.to(next(net.parameters()).dtype))
        each = F.cross_entropy(logits, torch.tensor(labels), reduction="none")
        loss += each.double().sum().item()
        for label, guess in zip(labels, logits.argmax(1), strict=True):
            matrix[label, guess] += 1
    return matrix, loss / count


@on_more_ranks
@pytest.mark.parametrize(
    "scoring", [pytest.param(s, id=name_of(s), marks=unless(s in QUICK)) for s in SCORINGS]
)
def test_scores_are_those_of_a_plain_loop(one, more, ranks, scoring, many_images, weights):
    matrix, loss = plain_loop(many_images, weights, scoring)
    assert (matrix.sum(0) > 0).sum() > (1 if scoring[0] > 7 else 0)  # it takes them for several
    for folder, world_size in (one, 1), (more, ranks):
        run = folder / name_of(scoring)
        results = outcome(run)
        assert results["test/count"] == scoring[0]
        assert results["test/acc"] == matrix.diag().sum().item() / scoring[0]
        assert results["test/loss"] == pytest.approx(loss, rel=1e-9)
        matrices = [torch.load(run / f"trace/matrix-{rank}.pt") for rank in range(world_size)]
        assert all(torch.equal(each, matrix) for each in matrices)


@on_more_ranks
def test_a_batch_left_out_shows_in_the_count(one, more, ranks):
    for folder, world_size in (one, 1), (more, ranks):
        results = outcome(folder / "cut")
        assert results["test/count"] == 2 * 10 * world_size != 101
