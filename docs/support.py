"""The support matrix, made of what the nightly runs said.

python docs/support.py record VERSION GROUP RESULT   # of pytest or benchmarks/survived.py
python docs/support.py                               # writes the table into docs/dependencies.md

Results stand in `support.json`: by version of torch and group of tests, how many passed, failed and
were skipped, and when.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
RESULTS = HERE / "support.json"
PAGE = HERE / "dependencies.md"
GROUPS = {
    "killed": "a job whose worker is killed ends with the parameters of an undisturbed one, "
    "with a restart and live",
    "names": "private names",
    "gradient": "gradients, gates, the loop",
    "checkpoints": "checkpoints",
    "restart": "exactness and restarts",
    "live": "live jobs",
    "engine": "process groups",
    "compile": "`torch.compile`",
}
"""Groups of tests, in the order of the page."""
SINCE = {
    "FSDP2, HSDP": ("2.13", "`FSDPModule.reset_iter_state`"),
    "complex parameters and buffers on several replicas, with gloo": ("2.10", "gloo sends them"),
}
"""What is refused on older versions, with a sentence that names the first one that has it."""
BEGIN, END = "<!-- support: from here -->", "<!-- support: to here -->"


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def record(version: str, group: str, path: Path) -> str:
    """Adds one result; returns the reason why it is a failure, or an empty text."""
    assert group in GROUPS, group
    if group == "killed":
        said = json.loads(path.read_text().splitlines()[-1])
        result = {name: said[name] for name in ("restart", "live", "norm")}
        failure = "; ".join(said["missed"])
    else:
        (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
        count = {
            name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
        }
        failed = count["failures"] + count["errors"]
        passed = count["tests"] - failed - count["skipped"]
        result = {"passed": passed, "failed": failed, "skipped": count["skipped"]}
        failure = f"{failed} failed" if failed else ""
    results = json.loads(RESULTS.read_text())
    day = datetime.now(timezone.utc).date().isoformat()
    results.setdefault(version, {})[group] = {**result, "day": day}
    ordered = sorted(results.items(), key=lambda item: numbers(item[0]))
    RESULTS.write_text(json.dumps(dict(ordered), indent=1) + "\n")
    return failure


def cell(result: dict | None) -> str:
    if result is None:
        return "not run"
    if "restart" in result:
        return f"{result['restart']:.0e} and {result['live']:.0e}"
    failed = f", **{result['failed']} failed**" if result["failed"] else ""
    return f"{result['passed']} passed{failed}"


def table() -> str:
    """The table, in Markdown."""
    results = json.loads(RESULTS.read_text())
    rows = [["torch", *results], ["---"] * (1 + len(results))]
    rows += [
        [what, *(cell(results[version].get(group)) for version in results)]
        for group, what in GROUPS.items()
    ]
    for what, (since, reason) in SINCE.items():
        old = f"refused: torch {since} has it ({reason})"
        has = [numbers(version) >= numbers(since) for version in results]
        rows.append([what, *("yes" if each else old for each in has)])
    days = {each["day"] for groups in results.values() for each in groups.values()}
    span = " to ".join(sorted({min(days), max(days)}))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(
        [*lines, "", f"Run {span}, Linux, CPU. The first row is the largest difference."]
    )


def fill(page: str) -> str:
    """The page, with the table of today's results."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    if sys.argv[1:2] == ["record"]:
        version, group, path = sys.argv[2:]
        failure = record(version, group, Path(path))
        if failure:
            sys.exit(f"torch {version}, {group}: {failure}")
    else:
        PAGE.write_text(fill(PAGE.read_text()))


if __name__ == "__main__":
    main()
