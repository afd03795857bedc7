"""`ElasticStrategy` for DDP, and `ElasticShardedStrategy` for models that FSDP2 shards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from resilin.compat import lightning_names
from resilin.engine.group import DEFAULT_TIMEOUT, init_process_group
from resilin.integrations.lightning.elastic import ElasticLoop
from resilin.integrations.lightning.refusals import check_sharded, check_strategy
from resilin.training.bridge.carried import own_step
from resilin.training.bridge.home import Home, refuse_sharded
from resilin.training.gates.patch import Patch
from resilin.training.gradient.sharding import is_sharded

logger = logging.getLogger("resilin")


class ElasticStrategy(ElasticLoop, DDPStrategy):
    """Trains with `AdaptiveDataParallel` on any number of processes.

    Give it to a Trainer, and an `AdaptiveDataLoader` as the train dataloader. A batch of the
    Trainer is then one optimizer step: `training_step` runs once per micro-batch, while
    `global_step`, `batch_idx`, schedulers, clipping, callbacks and loggers count steps.

    A scheduler with `interval="step"` is stepped by a clock, once per reference step, so that
    `trainer.estimated_stepping_batches` and any schedule written for the reference batch stay
    right. Those with `interval="epoch"`, and `ReduceLROnPlateau`, stay with the Trainer.

    Args:
        rule: Name of a scaling rule or a rule of your own; `auto` chooses by the optimizer.
        schedule_by: The clock that steps a scheduler with `interval="step"`; `rule` takes that of
            the rule, `user` leaves it to the Trainer, which steps it once per optimizer step.
        stats_every: Measure the noise every so many steps; `auto` as often as `stats_budget`
            allows, where the rule or the autoscaler needs it.
        stats_budget: Time for measuring, as a fraction of the step, under `auto`; None takes 0.01.
        tokens_per_step: Tokens in one reference step, for the `tokens` clock.
        **kwargs: Those of `DDPStrategy`, such as `find_unused_parameters` or `timeout`.

    Raises:
        ValueError: A setting is not supported; `fit` checks those of the Trainer.
    """

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        check_strategy(arguments)

    def connect(self, model: LightningModule) -> None:
        """Check the settings of the Trainer, and add the state of the job to its checkpoints."""
        lightning_names.check_strategy(self)
        super().connect(model)

    def setup_distributed(self) -> None:
        """Join the other processes, under a group name that is new on this store."""
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            backend, timeout = lightning_names.process_group_of(self)
            init_process_group(backend, timeout=timeout or DEFAULT_TIMEOUT)
        super().setup_distributed()

    def setup_environment(self) -> None:
        """Join the other processes, and resume if there is a state."""
        super().setup_environment()
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._begin_fit()

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, unless the state of the job is newer: then return that."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._trainer.state.fn != TrainerFn.FITTING or self.fit is None or not self.fit.resumes:
            return checkpoint
        if checkpoint.get("global_step", 0) <= Home().clock.steps:
            return self.fit.checkpoint()
        self.fit.drop_state()
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of the checkpoint, or the newest ones of the job."""
        if self.fit is not None and self.fit.resumes:
            assert self.lightning_module is not None
            self.fit.load_weights(self.lightning_module)
        else:
            super().load_model_state_dict(checkpoint, strict)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether the Trainer restores the optimizer; else the job has done it."""
        return self.fit is None or not self.fit.resumes

    def configure_ddp(self) -> None:
        """Do nothing: the model is wrapped together with its optimizer."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make optimizers and schedulers, and wrap the model."""
        super().setup_optimizers(trainer)
        assert self.fit is not None
        assert self.lightning_module is not None
        if self.fit.passed is not None:
            self.fit.load_weights(self.lightning_module)
            return
        refuse_sharded(self.lightning_module, "use an ElasticShardedStrategy")
        arguments = lightning_names.ddp_arguments(self)
        if (device_ids := self.determine_ddp_device_ids()) is not None:
            arguments["device_ids"] = device_ids
        self._wrap(arguments)


class ElasticShardedStrategy(ElasticLoop, ModelParallelStrategy):
    """Trains a model that is sharded with `fully_shard`, on any number of processes.

    `configure_model` of the module calls `fully_shard` with `self.device_mesh["data_parallel"]`, as
    for Lightning's `ModelParallelStrategy`. Everything else is as with `ElasticStrategy`.

    The state of the job is restored once the model is sharded. If there is one, it counts, and
    `ckpt_path` is not read.

    Args:
        rule: As in `ElasticStrategy`.
        schedule_by: As in `ElasticStrategy`.
        stats_every: As in `ElasticStrategy`.
        stats_budget: As in `ElasticStrategy`.
        tokens_per_step: As in `ElasticStrategy`.
        **kwargs: Those of `ModelParallelStrategy`, such as `save_distributed_checkpoint`. The sizes
            of the mesh must be left out: all processes are data-parallel.

    Raises:
        ValueError: A setting is not supported; `fit` checks those of the Trainer.
    """

    def _check_arguments(self, arguments: dict[str, Any]) -> None:
        check_sharded(arguments)
        arguments["tensor_parallel_size"] = 1

    def connect(self, model: LightningModule) -> None:
        """Check the settings of the Trainer, and add the state of the job to its checkpoints."""
        lightning_names.check_sharded_strategy(self)
        super().connect(model)

    def setup_environment(self) -> None:
        """Join the other processes, and make the mesh of all of them."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            backend, timeout = lightning_names.process_group_of(self)
            init_process_group(backend, timeout=timeout or DEFAULT_TIMEOUT)
        lightning_names.set_data_parallel_size(self, self.num_nodes * self.num_processes)
        super().setup_environment()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make optimizers and schedulers, wrap the model, and resume if there is a state."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        if not any(is_sharded(parameter) for parameter in self.lightning_module.parameters()):
            raise ValueError(
                f"configure_model() of {type(self.lightning_module).__name__} has sharded nothing: "
                'call fully_shard with mesh=self.device_mesh["data_parallel"] in it, or use an '
                "ElasticStrategy"
            )
        self._wrap({})
        assert self.parallel is not None
        clips = {"clip_grad_by_norm": _clip_by_norm, "clip_grad_by_value": _clip_by_value}
        self.parallel.add_gate(Patch(self.precision_plugin, clips))
        self._begin_fit()
        assert self.fit is not None
        if self.fit.number > 1:
            raise ValueError(
                f"this is call {self.fit.number} of fit() in the job, and a sharded model is "
                "trained by 1: its state could not be told from that of the others; begin another "
                "job with resilin.reset_job()"
            )

    # Files ---------------------------------------------------------------------------------

    @contextmanager
    def _files(self, *, loads: bool) -> Iterator[None]:
        """Make Lightning save and load the sharded module itself, without making a step."""
        wrapped = self.model
        if self.parallel is None:
            yield
            return
        self.model = self.lightning_module
        try:
            with own_step(self.parallel.optimizer, loads=loads):
                yield
        finally:
            self.model = wrapped

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State of the module. Collective."""
        with self._files(loads=False):
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """State of the optimizer. Collective."""
        with self._files(loads=False):
            return super().optimizer_state(optimizer)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, unless the job has a state: then return that."""
        if self._trainer.state.fn == TrainerFn.FITTING and self.fit and self.fit.resumes:
            logger.warning(
                "ckpt_path (%s) is not read: the job resumes from its own state", checkpoint_path
            )
            return self.fit.checkpoint()
        with self._files(loads=True):
            return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: the model is restored with the state of the job, or by `load_checkpoint`."""


# In place of the methods of Lightning, which fail where not all parameters are on one mesh.


def _clip_by_norm(optimizer: Optimizer, clip_val: float) -> None:
    if clip_val > 0:
        Home().clip(clip_val)


def _clip_by_value(optimizer: Optimizer, clip_val: float) -> None:
    if clip_val <= 0:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is not None:
                (grad.to_local() if is_sharded(grad) else grad).clamp_(-clip_val, clip_val)
