"""Draw the pictures of the pages as SVG. `make tables` writes the pictures to docs/pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html import escape
from pathlib import Path

FIGURES = Path(__file__).with_name("figures.json")
COLOURS = {
    "program": ("#e3edfb", "#2f5f9e"),
    "service": ("#e5f4e8", "#2e7d43"),
    "shared": ("#fff3d6", "#a87406"),
    "plain": ("#ffffff", "#667085"),
    "danger": ("#fdeaea", "#b3261e"),
    "grid": ("#ffffff", "#dfe3ea"),
}
"""Colours by kind of object: the inside of a box, and the line of a box or arrow."""
SIZE, LEADING = 14, 19
"""Font size, and distance between lines, in pixels."""


class Picture:
    """A picture of boxes, texts and arrows. Positions are in pixels from the upper left corner."""

    def __init__(self, width: int, height: int, says: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' font-family="Helvetica, Arial, sans-serif" font-size="{SIZE}" role="img">',
            f"<title>{escape(says)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#fcfcfd"/>',
        ]

    def text(self, x: float, y: float, *lines: str, anchor: str = "middle", bold: str = "", colour: str = "") -> None:
        """Write lines below each other, with their vertical centre at `y`. `bold` is an additional first line."""
        written = [line for line in (bold, *lines) if line]
        for number, line in enumerate(written):
            at = y + (number - (len(written) - 1) / 2) * LEADING + SIZE * 0.36
            weight = ' font-weight="bold"' if bold and not number else ""
            fill = COLOURS[colour][1] if colour else "#1d2430"
            self._parts.append(
                f'<text x="{x:g}" y="{at:.1f}" text-anchor="{anchor}" fill="{fill}"{weight}>{escape(line)}</text>'
            )

    def box(self, x: float, y: float, width: float, height: float, kind: str, name: str = "", *lines: str) -> None:
        """Draw a box. Write its name (bold) and the lines in the middle of the box."""
        fill, border = COLOURS[kind]
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{border}"/>'
        )
        self.text(x + width / 2, y + height / 2, *lines, bold=name)

    def frame(self, x: float, y: float, width: float, height: float, kind: str, name: str) -> None:
        """Draw a box that contains other boxes. Write its name at the top."""
        self.box(x, y, width, height, kind)
        self.text(x + width / 2, y + 18, bold=name)

    def arrow(
        self, *points: tuple[float, float], kind: str = "plain", dashed: bool = False, both: bool = False
    ) -> None:
        """Draw a line through points, with an arrowhead at the last point, or at both ends."""
        colour = COLOURS[kind][1]
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        for (x0, y0), (x, y) in [points[-2:], *([points[1::-1]] if both else [])]:
            a = math.atan2(y - y0, x - x0)
            wings = [(x - 10 * math.cos(a + side), y - 10 * math.sin(a + side)) for side in (-0.45, 0.45)]
            head = " ".join(f"{px:.1f},{py:.1f}" for px, py in [(x, y), *wings])
            self._parts.append(f'<polygon points="{head}" fill="{colour}"/>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a bar of a chart, or a line as a thin bar."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{COLOURS[kind][1]}"/>'
        )

    def svg(self) -> str:
        """Return the content of the SVG file."""
        return "\n".join([*self._parts, "</svg>", ""])


def architecture() -> str:
    """Return the picture of the program, the service, and the memory that they share."""
    p = Picture(760, 300, "Your program and the service share two queues and the tensors; a socket carries the rest.")
    p.frame(20, 20, 200, 215, "program", "your program")
    p.frame(540, 20, 200, 215, "service", "service: a sandbox")
    p.box(40, 60, 160, 90, "plain", "Session", "run()", "sends a packet")
    p.box(560, 60, 160, 90, "plain", "a waiting thread", "takes a packet,", "runs the model")
    p.box(290, 56, 180, 40, "shared", "request queue")
    p.box(290, 112, 180, 40, "shared", "result queue")
    p.arrow((200, 76), (290, 76))
    p.arrow((470, 76), (560, 76))
    p.arrow((560, 132), (470, 132))
    p.arrow((290, 132), (200, 132))
    p.box(40, 172, 680, 44, "shared", "tensors: shared memory that both processes map; nothing is copied")
    p.arrow((120, 235), (120, 264), (640, 264), (640, 235), dashed=True, both=True)
    p.text(380, 281, "a socket: opens models and shows when the other process ends; a run does not use it")
    return p.svg()


def request() -> str:
    """Return the picture of one run, from top to bottom."""
    p = Picture(800, 400, "The life of a request: a packet there, a packet back, and tensors that stay where they are.")
    program, memory, service, bottom = 110, 400, 690, 350
    for x, kind, name in ((program, "program", "your program"), (memory, "shared", "shared memory")):
        p.box(x - 80, 20, 160, 36, kind, name)
    p.box(service - 80, 20, 160, 36, "service", "service")
    for x in (program, memory, service):
        p.bar(x - 0.5, 56, 1, bottom - 56, "plain")
    steps = (
        (program, memory, "program", "1  write the inputs"),
        (program, memory, "program", "2  run(): put a packet into the queue"),
        (memory, service, "service", "3  take the packet from the queue"),
        (memory, service, "service", "4  the model reads the inputs"),
        (service, memory, "service", "5  … and writes the outputs"),
        (service, memory, "service", "6  put a packet into the other queue"),
        (memory, program, "program", "7  run() returns"),
        (memory, program, "program", "8  read the outputs"),
    )
    for number, (start, end, kind, words) in enumerate(steps):
        y = 92 + number * 34
        p.arrow((start, y), (end, y), kind=kind)
        p.text((start + end) / 2, y - 11, words)
    p.text(400, 376, "While both processes poll, steps 1 to 8 need no system call. A process that sleeps is woken.")
    return p.svg()


POLLING = (
    ("nnburst", "burst Execution.run()"),
    ("a word in an mmap, by hand", "a word in an mmap, nothing checked"),
    ("iceoryx2", "iceoryx2 request-response"),
    ("Unix socket", "Unix SOCK_SEQPACKET, MSG_DONTWAIT"),
    ("faster-fifo", "faster-fifo, bytes"),
)
SLEEPING = (
    ("nnburst", "burst Execution.run()"),
    ("Unix socket", "Unix SOCK_SEQPACKET"),
    ("multiprocessing.Pipe", "multiprocessing.Pipe, bytes"),
    ("pyzmq", "pyzmq ipc:// REQ/REP"),
    ("multiprocessing.Queue", "multiprocessing.Queue"),
)
"""Labels in the picture, each with its row of the stored run of `make bench`. Each end runs on its own core."""
BUSY = (("nnburst", "burst:"), ("Unix socket", "socket:"), ("multiprocessing.Pipe", "pipe:"))
"""Labels in the picture, each with its column of the stored run of benchmarks/waiting.py."""


def latency() -> str:
    """Return the chart of calls in three situations, from the stored runs."""
    runs = json.loads(FIGURES.read_text("utf-8"))
    called = {tuple(row[:3]): row for part in runs["round-trips"]["tables"] for row in part["rows"]}
    (paused,) = runs["waiting"]["tables"]
    (busy,) = (dict(zip(paused["header"], row, strict=True)) for row in paused["rows"] if row[0] == "2 programs, 33 ms")
    panels = [
        (title, [(words, row[4], row[6]) for words, key in rows for row in [called[key, wait, "apart"]]])
        for title, rows, wait in (
            ("Calls without a pause, both ends poll: median, p99", POLLING, "poll"),
            ("Both ends sleep while they wait: median, p99", SLEEPING, "block"),
        )
    ]
    beside = [(words, *busy[column].rstrip(")").split(" (")) for words, column in BUSY]
    panels.append(("30 calls a second beside programs that take both processors: mean, p99", beside))
    left, step, decade = 230, 28, 78
    height = sum(54 + step * len(rows) for _, rows in panels) + 46
    p = Picture(
        760, height, "A call between two processes in three situations, in microseconds, on a logarithmic scale."
    )
    for power in range(-1, 5):
        x = left + (power + 1) * decade
        p.bar(x - 0.5, 16, 1, height - 56, "grid")
        p.text(x, height - 24, f"{10**power:g} µs" if power < 3 else f"{10 ** (power - 3):g} ms")
    y = 16.0
    for title, rows in panels:
        p.text(20, y + 20, bold=title, anchor="start")
        y += 42
        for words, middle, tail in rows:
            start, end = (left + (math.log10(float(figure.replace(",", ""))) + 1) * decade for figure in (middle, tail))
            ours = words == "nnburst"
            p.text(left - 12, y + 10, "" if ours else words, anchor="end", bold=words if ours else "")
            p.bar(left, y, start - left, 20, "service" if ours else "program")
            p.bar(start, y + 9, end - start, 2, "plain")
            p.text(end + 8, y + 10, f"{middle} ({tail})", anchor="start")
            y += step
        y += 12
    return p.svg()


def sharing() -> str:
    """Return the picture of a shared service: broker, workers, gateway."""
    p = Picture(
        760, 430, "Programs open sessions at a broker, which passes each connection to a process that runs models."
    )
    p.frame(20, 100, 180, 230, "program", "programs")
    for y, lines in ((138, ("a program with", "its own model")), (202, ("web worker",)), (262, ("robot",))):
        p.box(38, y, 144, 48, "plain", "", *lines)
    p.box(260, 20, 240, 56, "service", "broker", "nnburst serve --name vision")
    p.box(560, 118, 180, 88, "service", "one process per user", "models that this", "user's programs load")
    p.box(560, 224, 180, 88, "service", "one process for all", "models that all", "programs share")
    for start, end in ((162, 162), (226, 248), (286, 286)):
        p.arrow((182, start), (560, end), kind="shared", both=True)
    p.text(380, 146, "queues in shared memory", colour="shared")
    p.arrow((110, 100), (110, 48), (260, 48), dashed=True)
    p.text(185, 32, "open a session")
    p.arrow((500, 48), (650, 48), (650, 118), dashed=True)
    p.text(580, 32, "pass the connection on")
    p.box(20, 360, 180, 50, "plain", "other machines")
    p.box(290, 360, 180, 50, "service", "gateway", "gRPC, HTTP")
    p.arrow((200, 385), (290, 385), both=True)
    p.arrow((470, 385), (650, 385), (650, 312), kind="shared", both=True)
    return p.svg()


def walls() -> str:
    """Return the picture of the protections around a model in a service."""
    p = Picture(
        760,
        400,
        "A sandbox in three layers: a process, Landlock, seccomp. Inputs and outputs pass through shared memory.",
    )
    for inset, name in enumerate(
        (
            "a separate process: your program survives a crash",
            "Landlock: reads only code files",
            "seccomp: few system calls",
        )
    ):
        p.frame(270 + 50 * inset, 20 + 36 * inset, 470 - 75 * inset, 360 - 54 * inset, "service", name)
    p.box(470, 130, 170, 190, "danger", "the model", "and the libraries", "that run it")
    for y, name, wall in ((154, "your files", 320), (202, "the network", 370), (250, "other processes", 370)):
        p.box(20, y - 18, 180, 36, "program", name)
        p.arrow((470, y), (wall, y), kind="danger")
        p.text(wall - 14, y, bold="✕", colour="danger")
    p.box(20, 280, 180, 36, "program", "your program")
    p.arrow((200, 298), (470, 298), kind="shared", both=True)
    p.text(20, 334, "through shared memory", anchor="start", colour="shared")
    return p.svg()


PICTURES: dict[str, Callable[[], str]] = {
    f"docs/pictures/{drawn.__name__}.svg": drawn for drawn in (architecture, request, latency, sharing, walls)
}
"""The functions that draw the pictures, by file."""
