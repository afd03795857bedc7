"""Each field of the job, and the step under way, is assigned by one module alone."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest

import resilin
from resilin.training.job import Job

SRC = Path(resilin.__file__).parent
# What a value with these fields is called where it is used.
JOB, STEP = {"job", "_job", "current_job()"}, {"now", "exchange"}
OWNED = [field.name for field in fields(Job) if field.init and not field.name.startswith("_")]


def writers(names: set[str], field: str) -> set[str]:
    """Modules that assign `field` of something whose last name is one of `names`."""
    found = set()
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or node.attr != field:
                continue
            if isinstance(node.ctx, ast.Store) and ast.unparse(node.value).split(".")[-1] in names:
                found.add(path.relative_to(SRC).as_posix())
    return found


@pytest.mark.parametrize("field", OWNED)
def test_a_field_of_the_job_has_one_writer(field):
    assert len(writers(JOB, field)) <= 1


def test_the_driver_alone_replaces_the_step():
    assert writers(STEP, "step") == {"training/step.py"}


def test_writers_are_found():
    assert writers(JOB, "trained") == {"training/parallel.py"}
