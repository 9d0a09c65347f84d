"""Weakens every memory order of the C core in turn and asks whether the programs here find it: ``make prove-mutants``.

A mutant is one call in ``csrc`` with the next weaker order (or each of several), or without its fence. It is caught if
some program fails on it that proves the real sources. ``mutants.txt`` is what the last whole run has found; a mutant
that none catches has its reason there, or the run fails. ``bench.c`` measures and runs in no product.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import checker

TABLE = checker.HERE / "mutants.txt"
LEAST_CAUGHT = 0.95
QUICK = """row wander adopt stamps hang_up guard unsynchronized wanted group_rest group_three group_held bell abandon
group_sleeper_thread group_end group_hand_over flights move kernels plans blocking full_results channel
full""".split()

# Order of each word of nnb_atomic.h -> the weaker ones to try. "" is a fence that is not there.
WEAKER = {
    "nnb_load_acquire": ("nnb_load_relaxed",),
    "nnb_load32_acquire": ("nnb_load32_relaxed",),
    "nnb_store_release": ("nnb_store_relaxed",),
    "nnb_store32_release": ("nnb_store32_relaxed",),
    "nnb_add_release": ("nnb_add_relaxed",),
    "nnb_cas_acquire": ("nnb_cas_relaxed",),
    "nnb_cas_release": ("nnb_cas_relaxed",),
    "nnb_cas32_release": ("nnb_cas32_relaxed",),
    "nnb_cas_seq_cst": ("nnb_cas_acquire",),
    "nnb_load_seq_cst": ("nnb_load_acquire",),
    "nnb_load32_seq_cst": ("nnb_load32_acquire",),
    "nnb_store32_seq_cst": ("nnb_store32_release",),
    "nnb_swap_release": ("nnb_swap_relaxed",),
    "nnb_or32_release": ("nnb_or32_relaxed",),
    "nnb_and32_acquire": ("nnb_and32_relaxed",),
    "nnb_fence_seq_cst": ("nnb_fence_acq_rel", "nnb_fence_acquire", "nnb_fence_release", ""),
    "nnb_fence_acquire": ("",),
    "nnb_fence_release": ("",),
}
# What the header lacks because the product needs it nowhere.
EXTRA = """
static inline uint64_t nnb_swap_relaxed(nnb_a64 *p, uint64_t v)
{
    return atomic_exchange_explicit(p, v, memory_order_relaxed);
}
static inline uint32_t nnb_or32_relaxed(nnb_a32 *p, uint32_t v)
{
    return atomic_fetch_or_explicit(p, v, memory_order_relaxed);
}
static inline void nnb_fence_acq_rel(void) { atomic_thread_fence(memory_order_acq_rel); }
"""
CALL = re.compile(r"\b(" + "|".join(WEAKER) + r")\(")
FUNCTION = re.compile(r"^[a-z][\w \*]*?\b(\w+)\(")


@dataclass(frozen=True)
class Mutant:
    file: str
    function: str
    which: int  # among the calls of that function
    call: str
    weaker: str
    start: int
    end: int

    @property
    def name(self) -> str:
        """Stays the same when lines move."""
        return f"{self.file}:{self.function}#{self.which} {self.call} -> {self.weaker or 'none'}"


def mutants(source: Path) -> list[Mutant]:
    """Every order of the core, each in every weaker form."""
    found: list[Mutant] = []
    for path in sorted(source.glob("*.[ch]")):
        if path.name in ("nnb_atomic.h", "bench.c"):
            continue
        function, which, offset = "", 0, 0
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if head := FUNCTION.match(line.rstrip()):
                function, which = head.group(1), 0
            for call in CALL.finditer(line):
                which += 1
                for weaker in WEAKER[call.group(1)]:
                    place = (offset + call.start(), offset + call.end() - 1)
                    found.append(Mutant(path.name, function, which, call.group(1), weaker, *place))
            offset += len(line)
    return found


def make(mutant: Mutant, source: Path, core: Path) -> None:
    """Write a copy of the core with the mutant in it."""
    shutil.copytree(source, core)
    text = (core / mutant.file).read_text(encoding="utf-8")
    changed = text[: mutant.start] + (mutant.weaker or "(void)") + text[mutant.end :]
    if not mutant.weaker:  # `nnb_fence_x();` becomes `(void)(0);`
        changed = changed.replace("(void)()", "(void)(0)", 1)
    (core / mutant.file).write_text(changed, encoding="utf-8")
    header = core / "nnb_atomic.h"
    text = header.read_text(encoding="utf-8")
    place = text.rindex("#endif")
    header.write_text(text[:place] + EXTRA + text[place:], encoding="utf-8")


def includes(program: str) -> set[str]:
    """The files that a program includes, itself or through another file here."""
    names = set(re.findall(r'#include "(\w+\.[ch])"', (checker.HERE / program).read_text(encoding="utf-8")))
    for other in names & {path.name for path in checker.HERE.glob("*.[ch]")}:
        names |= includes(other)
    return names


def programs_for(mutant: Mutant) -> list[str]:
    """The programs that a mutant is shown to: the one that found it last, then the quick ones, then the others."""
    last = re.search(rf"^{re.escape(mutant.name)}: (\w+)", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    order = [*(last.groups() if last else ()), *QUICK, *checker.PROGRAMS]
    names = sorted(checker.PROGRAMS, key=order.index)
    return [name for name in names if mutant.file.endswith(".h") or mutant.file in includes(f"{name}.c")]


def hunt(mutant: Mutant, source: Path, timeout: float) -> tuple[str, str]:
    """What became of it ("caught", "survived", "unbuilt") and by what."""
    with tempfile.TemporaryDirectory() as scratch:
        core = Path(scratch) / "csrc"
        make(mutant, source, core)
        slow = []
        for model in checker.MODELS:
            for program in programs_for(mutant):
                outcome = checker.genmc(program, model, core, timeout)
                if outcome.verdict == "error":
                    return "caught", program + f" ({model})" * (model != checker.MODELS[0])
                if outcome.verdict == "broken":
                    return "unbuilt", f"{program}: {outcome.detail}"
                if outcome.verdict == "timeout":
                    slow.append(f"{program} ({model})")
    return "survived", f"not finished: {', '.join(slow)}" if slow else ""


def reasons() -> dict[str, str]:
    """What the table says of mutants that survive."""
    return dict(re.findall(r"^(\w+\.[ch]:.+?): survived: (.+)$", TABLE.read_text(encoding="utf-8"), re.MULTILINE))


def weaken(source: Path, only: str, timeout: float) -> bool:
    """Hunt the mutants whose names contain `only`; whether enough are caught and the others have a reason."""
    chosen = [mutant for mutant in mutants(source) if only in mutant.name]
    known, caught, unexplained = reasons(), 0, 0
    for mutant in chosen:
        start = time.monotonic()
        what, by = hunt(mutant, source, timeout)
        if what == "caught":
            caught += 1
        elif what == "survived" and mutant.name in known:
            by = known[mutant.name]
        else:
            unexplained += 1
            by = f"NO REASON GIVEN. {by}"
        print(f"{mutant.name}: {by if what == 'caught' else f'{what}: {by}'}", flush=True)
        print(f"{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if chosen:
        print(f"{caught} of {len(chosen)} caught ({caught / len(chosen):.1%}), {unexplained} without a reason")
    return not unexplained and (bool(only) or caught >= LEAST_CAUGHT * len(chosen))


def main() -> int:
    parser = argparse.ArgumentParser(description="Weakens every memory order of the C core and asks what finds it.")
    parser.add_argument("only", nargs="?", default="", help="part of the names of the mutants to make")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one program")
    parser.add_argument("--list", action="store_true", help="name the mutants and make none")
    options = parser.parse_args()
    if options.list:
        print(*(mutant.name for mutant in mutants(checker.CORE) if options.only in mutant.name), sep="\n")
        return 0
    if checker.missing("genmc"):
        print("skipped the memory orders: genmc is not on the PATH")
        return 0
    with tempfile.TemporaryDirectory() as scratch:  # the tree may change while this runs
        source = Path(shutil.copytree(checker.CORE, Path(scratch) / "csrc"))
        return 0 if weaken(source, options.only, options.timeout) else 1


if __name__ == "__main__":
    sys.exit(main())
