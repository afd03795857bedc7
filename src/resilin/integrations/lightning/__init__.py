"""Lightning: the Trainer, and Fabric.

Both keep their loops. A strategy takes the place of DDP's and gives the model to
`AdaptiveDataParallel`; the data come from an `AdaptiveDataLoader`. To the Trainer a batch is then
one optimizer step, whatever its size and however it is split, so that whatever it counts, clips,
schedules or logs per batch is right at any batch size and any number of replicas.
"""

from __future__ import annotations

from resilin.telemetry import extras
from resilin.training.bridge.home import refuse_live_framework

refuse_live_framework()

extras.load("lightning", "lightning", "resilin.integrations.lightning")

from resilin.integrations.lightning.callback import Elastic  # noqa: E402
from resilin.integrations.lightning.fabric import ElasticFabricStrategy, JobState, setup  # noqa: E402
from resilin.integrations.lightning.steps import launched  # noqa: E402
from resilin.integrations.lightning.strategy import (  # noqa: E402
    ElasticShardedStrategy,
    ElasticStrategy,
)

__all__ = [
    "Elastic",
    "ElasticFabricStrategy",
    "ElasticShardedStrategy",
    "ElasticStrategy",
    "JobState",
    "launched",
    "setup",
]
