"""torch: names of autograd, DDP, optimizers, schedulers, torch.compile and checkpoints.

Names that every job needs are looked up when this module is imported, and cost nothing later.
Those of torch.compile and of checkpoints are looked up when they are used.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroup, Store
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from resilin.compat.names import Package

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TORCH = Package("torch", tested=("2.8.0", "2.10.0", "2.12.1", "2.13.0", "2.15.0"))
"""torch, and the names of it that resilin uses."""

# Tensors -----------------------------------------------------------------------------------------

multiply_all: Callable[[Sequence[Tensor], float], None] = TORCH.name(
    "torch:_foreach_mul_", "scales all gradients in one call"
).find()
"""Multiplies tensors by a number, in place."""

multiplied_all: Callable[[Sequence[Tensor], float], Sequence[Tensor]] = TORCH.name(
    "torch:_foreach_mul", "makes multiples of all gradients in one call"
).find()
"""Multiples of tensors by a number."""

copy_all: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = TORCH.name(
    "torch:_foreach_copy_", "packs all gradients of a bucket in one call"
).find()
"""Copies tensors into others of the same shapes."""

interpolate_all: Callable[[Sequence[Tensor], Sequence[Tensor], float], None] = TORCH.name(
    "torch:_foreach_lerp_", "averages the gradients of micro-batches in one call"
).find()
"""Moves tensors towards others by a share of the distance, in place."""

pin_batch: Callable[[Any], Any] = TORCH.name(
    "torch.utils.data._utils.pin_memory:pin_memory", "pins batches as a DataLoader does"
).find()
"""A collated batch in pinned memory."""

_END_WORKERS = TORCH.name(
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers",
    "ends the workers of a DataLoader while somebody still refers to its iterator",
)
_END_WORKERS.find()


def end_workers(iterator: object) -> None:
    """End the workers of an iterator of a DataLoader now; those without workers are left alone."""
    if hasattr(iterator, _END_WORKERS.attribute):
        getattr(iterator, _END_WORKERS.attribute)()


norms_of_all: Callable[[Sequence[Tensor]], list[Tensor]] = TORCH.name(
    "torch:_foreach_norm", "measures all gradients in one call, on a GPU"
).find()
"""The norm of each tensor."""

_VERSION = TORCH.name("torch:Tensor._version", "detects that a tensor was changed in place")
_VERSION.find()
version_of: Callable[[Tensor], int] = operator.attrgetter(_VERSION.attribute)
"""Number of changes in place that a tensor has had."""

_TENSOR_HOOKS = TORCH.name(
    "torch:Tensor._backward_hooks", "calls hooks of tensors with the complete gradient"
)
_POST_HOOKS = TORCH.name(
    "torch:Tensor._post_accumulate_grad_hooks",
    "calls hooks of parameters with the complete gradient",
)
for _name in (_TENSOR_HOOKS, _POST_HOOKS):
    _name.find()
hooks_of: Callable[[Tensor], tuple[Any, Any]] = operator.attrgetter(
    _TENSOR_HOOKS.attribute, _POST_HOOKS.attribute
)
"""Hooks of `register_hook`, and of `register_post_accumulate_grad_hook`: dicts, or None."""

_SCALE = TORCH.name(
    "torch.amp:GradScaler._get_scale_async",
    "reads the scale of a GradScaler without waiting for the device",
)
_SCALE.find()


def scale_of(scaler: GradScaler) -> Tensor | None:
    """The scale of a GradScaler, where it is; None before the first scaled loss."""
    scale: Tensor | None = _SCALE.of(scaler)()
    return scale


_pytree: Any = TORCH.name("torch.utils:_pytree", "finds tensors in nested containers").find()
tree_leaves: Callable[[Any], list[Any]] = _pytree.tree_leaves
"""The leaves of a nesting of containers."""

# The backward pass -------------------------------------------------------------------------------

after_backward: Callable[[Callable[[], None]], None] = (
    TORCH.name(
        "torch.autograd:Variable._execution_engine",
        "completes a gradient at the end of the backward pass, after the reduction of DDP",
    )
    .find()
    .queue_callback
)
"""Queues a function that is called once the backward pass under way has ended."""

Dropout: type[nn.Module] = TORCH.name(
    "torch.nn.modules.dropout:_DropoutNd", "switches dropout off for `check_split`"
).find()
"""Base class of all dropout modules."""

# DDP ---------------------------------------------------------------------------------------------

_PRE_FORWARD = TORCH.name(
    "torch.nn.parallel:DistributedDataParallel._pre_forward",
    "takes part in a reduction without a forward pass",
)
_POST_FORWARD = TORCH.name(
    "torch.nn.parallel:DistributedDataParallel._post_forward",
    "takes part in a reduction without a forward pass",
)
_REDUCER = TORCH.name(
    "torch.nn.parallel:DistributedDataParallel.reducer",
    "repeats or gives up a reduction",
    instance=True,
)
_PREPARE = TORCH.name(
    "torch.distributed:Reducer.prepare_for_backward", "repeats a reduction that was given up"
)
_RESET = TORCH.name(
    "torch.distributed:Reducer._reset_state", "gives up a reduction before the first one"
)
_SYNC = TORCH.name(
    "torch.nn.parallel:DistributedDataParallel.require_backward_grad_sync",
    "sets which micro-batch reduces",
    instance=True,
)
_UNUSED = TORCH.name(
    "torch.nn.parallel:DistributedDataParallel.find_unused_parameters",
    "takes part in a reduction as the user has configured it",
    instance=True,
)
_IGNORED = TORCH.name(
    "torch.nn.parallel:DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "knows which parameters DDP leaves alone, by the attribute that it sets",
)
_FIRST_BUCKET = TORCH.name(
    "torch.distributed:_DEFAULT_FIRST_BUCKET_BYTES", "checks bucket_cap_mb of compiled models"
)
for _name in (_PRE_FORWARD, _POST_FORWARD, _PREPARE, _RESET, _IGNORED):
    _name.find()


def check_ddp(ddp: DistributedDataParallel) -> None:
    """Check that a DDP has all attributes that the functions below use.

    Raises:
        MissingNameError: One is gone.
    """
    for name in (_REDUCER, _SYNC, _UNUSED):
        name.of(ddp)


def set_reduces(ddp: DistributedDataParallel, reduces: bool) -> None:
    """Set whether the backward pass of the next forward pass reduces, as `no_sync` does."""
    ddp.require_backward_grad_sync = reduces


def finds_unused(ddp: DistributedDataParallel) -> bool:
    """Whether DDP looks for parameters that a forward pass did not use."""
    return bool(ddp.find_unused_parameters)


def prepare_backward(ddp: DistributedDataParallel, outputs: Sequence[Tensor]) -> None:
    """Make DDP expect a backward pass from these outputs, without a forward pass.

    Args:
        ddp: The model.
        outputs: Roots of the backward pass; empty unless unused parameters are looked for.
    """
    ddp.reducer.prepare_for_backward(list(outputs))


def wrap_outputs(ddp: DistributedDataParallel, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Run the hooks of DDP around a forward pass, for outputs that were computed outside of it.

    Returns:
        The outputs, connected so that their backward pass reduces.
    """
    # An argument, because DDP moves its arguments to the device and expects some.
    unused = torch.zeros(())
    ddp._pre_forward(unused, unused=unused)  # type: ignore[no-untyped-call]
    wrapped: Sequence[Tensor] = ddp._post_forward(tuple(outputs))  # type: ignore[no-untyped-call]
    return wrapped


def reset_reducer(ddp: DistributedDataParallel) -> None:
    """Make DDP forget a forward pass whose backward pass never ended, and its bucket order."""
    ddp.reducer._reset_state()


def ignored_by_ddp(module: nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers that DDP was configured to ignore."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def first_bucket_bytes() -> int:
    """Size of the first bucket of DDP, in bytes."""
    return int(_FIRST_BUCKET.find())


# Process groups ----------------------------------------------------------------------------------

_DEFAULT_STORE = TORCH.name(
    "torch.distributed.distributed_c10d:_get_default_store",
    "shares the nodes of Ray Train's workers",
)
_RENDEZVOUS = TORCH.name(
    "torch.distributed.rendezvous:rendezvous", "gives each process group a name of its own"
)
_BACKEND = TORCH.name(
    "torch.distributed:ProcessGroup._get_backend",
    "gives the group of host numbers the time limit of the gradients' group",
)
_TIME_LIMIT = TORCH.name(
    "torch._C._distributed_c10d:Backend.Options._timeout",
    "gives the group of host numbers the time limit of the gradients' group",
)
_GLOO = TORCH.name(
    "torch.distributed.distributed_c10d:ProcessGroupGloo",
    "is replaced while a live job forms, so that nobody waits for connections of a member that is"
    " gone",
)
_SET_TIME_LIMIT = TORCH.name(
    "torch._C._distributed_c10d:ProcessGroupGloo._set_default_timeout",
    "gives a group another time limit for its collectives than for its connections",
)


def default_store() -> Store:
    """The store through which the default process group was formed."""
    store: Store = _DEFAULT_STORE.find()()
    return store


def rendezvous_from_environment(timeout: timedelta) -> tuple[Store, int, int]:
    """Join the other processes by the environment variables of torchrun.

    Returns:
        The store, the rank of this process, and the number of processes.
    """
    store, rank, world_size = next(_RENDEZVOUS.find()("env://", timeout=timeout))
    return store, rank, world_size


@contextmanager
def gloo_made_by(make: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Has `make` call the constructor of each gloo group that is made within this block.

    torch connects the members in the constructor, which nothing can interrupt.

    Args:
        make: Takes a function that makes the group, and returns the group.
    """
    gloo: Any = _GLOO.find()
    module: Any = distributed_c10d

    class InPlace(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(partial(gloo, *args, **kwargs))

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, gloo)

    module.ProcessGroupGloo = InPlace("ProcessGroupGloo", (), {})
    try:
        yield
    finally:
        module.ProcessGroupGloo = gloo


@contextmanager
def copies_of(module: nn.Module) -> Iterator[None]:
    """Explain why gloo cannot copy a module with complex numbers to other replicas.

    Raises:
        RuntimeError: The module has a complex tensor, which gloo cannot send before torch 2.10.
    """
    try:
        yield
    except RuntimeError as error:
        of = [*module.named_parameters(), *module.named_buffers()]
        names = [f"{name} ({each.dtype})" for name, each in of if each.is_complex()]
        if "Invalid scalar type" not in str(error) or not names:
            raise
        raise RuntimeError(
            f"gloo of torch {torch.__version__} cannot send complex tensors to other replicas, and "
            f"the model has {names[0]}; torch 2.10 can"
        ) from error


def set_timeout_of(group: ProcessGroup, timeout: timedelta) -> None:
    """Sets the time limit of later collectives of a gloo group."""
    _BACKEND.find()
    _SET_TIME_LIMIT.find()
    group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta | None:
    """Time limit of the collectives of a group, for tensors on this device; None if unknown."""
    _BACKEND.find()
    _TIME_LIMIT.find()
    try:
        options = group._get_backend(device).options
    # A backend from outside of torch need not have options (in torch 2.8 it lacks the name),
    except (RuntimeError, AttributeError):
        return None
    # and one without settings has none.
    timeout: timedelta | None = None if options is None else options._timeout
    return timeout


# torch.compile -----------------------------------------------------------------------------------

_OPTIMIZED = TORCH.name("torch._dynamo:OptimizedModule", "recognises compiled modules")
_ORIGINAL = TORCH.name(
    "torch._dynamo:OptimizedModule._orig_mod",
    "reaches the module within a compiled one",
    instance=True,
)
_COMPILED_CALL = TORCH.name(
    "torch.nn:Module._compiled_call_impl", "recognises modules compiled in place"
)
_DDP_MODE = TORCH.name(
    "torch._dynamo.utils:get_optimize_ddp_mode", "checks bucket_cap_mb of compiled models"
)
_NOT_TRACED = TORCH.name(
    "torch._dynamo.trace_rules:add", "keeps torch.compile from tracing resilin itself"
)
DYNAMO = "torch._dynamo"
"""The module of torch.compile; only loaded where something is compiled, or an optimizer was made.
"""


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile was applied to this module, by function or in place."""
    if _COMPILED_CALL.of(module) is not None:
        return True
    return DYNAMO in sys.modules and isinstance(module, _OPTIMIZED.find())


def uncompiled(module: nn.Module) -> nn.Module:
    """The module within a compiled one; any other module is itself returned."""
    if DYNAMO not in sys.modules or not isinstance(module, _OPTIMIZED.find()):
        return module
    inner: nn.Module = _ORIGINAL.of(module)
    return inner


@cache
def keep_from_tracing(package: str) -> None:
    """Make torch.compile leave the functions of a package alone, but not those that they call.

    It treats its own DistributedDataParallel like that. Without this, a model that is compiled
    from outside would have our bookkeeping traced, function by function.
    For callers that have an optimizer: torch has loaded its compiler by then.
    """
    _NOT_TRACED.find()(package)


def splits_graph_by_buckets() -> bool:
    """Whether torch.compile would split the graph of a model in DDP by its buckets."""
    return DYNAMO in sys.modules and _DDP_MODE.find()() == "ddp_optimizer"


# Optimizers and schedulers -----------------------------------------------------------------------

_COUNTED = "_wrapped_by_lr_sched"
_CALLED = TORCH.name(
    "torch.optim:Optimizer._opt_called", "keeps schedulers from warning about gates", instance=True
)
_INITIAL = TORCH.name(
    "torch.optim.lr_scheduler:LRScheduler._is_initial",
    "distinguishes the step of a scheduler's constructor from those of training",
)
_INITIAL.find()


def is_counted(step: Callable[..., Any]) -> bool:
    """Whether a scheduler has wrapped this `optimizer.step` to detect that it was called."""
    return hasattr(step, _COUNTED)


def mark_counted(step: Callable[..., Any]) -> None:
    """Mark an `optimizer.step` as wrapped; a scheduler warns about one that is not."""
    setattr(step, _COUNTED, True)


def note_called(optimizer: Optimizer) -> None:
    """Note that the optimizer was stepped; a scheduler that is stepped first warns about it."""
    setattr(optimizer, _CALLED.attribute, True)


def is_initial(scheduler: LRScheduler) -> bool:
    """Whether the scheduler's constructor is stepping it."""
    return bool(scheduler._is_initial)


# Meshes ------------------------------------------------------------------------------------------

_ROOT = TORCH.name(
    "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
    "finds the processes that have copies of a parameter that tensor parallelism leaves alone",
    since="2.10",
)
_MESHES = TORCH.name(
    "torch.distributed.device_mesh:_mesh_resources.get_root_mesh",
    "the same, before torch 2.10",
    until="2.10",
)


def root_of_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which a mesh is a part; itself if it is no part."""
    root: DeviceMesh
    root = _ROOT.of(mesh)() if hasattr(mesh, _ROOT.attribute) else _MESHES.find()(mesh)
    return root


# Checkpoints -------------------------------------------------------------------------------------

_PLACE = TORCH.name(
    "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "writes checkpoints that torch.distributed.checkpoint can read",
)


def make_place(file: str, offset: int, length: int) -> Any:
    """Make the record of the position of a tensor, in metadata of torch.distributed.checkpoint."""
    return _PLACE.find()(file, offset, length)
