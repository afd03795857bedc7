"""Private names of other packages: declared in `compat/`, there, and missed in one sentence."""

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import resilin
from resilin.compat import (
    accelerate_names,
    hf_datasets,
    keras_names,
    python_names,
    ray_names,
    torch_agent,
    torch_fsdp,
    torch_names,
    transformers_names,
)
from resilin.compat.names import MissingNameError, Name, Package

os.environ.setdefault("KERAS_BACKEND", "torch")

PACKAGES = [
    torch_agent.TORCH,
    python_names.PYTHON,
    ray_names.RAY,
    accelerate_names.ACCELERATE,
    transformers_names.TRANSFORMERS,
    keras_names.KERAS,
    hf_datasets.DATASETS,
]
# Environments of one torch have no framework beside it, and this module loads Lightning.
if find_spec("lightning"):
    from resilin.compat import lightning_names

    PACKAGES += [lightning_names.LIGHTNING, lightning_names.TORCHMETRICS]
NAMES = [name for package in PACKAGES for name in package.names]
assert torch_fsdp.TORCH in PACKAGES


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def is_expected(name: Name) -> bool:
    """Whether the installed version should have a name."""
    installed = name.package.installed()
    until = release(name.until or "999")
    return installed is not None and release(name.since) <= release(installed) < until


EXPECTED = [name for name in NAMES if is_expected(name)]


@pytest.mark.parametrize("name", [n for n in NAMES if n.since and n not in EXPECTED], ids=str)
def test_a_name_of_a_later_version_is_missed_with_that_version(name):
    if name.package.installed() is None:
        pytest.skip(f"no {name.package.distribution} here")
    with pytest.raises(MissingNameError, match=f"does not have; {name.package.distribution} "):
        name.of(name.find()) if name.instance else name.find()


@pytest.mark.parametrize("name", EXPECTED, ids=str)
def test_a_name_is_in_the_installed_version(name):
    found = name.find()
    if name.instance:
        assert is_assigned(found, name.attribute)


ELSEWHERE = {"_opt_called": "torch.optim.lr_scheduler"}
"""Attributes that another module sets."""


def is_assigned(kind, attribute) -> bool:
    """Whether instances get this attribute: it is annotated, or assigned where the class is."""
    bases = [base for base in kind.__mro__ if base is not object]
    if any(attribute in getattr(base, "__annotations__", {}) for base in bases):
        return True
    modules = {base.__module__ for base in bases} | {ELSEWHERE.get(attribute)} - {None}
    assigned = re.compile(rf"\b\w+\.{attribute}\b[^=\n]* = |\"{attribute}\"")
    return any(assigned.search(inspect.getsource(import_module(name))) for name in modules)


@pytest.mark.parametrize("name", [n for n in EXPECTED if not n.instance], ids=str)
def test_a_name_that_is_gone_is_missed_in_one_sentence(name, monkeypatch):
    name.find()  # Packages that load their parts on first use have loaded this one.
    remove(name, monkeypatch)
    with pytest.raises(MissingNameError) as missed:
        name.find()
    package = name.package
    assert re.fullmatch(
        rf"resilin needs {re.escape(str(name))}, which {package.distribution} \S+ does not have; "
        + (rf"{package.distribution} {re.escape(name.since)} has it; " if name.since else "")
        + rf"tested with {re.escape(in_words(package.tested))}",
        str(missed.value),
    )


def in_words(versions: tuple[str, ...]) -> str:
    return re.sub(r", (\S+)$", r" and \1", ", ".join(versions))


def remove(name: Name, monkeypatch) -> None:
    module, _, attributes = name.path.partition(":")
    owner = import_module(module)
    *outer, last = attributes.split(".")
    if not outer:
        monkeypatch.delattr(owner, last)
        return
    # Classes written in C keep what they have, so the whole class makes room for an empty one.
    for part in outer[:-1]:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, outer[-1], type(outer[-1], (), {}))


@pytest.mark.parametrize("name", [n for n in NAMES if n.instance], ids=str)
def test_an_attribute_that_is_gone_is_missed_in_one_sentence(name):
    class Bare:
        pass

    said = rf"resilin needs \S+Bare\.{name.attribute}, which {name.package.distribution} "
    with pytest.raises(MissingNameError, match=said):
        name.of(Bare())
    # Else it would be set, to no effect.
    with pytest.raises(MissingNameError, match=said):
        name.set(Bare(), 1)


def test_an_attribute_is_read_and_set():
    name = Package("torch", tested=("1", "2")).name("torch.nn:Linear.bias", "", instance=True)
    linear = nn.Linear(1, 1)
    assert name.of(linear) is linear.bias
    name.set(linear, None)
    assert linear.bias is None


def test_a_package_of_unknown_version_is_named_all_the_same():
    name = Package("no-such-package", tested=("1", "2", "3")).name("no_such_package:_x", "")
    with pytest.raises(MissingNameError, match=r"no-such-package .version unknown. .* 1, 2 and 3$"):
        name.find()


def test_a_module_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken_for_test.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    package = Package("torch", tested=("1", "2"))
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        package.name("broken_for_test:x", "").find()
    for path in ("torch.no_such:x", "torch.nn.no_such.module:x", "torch:no_such"):
        with pytest.raises(MissingNameError, match=r"resilin needs torch\.\S+, which torch"):
            package.name(path, "").find()


def test_each_name_has_a_use_and_no_two_are_the_same():
    assert all(name.use for name in NAMES)
    assert len({name.path for name in NAMES}) == len(NAMES)


@pytest.mark.skipif(not find_spec("lightning"), reason="its names are declared where it is")
def test_the_page_lists_every_name_and_its_use():
    page = (Path(__file__).parents[1] / "docs" / "compatibility.md").read_text()
    listed = set(re.findall(r"^\| `(\S+)` \| (.+) \|$", page, re.MULTILINE))
    assert listed == {(str(name), name.use) for name in NAMES}
    for package in PACKAGES:
        head = (
            rf"^## {package.distribution}\n\nTested with {re.escape(in_words(package.tested))}\.$"
        )
        assert re.search(head, page, re.MULTILINE), package.distribution


# Nobody else uses such a name ----------------------------------------------------------------

PUBLIC = {"_exit", "_replace", "_fields"}
"""Names with an underscore that Python documents: `os._exit`, and those of named tuples."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined_in(tree: ast.AST) -> set[str]:
    """Attributes and functions that some code defines."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def classes(trees: Iterable[ast.Module]) -> dict[str, ast.ClassDef]:
    return {n.name: n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}


def foreign_names(tree: ast.Module, ours: Mapping[str, ast.ClassDef]) -> list[str]:
    """Private names that a module uses, and that neither it nor a base class of ours defines.

    Args:
        tree: The module.
        ours: All classes of the package, by name.
    """
    defined, bases = defined_in(tree), [*classes([tree]).values()]
    for each in bases:
        found = [ours[ast.unparse(base)] for base in each.bases if ast.unparse(base) in ours]
        bases.extend(base for base in found if base not in bases)
        defined |= defined_in(each)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in defined:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom):
            # `resilin.core._validate` and the like are modules of our own.
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if parts[0] != "resilin" and any(private(part) for part in parts):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            *("getattr", "setattr", "hasattr", "delattr"),
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and private(str(name.value)):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


SOURCES = Path(resilin.__file__).parent


def test_no_other_module_uses_a_private_name():
    trees = {
        path.relative_to(SOURCES).as_posix(): ast.parse(path.read_text())
        for path in sorted(SOURCES.rglob("*.py"))
    }
    ours = classes(trees.values())
    found = {where: foreign_names(tree, ours) for where, tree in trees.items()}
    assert found.pop("compat/torch_names.py")
    assert {
        where: names for where, names in found.items() if names and "compat/" not in where
    } == {}


@pytest.mark.parametrize(
    "line",
    [
        "torch._foreach_mul_(x)",
        "from torch._utils import x",
        "from torch.optim import _x",
        "getattr(trainer, '_loops')",
        "self._of_a_base_class()",
    ],
)
def test_a_private_name_would_be_found(line):
    assert foreign_names(ast.parse(line), {})
    assert not foreign_names(ast.parse("class A:\n def f(self):\n  self._x = os._exit"), {})


# What the functions do -----------------------------------------------------------------------


def test_ddp_is_asked_what_it_leaves_alone():
    model = nn.Linear(2, 1)
    assert torch_names.ignored_by_ddp(model) == frozenset()
    ddp = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    assert torch_names.ignored_by_ddp(model) == {"bias"}


def test_a_ddp_that_lost_an_attribute_is_refused_when_it_is_made():
    class Later:
        reducer = find_unused_parameters = None

    with pytest.raises(MissingNameError, match=r"Later\.require_backward_grad_sync, which torch"):
        torch_names.check_ddp(Later())


def test_sharded_models_are_refused_with_the_version_that_takes_them(monkeypatch):
    # As it is before torch 2.13.
    monkeypatch.delattr(torch_fsdp.FSDPModule, "reset_iter_state", raising=False)
    said = (
        r"FSDPModule\.reset_iter_state, which torch \S+ does not have; torch 2\.13 has it; tested"
    )
    with pytest.raises(MissingNameError, match=said):
        torch_fsdp.check_fsdp()


def test_the_root_of_a_mesh_is_found():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
        assert torch_names.root_of_mesh(mesh["data"]) is mesh
        assert torch_names.root_of_mesh(mesh) is mesh
    finally:
        dist.destroy_process_group()


def test_the_time_limit_of_a_group_is_known_where_its_backend_has_one():
    # The fake backend of torch's own tests has no options; it also keeps no time.
    import_module("torch.testing._internal.distributed.fake_pg")
    cpu, limit = torch.device("cpu"), timedelta(seconds=77)
    for backend, known in {"gloo": limit, "cpu:fake": None}.items():
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit
        )
        try:
            assert torch_names.timeout_of(dist.group.WORLD, cpu) == known
        finally:
            dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when dynamo is loaded
def test_compiled_modules_are_recognised():
    plain = nn.Linear(1, 1)
    compiled = torch.compile(plain)
    assert torch_names.is_compiled(compiled)
    assert not torch_names.is_compiled(plain)
    assert torch_names.uncompiled(compiled) is plain
    assert torch_names.uncompiled(plain) is plain
    plain.compile()
    assert torch_names.is_compiled(plain)


def test_schedulers_count_the_steps_of_an_optimizer_by_a_mark_on_it():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    assert not torch_names.is_counted(optimizer.step)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert torch_names.is_counted(optimizer.step)
    optimizer.step()
    assert torch_names._CALLED.of(optimizer) is True
    assert not torch_names.is_initial(scheduler)


def test_the_step_of_a_schedulers_constructor_is_known():
    seen = []

    class Watched(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch=None):
            seen.append(torch_names.is_initial(self))
            super().step()

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 1.0)
    scheduler = Watched(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert seen == [True, False]


def test_the_frame_of_the_caller():
    def asks():
        return python_names.frame_of_caller()

    assert asks() is sys._getframe()
    assert python_names.frame_of_main_thread().f_back is sys._getframe()
