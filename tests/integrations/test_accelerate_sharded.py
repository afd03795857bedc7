"""Accelerate with FSDP2: it shards, and trains what one whole process would have trained.

On CPUs Accelerate never shards: it knows `MULTI_CPU`, and takes FSDP for devices alone. The tests
set the one attribute in which it notes the kind of devices; everything after that is its own.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import resilin

pytest.importorskip("accelerate")

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, ParallelismConfig

from resilin.integrations.accelerate import prepare
from tests.integrations.parts import alone, everywhere, forget, is_first
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

pytestmark = pytest.mark.nightly(part="frameworks")

PRELOAD = ("resilin.integrations.accelerate",)


def accelerator(version=2, *, state="SHARDED_STATE_DICT", **settings):
    forget()
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="transformer_based_wrap", state_dict_type=state
    )
    return Accelerator(fsdp_plugin=plugin, **settings)


class Loop:
    """A loop as Accelerate's guide has it; `folder` is where resilin keeps its own state."""

    def __init__(self, made, folder=None):
        self.accelerator, self.net = made, make_net()
        optimizer = make_optimizer(self.net)
        loader = resilin.AdaptiveDataLoader(
            Data(), REFERENCE, max_local_bsz=LOCAL, shuffle=True, seed=SEED
        )
        schedule = LambdaLR(optimizer, lambda step: 1.0)
        parts = prepare(made, self.net, optimizer, loader, schedule, rule="constant")
        self.model, self.optimizer, self.loader, self.scheduler = parts
        self.loader.set_batch_size(size_of)
        if folder is not None:
            resilin.checkpoint_to(folder, every=1, memory_every=None)
        self.norms, self.passes = [], 0

    def train(self, stop):
        for _ in resilin.remaining_epochs_until(99):
            for batch in self.loader:
                self.passes += 1
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(self.model(**batch)["loss"])
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                        self.norms.append(float(norm))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients and self.model.clock.steps == stop:
                    return self
        raise AssertionError("the epochs ended first")


# Accelerate takes its mesh apart in a way that torch deprecates.
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning")
@pytest.mark.world_size(2)
def test_it_trains_and_resumes_as_one_whole_process(shared_path):
    bare = Bare()
    mesh = ParallelismConfig(dp_shard_size=2)
    loop = Loop(accelerator(parallelism_config=mesh), shared_path / "own").train(7)
    assert num_sharded(loop.net) >= 10
    assert loop.passes > 2 * 7
    assert worst_error(loop.net, bare.train(7)) < 1e-11
    assert loop.norms == pytest.approx(bare.norms, rel=1e-11)
    assert sum(norm > CLIP for norm in loop.norms) >= 3
    a, b = everywhere(loop.norms)
    assert a == b
    made = loop.accelerator
    assert made.unwrap_model(loop.model) is loop.net
    whole = made.get_state_dict(loop.model)
    assert list(whole) == (list(bare.net.state_dict()) if is_first() else [])
    with pytest.raises(Exception, match="FSDP  do not support `clip_grad_value_`"):
        made.clip_grad_value_(loop.model.parameters(), 1.0)
    made.save_state(str(shared_path / "theirs"))
    # The state is that of AdamW: it does not exist yet, and torch makes it by a step of zeros.
    loop = Loop(accelerator(state="FULL_STATE_DICT"))
    loop.accelerator.save_state(str(shared_path / "before"))
    loop.accelerator.load_state(str(shared_path / "before"))
    assert loop.model.clock.steps == 0
    assert worst_error(loop.net, Bare()) == 0
    norm_before = loop.train(1).norms[0]
    assert norm_before == pytest.approx(bare.norms[0], rel=1e-11)
    assert worst_error(loop.net, Bare().train(1)) < 1e-11
    dist.destroy_process_group()
    if not is_first():
        return
    with single_process(shared_path / "store"):
        loop = Loop(accelerator())
        loop.accelerator.load_state(str(shared_path / "theirs"))
        assert loop.train(9).passes > 2
        assert len(loop.norms) == 2
        assert worst_error(loop.net, bare.train(9)) < 1e-11
        forget()
    with alone():
        loop = Loop(Accelerator(cpu=True), shared_path / "own").train(11)
        # It resumes: the last step before the loop was left had not been saved, and a save that
        # took longer than a step may have skipped the one before.
        assert 11 - 6 <= len(loop.norms) < 11
        assert num_sharded(loop.net) == 0
        assert worst_error(loop.net, bare.train(11)) < 1e-11


@pytest.mark.world_size(1)
def test_the_norm_alone_is_exact_and_other_ways_to_divide_a_model_are_refused(caplog):
    bare = Bare(clip=None).train(1)
    loop = Loop(accelerator())
    for batch in loop.loader:
        loop.accelerator.backward(loop.model(**batch)["loss"])
        norm = loop.accelerator.clip_grad_norm_(loop.model.parameters(), float("inf"))
        if norm is not None:
            break
        loop.optimizer.step()
    assert type(norm) is torch.Tensor
    assert float(norm) == pytest.approx(bare.norms[0], rel=1e-11)
    loop.optimizer.step()
    assert worst_error(loop.net, bare) < 1e-11

    with pytest.raises(ValueError, match=r"fsdp_version \(1\) must be 2"):
        Loop(accelerator(1))
    made = accelerator()
    made.state.distributed_type = DistributedType.DEEPSPEED
    with pytest.raises(ValueError, match=r"distributed_type \(DEEPSPEED\) is not supported"):
        Loop(made)
    made.state.distributed_type = DistributedType.MEGATRON_LM
    with pytest.raises(ValueError, match=r"distributed_type \(MEGATRON_LM\).*fsdp_version=2"):
        Loop(made)
    for name in ("tp_size", "cp_size"):
        made = accelerator()
        made.state.parallelism_config = ParallelismConfig(**{name: 2})
        with pytest.raises(ValueError, match=rf"{name} \(2\) of the parallelism_config must be 1"):
            Loop(made)
    for make, instead in (
        (accelerator, "pass it as it was before fully_shard"),
        (lambda: Accelerator(cpu=True), "with fsdp_version=2 in its FSDP plugin"),
    ):
        made, net = make(), make_net()
        fully_shard(net)
        optimizer = make_optimizer(net)
        with pytest.raises(ValueError, match=rf"\d+ parameters are sharded .*{instead}"):
            prepare(made, net, optimizer, resilin.AdaptiveDataLoader(Data(), 8))
        forget()
    net = make_net()
    optimizer, made = make_optimizer(net), Accelerator(cpu=True)
    schedule = made.prepare(LambdaLR(optimizer, lambda step: 1.0))
    with pytest.raises(ValueError, match="is an AcceleratedScheduler already"):
        prepare(made, net, optimizer, schedule, resilin.AdaptiveDataLoader(Data(), 8))
    # A plugin that Accelerate ignores, as it does on CPUs.
    assert "does not shard (distributed_type MULTI_CPU)" in caplog.text
