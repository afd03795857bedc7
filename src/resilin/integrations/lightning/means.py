"""Means of `self.log(on_epoch=True)` over an epoch: exact over replicas, and across restarts.

Lightning divides a sum by a count on each replica, or the mean of the sums by the mean of the
counts, which it rounds down to a whole number. Here both are summed over the replicas first, filler
micro-batches count nothing, and the sums of a lost process are a part of the state of the job.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

from resilin.compat import lightning_names
from resilin.compat.lightning_names import num_updates, set_num_updates, states_of
from resilin.core._warn import warn
from resilin.training.bridge.home import Home
from resilin.training.state.replica_parts import LARGEST, SMALLEST

_PLAIN = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
"""Fields of a logged value, apart from its reduction and synchronisation."""
_OPERATIONS: dict[Any, str] = {dim_zero_sum: "", dim_zero_max: LARGEST, dim_zero_min: SMALLEST}
"""Operation of the registry for each reduction of torchmetrics."""
_MOST = 4096
"""Largest state of a torchmetrics metric that is kept, in numbers."""


def counts() -> bool:
    """Whether the current batch counts: it has samples of this replica, or is not trained on."""
    micro_batch = Home().micro_batch
    return micro_batch is None or micro_batch.weight > 0


class EpochMetric(lightning_names.ResultMetric):  # type: ignore[misc]
    """A logged value, with the sums of an earlier process added."""

    carried: tuple[float, float] | None = None
    """`value` and `cumulated_batch_size` of an earlier process."""
    carried_dtype = torch.float32
    """Its dtype."""

    def update(self, value: Any, batch_size: int) -> None:
        """Add a value, unless the micro-batch has no samples of this replica."""
        if not self.is_tensor or self.meta.fx != "training_step" or counts():
            super().update(value, batch_size)
        elif self.meta.on_step:
            # Other replicas may be synchronising it.
            lightning_names.show_in_step(self, self.meta.sync(value.clone()))

    def compute(self) -> Tensor:
        """The value of the epoch."""
        if not self.is_tensor:
            computed: Tensor = super().compute()
            return computed
        value, count = self.total()
        if self.meta.is_mean_reduction:
            both = self._reduced(torch.stack([value, count.to(value)]), "sum")
            return both[0] / both[1]
        return self._reduced(value.clone(), self.meta.reduce_fx.__name__)

    def _reduced(self, value: Tensor, operation: str) -> Tensor:
        sync = self.meta.sync
        if sync.fn is None or not sync.should or sync.rank_zero_only:
            return value
        return sync.fn(value, reduce_op=operation, group=sync.group)  # type: ignore[no-any-return]

    def total(self) -> tuple[Tensor, Tensor]:
        """Sum of this replica and of earlier processes, and its weight."""
        count = getattr(self, "cumulated_batch_size", torch.tensor(0))
        if self.carried is None:
            return self.value, count
        value, weight = self.carried
        dtype = torch.promote_types(self.value.dtype, self.carried_dtype)
        carried = torch.as_tensor(value, dtype=dtype, device=self.value.device)
        if self.meta.is_mean_reduction or self.meta.is_sum_reduction:
            return self.value + carried, count + weight
        return self.meta.reduce_fx(self.value.to(dtype), carried), count


class EpochResults(lightning_names.ResultCollection):  # type: ignore[misc]
    """The values that were logged in an epoch."""

    def __setitem__(self, key: str, metric: Any) -> None:
        super().__setitem__(key, EpochMetric(metric.meta, metric.is_tensor))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Reset values; sums of earlier processes are kept until the end of their epoch."""
        super().reset(metrics, fx)
        for metric in self.values():
            if metrics is None and fx is None:
                metric.carried = None
            elif metric.carried is not None:
                metric.has_reset = False

    # State ---------------------------------------------------------------------------------

    def _kept(self) -> list[tuple[str, EpochMetric]]:
        return [
            (key, metric)
            for key, metric in self.items()
            if metric.meta.on_epoch and not metric.has_reset and metric.meta.sync.group is None
        ]

    def outline(self, metrics: Mapping[str, Metric]) -> dict[str, Any]:
        """Names of the values and how they were logged; the same on all replicas.

        Args:
            metrics: The torchmetrics metrics of the module, of which some may be logged.
        """
        names = {id(metric): name for name, metric in metrics.items()}
        return {
            key: {name: getattr(logged.meta, name) for name in _PLAIN}
            | {
                "reduce_fx": logged.meta.reduce_fx.__name__,
                "sync_dist": logged.meta.sync.should,
                "rank_zero_only": logged.meta.sync.rank_zero_only,
                "metric": None if logged.is_tensor else names[id(logged.value)],
                "dtype": logged.total()[0].dtype if logged.is_tensor else None,
            }
            for key, logged in self._kept()
            if logged.is_tensor or id(logged.value) in names
        }

    def revive(
        self,
        outline: Mapping[str, Mapping[str, Any]],
        trainer: Trainer,
        metrics: Mapping[str, Metric],
    ) -> None:
        """Create the values that `outline` describes, without their sums."""
        for key, made in outline.items():
            meta = lightning_names.Metadata(
                **{name: made[name] for name in _PLAIN},
                reduce_fx=made["reduce_fx"],
            )
            meta.sync = lightning_names.make_sync(
                should=made["sync_dist"],
                function=trainer.strategy.reduce,
                rank_zero_only=made["rank_zero_only"],
            )
            self[key] = lightning_names.ResultMetric(meta, is_tensor=made["metric"] is None)
            set_num_updates(self[key], 1)
            if made["metric"] is None:
                # This replica has added nothing yet; `add` sets the sums.
                self[key].carried = (float(self[key].value), 0.0)
                self[key].carried_dtype = made["dtype"]
            else:
                self[key].value = metrics[made["metric"]]

    def sums(self) -> dict[str, float]:
        """Sums of this replica."""
        kept = [(key, each, *each.total()) for key, each in self._kept() if each.is_tensor]
        if not kept:
            return {}
        device = kept[0][2].device
        table = torch.stack(
            [
                torch.stack([value.to(device, torch.float64), count.to(device, torch.float64)])
                for _, _, value, count in kept
            ]
        )
        found: dict[str, float] = {}
        for (key, metric, *_), (value, count) in zip(kept, table.tolist(), strict=True):
            found[_operation(metric) + f"value {key}"] = value
            if metric.meta.is_mean_reduction:
                found[f"count {key}"] = count
        return found

    def add(self, sums: Mapping[str, float]) -> None:
        """Set the sums of values that `revive` has created."""
        for key, metric in self.items():
            name = _operation(metric) + f"value {key}"
            if metric.carried is not None and name in sums:
                metric.carried = (sums[name], sums.get(f"count {key}", 0.0))


def _operation(metric: EpochMetric) -> str:
    if metric.meta.is_max_reduction:
        return LARGEST
    return SMALLEST if metric.meta.is_min_reduction else ""


class EpochSums:
    """This replica's part of the values of an epoch: those of `self.log`, and of torchmetrics.

    A state of a metric that is not summed over the replicas, such as a list of all predictions, is
    not kept. A warning names it when the job resumes within an epoch.
    """

    def __init__(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        self.results = EpochResults(training=True)
        lightning_names.replace_results(loop, self.results)
        lightning_names.replace_results(loop.val_loop, EpochResults(training=False))
        self._trainer = trainer
        self._left: dict[str, Any] = {}

    @property
    def _module(self) -> LightningModule:
        return self._trainer.lightning_module

    def state_dict(self) -> dict[str, Any]:
        """Sums of this replica, of logged values and of metrics."""
        found = self.results.sums()
        for name, metric in metrics_of(self._module):
            for state, operation in _summable(metric):
                numbers = getattr(metric, state).flatten().tolist()
                for place, number in enumerate(numbers):
                    found[f"{operation}metric {name}.{state} {place}"] = float(number)
        return {"sums": {**self._left, **found}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load sums; `resume` sets them."""
        self._left = dict(state["sums"])

    def outline(self) -> dict[str, Any]:
        """Description of all values and metrics; the same on all replicas."""
        metrics = metrics_of(self._module)
        used = [(name, metric) for name, metric in metrics if num_updates(metric)]
        return {
            "logged": self.results.outline(dict(metrics)),
            "metrics": [name for name, metric in used if len(_summable(metric)) == _size(metric)],
            "lost": [name for name, metric in used if len(_summable(metric)) < _size(metric)],
        }

    def resume(self, outline: Mapping[str, Any]) -> None:
        """Restore values and metrics from an outline and the loaded sums."""
        self.results.revive(outline["logged"], self._trainer, dict(metrics_of(self._module)))
        sums, self._left = self._left, {}
        self.results.add(sums)
        for name, metric in metrics_of(self._module):
            if name in outline["metrics"]:
                _fill(name, metric, sums)
            elif name in outline["lost"]:
                warn(
                    f"the metric {name!r} ({type(metric).__name__}) has states that are not sums "
                    "over samples and are not kept: in the epoch that is resumed, its value "
                    "covers only what came after the restart"
                )


@contextmanager
def untouched(module: LightningModule) -> Iterator[None]:
    """Restore the metrics of a module after a micro-batch that counts nothing."""
    before = [
        (metric, num_updates(metric), copy.deepcopy(metric.metric_state))
        for _, metric in metrics_of(module)
    ]
    yield
    for metric, number, states in before:
        set_num_updates(metric, number)
        for state, value in states.items():
            setattr(metric, state, value)


def metrics_of(module: LightningModule) -> list[tuple[str, Metric]]:
    """The torchmetrics metrics of a module, by name."""
    return [(name, part) for name, part in module.named_modules() if isinstance(part, Metric)]


def _size(metric: Metric) -> int:
    return len(states_of(metric))


def _summable(metric: Metric) -> list[tuple[str, str]]:
    """States that can be combined over replicas, and the prefix of their operation."""
    return [
        (state, _OPERATIONS[reduction])
        for state, (default, reduction) in states_of(metric).items()
        if reduction in _OPERATIONS
        and isinstance(default, Tensor)
        and isinstance(getattr(metric, state), Tensor)
        and getattr(metric, state).numel() <= _MOST
    ]


def _fill(name: str, metric: Metric, sums: Mapping[str, float]) -> None:
    for state, operation in _summable(metric):
        default, _ = states_of(metric)[state]
        assert isinstance(default, Tensor)
        keys = [f"{operation}metric {name}.{state} {place}" for place in range(default.numel())]
        if all(key in sums for key in keys):
            values = torch.tensor([sums[key] for key in keys], dtype=torch.float64)
            now = getattr(metric, state)
            setattr(metric, state, values.to(now.dtype).reshape(now.shape).to(now.device))
    set_num_updates(metric, max(1, num_updates(metric)))
