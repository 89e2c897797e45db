"""Breaks each mechanism in turn, in a copy of the repository, and runs the test that must notice.

python tests/mutants.py [WORD]      those whose name holds WORD; a table, and 1 if one survives

A mutant is killed if its run comes to an end in order and the test then fails; an error on the way
to the test does not count.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A change of one file of the package.

    Args:
        file: in src/project.
        old, new: code; `old` stands there once.
        test: what must fail.
    """

    file: str
    old: str
    new: str
    test: str


WEIGHTS = "test_parity.py::test_weights_and_buffers_are_equal[{}-2 ranks]"
STEPS = "test_parity.py::test_each_rank_does_the_same_at_every_step[{}-2 ranks]"
ROWS = "test_parity.py::test_each_rank_sees_the_images_of_distributed_sampler[{}-2 ranks]"
SCORES = "test_devices.py::test_scores_are_those_of_a_plain_loop[{}-2]"
HISTORY = "test_parity.py::test_the_history_has_the_mean_of_the_raw_losses[{}-2 ranks]"
LOGGED = (
    "test_parity.py::test_the_logged_loss_of_a_step_is_that_of_all_ranks_and_batches[{}-2 ranks]"
)
VALIDATION = (
    "test_parity.py::test_validation_scores_what_the_raw_loop_scores"
    "[validation, sanity check, all logging-2 ranks]"
)

MUTANTS = {
    "no set_epoch": Mutant(
        "data.py",
        "            self.start = 0\n        self.epoch = epoch\n",
        "            self.start = 0\n",
        ROWS.format("Adam"),
    ),
    "all ranks train on the shard of rank 0": Mutant(
        "datamodule.py",
        "            rank=trainer.global_rank,\n",
        "            rank=0,\n",
        ROWS.format("Adam"),
    ),
    "batch size of each rank": Mutant(
        "steps.py",
        "        return batch_size // parts\n",
        "        return batch_size // accumulate\n",
        "test_devices.py::test_a_step_has_the_same_images_augmented_alike[2]",
    ),
    "augmentation keyed by rank": Mutant(
        "datamodule.py",
        "self.image_size, self.seed, epoch)",
        "self.image_size, self.seed + self._trainer.global_rank, epoch)",
        WEIGHTS.format("full augmentation"),
    ),
    "dropout alike on all ranks": Mutant(
        "task.py", "batch_idx, self.global_rank)", "batch_idx, 0)", WEIGHTS.format("dropout")
    ),
    "NumPy draws on": Mutant(
        "seeds.py", "    np.random.seed(seed % 2**32)\n", "", WEIGHTS.format("dropout")
    ),
    "no averaging over the window": Mutant(
        "task.py",
        "        return loss\n",
        "        return loss * self.trainer.accumulate_grad_batches\n",
        WEIGHTS.format("accumulation of 3"),
    ),
    "schedule stepped per micro-batch": Mutant(
        "task.py",
        "    def on_train_epoch_end(self)",
        """    def on_train_batch_end(self, outputs, batch, batch_idx):
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches:
            self.lr_schedulers().step()

    def on_train_epoch_end(self)""",
        STEPS.format("accumulation of 3"),
    ),
    "BatchNorm buffers of rank 1 saved": Mutant(
        "task.py",
        '        checkpoint["epoch_metrics"] = ',
        """        import torch.distributed as dist
        for name, value in checkpoint["state_dict"].items():
            if "running" in name:
                checkpoint["state_dict"][name] = value.clone()
                dist.broadcast(checkpoint["state_dict"][name], src=1)
        checkpoint["epoch_metrics"] = """,
        WEIGHTS.format("Adam"),
    ),
    "buckets as before the first step when resumed": Mutant(
        "callbacks.py",
        "            continuation.rebuild_buckets(trainer, pl_module)\n",
        "",
        WEIGHTS.format("the default recipe, interrupted").replace("2 ranks", "4 ranks"),
    ),
    "weights of rank 0 not copied": Mutant(
        "upstream.py",
        "    trainer.fit_loop._iteration_based_training = lambda: False\n",
        """    trainer.fit_loop._iteration_based_training = lambda: False
    trainer.strategy._ddp_kwargs["init_sync"] = False
""",
        WEIGHTS.format("ranks that begin apart"),
    ),
    "no clipping": Mutant(
        "task.py",
        "    def on_train_start(self)",
        """    def configure_gradient_clipping(self, *args, **kwargs):
        pass

    def on_train_start(self)""",
        WEIGHTS.format("clipping"),
    ),
    "each rank validates with its own statistics": Mutant(
        "task.py",
        "        self._eval_sums = EpochSums(self.device)\n",
        """        self._eval_sums = EpochSums(self.device)
        self.trainer.strategy.model.require_forward_param_sync = False
""",
        VALIDATION,
    ),
    "label smoothing when scoring": Mutant(
        "task.py",
        'F.cross_entropy(logits, labels, reduction="none")',
        'F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)',
        SCORES.format("7 by 1 in 64-true"),
    ),
    "whitening sees validation images": Mutant(
        "datamodule.py",
        "self.split[0][:count]",
        "torch.arange(len(self.train_images))[:count]",
        WEIGHTS.format("the default recipe, narrow"),
    ),
    "the last loss of a window shown": Mutant(
        "progress.py",
        "losses[-trainer.accumulate_grad_batches :].mean()",
        "losses[-1]",
        LOGGED.format("accumulation of 3"),
    ),
    "train/loss over the window": Mutant(
        "task.py",
        "self._train_sums.add(loss.expand",
        "self._train_sums.add((loss / self.trainer.accumulate_grad_batches).expand",
        HISTORY.format("accumulation of 3"),
    ),
    "a step's line shows the loss of rank 0": Mutant(
        "losses.py",
        "            dist.all_reduce(losses)\n            losses /= trainer.world_size\n",
        "            pass\n",
        LOGGED.format("accumulation of 3"),
    ),
    "always the same guess": Mutant(
        "losses.py",
        "cells = labels * self.num_classes + logits.detach().argmax(1)",
        "cells = labels * self.num_classes",
        SCORES.format("101 by 10 in 32-true"),
    ),
    "other images scored": Mutant(
        "task.py",
        "self.net(shown)",
        "self.net(shown.flip(0))",
        SCORES.format("101 by 10 in 32-true"),
    ),
    "padded evaluation": Mutant(
        "data.py",
        "= indices.split(batch_size)[rank::world_size]",
        """= indices[
            list(
                torch.utils.data.DistributedSampler(
                    range(len(indices)), world_size, rank, shuffle=False
                )
            )
        ].split(batch_size)""",
        SCORES.format("7 by 1 in 64-true"),
    ),
    "mean of means": Mutant(
        "losses.py",
        "        loss, correct, count = total.tolist()\n",
        """        count = total[2].item()
        means = self._vector() / self._vector()[2].clamp(min=1)
        dist.all_reduce(means)
        loss, correct, _ = (means * count / dist.get_world_size()).tolist()
""",
        SCORES.format("101 by 10 in 32-true"),
    ),
}


def kill(mutant: Mutant) -> str:
    """Returns "killed", or what happened instead."""
    with tempfile.TemporaryDirectory() as place:
        copy = copied(Path(place, "copy"))
        path = copy / "src/project" / mutant.file
        code = path.read_text()
        if code.count(mutant.old) != 1:
            return f"is out of date: {mutant.file} has not its code once"
        path.write_text(code.replace(mutant.old, mutant.new))
        done = tested(copy, [mutant.test])
    if done.returncode == 0:
        return "SURVIVED"
    is_killed = f"FAILED tests/{mutant.test}" in done.stdout and "ERROR" not in done.stdout
    return "killed" if is_killed else f"did not come to the test: {done.stdout[-2000:]}"


def copied(copy: Path) -> Path:
    for name in "src", "tests", "conf":
        shutil.copytree(REPOSITORY / name, copy / name)
    for name in "train.py", "pyproject.toml":
        shutil.copy(REPOSITORY / name, copy)
    if (REPOSITORY / "data").exists():
        (copy / "data").symlink_to(REPOSITORY / "data")
    return copy


def tested(copy: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfE", "-m", "slow or not slow"]
        + [f"tests/{test}" for test in tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy / "src")},
        capture_output=True,
        text=True,
    )


def main(word: str = "") -> int:
    mutants = {name: mutant for name, mutant in MUTANTS.items() if word in name}
    with tempfile.TemporaryDirectory() as place:  # first the code as it is
        tests = sorted({mutant.test for mutant in mutants.values()})
        done = tested(copied(Path(place, "copy")), tests)
    if done.returncode:
        print(f"the tests fail without a mutant: {done.stdout[-2000:]}")
        return 1
    fates = {}
    for name, mutant in mutants.items():
        fates[name] = kill(mutant)
        print(f"| {name} | `{mutant.test}` | {fates[name]} |", flush=True)
    return int(set(fates.values()) != {"killed"})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
