"""What loaders of other libraries do when a job is resumed on another number of ranks.

    python benchmarks/streams_table.py [--check]

1003 samples in 60 files. A job on 4 ranks is saved after 10 steps of a global batch of 24, and is
finished on 4, 2, 3 and 5 ranks. Each loader is saved and resumed as its own documentation says:

- `datasets`: `split_dataset_by_node`, and the `state_dict` of each rank for the same rank; a rank
  that has no state begins at the beginning;
- `torchdata`: a `StatefulDataLoader` over a dataset that deals samples to ranks and counts those of
  its rank, likewise;
- `webdataset`: `split_by_node`, and each rank passes over its part of the samples that were used;
- `litdata`: a `StreamingDataLoader`, and the state of the first rank for all;
- `mosaic`: a `StreamingDataLoader`, likewise.

Beside each of them, an `AdaptiveDataLoader` does the same over the same source, and all its ranks
load the state that one of them saved. Ranks are processes of their own. Prints, for each loader and
number of ranks, how many samples of the epoch were used once more than they should be, and how many
never; or why it cannot be resumed. A package that cannot be imported is named as such: litdata and
Mosaic need other versions of NumPy than this project, so they want an environment of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import multiprocessing
import os
import shutil
import tarfile
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from contest import free_port
from harness import finish, parse_args

NUM_SAMPLES, NUM_FILES = 1003, 60
BATCH, STEPS = 24, 10
BEFORE, AFTER = 4, (4, 2, 3, 5)
"""Ranks of the job that is saved, and of those that finish it."""
LIMIT = 120.0
"""Seconds that the ranks of one job may take."""


class Rank(NamedTuple):
    """One rank of a job."""

    rank: int
    world: int
    data: Path
    states: list[Any] | None
    """What all ranks of the first job saved; None in that job itself."""

    @property
    def batch(self) -> int:
        return -(-BATCH // self.world)

    @property
    def mine(self) -> Any:
        """The state that this rank saved, if there was such a rank."""
        own = self.states is not None and self.rank < len(self.states)
        return self.states[self.rank] if self.states is not None and own else None

    @property
    def is_first_job(self) -> bool:
        return self.states is None


Loader = Callable[[Rank], tuple[list[int], Any]]
"""Gives the samples that a rank used, and in the first job the state that it saved."""


# Loaders ---------------------------------------------------------------------------------------


def _hugging_face(rank: Rank) -> Any:
    from datasets import load_dataset

    files = [str(path) for path in sorted((rank.data / "jsonl").iterdir())]
    cache = rank.data / f"cache-{rank.world}-{rank.rank}"
    return load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(cache)
    )


def hugging_face(rank: Rank) -> tuple[list[int], Any]:
    from datasets.distributed import split_dataset_by_node

    dataset = split_dataset_by_node(_hugging_face(rank), rank=rank.rank, world_size=rank.world)
    if rank.is_first_job:
        used = [row["id"] for row in itertools.islice(dataset, STEPS * rank.batch)]
        return used, dataset.state_dict()
    if rank.mine is not None:
        dataset.load_state_dict(rank.mine)
    return [row["id"] for row in dataset], None


class Dealt:
    """A stateful iterable dataset as torchdata wants one: each rank counts its own samples."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.num_used = rank, 0

    def __iter__(self) -> Iterator[int]:
        own = itertools.islice(_lines(self.rank.data), self.rank.rank, None, self.rank.world)
        for line in itertools.islice(own, self.num_used, None):
            self.num_used += 1
            yield json.loads(line)["id"]
        self.num_used = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_used": self.num_used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_used = state["num_used"]


def stateful_dataloader(rank: Rank) -> tuple[list[int], Any]:
    from torch.utils.data import IterableDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Iterable(Dealt, IterableDataset):  # type: ignore[misc, type-arg]
        pass

    loader = StatefulDataLoader(Iterable(rank), batch_size=rank.batch)
    if rank.is_first_job:
        used = [i for batch in itertools.islice(loader, STEPS) for i in batch.tolist()]
        return used, loader.state_dict()
    if rank.mine is not None:
        loader.load_state_dict(rank.mine)
    return [i for batch in loader for i in batch.tolist()], None


def web_dataset(rank: Rank) -> tuple[list[int], Any]:
    import webdataset

    files = [str(path) for path in sorted((rank.data / "tar").iterdir())]
    dataset = webdataset.WebDataset(files, nodesplitter=webdataset.split_by_node, shardshuffle=0)
    if rank.is_first_job:
        part = dataset.slice(STEPS * rank.batch)
    else:
        part = dataset.slice(STEPS * BATCH // rank.world, NUM_SAMPLES)
    return [json.loads(row["json"])["id"] for row in part], None


def _lit_data(rank: Rank) -> Any:
    import litdata

    return litdata.StreamingDataset(str(rank.data / "litdata"), shuffle=False, drop_last=False)


def lit_data(rank: Rank) -> tuple[list[int], Any]:
    import litdata

    loader = litdata.StreamingDataLoader(_lit_data(rank), batch_size=rank.batch)
    if rank.is_first_job:
        used = [i for batch in itertools.islice(loader, STEPS) for i in batch["id"].tolist()]
        return used, loader.state_dict()
    assert rank.states is not None
    loader.load_state_dict(rank.states[0])
    return [i for batch in loader for i in batch["id"].tolist()], None


def _mosaic(rank: Rank) -> Any:
    from streaming import StreamingDataset

    return StreamingDataset(local=str(rank.data / "mds"), batch_size=rank.batch, shuffle=False)


def mosaic(rank: Rank) -> tuple[list[int], Any]:
    import torch.distributed as dist
    from streaming import StreamingDataLoader

    dist.init_process_group("gloo")
    loader = StreamingDataLoader(_mosaic(rank), batch_size=rank.batch)
    if rank.is_first_job:
        used = [i for batch in itertools.islice(loader, STEPS) for i in batch["id"].tolist()]
        return used, loader.state_dict()
    assert rank.states is not None
    loader.load_state_dict(rank.states[0])
    return [i for batch in loader for i in batch["id"].tolist()], None


# The same sources under resilin ------------------------------------------------------------------


def adaptive(rank: Rank, source: Any, ids: Callable[[Any], Any]) -> tuple[list[int], Any]:
    """The loader of resilin over a source.

    Args:
        rank: The rank.
        source: The data.
        ids: Returns the numbers of the samples of a batch.
    """
    import resilin

    loader = resilin.AdaptiveDataLoader(source, batch_size=BATCH)
    if rank.states is not None:
        loader.load_state_dict(rank.states[0])
    used: list[int] = []
    for step, batch in enumerate(loader, 1):
        if loader.current_samples:
            used += map(int, ids(batch))
        loader.commit()
        if rank.is_first_job and step == STEPS:
            break
    return used, loader.state_dict()


def _joined() -> Any:
    """Joins the job; `resilin.streams`."""
    import resilin
    from resilin import streams

    resilin.init_process_group()
    return streams


def over_hugging_face(rank: Rank) -> tuple[list[int], Any]:
    _joined()
    return adaptive(rank, _hugging_face(rank), lambda batch: batch["id"])


def over_stateful(rank: Rank) -> tuple[list[int], Any]:
    def shard(number: int, num_shards: int, epoch: int) -> Dealt:
        return Dealt(Rank(number, num_shards, rank.data, None))

    source = _joined().StatefulShards(shard, NUM_FILES, "dealt")
    return adaptive(rank, source, lambda batch: batch)


def over_tar(rank: Rank) -> tuple[list[int], Any]:
    streams = _joined()
    files = sorted((rank.data / "tar").iterdir())
    source = streams.FileStream(files, streams.tar_samples, num_shards=NUM_FILES)
    return adaptive(rank, source, lambda batch: [json.loads(text)["id"] for text in batch["json"]])


def over_lit_data(rank: Rank) -> tuple[list[int], Any]:
    source = _joined().Indexed(_lit_data(rank), NUM_SAMPLES)
    return adaptive(rank, source, lambda batch: batch["id"])


def over_mosaic(rank: Rank) -> tuple[list[int], Any]:
    source = _joined().Indexed(_mosaic(rank), NUM_SAMPLES)
    return adaptive(rank, source, lambda batch: batch["id"])


LOADERS: dict[str, tuple[str, Loader, Loader]] = {
    "datasets": ("datasets", hugging_face, over_hugging_face),
    "torchdata": ("torchdata.stateful_dataloader", stateful_dataloader, over_stateful),
    "webdataset": ("webdataset", web_dataset, over_tar),
    "litdata": ("litdata", lit_data, over_lit_data),
    "mosaic": ("streaming", mosaic, over_mosaic),
}
"""By name: the package that it needs, its own loader, and that of resilin over the same source."""


# Data ------------------------------------------------------------------------------------------


def make_data(folder: Path, present: set[str]) -> None:
    """The same samples in the format of each library: unequal files, in order."""
    ends = [NUM_SAMPLES * i // NUM_FILES for i in range(NUM_FILES + 1)]
    parts = [range(*pair) for pair in itertools.pairwise(ends)]
    for kind in ("jsonl", "tar"):
        (folder / kind).mkdir()
    for number, part in enumerate(parts):
        rows = [json.dumps({"id": i}) for i in part]
        (folder / "jsonl" / f"{number:03d}.jsonl").write_text("".join(f"{r}\n" for r in rows))
        with tarfile.open(folder / "tar" / f"{number:03d}.tar", "w") as archive:
            for i, row in zip(part, rows, strict=True):
                entry = tarfile.TarInfo(f"{i:06d}.json")
                entry.size = len(row)
                archive.addfile(entry, io.BytesIO(row.encode()))
    if "litdata" in present:
        import litdata

        litdata.optimize(
            _row,
            list(range(NUM_SAMPLES)),
            str(folder / "litdata"),
            chunk_size=-(-NUM_SAMPLES // NUM_FILES),
            num_workers=1,
        )
    if "mosaic" in present:
        from streaming import MDSWriter

        with MDSWriter(out=str(folder / "mds"), columns={"id": "int"}, size_limit=256) as writer:
            for i in range(NUM_SAMPLES):
                writer.write(_row(i))


def _row(number: int) -> dict[str, int]:
    return {"id": number}


def _lines(folder: Path) -> Iterator[str]:
    for file in sorted((folder / "jsonl").iterdir()):
        yield from file.read_text().splitlines()


# Ranks -----------------------------------------------------------------------------------------


class Failed(Exception):
    """A rank has ended with an error; the message says which."""


def run(loader: Loader, world: int, data: Path, states: list[Any] | None) -> list[Any]:
    """Runs one job, and returns what each rank returned.

    Raises:
        Failed: A rank failed, or took too long.
    """
    context = multiprocessing.get_context("fork")
    common = {
        "WORLD_SIZE": f"{world}",
        "LOCAL_WORLD_SIZE": f"{world}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{free_port()}",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes, ends = [], []
    for number in range(world):
        ours, theirs = context.Pipe()
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "GLOBAL_RANK"), f"{number}")
        rank = Rank(number, world, data, states)
        # Not a daemon: loaders may start processes of their own.
        process = context.Process(target=_rank, args=(loader, rank, common | ranks, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    try:
        said: list[Any] = []
        for number, end in enumerate(ends):
            if not end.poll(LIMIT):
                raise Failed(f"rank {number} said nothing for {LIMIT:g} s")
            said.append(end.recv())
        if errors := [each for each in said if isinstance(each, str)]:
            raise Failed(errors[0])
        for end in ends:
            end.send(None)
        for process in processes:
            process.join(10)
        return said
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(loader: Loader, rank: Rank, environment: dict[str, str], result: Connection) -> None:
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    try:
        result.send(loader(rank))
    except BaseException as error:
        lines = traceback.format_exception_only(error)
        result.send(" ".join("".join(lines).split())[:200])
    # A rank stays until all are done: others may still need what it shares with them.
    if result.poll(LIMIT):
        result.recv()


def row(loader: Loader, data: Path) -> dict[str, Any]:
    """Repeated and missing samples for each number of ranks that finish the epoch."""
    try:
        first = run(loader, BEFORE, data, None)
    except Failed as error:
        return {f"{world}": {"refused": str(error)} for world in AFTER}
    before = [i for used, _ in first for i in used]
    figures: dict[str, Any] = {}
    for world in AFTER:
        try:
            after = run(loader, world, data, [state for _, state in first])
        except Failed as error:
            figures[f"{world}"] = {"refused": str(error)}
            continue
        counts = Counter(before + [i for used, _ in after for i in used])
        assert set(counts) <= set(range(NUM_SAMPLES))
        figures[f"{world}"] = {
            "repeated": counts.total() - len(counts),
            "missing": NUM_SAMPLES - len(counts),
        }
    return figures


def wrong(figures: dict[str, Any]) -> int:
    """Samples of a row that were repeated or missing; a row that was refused counts as a whole."""
    return sum(
        NUM_SAMPLES if "refused" in each else each["repeated"] + each["missing"]
        for each in figures.values()
    )


def lacks(package: str) -> str:
    """Why a package cannot be used; empty if it can."""
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError) as error:
        return f"not installed: {error}"[:120]
    return ""


def main() -> None:
    args = parse_args(__doc__ or "")
    missing = {name: why for name, (package, *_) in LOADERS.items() if (why := lacks(package))}
    table: dict[str, Any] = dict(missing)
    folder = Path(tempfile.mkdtemp(prefix="streams-table-"))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            make_data(folder, set(LOADERS) - set(missing))
        for name, (_, stock, ours) in LOADERS.items():
            if name not in missing:
                table[name] = {"own": row(stock, folder), "resilin": row(ours, folder)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    num_wrong = sum(wrong(rows["resilin"]) for name, rows in table.items() if name not in missing)
    figures = {"table": table, "resilin_wrong": num_wrong, "no_source": int(missing == table)}
    finish("streams_table", figures, {"resilin_wrong": 0, "no_source": 0}, check=args.check)


if __name__ == "__main__":
    main()
