"""Train an image classifier under DDP.

python train.py                                       CIFAR-10 on one device
python train.py trainer.devices=4                     DDP on four (-1: all GPUs)
python train.py experiment=quickstart                 offline, two CPU ranks, under a minute
python train.py data=imagefolder data.root=FOLDER     your images: FOLDER/{train,test}/<class>/*
python train.py resume=FOLDER                         go on with a run that was stopped
python train.py -m seed=0,1,2 optimizer.lr=0.1,0.3    a sweep
python train.py hparams_search=optuna                 a search
torchrun --nproc-per-node=4 train.py trainer.devices=4
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from project import entry
from project.schema import check_nodes

if TYPE_CHECKING:
    from torch import nn


def train(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """The whole program of one rank; all ranks run it alike."""
    import lightning  # here, since the process that launches the ranks does without

    from project import checkpoint
    from project.callbacks import RunRecord
    from project.checkpoint_io import PlainCheckpointIO
    from project.plots import Pictures
    from project.progress import Progress
    from project.task import Classifier

    check_nodes(cfg)
    data = instantiate(cfg.data, seed=cfg.seed, _convert_="all")
    data.open(test=cfg.test)  # what is missing or broken shows now, not after the training
    num_classes = data.num_classes
    start = (checkpoint.begun(folder) if cfg.fit else None) or cfg.ckpt_path
    lightning.seed_everything(cfg.seed, workers=True, verbose=False)  # packing has no say in it
    task = Classifier(
        network(cfg, num_classes, start),
        instantiate(cfg.optimizer),
        instantiate(cfg.scheduler),
        num_classes,
        cfg.seed,
        label_smoothing=cfg.label_smoothing,
        initialise=not (cfg.weights or start),
    )
    config = OmegaConf.to_container(cfg)  # unresolved: holds no secrets
    record = RunRecord(folder, config, **cfg.checkpoint)
    trainer = instantiate(
        cfg.trainer,
        callbacks=[*instantiate(cfg.callbacks).values(), Progress(), Pictures(folder), record],
        logger=[instantiate(logger, save_dir=str(folder)) for logger in cfg.logger.values()],
        plugins=[PlainCheckpointIO()],
        default_root_dir=str(folder),
        use_distributed_sampler=False,  # Lightning's would deal ours out once more
        _convert_="all",
    )
    for logger in trainer.loggers:
        logger.log_hyperparams(config)
    if cfg.fit:
        trainer.fit(task, datamodule=data, ckpt_path=start)
        chosen = record.chosen_path
    else:
        chosen = start
        trainer.validate(task, datamodule=data, ckpt_path=chosen, verbose=False)
    scored = {"checkpoint": cfg.ckpt_path or cfg.weights}
    results = record.results(trainer) if cfg.fit else task.metrics | scored
    if cfg.test:
        trainer.test(task, datamodule=data, ckpt_path=chosen, verbose=False)
        results |= {k: v for k, v in task.metrics.items() if k.startswith("test/")}
    return results


def network(cfg: DictConfig, num_classes: int, start: str | None) -> "nn.Module":
    """The network, with weights from a file if the config names one.

    Args:
        start: checkpoint of a run that the Trainer will load.
    """
    from project import checkpoint

    net = instantiate(cfg.model, num_classes=num_classes, _convert_="all")
    if start:
        checkpoint.check_run(net, start, "ckpt_path" if start == cfg.ckpt_path else "resume")
    elif cfg.weights:
        checkpoint.load_weights(net, cfg.weights, num_classes)
    if cfg.compile:
        net.compile()  # in place: names in checkpoints stay as they are
    return net


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    """One job: every rank reads the config that Hydra wrote to the run's folder."""
    entry.run_job(train)


if __name__ == "__main__":
    entry.start(main, train)
