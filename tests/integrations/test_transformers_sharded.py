"""The Trainer with FSDP2: it shards, and trains what one whole process would have trained.

On CPUs Accelerate never shards, so the tests set the one attribute in which it notes the kind of
devices, as those of Accelerate do.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import resilin

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import PartialState
from accelerate.utils import DistributedType

from resilin.integrations.transformers import ElasticTrainer
from tests.integrations.parts import alone, forget, is_first
from tests.integrations.sharded_home import (
    CLIP,
    LOCAL,
    REFERENCE,
    SEED,
    Bare,
    Data,
    make_net,
    make_optimizer,
    num_sharded,
    single_process,
    size_of,
    worst_error,
)
from tests.integrations.trainers import StopAt, arguments

pytestmark = pytest.mark.nightly(part="frameworks")

PRELOAD = ("datasets", "transformers.trainer", "resilin.integrations.transformers")


class Trainer(ElasticTrainer):
    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model)
        return self.optimizer


class WithDeepSpeed(Trainer):
    """DeepSpeed is not installed: the kind of its processes is all that can be set."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.state.distributed_type = DistributedType.DEEPSPEED


def make(folder, stop, *, own=None, shards=True, cls=Trainer, **settings):
    forget()
    if shards:
        settings["fsdp"] = True
        settings["fsdp_config"] = {"fsdp_version": 2, **settings.get("fsdp_config", {})}
    args = arguments(
        folder,
        per_device_train_batch_size=LOCAL,
        max_grad_norm=CLIP,
        seed=SEED,
        num_train_epochs=3,
        label_names=["y"],
        **settings,
    )
    if shards:
        PartialState().distributed_type = DistributedType.MULTI_GPU
    trainer = cls(
        model=make_net(),
        args=args,
        train_dataset=Data(),
        eval_dataset=torch.utils.data.Subset(Data(), range(16)),
        callbacks=[StopAt(stop)],
        batch_size=REFERENCE,
        rule="constant",
    )
    trainer.set_batch_size(size_of)
    if own is not None:
        resilin.checkpoint_to(own, every=1, memory_every=None)
    return trainer


def norms(trainer):
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


@pytest.mark.world_size(2)
def test_it_trains_and_resumes_as_one_whole_process(shared_path):
    bare = Bare()
    saves = {"save_strategy": "steps", "save_steps": 5}
    trainer = make(shared_path / "full", 7, own=shared_path / "own", **saves)
    trainer.train()
    assert num_sharded(trainer.model) >= 10
    assert worst_error(trainer.model, bare.train(7)) < 1e-11
    assert norms(trainer) == pytest.approx(bare.norms, rel=1e-11)
    assert sum(norm > CLIP for norm in norms(trainer)) >= 3
    whole = trainer.evaluate()["eval_loss"]
    first = Data()[slice(16)]
    expected = bare.net(first["x"], first["y"])["loss"].item()
    assert whole == pytest.approx(expected, rel=1e-6)
    pieces = {"state_dict_type": "SHARDED_STATE_DICT"}
    saves = {"save_strategy": "steps", "save_steps": 3}
    make(shared_path / "pieces", 4, fsdp_config=pieces, **saves).train()
    dist.barrier()
    dist.destroy_process_group()
    if not is_first():
        return
    with single_process(shared_path / "store"):
        for folder, kind in (("full/checkpoint-5", {}), ("pieces/checkpoint-3", pieces)):
            trainer = make(shared_path / "one", 8, fsdp_config=kind)
            trainer.train(resume_from_checkpoint=str(shared_path / folder))
            assert trainer.state.global_step == 8
            assert worst_error(trainer.model, bare.train(8)) < 1e-11
        # The files that others read have the whole model.
        forget()
    from safetensors.torch import load_file

    saved = load_file(shared_path / "full" / "checkpoint-5" / "model.safetensors")
    assert {n: t.shape for n, t in saved.items()} == {
        n: t.shape for n, t in bare.net.state_dict().items()
    }
    with alone():
        trainer = make(shared_path / "last", 9, own=shared_path / "own", shards=False)
        trainer.train()
        assert num_sharded(trainer.model) == 0
        assert worst_error(trainer.model, bare.train(9)) < 1e-11
        assert trainer.state.global_step == 9


@pytest.mark.world_size(1)
def test_fsdp1_and_deepspeed_are_refused(tmp_path):
    first = {"fsdp_version": 1, "sync_module_states": False}
    with pytest.raises(ValueError, match=r"fsdp_version \(1\) must be 2"):
        make(tmp_path, 1, fsdp_config=first)
    with pytest.raises(ValueError, match=r"distributed_type \(DEEPSPEED\) is not supported"):
        make(tmp_path, 1, cls=WithDeepSpeed)
