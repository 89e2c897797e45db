"""Packing, splitting and dealing images."""

import filecmp
import importlib
import linecache
import os
import pickle
import shutil
import struct
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CIFAR10, ImageFolder

from project import pack_files, sources
from project.data import EvalBatches, TrainBatches, stratified_split
from project.errors import UserError
from project.pack import pack
from project.steps import local_batch_size

shapes = partial(sources.shapes, num_train=60, num_test=20, seed=0)


def draw(root: Path, count: int = 3, size: tuple[int, int] = (32, 32)) -> Path:
    """An image folder of two classes."""
    rng = np.random.default_rng(0)
    for split in "train", "test":
        for name in "ant", "bee":
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


# Packing


def test_a_packed_image_folder_holds_the_files_pixels_labels_and_classes(tmp_path):
    packed = pack(sources.imagefolder, draw(tmp_path), "train", 32)
    files = ImageFolder(tmp_path / "train")
    images, labels, index = packed[torch.tensor([4, 1])]
    assert index.tolist() == [4, 1]
    assert labels.tolist() == [files[4][1], files[1][1]]
    assert packed.classes == files.classes
    for image, row in zip(images, [4, 1], strict=True):
        assert np.array_equal(image.permute(1, 2, 0), files[row][0])


def test_real_images_survive_packing_exactly(real_images, thousand_images):
    packed = pack(sources.imagefolder, real_images, "train", 32)
    assert torch.equal(packed[torch.arange(1000)][0], thousand_images)


def test_images_of_another_size_are_resized_and_cropped_to_the_centre(tmp_path):
    packed = pack(sources.imagefolder, draw(tmp_path, size=(90, 60)), "train", 32)
    image = Image.open(tmp_path / "train" / "bee" / "2.png").resize((48, 32), Image.BILINEAR)  # type: ignore
    assert np.array_equal(packed.images[5].transpose(1, 2, 0), np.asarray(image)[:, 8:40])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_images_of_another_mode_become_rgb(tmp_path, mode):
    pixels = Image.open(draw(tmp_path) / "train" / "ant" / "0.png").convert(mode)
    path = tmp_path / "train" / "ant" / ("0.tif" if mode == "CMYK" else "0.png")
    pixels.save(path)
    packed = pack(sources.imagefolder, tmp_path, "train", 32)
    row = [str(path) for path, _ in ImageFolder(tmp_path / "train").samples].index(str(path))
    assert np.array_equal(packed.images[row].transpose(1, 2, 0), np.asarray(pixels.convert("RGB")))


def test_whoever_comes_first_packs_and_the_others_wait(tmp_path):
    calls = []

    def counted(root, split, image_size):
        calls.append(split)
        return shapes(root, split, image_size)

    with ThreadPoolExecutor(4) as pool:
        packs = list(pool.map(lambda _: pack(counted, tmp_path, "train", 32), range(4)))
    assert calls == ["train"]
    assert all(np.array_equal(packed.images, packs[0].images) for packed in packs)


def test_other_arguments_or_another_image_give_another_pack(tmp_path):
    draw(tmp_path)
    assert len(pack(sources.imagefolder, tmp_path, "train", 32)) == 6
    Image.new("RGB", (32, 32)).save(tmp_path / "train" / "ant" / "new.png")
    os.utime(tmp_path / "train" / "ant", ns=(1, 1))  # at once, whatever the clock's grain
    assert len(pack(sources.imagefolder, tmp_path, "train", 32)) == 7
    assert pack(sources.imagefolder, tmp_path, "train", 16).images.shape == (7, 3, 16, 16)
    more = partial(sources.shapes, num_train=70, num_test=20, seed=0)
    assert len(pack(shapes, tmp_path, "train", 32)) == 60
    assert len(pack(more, tmp_path, "train", 32)) == 70


def test_an_edited_source_gives_another_pack(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for count in 2, 10:  # of two lengths, by which Python knows files edited within a second
        (tmp_path / "own_source.py").write_text(
            "import numpy as np\nfrom project.sources import Listing\n\n"
            f"def source(root, split, size, count={count}):\n"
            "    return Listing([0] * count, ['a'], np.zeros((count, size, size, 3), np.uint8))\n"
        )
        sys.modules.pop("own_source", None)
        linecache.clearcache()
        own = importlib.import_module("own_source")
        assert len(pack(own.source, tmp_path / "data", "train", 32)) == count


def test_where_the_root_cannot_be_written_packs_go_to_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(pack(sources.imagefolder, draw(tmp_path / "images"), "train", 32)) == 6
    assert not (tmp_path / "images" / ".packed").exists()
    assert list((tmp_path / "cache").rglob("images.npy"))


def test_all_who_pack_what_cannot_be_decoded_are_told_so(tmp_path):
    (draw(tmp_path) / "train" / "bee" / "0.png").write_bytes(b"no image")

    def told(_: int) -> str:
        with pytest.raises(UserError) as error:
            pack(sources.imagefolder, tmp_path, "train", 32)
        return str(error.value)

    with ThreadPoolExecutor(4) as pool:
        assert all("0.png cannot be decoded" in message for message in pool.map(told, range(8)))
    assert not (tmp_path / ".packed").exists()


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        (([0], ["a"], np.zeros((1, 32, 32, 3), np.float32)), "image 0 .* float32"),
        (([0], ["a"], np.zeros((1, 3, 32, 32), np.uint8)), r"image 0 .*uint8 \(3, 32, 32\)"),
        (([0, 0], ["a"], np.zeros((1, 32, 32, 3), np.uint8)), "2 labels"),
        (([0], ["a"], np.zeros((2, 32, 32, 3), np.uint8)), "1 labels"),
        (([1], ["a"], np.zeros((1, 32, 32, 3), np.uint8)), "labels 1 to 1, 1 classes"),
    ],
)
def test_what_a_source_of_ones_own_gets_wrong_is_said(tmp_path, listing, message):
    with pytest.raises(UserError, match=message):
        pack(lambda root, split, image_size: listing, tmp_path / "data", "train", 32)
    assert not (tmp_path / "data").exists()


def png_of_16_bits(channels: int) -> bytes:
    """A PNG of 32×32, 2 bytes a channel: grey (1) or RGB (3), which Pillow cannot write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", 32, 32, 16, 0 if channels == 1 else 2, 0, 0, 0)
    rows = (b"\0" + bytes(32 * 2 * channels)) * 32
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.parametrize("channels", [1, 3])
def test_more_than_8_bits_a_channel_are_refused(tmp_path, channels):
    (draw(tmp_path) / "train" / "ant" / "0.png").write_bytes(png_of_16_bits(channels))
    with pytest.raises(UserError, match=r"0\.png .*more than 8 bits"):
        pack(sources.imagefolder, tmp_path, "train", 32)


def test_what_a_killed_packer_left_is_cleared_away(tmp_path):
    pack(shapes, tmp_path, "train", 32)
    (folder,) = (path for path in (tmp_path / ".packed").iterdir() if path.is_dir())
    part = folder.rename(f"{folder}.part")
    (part / "classes.json").unlink()
    assert len(pack(shapes, tmp_path, "train", 32)) == 60
    assert not part.exists()


def flip(path: Path) -> None:
    """Changes a bit in the midst of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a bit of an image": lambda folder: flip(folder / "images.npy"),
    "a bit of a label": lambda folder: flip(folder / "labels.npy"),
    "an image too few": lambda folder: os.truncate(folder / "images.npy", 9000),
    "no classes": lambda folder: (folder / "classes.json").unlink(),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "checksums of nothing": lambda folder: (folder / "checksums.json").write_text("{}"),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "a link to nothing": lambda folder: (shutil.rmtree(folder), folder.symlink_to("nowhere")),
    "bad checksums": lambda folder: (folder / "checksums.json").write_text('{"images.npy": 1}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pack_is_made_anew(tmp_path, caplog, damage):
    before = pack(shapes, tmp_path, "train", 32)
    images, labels = before.images.copy(), before.labels.clone()
    (folder,) = (path for path in (tmp_path / ".packed").iterdir() if path.is_dir())
    copy = shutil.copytree(folder, tmp_path / "copy")
    DAMAGES[damage](folder)
    after = pack(shapes, tmp_path, "train", 32)
    assert "packed anew" in caplog.text
    assert np.array_equal(after.images, images)
    assert torch.equal(after.labels, labels)
    for path in folder.iterdir():
        assert path.name == "checksums.json" or filecmp.cmp(path, copy / path.name, shallow=False)


def test_a_damaged_pack_whose_source_is_gone_is_refused_by_name(tmp_path):
    is_gone = []

    def source(root, split, image_size):
        if is_gone:
            raise UserError("the source is not there.")
        return shapes(root, split, image_size)

    pack(source, tmp_path, "train", 32)
    is_gone.append(True)
    assert len(pack(source, tmp_path, "train", 32)) == 60  # it is not asked for
    (path,) = tmp_path.glob(".packed/*/images.npy")
    flip(path)
    for _ in range(2):
        with pytest.raises(UserError, match=f"{path} is another, and cannot be made anew: the sou"):
            pack(source, tmp_path, "train", 32)


def test_a_large_pack_is_read_through_only_if_it_was_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(pack_files, "LARGE", 0)
    pack(shapes, tmp_path, "train", 32)
    (path,) = tmp_path.glob(".packed/*/images.npy")
    monkeypatch.setattr(pack_files, "_checksum", lambda path: pytest.fail("read"))
    assert pack_files.damage(path.parent) is None
    monkeypatch.undo()
    monkeypatch.setattr(pack_files, "LARGE", 0)
    flip(path)
    assert pack_files.damage(path.parent) == f"the checksum of {path} is another"


def test_a_failed_pack_leaves_nothing_and_the_next_try_succeeds(tmp_path):
    draw(tmp_path)
    broken = tmp_path / "train" / "bee" / "0.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:50])
    with pytest.raises(UserError, match=r"bee/0\.png cannot be decoded"):
        pack(sources.imagefolder, tmp_path, "train", 32)
    assert not (tmp_path / ".packed").exists()
    broken.write_bytes(whole)
    assert len(pack(sources.imagefolder, tmp_path, "train", 32)) == 6


# Sources


def test_a_missing_or_empty_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        pack(sources.imagefolder, tmp_path / "nowhere" / "images", "train", 32)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "train" / "ant").mkdir(parents=True)
    with pytest.raises(UserError, match="lacks images"):
        pack(sources.imagefolder, tmp_path, "train", 32)


def test_cifar10_files_are_read_and_packed(cifar10_folder):
    packed = pack(sources.cifar10, cifar10_folder, "train", 32)
    raw = pickle.loads((cifar10_folder / CIFAR10.base_folder / "data_batch_2").read_bytes())
    images, labels, _ = packed[torch.arange(20, 40)]
    assert len(packed) == 100
    assert np.array_equal(images.reshape(20, -1), raw["data"])
    assert labels.tolist() == raw["labels"]
    assert len(pack(sources.cifar10, cifar10_folder, "test", 32)) == 20
    assert packed.classes[3] == "class 3"


def test_cifar10_without_files_or_network_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/cifar-10-python.tar.gz")
    with pytest.raises(UserError, match=r"by hand.*experiment=quickstart"):
        pack(sources.cifar10, tmp_path, "train", 32)


def test_shapes_follow_from_their_seed_alone(tmp_path):
    one, same = (shapes(tmp_path, "train", 32) for _ in range(2))
    other = partial(shapes, seed=1)(tmp_path, "train", 32)
    images = [np.stack(list(listing.images)) for listing in (one, same, other)]
    assert np.array_equal(images[0], images[1])
    assert not np.array_equal(images[0], images[2])
    assert len(one.classes) == len(set(one.labels)) == 10


@pytest.mark.slow
def test_a_linear_model_stays_below_60_percent_on_shapes(tmp_path):
    full = partial(sources.shapes, num_train=10_000, num_test=2000, seed=0)
    train, test = (pack(full, tmp_path, split, 32) for split in ("train", "test"))
    x, y = (torch.from_numpy(d.images.reshape(len(d), -1) / np.float32(255)) for d in (train, test))
    targets = torch.nn.functional.one_hot(train.labels).float()
    x, y = x - x.mean(0), y - x.mean(0)
    weights = torch.linalg.solve(x.T @ x + 100 * torch.eye(3072), x.T @ (targets - 0.1))
    accuracy = ((y @ weights).argmax(1) == test.labels).float().mean().item()
    assert 0.1 < accuracy < 0.6


# Splitting


def test_the_split_takes_its_fraction_of_each_class():
    labels = torch.arange(1000) % 7 % 3
    train, val = stratified_split(labels, 0.1, seed=0)
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(1000))
    for label in range(3):
        members = int((labels == label).sum())
        assert int((labels[val] == label).sum()) == round(0.1 * members)


def test_the_split_follows_from_its_own_seed():
    labels = torch.arange(1000) % 10
    assert torch.equal(stratified_split(labels, 0.1, 5)[1], stratified_split(labels, 0.1, 5)[1])
    assert not torch.equal(stratified_split(labels, 0.1, 5)[1], stratified_split(labels, 0.1, 6)[1])


def test_a_fraction_that_leaves_no_image_is_refused():
    with pytest.raises(UserError, match="no image to validate on"):
        stratified_split(torch.arange(20) % 10, 0.1, seed=0)


def test_no_fraction_is_no_validation():
    train, val = stratified_split(torch.arange(20) % 10, 0, seed=0)
    assert (train.tolist(), val.tolist()) == (list(range(20)), [])


# Dealing


def dealt(ranks: int, accumulate: int = 1, batch_size: int = 24, epoch: int = 2):
    """Each rank's batches of 211 images."""
    rows = torch.arange(1000, 1211)
    samplers = [
        TrainBatches(rows, batch_size, rank=rank, world_size=ranks, accumulate=accumulate, seed=3)
        for rank in range(ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_rank_sees_the_batches_of_distributed_sampler(ranks):
    for rank, batches in enumerate(dealt(ranks)):
        sampler = DistributedSampler(range(211), ranks, rank, seed=3, drop_last=True)  # type: ignore
        sampler.set_epoch(2)
        loader = DataLoader(range(211), 24 // ranks, sampler=sampler, drop_last=True)  # type: ignore
        assert [b.tolist() for b in batches] == [(b + 1000).tolist() for b in loader]


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (4, 1), (1, 3), (2, 3), (4, 2)])
def test_a_step_sees_the_same_images_on_any_number_of_ranks(ranks, accumulate):
    steps = [set(batch.tolist()) for batch in dealt(1)[0]]
    shares = zip(*dealt(ranks, accumulate), strict=True)
    batches = [set(torch.cat(share).tolist()) for share in shares]
    windows = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]
    assert [set().union(*window) for window in windows] == steps
    assert len(steps) == 211 // 24


def test_epochs_differ_and_repeat():
    assert torch.equal(dealt(1, epoch=4)[0][0], dealt(1, epoch=4)[0][0])
    assert not torch.equal(dealt(1, epoch=4)[0][0], dealt(1, epoch=5)[0][0])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 7, 101])
@pytest.mark.parametrize("batch_size", [1, 10, 500])
def test_every_evaluation_image_is_dealt_once_and_every_rank_has_a_batch(ranks, count, batch_size):
    rows = torch.arange(count)
    shares = [list(EvalBatches(rows, batch_size, rank, ranks)) for rank in range(ranks)]
    assert all(shares)
    batches = [batch.tolist() for share in shares for batch in share if len(batch)]
    assert sorted(batches) == sorted(batch.tolist() for batch in rows.split(batch_size))


def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest_that_do():
    assert local_batch_size(96, 4, 3) == 8
    with pytest.raises(UserError, match=r"100.*4 ranks × 3 accumulated.*96 or 108"):
        local_batch_size(100, 4, 3)
    with pytest.raises(UserError, match="Nearest that do: 4"):
        local_batch_size(3, 4, 1)


def test_fewer_images_than_one_step_are_refused():
    with pytest.raises(UserError, match="choose 1 to 100, the count of training images"):
        TrainBatches(torch.arange(100), 512, rank=0, world_size=1, accumulate=1, seed=0)
