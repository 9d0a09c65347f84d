"""Writes the tables of the documentation that follow from the sources and from stored runs: `make tables`.

    python docs/tables.py                                # write them
    python docs/tables.py --check                        # fail if one is not up to date
    python docs/tables.py --store round-trips table.md   # what `python -m benchmarks.record --markdown table.md` wrote

A page says where a table goes: `<!-- made: NAME -->`, the table, `<!-- end -->`. Files of `WHOLE` are made as a whole,
the pictures (docs/pictures.py) among them.

Figures that were measured are in `docs/figures.json`: for each run its command, its conditions, and its figures. A
paragraph, list or table that quotes a run says which, on the line before: `<!-- figures: ENTRY -->`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import click  # noqa: E402
import messages  # noqa: E402
from operation_methods import render_module  # noqa: E402
from operations_page import render_page  # noqa: E402
from pictures import PICTURES  # noqa: E402

from nnburst.cli import main as nnburst  # noqa: E402
from nnburst.service.wire.protocol import CALLS, Side  # noqa: E402

WIDTH = 119
FIGURES = ROOT / "docs" / "figures.json"
MADE = re.compile(r"(<!-- made: (\S+)(?: (\S+))? -->\n).*?(<!-- end -->)", re.DOTALL)
TABLE = re.compile(r"(?:^\*\*(.+)\*\*\n\n)?^\|(.+)\|\n\|([-:|]+)\|\n((?:\|.*\|\n)+)", re.MULTILINE)
STRINGS = re.compile(r'\[\s*"(?:[^"\\]|\\.)*"(?:,\s*"(?:[^"\\]|\\.)*")*\s*\]')
VERSION = re.compile(r"(?:CPython|Linux|Runtime|ONNX|DLPack|GenMC\S*|HAL|Python)[\s≥]+[\d.]+")
QUOTING = (
    "README.md",
    "async.md",
    "benchmarks.md",
    "comparison.md",
    "quotas.md",
    "scale.md",
    "sharing.md",
    "watching.md",
)
"""Pages whose figures all come from stored runs."""

WHOLE: dict[str, Callable[[], str]] = {
    "docs/operations.md": render_page,
    "nnburst/model/operation_methods.py": render_module,
} | PICTURES
REQUIREMENT = re.compile(r"^REQ-[A-Z]+-\d{3} +(deviates|absent)?\b", re.MULTILINE)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a header that ends with a colon is that of a column of numbers."""
    rule = "".join("|--:" if name.endswith(":") else "|---" for name in header) + "|"
    lines: list[Sequence[str]] = [[name.removesuffix(":") for name in header], *rows]
    first, *others = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([first, rule, *others])


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()), maxsplit=1)[0]


# -- from the sources --------------------------------------------------------------------------------------------------


def calls() -> str:
    """The calls that compute, and those that the service does not serve."""
    rows = {"compute": [call.name for call in CALLS if call.computes]}
    rows |= {f"served by the {side.value}": [call.name for call in CALLS if call.side is side] for side in Side}
    del rows[f"served by the {Side.SERVICE.value}"]
    return "".join(item(f"{what}: {', '.join(map('`{}`'.format, names))}") for what, names in rows.items()).rstrip()


def commands() -> str:
    """The commands, each with a link to its page."""
    lines = (f"[`nnburst {path}`]({page(path)}): {first_sentence(each.help)}" for path, each, _ in every_command())
    return "".join(map(item, lines)).rstrip()


def page(path: str) -> str:
    """Return where the page of a command is; a group and its commands share one."""
    first, _, rest = path.partition(" ")
    return f"commands/{first}.md" + (f"#nnburst-{first}-{rest}" if rest else "")


def command_page(name: str) -> str:
    """Return the page of a command, or of a group: what it does, how it is called, its options."""
    text = ""
    for path, command, inner in every_command():
        if path.partition(" ")[0] != name:
            continue
        usage = " ".join(command.collect_usage_pieces(inner)).replace("[OPTIONS]", "").strip()
        text += f"{'##' if ' ' in path else '#'} nnburst {path}\n\n"
        text += "\n\n".join(map(paragraph, inspect.cleandoc(command.help or "").split("\n\n"))) + "\n\n"
        if isinstance(command, click.Group):
            continue
        text += f"Usage: `nnburst {f'{path} {usage}'.strip()}`\n\n"
        records = [option.get_help_record(inner) for option in command.params if isinstance(option, click.Option)]
        text += "".join(item(f"`{names}`: {words}") for names, words in filter(None, records)) + "\n" * any(records)
    return text.rstrip() + "\n"


def paragraph(text: str) -> str:
    """Return a paragraph of a command's help; one that click does not wrap is commands for a shell."""
    if text.startswith("\b"):
        return f"```sh\n{inspect.cleandoc(text.removeprefix(chr(8)))}\n```"
    return textwrap.fill(" ".join(text.split()), WIDTH)


def item(text: str) -> str:
    """Return an item of a list, in lines that end before the margin."""
    return textwrap.fill(" ".join(text.split()), WIDTH, initial_indent="- ", subsequent_indent="  ") + "\n"


def every_command() -> list[tuple[str, click.Command, click.Context]]:
    """Return all commands, and groups of commands: name, command, context."""
    return list(walk(nnburst, click.Context(nnburst, info_name="nnburst")))


def walk(
    group: click.Group, context: click.Context, before: str = ""
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield all commands below a group: name, command, context."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        yield f"{before}{name}", command, inner
        if isinstance(command, click.Group):
            yield from walk(command, inner, f"{before}{name} ")


def requirements() -> str:
    """How many requirements are met, deviate and are absent."""
    pages = (ROOT / "docs" / "requirements").glob("*.md")
    found = Counter(status or "met" for page in pages for status in REQUIREMENT.findall(page.read_text("utf-8")))
    return f"{found['met']} requirements are met, {found['deviates']} deviate, {found['absent']} are absent."


def mutants() -> str:
    """How many weakened memory orders the proofs catch."""
    text = (ROOT / "tests" / "model" / "mutants.txt").read_text("utf-8")
    found = re.findall(r"^\w+\.[ch]:.+?: (\w+)", text, re.MULTILINE)
    return f"{len(found) - found.count('survived')} of {len(found)} are caught."


WHOLE |= {f"docs/{page(path)}": partial(command_page, path) for path, _, _ in every_command() if " " not in path}


# -- from stored runs --------------------------------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    """Return the runs, by name."""
    runs = json.loads(FIGURES.read_text("utf-8"))
    assert isinstance(runs, dict)
    return runs


def dump(runs: dict[str, Any]) -> str:
    """Return the store's text: a row of a table is a line."""
    text = json.dumps(runs, indent=1, ensure_ascii=False)
    return STRINGS.sub(lambda match: json.dumps(json.loads(match.group()), ensure_ascii=False), text) + "\n"


WAITS = {"poll": "polls", "block": "sleeps"}
UNTOLD = re.compile(
    r".*(16 KiB|64 KiB|256 KiB|4 MiB| 0\.1 ms| 10 ms|(pool|bytes), 1 MiB|(device|run|turn), 16 MiB)|3 programs.*"
)
"""Rows that pages leave out: sizes of tensors, pauses of clients, numbers of programs."""


def rows_of_record(parts: Iterable[dict[str, Any]]) -> str:
    """The rows of `make bench` as pages have them: in units of L as well up to (e)."""
    texts = []
    for is_ratio in (True, False):
        figures = ["p50:", "p99:", "p50/L:"] if is_ratio else ["p50:", "p99:"]
        rows = []
        for part in (each for each in parts if (each["title"] < "(f)") is is_ratio):
            for row in (dict(zip(part["header"], cells, strict=True)) for cells in part["rows"]):
                waits = WAITS.get(row["wait"], row["wait"]) + ", one core" * (row["placement"] == "one core")
                if not UNTOLD.fullmatch(row["µs"]):
                    rows.append([f"{part['title'][:3]} {row['µs']}", waits, *(row[name] for name in figures)])
        texts.append(table(["µs", "both ends", *figures], rows) + "\n")
    return "\n".join(texts)


def run_tables(name: str) -> str:
    """All tables of a run, and its conditions; of the budget the promises that were not kept."""
    run = stored()[name]
    texts = [textwrap.fill(f"`{run['command']}`. {run['machine']}.", WIDTH) + "\n"]
    record = [part for part in run["tables"] if "placement" in part["header"]]
    texts += [rows_of_record(record)] * bool(record)
    for part in (part for part in run["tables"] if part not in record):
        rows = [row for row in part["rows"] if not UNTOLD.fullmatch(row[0])]
        if part["header"][0] == "budget":
            rows = [row for row in rows if row[-1] != "pass"]
            kept = len(part["rows"]) - len(rows)
            texts.append(f"{kept} of {len(part['rows'])} promises of the [budget](#the-budget) are kept. The others:\n")
        texts.append(table(part["header"], rows) + "\n")
    if run.get("conditions"):
        told = [line.split(": ", 1) for line in run["conditions"]]
        texts.append(table(("conditions", ""), [line for line in told if line[0] not in WAITS]) + "\n")
    return "\n".join(texts).rstrip()


WAYS = {
    "nnburst": ("burst Execution.run()", "burst Execution.run()", "burst"),
    "Unix socket": ("Unix SOCK_SEQPACKET, MSG_DONTWAIT", "Unix SOCK_SEQPACKET", "socket"),
    "`Pipe`": ("", "multiprocessing.Pipe, bytes", "pipe"),
    "`mmap` by hand": ("a word in an mmap, nothing checked", "", ""),
}
"""The columns of the README's table: the rows of `make bench` that poll and that sleep, the column of waiting.py."""
CALLS_WITHOUT_PAUSE = (
    ("no pause, both ends poll", "poll", "apart"),
    ("no pause, both ends sleep", "block", "apart"),
    ("no pause, both ends sleep on one core", "block", "one core"),
)
PAUSES = (
    ("30 calls a second, idle machine", "0 programs, 33 ms"),
    ("30 calls a second, one of two cores busy", "1 programs, 33 ms"),
    ("30 calls a second, both cores busy", "2 programs, 33 ms"),
)


def first_page() -> str:
    """The README's table: a call in six situations, by four ways."""
    measured = [row for part in stored()["round-trips"]["tables"] if "wait" in part["header"] for row in part["rows"]]
    called = {tuple(row[:3]): f"{row[4]} ({row[6]})" for row in measured}
    (run,) = stored()["waiting"]["tables"]
    paused = {(row[0], name): cell for row in run["rows"] for name, cell in zip(run["header"], row, strict=True)}
    rows = [
        (
            words,
            *(called.get((polls if wait == "poll" else sleeps, wait, where), "") for polls, sleeps, _ in WAYS.values()),
        )
        for words, wait, where in CALLS_WITHOUT_PAUSE
    ]
    rows += [(words, *(paused.get((key, f"{column}:"), "") for *_, column in WAYS.values())) for words, key in PAUSES]
    return table(("µs", *(f"{way}:" for way in WAYS)), rows)


OTHERS = (
    ("**nnburst**", "calling a network in another process as if it were a function", "burst Execution.run()"),
    ("iceoryx2", "messages between many processes, zero copy", "iceoryx2 request-response"),
    ("Unix socket", "bytes between two processes", "Unix SOCK_SEQPACKET"),
    ("faster-fifo", "a fast `multiprocessing.Queue`", "faster-fifo, bytes"),
    ("`multiprocessing.Pipe`", "Python objects between two processes", "multiprocessing.Pipe, bytes"),
    ("`multiprocessing.Queue`", "the same, for many processes", "multiprocessing.Queue"),
    ("ONNX Runtime in process", "running a model in your own process", ""),
    ("Triton", "a model server with batching and many frameworks, over a network", ""),
    ("mosec", "a web service around a Python model", ""),
    ("Ray Serve", "deployments over a cluster", ""),
)
"""Other ways, what they are made for, and their row of `make bench`."""


def ways(name: str) -> str:
    """Other ways beside nnburst, and what a call costs when both ends poll, and when they sleep."""
    measured = [row for part in stored()[name]["tables"] if "wait" in part["header"] for row in part["rows"]]
    found = {(row[0].removesuffix(", MSG_DONTWAIT"), *row[1:3]): row[4] for row in measured}
    waits = ("poll", "block")
    rows = [(way, use, *(found.get((title, wait, "apart"), "") for wait in waits)) for way, use, title in OTHERS]
    return table(("", "made for", "both poll:", "both sleep:"), rows)


def parse(text: str) -> dict[str, Any]:
    """Return the tables and the conditions of Markdown of a benchmark, and its command and machine if it has them."""
    tables: list[dict[str, Any]] = []
    listed = re.search(r"^Conditions:\n\n((?:- .*\n(?:  .*\n)*)+)", text, re.MULTILINE)
    conditions = re.findall(r"^- (.*(?:\n  .*)*)", listed.group(1), re.MULTILINE) if listed else []
    for title, head, rule, body in TABLE.findall(text):
        names = [cell.strip() for cell in head.split("|")]
        header = [name + ":" * right.endswith(":") for name, right in zip(names, rule.split("|"), strict=True)]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in body.splitlines()]
        tables.append({"title": title, "header": header, "rows": rows})
    run = re.match(r"`(?P<command>.+)`\. (?P<machine>.+)\.\n", text)
    known = run.groupdict() if run else {}
    return known | {"tables": tables, "conditions": [" ".join(line.split()) for line in conditions]}


def numbers(text: str) -> set[str]:
    """Return the measured numbers of a text: those with a point that are no versions and not in code."""
    plain = VERSION.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))
    return set(re.findall(r"(?<![\w.-])\d[\d,]*\.\d+(?!\d|\.\d)", plain))


CONSTANTS = {
    "30": "what all pending runs of an event loop may spin together in one iteration",
    "45": "what they may delay another task",
    "50": "the polling window",
    "300": "the longest answer that the gateway polls for",
}
"""Microseconds that are set, not measured."""
MICROSECONDS = re.compile(r"((?:\d[\d,]*(?:\.\d+)?,?\s(?:(?:to|and|or|against)\s)?)+)(?:µs|microseconds?)\b")


def microseconds(text: str) -> set[str]:
    """Return the numbers of microseconds in prose, without those that are set."""
    plain = re.sub(r"`[^`]*`|^\|.*$", "", text, flags=re.MULTILINE)
    found = re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join(MICROSECONDS.findall(plain)))
    return {number.rstrip(",") for number in found} - CONSTANTS.keys()


def quoted(path: Path) -> Iterator[str]:
    """Yield what is wrong with the figures of a page: runs and figures that are not in the store, figures of no run."""
    text = re.sub(r"^```.*?^```$", "", MADE.sub("", path.read_text("utf-8")), flags=re.DOTALL | re.MULTILINE)
    runs = stored()
    inner = path.parent.name in ("internals", "requirements")
    for block in re.split(r"\n\s*\n", text):
        measured = numbers(block) if path.name in QUOTING else set()
        measured |= set() if inner else microseconds(block)
        named = re.search(r"<!-- figures: (\S+) -->", block)
        if named is None:
            if measured:
                yield f"no run is named beside {sorted(measured)}: {block.strip()[:60]}"
        elif named.group(1) not in runs:
            yield f"no such run: {named.group(1)}"
        else:
            known = re.findall(r"\d[\d,]*(?:\.\d+)?", json.dumps(runs[named.group(1)], ensure_ascii=False))
            if missing := (measured | numbers(block)) - {number.rstrip(",") for number in known}:
                yield f"the run {named.group(1)} has no {sorted(missing)}"


# -- pages -------------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[..., str]] = {
    "calls": calls,
    "messages": messages.messages,
    "bytes": messages.bytes_of_messages,
    "types": messages.types,
    "codes": messages.codes,
    "commands": commands,
    "requirements": requirements,
    "mutants": mutants,
    "run": run_tables,
    "first-page": first_page,
    "ways": ways,
}


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    built = ROOT / "docs" / "_build"
    return [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if built not in path.parents)]


def made(path: Path) -> str:
    """Return a file as it has to be."""
    name = str(path.relative_to(ROOT))
    if name in WHOLE:
        return WHOLE[name]()

    def fill(match: re.Match[str]) -> str:
        begin, maker, argument, end = match.groups()
        return f"{begin}\n{MAKERS[maker](*filter(None, [argument]))}\n\n{end}"

    return MADE.sub(fill, path.read_text("utf-8"))


def main() -> int:
    """Write, check or store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail if a table is not up to date, or a figure of no run"
    )
    parser.add_argument("--store", nargs=2, metavar=("ENTRY", "FILE"), help="put the tables of a run into the store")
    options = parser.parse_args()
    if options.store:
        name, file = options.store
        runs = stored()
        runs[name] = runs.get(name, {"command": "", "machine": ""}) | parse(Path(file).read_text("utf-8"))
        FIGURES.write_text(dump(runs), "utf-8")
    late = []
    for path in [*pages(), *(ROOT / name for name in WHOLE)]:
        text = made(path)
        if not path.exists() or text != path.read_text("utf-8"):
            late.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, "utf-8")
    wrong = [f"{path.relative_to(ROOT)}: {problem}" for path in pages() for problem in quoted(path)]
    print("\n".join(late + wrong))
    return int(bool(wrong) or (options.check and bool(late)))


if __name__ == "__main__":
    sys.exit(main())
