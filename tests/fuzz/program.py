"""Random training programs: a small record that the script and the oracle are both made from.

A `Program` says what a training loop does, feature by feature, and nothing about how. `script.py`
writes it down as a script that uses resilin; `oracle.py` runs the same thing in plain PyTorch, in
one process. A `Case` adds the disturbance: how many replicas each life of the job has, and at which
point which replica is killed.

Programs of other frameworks, and loops of a shape of their own, are families (`families/`): their
record is a dict of options, and their oracle is their own, or the undisturbed run of the same
program.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HOOKS = (
    "setup",
    "wrapped",
    "epoch",
    "batch",
    "forward",
    "backward",
    "between",
    "stepped",
    "zeroed",
    "epoch_end",
    "evaluating",
    "evaluated",
    "trained",
    "reported",
)
"""Places in a program where it calls `kill_point(name)`."""

PLACES = (
    "training/state/memory.py",
    "training/state/memory_file.py",
    "training/state/memory_schedule.py",
    "training/state/checkpoint_schedule.py",
    "training/state/recovery.py",
    "training/state/startup.py",
    "training/state/restore.py",
    "training/state/transfer.py",
    "training/state/registry.py",
    "training/state/snapshot.py",
    "training/state/shards.py",
    "training/state/checkpoint/",
    "training/loader.py",
    "training/passes.py",
    "training/data/cursor.py",
    "training/data/fetching.py",
    "training/data/iteration.py",
    "training/data/reading.py",
    "training/gradient/",
    "training/parallel.py",
    "training/gates/optimizer.py",
    "training/script/epochs.py",
    "training/",
    "engine/",
    "core/",
)
"""Files of resilin in which a replica may be killed, at the n-th line that is executed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL (or SIGTERM) of one replica in one life of the job."""

    replica: int
    """Which one, modulo the number of replicas of that life."""
    at: str
    """A name of `HOOKS`, or `line:` and one of `PLACES`."""
    count: int
    """The kill comes when the point is reached for the `count`-th time in that life, from 1."""
    term: bool = False
    """Whether it is SIGTERM, on which a job saves its state and leaves."""
    wipe: bool = False
    """Whether the copies in memory are lost too, as with the host; only checkpoints are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a training loop does."""

    data_seed: int = 0
    """Chooses data and initial parameters."""
    num_samples: int = 24
    batch_size: int = 4
    """The reference batch."""
    epochs: int = 2
    shuffle: bool = True
    tail: str = "short"
    num_workers: int = 0
    max_local_bsz: int | None = None
    reader: str = "none"
    """How the loop gets its batches: as it asks for them (`none`), or before it trains them, by a
    name of `parts.READERS`."""
    collate: str = "default"
    """What a batch is: a tuple (`default`), a `dict`, or tuples whose inputs have the samples
    along their second dimension (`time`)."""
    sizes: str = "fixed"
    """Who sets the batch size: `fixed`, `trace`, `clock` (a function), `schedule`, `epoch` (set by
    the loop when an epoch begins), `once` (set by the loop when the second epoch begins), `auto`
    (the autoscaler, with an adaptive rule)."""
    trace: tuple[int, ...] = ()
    """Batch sizes, by optimizer step (two steps each) or by epoch; the last one holds."""
    weights: str = "samples"
    """What a sample counts by: `samples`, `batch_weight` or `model_weight` (tokens)."""

    net: str = "linear"
    """`linear`, `mlp`, `tied`, `unused`, `sometimes`, `checkpointed`, `compiled`."""
    dropout: float = 0.0
    """The same at each number of replicas only where that never changes."""
    frozen: str = "none"
    """Which epochs train the first layer: `none` (all do), `first` (not the first epoch), `last`
    (not the last one), `always` (none does), `once` (frozen at first, and unfrozen by the loop when
    the second epoch begins)."""
    bucket_kb: float | None = None
    """Size of DDP's buckets; None leaves torch's."""
    shard: str = "none"
    """What `fully_shard` makes a unit of: `none` (it is not called), `root` (the model is one),
    `layers` (each layer is one, and the rest), `blocks` (each layer is one, the rest is left)."""
    hybrid: bool = False
    """Whether pairs of replicas share a copy of the model, where their number is even (HSDP)."""

    optimizer: str = "sgd"
    """`sgd`, `momentum`, `nesterov`, `adam`, `adamw`."""
    groups: int = 1
    """Parameter groups besides that of the sample counts."""
    others: tuple[str, ...] = ()
    """Kinds of more optimizers: the first one has the first group, the last one all the rest."""
    order: str = "together"
    """How several of them step: `together` and then they are zeroed, `reversed`, or
    `interleaved` with that."""
    weight_decay: float = 0.0
    rule: str = "linear"
    """A static rule: `constant`, `linear`, `sqrt`, `malladi`, `legw`; or an adaptive one."""
    zero_first: bool = False
    """Whether `zero_grad()` stands at the top of the body rather than at its end."""
    zero: str = "optimizer"
    """Whose `zero_grad()`: that of the `optimizer`, or of the `model`."""
    closure: bool = False
    """Whether the loop hands a closure to `optimizer.step()`."""
    clip: str = "none"
    """Policy of `model.clip_grad_norm_`, or `none`."""
    scaler: bool = False
    """Whether a GradScaler scales the loss; one sample overflows while the scale is high."""

    scheduler: str = "none"
    schedule: str = "epoch"
    """Who steps it: the loop in every `step` or `epoch`, or a `clock`."""
    ema: bool = False
    train_stats: bool = False
    """Whether an Accumulator sums over each epoch of training."""
    bad: str = "none"
    """What the loop does with one sample that is not fit for training: `skip` leaves out the
    backward pass where the loss is not finite, `raise` catches an exception of the forward pass.
    The micro-batches have one sample each, so that nothing else is left out."""
    break_after: int | None = None
    """Committed steps after which an epoch of the loop is left, counted within the epoch."""
    evaluate: str = "none"
    """`none`, `eval` (model.eval()), `no_grad` (without eval()), `plain` (a stock loader)."""
    evaluate_every: int | None = None
    """Steps between evaluations in the middle of an epoch; None evaluates behind each epoch."""
    recreate: bool = False
    """Whether the loader is made anew in each epoch."""

    checkpoint_every: int | None = None
    """Steps between two checkpoints; None writes none but the last."""
    checkpoints: bool = False
    memory_every: int | str = 1
    stats_every: int | str = "auto"

    @property
    def adaptive(self) -> bool:
        """Whether the factors depend on measured noise, which the oracle does not know."""
        return self.rule in ("adascale", "sgdscale", "adamscale", "surge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program and what befalls it."""

    program: Program = Program()
    family: str = "loops"
    """Which kind of program: `loops`, or the name of a module in `families/`."""
    options: dict[str, Any] = field(default_factory=dict)
    """What a program of another family is made of."""
    worlds: tuple[int, ...] = (1,)
    """Replicas in each life; the last number holds."""
    kills: tuple[Kill, ...] = ()
    """The kill of each life; lives after the last one are left alone."""
    seed: int | None = None
    """Where it comes from, if from the generator as it was then."""
    note: str = field(default="", compare=False)

    @property
    def has_twin(self) -> bool:
        """Whether it is compared with an undisturbed run of itself rather than with the oracle."""
        return self.family not in ("loops", "shapes") or self.program.dropout > 0

    @property
    def twin(self) -> Case:
        """The same program, undisturbed."""
        return dataclasses.replace(self, kills=(), worlds=self.worlds[:1])

    def world(self, life: int) -> int:
        return self.worlds[min(life, len(self.worlds) - 1)]

    def to_json(self) -> str:
        return json.dumps(
            {
                "family": self.family,
                "options": self.options,
                "program": changed(self.program),
                "worlds": self.worlds,
                "kills": [dataclasses.asdict(kill) for kill in self.kills],
                "seed": self.seed,
                "note": self.note,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Case:
        record = json.loads(text)
        return cls(
            program=program_from(record["program"]),
            family=record.get("family", "loops"),
            options=record.get("options", {}),
            worlds=tuple(record["worlds"]),
            kills=tuple(Kill(**kill) for kill in record["kills"]),
            seed=record.get("seed"),
            note=record.get("note", ""),
        )


def changed(program: Program) -> dict[str, Any]:
    """The fields that are not at their defaults: what the program is about."""
    plain = Program()
    return {
        f.name: getattr(program, f.name)
        for f in dataclasses.fields(program)
        if getattr(program, f.name) != getattr(plain, f.name)
    }


def program_from(fields: dict[str, Any]) -> Program:
    return Program(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


# The generator -------------------------------------------------------------------------------

SCHEDULERS = (
    "StepLR",
    "MultiStepLR",
    "ExponentialLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "LinearLR",
    "ConstantLR",
    "PolynomialLR",
    "LambdaLR",
    "MultiplicativeLR",
    "CyclicLR",
    "OneCycleLR",
    "SequentialLR",
    "ChainedScheduler",
)


def generate(seed: int, *, max_world: int = 4, kills: bool = True) -> Case:
    """The case of this seed. Another version of the generator may make another one of it."""
    dice = random.Random(seed)

    def chance(p: float) -> bool:
        return dice.random() < p

    num_samples = dice.randint(9, 40)
    batch_size = dice.randint(2, 8)
    epochs = dice.randint(1, 4)
    fields: dict[str, Any] = {
        "data_seed": dice.randrange(1000),
        "num_samples": num_samples,
        "batch_size": batch_size,
        "epochs": epochs,
        "shuffle": chance(0.8),
        "tail": dice.choice(("short", "short", "straddle", "drop")),
    }
    if chance(0.6):
        fields["max_local_bsz"] = dice.randint(1, 4)
    if chance(0.6):
        fields["sizes"] = dice.choice(("trace", "clock", "schedule", "epoch", "once"))
        largest = min(16, num_samples)
        fields["trace"] = tuple(dice.randint(1, largest) for _ in range(dice.randint(2, 5)))
    if chance(0.3):
        fields["weights"] = dice.choice(("batch_weight", "model_weight"))
    if chance(0.15):
        fields["num_workers"] = dice.randint(1, 2)
    if chance(0.25):
        fields["reader"] = dice.choice(("ahead", "deep", "preloaded", "thread", "list"))
    if chance(0.2):
        fields["collate"] = dice.choice(("dict", "time"))
    fields["net"] = dice.choices(
        ("linear", "mlp", "tied", "unused", "sometimes", "checkpointed", "compiled"),
        (3, 4, 2, 1, 1, 1, 0.4),
    )[0]
    if chance(0.25):
        fields["bucket_kb"] = dice.choice((0.05, 0.2, 1.0))
    fields["optimizer"] = dice.choice(("sgd", "momentum", "nesterov", "adam", "adamw"))
    if chance(0.4):
        fields["groups"] = 2
    if chance(0.4):
        fields["weight_decay"] = 0.01
    fields["rule"] = dice.choice(("constant", "linear", "sqrt", "malladi", "legw"))
    fields["zero_first"] = chance(0.4)
    if chance(0.15):
        fields["zero"] = "model"
    fields["closure"] = chance(0.08)
    if chance(0.25):
        fields["clip"] = dice.choice(("loosen", "fixed", "invariant"))
    if chance(0.15):
        fields["scaler"] = True
    if chance(0.6):
        fields["scheduler"] = dice.choice(SCHEDULERS)
        fields["schedule"] = dice.choice(("epoch", "clock", "step"))
    elif chance(0.3):
        fields["scheduler"], fields["schedule"] = "ReduceLROnPlateau", "epoch"
    fields["ema"] = chance(0.4)
    fields["train_stats"] = chance(0.3)
    if chance(0.12):
        fields["rule"] = dice.choice(("adascale", "adamscale", "surge"))
        if fields["rule"] == "adascale" and fields["optimizer"] in ("sgd", "momentum", "nesterov"):
            fields["rule"] = dice.choice(("adascale", "sgdscale"))
        fields["stats_every"] = dice.randint(1, 3)
        if chance(0.4):
            fields["sizes"] = "auto"
    if chance(0.25):
        kinds = ("sgd", "momentum", "nesterov", "adam", "adamw")
        number = dice.randint(1, fields.get("groups", 1))
        fields["others"] = tuple(dice.choice(kinds) for _ in range(number))
        fields["order"] = dice.choice(("together", "reversed", "interleaved"))
    fields["recreate"] = chance(0.08)
    if chance(0.08):
        fields["bad"] = dice.choice(("skip", "raise"))
    if chance(0.08):
        fields["dropout"] = 0.3
    if chance(0.2):
        fields["break_after"] = dice.randint(1, 4)
    if chance(0.5):
        fields["evaluate"] = dice.choice(("eval", "eval", "no_grad", "plain"))
        if chance(0.3):
            fields["evaluate_every"] = dice.randint(1, 4)
    if chance(0.2):
        fields["frozen"] = dice.choice(("first", "last", "always", "once"))
    if chance(0.5):
        fields["checkpoints"] = True
        if chance(0.8):
            fields["checkpoint_every"] = dice.randint(1, 5)
    if chance(0.2):
        fields["memory_every"] = dice.choice((2, 3, "auto"))
    if chance(0.1):
        fields["stats_every"] = dice.randint(1, 3)
    program = Program(**fields)
    case = Case(
        program=program,
        worlds=tuple(dice.randint(1, max_world) for _ in range(4)),
        kills=random_kills(dice, program) if kills else (),
        seed=seed,
    )
    return possible(case)


def generate_sharded(seed: int) -> Case:
    """The case of this seed with a model that is sharded."""
    dice = random.Random(f"sharded {seed}")
    case = generate(seed)
    # Two units cannot share a parameter.
    kinds = ("root",) if case.program.net == "tied" else ("root", "layers", "layers", "blocks")
    shard, hybrid = dice.choice(kinds), dice.random() < 0.4
    return possible(
        dataclasses.replace(
            case,
            program=dataclasses.replace(case.program, shard=shard, hybrid=hybrid),
            note="sharded",
        )
    )


def generate_home(seed: int, family: str, *, max_world: int = 3) -> Case:
    """The case of this seed in a family of another framework."""
    dice = random.Random(f"{family} {seed}")
    home = importlib.import_module(f"tests.fuzz.families.{family}")
    return Case(
        family=family,
        options=home.options(dice),
        worlds=tuple(dice.randint(1, max_world) for _ in range(4)),
        kills=random_kills(dice, Program(), home.HOOKS, getattr(home, "PLACES", PLACES)),
        seed=seed,
    )


def generate_stream(seed: int) -> Case:
    """The case of this seed whose data are a stream."""
    return generate_home(seed, "streams", max_world=4)


def random_kills(
    dice: random.Random,
    program: Program,
    hooks: Sequence[str] = HOOKS,
    places: Sequence[str] = PLACES,
) -> tuple[Kill, ...]:
    """Kills of a few lives in a row."""
    number = dice.choices((0, 1, 2, 3, 4), (1, 5, 4, 2, 1))[0]
    return tuple(_kill(dice, program, hooks, places) for _ in range(number))


def _kill(
    dice: random.Random, program: Program, hooks: Sequence[str], places: Sequence[str]
) -> Kill:
    if dice.random() < 0.6 or program.net == "compiled":
        at = dice.choice(hooks)
        once = at in ("setup", "wrapped", "trained", "reported")
        rare = at in ("epoch", "epoch_end", "evaluating", "evaluated")
        count = 1 if once else dice.randint(1, 2 if rare else dice.choice((3, 12)))
    else:
        at = "line:" + dice.choice(places)
        count = int(2 ** dice.uniform(0, dice.choice((6, 11))))
    return Kill(
        replica=dice.randrange(4),
        at=at,
        count=count,
        term=dice.random() < 0.1,
        wipe=program.checkpoints and dice.random() < 0.25,
    )


def possible(case: Case) -> Case:
    """The case without combinations that mean nothing, or that mean something else each time."""
    if case.family != "loops":
        return case
    p = case.program
    fixes: dict[str, Any] = {}
    largest = max((p.batch_size, *p.trace))
    if p.tail == "drop" and largest > p.num_samples:
        fixes["tail"] = "short"
    if p.sizes == "fixed" and p.trace:
        fixes["trace"] = ()
    if p.scheduler == "ReduceLROnPlateau" and p.evaluate == "none":
        fixes["evaluate"] = "eval"
    if p.scheduler == "ReduceLROnPlateau" and p.evaluate_every is not None:
        fixes["evaluate_every"] = None
    if p.net == "compiled" and p.bucket_kb is not None:
        # torch compiles for no buckets below 1 MiB, with DDP alone as well.
        fixes["bucket_kb"] = None
    if p.stats_every != "auto" and p.clip in ("loosen", "invariant"):
        # The threshold would follow noise that the oracle does not know.
        fixes["clip"] = "fixed"
    if p.others:
        fixes["others"] = p.others[: p.groups]
        if p.closure:
            fixes["closure"] = False
        if p.order == "interleaved" and p.zero == "model":
            # It zeroes all of them.
            fixes["zero"] = "optimizer"
    elif p.order != "together":
        fixes["order"] = "together"
    if p.rule == "sgdscale" and not {p.optimizer, *p.others}.isdisjoint(("adam", "adamw")):
        # Refused: their momentum is a beta.
        fixes["rule"] = "adascale"
    if p.sizes == "auto" and not p.adaptive:
        fixes["sizes"], fixes["trace"] = "fixed", ()
    if p.sizes == "auto" and p.trace:
        fixes["trace"] = ()
    if p.adaptive:
        # The oracle takes factors and sizes of the steps from the run, and checks all else.
        if p.clip in ("loosen", "invariant"):
            fixes["clip"] = "fixed"
        if p.schedule == "clock":
            fixes["schedule"] = "epoch"
        fixes["tail"] = "straddle" if p.tail == "straddle" else "short"
        fixes["scaler"], fixes["break_after"] = False, None
    if p.recreate and p.sizes == "once":
        # A new loader begins as it was made.
        fixes["sizes"], fixes["trace"] = "fixed", ()
    if p.schedule == "clock" and p.scheduler in ("none", "ReduceLROnPlateau"):
        fixes["schedule"] = "epoch"
    if p.bad != "none":
        # Only the gradient is compared here: what a batch with fewer samples does to scale and
        # clocks is another matter.
        fixes.update(max_local_bsz=1, rule="constant", scaler=False, stats_every="auto")
        fixes["tail"] = "straddle" if p.tail == "straddle" else "drop"
        fixes["batch_size"] = max(2, p.batch_size)
        fixes["num_samples"] = max(p.num_samples, largest, 2)
        fixes["trace"] = tuple(max(2, size) for size in p.trace)
        if p.sizes in ("schedule", "auto"):
            fixes["sizes"], fixes["trace"] = "fixed", ()
        if p.schedule == "clock":
            fixes["schedule"] = "epoch"
        fixes["net"] = "mlp" if p.net in ("sometimes", "compiled") else p.net
        fixes["clip"] = "fixed" if p.clip != "none" else "none"
    if p.shard != "none":
        # All passes are collective: each replica runs the same layers, and none ends in the middle.
        fixes.update(scaler=False, bucket_kb=None)
        fixes["bad"] = "none" if p.bad == "raise" else p.bad
        if p.shard == "blocks" and p.frozen != "none":
            # torch leaves a unit whole that has no backward pass and no unit around it.
            fixes["shard"] = "layers"
        fixes["net"] = "mlp" if p.net == "sometimes" else fixes.get("net", p.net)
    if p.reader != "none" and p.scaler and p.sizes != "epoch":
        # A batch that is read early has the size of the clock as it would be without an overflow.
        fixes["sizes"], fixes["trace"] = "fixed", ()
    if p.reader == "preloaded" and p.collate == "time":
        # Of one sample alone its index has the shape that it had, and one number tells too little.
        fixes["collate"] = "dict"
    if p.reader != "none" and p.break_after is not None:
        # A thread would read on; and what was read to the end of a pass is left out with it.
        fixes["reader"] = "ahead" if p.reader in ("thread", "list") else p.reader
        if (p.break_after + 4) * largest > p.num_samples:
            fixes["reader"] = "none"
    if p.closure and (p.scaler or p.bad != "none" or p.clip != "none" or p.zero_first):
        fixes["closure"] = False
    if p.dropout:
        case = dataclasses.replace(case, worlds=case.worlds[:1])
        if p.sizes == "auto":
            # It follows the clock on the wall, so no two runs are alike.
            fixes["sizes"] = "fixed"
    return dataclasses.replace(case, program=dataclasses.replace(p, **fixes))
