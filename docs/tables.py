"""Generate the tables of the documentation from the sources and from stored benchmark runs. `make tables` runs this.

    python docs/tables.py                                # write all tables
    python docs/tables.py --check                        # fail if a table is not up to date
    python docs/tables.py --store round-trips table.md   # store the run in table.md (`benchmarks.record --markdown`)

In a page, a table stands between the lines `<!-- made: NAME -->` and `<!-- end -->`. Files in `WHOLE` are generated
completely, including the pictures (docs/pictures.py).

`docs/figures.json` contains the command, the conditions and the figures of each stored run. A paragraph, list or table
with figures of a run names the run on the line before: `<!-- figures: ENTRY -->`.
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
"""Pages on which all figures must come from stored runs."""

WHOLE: dict[str, Callable[[], str]] = {
    "docs/operations.md": render_page,
    "nnburst/model/operation_methods.py": render_module,
} | PICTURES
REQUIREMENT = re.compile(r"^REQ-[A-Z]+-\d{3} +(deviates|absent)?\b", re.MULTILINE)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. If a column's header ends with a colon, the column contains numbers."""
    rule = "".join("|--:" if name.endswith(":") else "|---" for name in header) + "|"
    lines: list[Sequence[str]] = [[name.removesuffix(":") for name in header], *rows]
    first, *others = (f"| {' | '.join(cells)} |" for cells in lines)
    return "\n".join([first, rule, *others])


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a docstring."""
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()), maxsplit=1)[0]


# -- from the sources --------------------------------------------------------------------------------------------------


def calls() -> str:
    """Return a list of the calls during which a device computes, and of the calls that the service does not serve."""
    rows = {"compute": [call.name for call in CALLS if call.computes]}
    rows |= {f"served by the {side.value}": [call.name for call in CALLS if call.side is side] for side in Side}
    del rows[f"served by the {Side.SERVICE.value}"]
    return "".join(item(f"{what}: {', '.join(map('`{}`'.format, names))}") for what, names in rows.items()).rstrip()


def commands() -> str:
    """Return a list of the commands, each with a link to its page."""
    lines = (f"[`nnburst {path}`]({page(path)}): {first_sentence(each.help)}" for path, each, _ in every_command())
    return "".join(map(item, lines)).rstrip()


def page(path: str) -> str:
    """Return the link to a command's page. A group and its commands share a page."""
    first, _, rest = path.partition(" ")
    return f"commands/{first}.md" + (f"#nnburst-{first}-{rest}" if rest else "")


def command_page(name: str) -> str:
    """Return the page of a command or group: purpose, usage and options."""
    text = ""
    for path, command, inner in every_command():
        if path.partition(" ")[0] != name:
            continue
        usage = " ".join(command.collect_usage_pieces(inner)).replace("[OPTIONS]", "").strip()
        text += f"{'##' if ' ' in path else '#'} nnburst {path}\n\n"
        text += "\n\n".join(map(paragraph, inspect.cleandoc(command.help or "").split("\n\n"))) + "\n\n"
        if not isinstance(command, click.Group):
            text += f"Usage: `nnburst {f'{path} {usage}'.strip()}`\n\n"
        records = [option.get_help_record(inner) for option in command.params if isinstance(option, click.Option)]
        text += "".join(item(f"`{names}`: {words}") for names, words in filter(None, records)) + "\n" * any(records)
    return text.rstrip() + "\n"


def paragraph(text: str) -> str:
    """Return a paragraph of a command's help. A paragraph marked ``\\b`` becomes a block of shell commands."""
    if text.startswith("\b"):
        return f"```sh\n{inspect.cleandoc(text.removeprefix(chr(8)))}\n```"
    return textwrap.fill(mark_options(" ".join(text.split())), WIDTH)


def mark_options(text: str) -> str:
    """Return a text with backquotes around options. Sphinx would make a dash of their hyphens."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def item(text: str) -> str:
    """Return a text as an item of a list, wrapped to `WIDTH`."""
    text = mark_options(text)
    return textwrap.fill(" ".join(text.split()), WIDTH, initial_indent="- ", subsequent_indent="  ") + "\n"


def every_command() -> list[tuple[str, click.Command, click.Context]]:
    """Return (name, command, context) of each command and each group of commands."""
    return list(walk(nnburst, click.Context(nnburst, info_name="nnburst")))


def walk(
    group: click.Group, context: click.Context, before: str = ""
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield (name, command, context) of each command and each group inside a group."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        yield f"{before}{name}", command, inner
        if isinstance(command, click.Group):
            yield from walk(command, inner, f"{before}{name} ")


def requirements() -> str:
    """Return a sentence with the numbers of requirements that are met, deviate or are absent."""
    pages = (ROOT / "docs" / "requirements").glob("*.md")
    found = Counter(status or "met" for page in pages for status in REQUIREMENT.findall(page.read_text("utf-8")))
    return f"{found['met']} requirements are met, {found['deviates']} deviate, {found['absent']} are absent."


def mutants() -> str:
    """Return a sentence with the number of weakened memory orders that the proofs catch."""
    text = (ROOT / "tests" / "model" / "mutants.txt").read_text("utf-8")
    found = re.findall(r"^\w+\.[ch]:.+?: (\w+)", text, re.MULTILINE)
    return f"{len(found) - found.count('survived')} of {len(found)} are caught."


WHOLE |= {f"docs/{page(path)}": partial(command_page, path) for path, _, _ in every_command() if " " not in path}


# -- from stored runs --------------------------------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    """Return the stored runs, by name."""
    runs = json.loads(FIGURES.read_text("utf-8"))
    assert isinstance(runs, dict)
    return runs


def dump(runs: dict[str, Any]) -> str:
    """Return runs as JSON, with each row of a table on its own line."""
    text = json.dumps(runs, indent=1, ensure_ascii=False)
    return STRINGS.sub(lambda match: json.dumps(json.loads(match.group()), ensure_ascii=False), text) + "\n"


WAITS = {"poll": "polls", "block": "sleeps"}
UNTOLD = re.compile(
    r".*(16 KiB|64 KiB|256 KiB|4 MiB| 0\.1 ms| 10 ms|(pool|bytes), 1 MiB|(device|run|turn), 16 MiB)|3 programs.*"
)
"""Rows that pages leave out, by the size of a tensor, the pause of a client, or the number of programs."""


def rows_of_record(parts: Iterable[dict[str, Any]]) -> str:
    """Return the rows of `make bench` as two tables: rows (a) to (e) with their ratio to L, then the other rows."""
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
    """Return all tables of a run, and its conditions. The table of the budget shows only promises that are not kept."""
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
        pairs = [line.split(": ", 1) for line in run["conditions"]]
        texts.append(table(("conditions", ""), [line for line in pairs if line[0] not in WAITS]) + "\n")
    return "\n".join(texts).rstrip()


WAYS = {
    "nnburst": ("burst Execution.run()", "burst Execution.run()", "burst"),
    "Unix socket": ("Unix SOCK_SEQPACKET, MSG_DONTWAIT", "Unix SOCK_SEQPACKET", "socket"),
    "`Pipe`": ("", "multiprocessing.Pipe, bytes", "pipe"),
    "`mmap` by hand": ("a word in an mmap, nothing checked", "", ""),
}
"""Columns of the README's table: a row of `make bench` that polls, a row that sleeps, and a column of waiting.py."""
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
    """Return the README's table: the durations of four kinds of calls in six situations."""
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
"""nnburst and other tools: the purpose of each, and its row of `make bench`."""


def ways(name: str) -> str:
    """Return a table of nnburst and other tools: purpose, and cost of a call if both ends poll or both sleep."""
    measured = [row for part in stored()[name]["tables"] if "wait" in part["header"] for row in part["rows"]]
    found = {(row[0].removesuffix(", MSG_DONTWAIT"), *row[1:3]): row[4] for row in measured}
    waits = ("poll", "block")
    rows = [(way, use, *(found.get((title, wait, "apart"), "") for wait in waits)) for way, use, title in OTHERS]
    return table(("", "made for", "both poll:", "both sleep:"), rows)


def parse(text: str) -> dict[str, Any]:
    """Return the tables and conditions in a benchmark's Markdown, and the command and machine if they are given."""
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
    """Return the measured numbers in a text: all numbers with a decimal point, except versions and code."""
    plain = VERSION.sub("", re.sub(r"`[^`]*`|\]\([^)]*\)", "", text))
    return set(re.findall(r"(?<![\w.-])\d[\d,]*\.\d+(?!\d|\.\d)", plain))


CONSTANTS = {
    "30": "what all pending runs of an event loop may spin together in one iteration",
    "45": "what they may delay another task",
    "50": "the polling window",
    "300": "the longest answer that the gateway polls for",
}
"""Numbers of microseconds that are constants in the sources, and are not measured."""
MICROSECONDS = re.compile(r"((?:\d[\d,]*(?:\.\d+)?,?\s(?:(?:to|and|or|against)\s)?)+)(?:µs|microseconds?)\b")


def microseconds(text: str) -> set[str]:
    """Return the numbers of microseconds in prose, except `CONSTANTS`."""
    plain = re.sub(r"`[^`]*`|^\|.*$", "", text, flags=re.MULTILINE)
    found = re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join(MICROSECONDS.findall(plain)))
    return {number.rstrip(",") for number in found} - CONSTANTS.keys()


def quoted(path: Path) -> Iterator[str]:
    """Yield the problems with a page's figures: an unknown run, a figure that the run lacks, a figure without a run."""
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
    """Return the pages that may contain generated tables."""
    built = ROOT / "docs" / "_build"
    return [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if built not in path.parents)]


def made(path: Path) -> str:
    """Return the up-to-date content of a file."""
    name = str(path.relative_to(ROOT))
    if name in WHOLE:
        return WHOLE[name]()

    def fill(match: re.Match[str]) -> str:
        begin, maker, argument, end = match.groups()
        return f"{begin}\n{MAKERS[maker](*filter(None, [argument]))}\n\n{end}"

    return MADE.sub(fill, path.read_text("utf-8"))


def main() -> int:
    """Write or check all tables. With ``--store``, first store a run."""
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
