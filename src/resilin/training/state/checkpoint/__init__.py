"""Checkpoints: snapshots on storage, in the format of torch.distributed.checkpoint.

An attempt to save has a directory of its own. Replicas write their shares of the tensors into it,
one file each, and the first replica writes `COMMIT.json` last: sizes and checksums of the files,
where each tensor is, and the state that JSON can hold. A directory without that file counts for
nothing, so whatever interrupts a save, what was there before stays as it was.

Loading executes nothing that a checkpoint holds: the one pickle in it, `.metadata`, is there for
other readers and never opened by this one, and tensors are read with `weights_only`.
"""

from resilin.training.state.checkpoint.checkpoints import Checkpoints
from resilin.training.state.checkpoint.commit import Commit
from resilin.training.state.checkpoint.errors import CheckpointError, CorruptCheckpoint

__all__ = ["CheckpointError", "Checkpoints", "Commit", "CorruptCheckpoint"]
