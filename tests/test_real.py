"""Training on all 50,000 real images."""

import pytest

from conftest import REAL_IMAGES, outcome


@pytest.mark.slow
def test_one_epoch_on_two_ranks_learns(command, real_images, tmp_path):
    options = [f"data.root={REAL_IMAGES}", "trainer.devices=2", "trainer.max_epochs=1"]
    options += ["experiment=tutorial", "data.batch_size=128", f"hydra.run.dir={tmp_path}/run"]
    done = command("python", "train.py", "data=imagefolder", *options, timeout=500)
    assert done.returncode == 0, done.stderr
    results = outcome(tmp_path / "run")
    assert (results["steps"], results["test/count"]) == (50_000 // 128, 10_000)
    assert 0.45 < results["test/acc"] < 0.6
