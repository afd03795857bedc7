"""Lightning's Trainer with a model that FSDP2 shards, beside one whole process."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

import resilin

L = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy  # noqa: E402

from resilin.integrations.lightning import (  # noqa: E402
    Elastic,
    ElasticFabricStrategy,
    ElasticShardedStrategy,
    ElasticStrategy,
    setup,
)
from resilin.integrations.lightning.refusals import refuse_strategy  # noqa: E402
from tests.integrations.parts import is_first  # noqa: E402
from tests.integrations.sharded_home import (  # noqa: E402
    CLIP,
    LOCAL,
    REFERENCE,
    SEED,
    Bare,
    Data,
    full,
    make_net,
    make_optimizer,
    num_sharded,
    single_process,
    size_of,
    worst_error,
)

PRELOAD = ("lightning.pytorch", "torchmetrics", "resilin.integrations.lightning")
pytestmark = [
    pytest.mark.nightly(part="frameworks"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class Module(L.LightningModule):
    def __init__(self, *, shards=True, root=True):
        super().__init__()
        self.net, self.shards, self.root = make_net(), shards, root

    def configure_model(self):
        # The Trainer calls it again for each fit, validation and test.
        if self.shards and not isinstance(self.net.layers[0], FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net.layers:
                fully_shard(layer, mesh=mesh)
            if self.root:
                fully_shard(self.net, mesh=mesh)

    def training_step(self, batch, batch_idx):
        loss = self.net(**batch)["loss"]
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("held_out", self.net(**batch)["loss"], sync_dist=True)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if gradient_clip_algorithm == "value":
            grads = [full(parameter.grad) for parameter in self.parameters()]
            self.largest = max(grad.abs().max().item() for grad in grads)

    def configure_optimizers(self):
        return make_optimizer(self.net)


def fit(module, steps, *, folder=None, own=None, start=None, strategy=None, devices=2, **settings):
    resilin.reset_job()
    if own is not None:
        resilin.checkpoint_to(own, every=1, memory_every=None)
    loader = resilin.AdaptiveDataLoader(
        Data(), REFERENCE, max_local_bsz=LOCAL, shuffle=True, seed=SEED
    )
    loader.set_batch_size(size_of)
    keeps = (
        [] if folder is None else [ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)]
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy or ElasticShardedStrategy(rule="constant"),
        max_steps=steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(keeps),
        logger=False,
        num_sanity_val_steps=0,
        callbacks=keeps,
        **{"gradient_clip_val": CLIP, **settings},
    )
    trainer.fit(module, loader, ckpt_path=start and str(start))
    return trainer


@pytest.mark.world_size(2)
def test_it_trains_and_resumes_as_one_whole_process(shared_path):
    bare = Bare()
    module = Module()
    trainer = fit(module, 7, folder=shared_path / "theirs", own=shared_path / "own")
    assert num_sharded(module.net) >= 10
    assert trainer.global_step == 7
    assert worst_error(module.net, bare.train(7)) < 1e-11
    assert sum(norm > CLIP for norm in bare.norms) >= 3
    held_out = torch.utils.data.DataLoader(Data(), batch_size=20)
    (found,) = trainer.validate(module, held_out, verbose=False)
    # Lightning's sampler repeats a sample so that both processes have equally many.
    data = Data()
    both = [slice(0, None, 2), slice(1, None, 2)]
    xs = [torch.cat([data.x, data.x[:1]])[part] for part in both]
    ys = [torch.cat([data.y, data.y[:1]])[part] for part in both]
    with torch.no_grad():
        expected = bare.net(torch.cat(xs), torch.cat(ys))["loss"].item()
    assert found["held_out"] == pytest.approx(expected, rel=1e-6)
    whole = ElasticShardedStrategy(rule="constant", save_distributed_checkpoint=False)
    # Where some parameters are no DTensors, torch cannot clip all of them together.
    fit(Module(root=False), 4, folder=shared_path / "whole", strategy=whole)
    strategy = ElasticShardedStrategy(rule="constant")
    module = Module(root=False)
    fit(module, 1, strategy=strategy, gradient_clip_algorithm="value", gradient_clip_val=0.05)
    assert module.largest == 0.05
    # The first step of AdamW is the sign of the gradient, and clipping keeps it.
    assert worst_error(module.net, Bare().train(1)) < 1e-4
    dist.barrier()
    dist.destroy_process_group()
    if not is_first():
        return
    with single_process(shared_path / "store"):
        for name in ("theirs", "whole"):
            module, start = Module(), shared_path / name / "epoch=0-step=4.ckpt"
            assert fit(module, 8, start=start, devices=1).global_step == 8
            assert worst_error(module.net, bare.train(8)) < 1e-11
        module = Module()
        fit(module, 10, own=shared_path / "own", devices=1)
        assert worst_error(module.net, bare.train(10)) < 1e-11
        assert resilin.current_job().clock.steps == 10
        again = ElasticShardedStrategy(rule="constant")
        trainer = L.Trainer(accelerator="cpu", devices=1, strategy=again, logger=False)
        with pytest.raises(ValueError, match=r"this is call 2 of fit\(\) in the job"):
            trainer.fit(Module(), resilin.AdaptiveDataLoader(Data(), REFERENCE))


class Theirs(FSDPStrategy):
    """Lightning itself refuses FSDPStrategy on CPUs, and no subclass of it."""


@pytest.mark.world_size(1)
def test_what_cannot_be_trained_sharded_is_refused_and_so_are_fsdp1_and_deepspeed():
    with pytest.raises(ValueError, match=r"configure_model\(\) of Module has sharded nothing"):
        fit(Module(shards=False), 1, devices=1)
    module = Module(shards=False)
    fully_shard(module.net)
    with pytest.raises(ValueError, match=r"are sharded .* use an ElasticShardedStrategy"):
        fit(module, 1, devices=1, strategy=ElasticStrategy())
    with pytest.raises(ValueError, match=r"data_parallel_size \(2\) must be left out"):
        ElasticShardedStrategy(data_parallel_size=2)
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(2\) must be left out or 1"):
        ElasticShardedStrategy(tensor_parallel_size=2)
    resilin.reset_job()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=Theirs(), logger=False, callbacks=[Elastic()]
    )
    with pytest.raises(ValueError, match=r"strategy \(Theirs\) must be an ElasticStrategy.*FSDP1"):
        Elastic().setup(trainer, Module(), "fit")
    # DeepSpeed is not installed, so that its strategy can only be made like this.
    theirs = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    with pytest.raises(ValueError, match=r"strategy \(DeepSpeedStrategy\).*DeepSpeed are not"):
        refuse_strategy(theirs, "an ElasticStrategy")
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy="ddp")
    net, loader = make_net(), resilin.AdaptiveDataLoader(Data(), REFERENCE)
    with pytest.raises(ValueError, match=r"strategy \(DDPStrategy\) must be an ElasticFabric"):
        setup(fabric, net, make_optimizer(net), loader)
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=ElasticFabricStrategy())
    fabric.launch()
    fully_shard(net)
    with pytest.raises(ValueError, match=r"are sharded .* loop without Fabric"):
        setup(fabric, net, make_optimizer(net), loader)
