"""What only the engine may know: the group of all processes, ranks, launchers; and no pickle."""

import ast
from pathlib import Path

import pytest

import resilin

PACKAGE = Path(resilin.__file__).parent
ENGINES = {"Engine", "Single", "Torchrun", "RayTrain", "Live"}
PICKLED = {
    "training/state/checkpoint/writer.py": "the .metadata of DCP's own readers; never read here"
}
"""Modules that may import pickle, and why."""


NOT_YET = {
    "training/ballot.py",
    "training/gradient/buckets.py",
    "training/gradient/packs.py",
    "training/gradient/reducer.py",
}
"""Modules that still ask torch.distributed for a rank or a size, of a group they were given."""


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def names(node):
    """All names that a node is made of."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute):
            yield each.attr
        elif isinstance(each, ast.Name):
            yield each.id


def complaints(path, tree):
    """What a module does that is not its business."""
    in_engine = path.startswith("engine/")
    for node in ast.walk(tree):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and not in_engine:
            if node.attr in {"WORLD", "get_rank", "get_world_size"}:
                yield f"{where} names {node.attr}: ask engine.membership or engine.gradient_group()"
            if node.attr.endswith(("_object", "_object_list")) and "dist" in names(node.value):
                yield f"{where} sends pickled objects: use engine.collectives()"
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or "", *(alias.name for alias in node.names)]
            ours = (node.module or "").startswith("torch.distributed")
            if ours and not in_engine and {"group", "get_rank", "get_world_size"} & set(imported):
                yield f"{where} takes {imported} from torch.distributed"
        if "pickle" in imported and path not in PICKLED:
            yield f"{where} imports pickle"
        is_check = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"
        if is_check and ENGINES & set(names(node.args[1])):
            yield f"{where} asks which engine it is: let the engine answer a question instead"


def test_only_the_engine_knows_who_is_in_the_job():
    found = [
        text
        for path, tree in modules()
        for text in complaints(path, tree)
        if path not in NOT_YET or "names get_" not in text
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("dist.all_reduce(x, group=dist.group.WORLD)", "names WORLD"),
        ("torch.distributed.get_rank()", "names get_rank"),
        ("n = dist.get_world_size()", "names get_world_size"),
        ("dist.all_gather_object(a, b)", "sends pickled objects"),
        ("from torch.distributed import get_rank", "takes"),
        ("import pickle", "imports pickle"),
        ("from pickle import loads", "imports pickle"),
        ("isinstance(job.engine, torchrun.Torchrun)", "asks which engine"),
        ("isinstance(engine, (Single, Torchrun))", "asks which engine"),
    ],
)
def test_what_is_not_allowed_is_found(code, complaint):
    (found,) = complaints("training/x.py", ast.parse(code))
    assert complaint in found


def test_what_is_allowed_is_not_found():
    for code in ("engine.membership.replica", "serialize_keras_object(x)", "isinstance(x, Job)"):
        assert not list(complaints("training/x.py", ast.parse(code)))
    assert not list(complaints("engine/x.py", ast.parse("dist.get_rank(dist.group.WORLD)")))
    assert set(PICKLED) <= {path for path, _ in modules()}
