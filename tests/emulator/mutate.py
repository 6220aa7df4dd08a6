r"""Mutations of a kernel's synchronisation, and whether the emulator finds each.

A mutation removes or alters one synchronisation instruction in the PTX. The host code stays the same. A
mutation counts as found when some seed gives a fault or a wrong result.

    python3 -m tests.emulator.mutate        writes docs/emulator-mutations.md
    ... --kernels Blackwell --statements 'tcgen05\.fence'       surveys those again and keeps the other rows
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .faults import EmulatorError, Fault
from .host import Emulated


@dataclass(frozen=True)
class Mutation:
    line: int  # counted from 1
    what: str  # what was done, in words
    before: str  # the statement as it was
    after: str


@dataclass(frozen=True)
class Verdict:
    mutation: Mutation
    found: str  # fault code, "wrong result", or "" when every seed passed
    seed: int  # the first seed that found it, -1 for none
    message: str


TRUE = "setp.eq.u32 {0}, 0, 0"
# (statement, what is done, replacement). {n} are the statement's groups; None removes the statement.
RULES: list[tuple[str, str, str | None]] = [
    (r"bar(?:rier)?(?:\.cta)?\.(?:sync|red)\S* .*", "barrier removed", None),
    (r"bar(?:rier)?(?:\.cta)?\.arrive\S* .*", "barrier arrival removed", None),
    (r"barrier\.cluster\.arrive\S*", "cluster arrival removed", None),
    (r"barrier\.cluster\.wait\S*", "cluster wait removed", None),
    (r"fence\.\S*", "fence removed", None),
    (r"membar\.\S*", "fence removed", None),
    (r"(mbarrier\.init\S*\s+\[[^\]]*\]), (.*)", "count + 1", "{0}, COUNT_PLUS_1({1})"),
    (r"(mbarrier\.arrive\.expect_tx\S*\s+[^\[]*\[[^\]]*\]), (.*)", "16 bytes more", "{0}, PLUS_16({1})"),
    (r"(mbarrier\.arrive\.expect_tx\S*\s+[^\[]*\[[^\]]*\]), (.*)", "16 bytes fewer", "{0}, MINUS_16({1})"),
    (r"mbarrier\.arrive(?!\.expect_tx)\S* .*", "arrival removed", None),
    (r"mbarrier\.(?:try|test)_wait\S*\s+([^,]+), .*", "wait always succeeds", TRUE),
    (r"wgmma\.fence\S*", "wgmma.fence removed", None),
    (r"wgmma\.commit_group\S*", "commit removed", None),
    (r"wgmma\.wait_group\S* \d+", "wait removed", None),
    (r"(wgmma\.wait_group\S*) (\d+)", "one group fewer waited for", "{0} PLUS_1({1})"),
    (r"cp\.async\.bulk\.commit_group", "commit removed", None),
    (r"cp\.async\.bulk\.wait_group\S* \d+", "wait removed", None),
    (r"(cp\.async\.bulk\.wait_group\S*) (\d+)", "one group fewer waited for", "{0} PLUS_1({1})"),
    (r"tcgen05\.(?:wait|fence)::\S*", "removed", None),
    (r"tcgen05\.commit\S* .*", "commit removed", None),
    (r"tcgen05\.dealloc\S* .*", "dealloc removed", None),
    (r"tcgen05\.relinquish\S*", "relinquish removed", None),
    (r"setmaxnreg\.dec\S* \d+", "setmaxnreg.dec removed", None),
    (r"griddepcontrol\.wait", "wait removed", None),
]
# The same for arithmetic: operations and comparisons exchanged, operands dropped or swapped.
ARITHMETIC: list[tuple[str, str, str | None]] = [
    (r"add(\S*\.f32) (.*)", "subtracts", "sub{0} {1}"),
    (r"sub(\S*\.f32) (.*)", "adds", "add{0} {1}"),
    (r"mul\S*\.f32 ([^,]+), ([^,]+), (.*)", "second factor dropped", "mov.b32 {0}, {1}"),
    (r"fma\.rn\.f32 (.*), ([^,]+)", "addend dropped", "mul.f32 {0}"),
    (r"fma\.rn\.f32 ([^,]+), [^,]+, [^,]+, (.*)", "product dropped", "mov.b32 {0}, {1}"),
    (r"div\S*\.f32 ([^,]+), ([^,]+), (.*)", "divisor dropped", "mov.b32 {0}, {1}"),
    (r"neg\.f32 (.*)", "sign kept", "mov.b32 {0}"),
    (r"max(\.[fs]32) (.*)", "minimum", "min{0} {1}"),
    (r"min(\.[fs]32) (.*)", "maximum", "max{0} {1}"),
    (r"cvt\.rmi\.f32\.f32 (.*)", "rounds up", "cvt.rpi.f32.f32 {0}"),
    (r"cvt\.rpi\.f32\.f32 (.*)", "rounds down", "cvt.rmi.f32.f32 {0}"),
    (r"setp\.lt(\S*) (.*)", "or equal", "setp.le{0} {1}"),
    (r"setp\.le(\S*) (.*)", "not equal", "setp.lt{0} {1}"),
    (r"setp\.gt(\S*) (.*)", "or equal", "setp.ge{0} {1}"),
    (r"setp\.ge(\S*) (.*)", "not equal", "setp.gt{0} {1}"),
    (r"setp\.eq(\S*) (.*)", "reversed", "setp.ne{0} {1}"),
    (r"setp\.ne(\S*) (.*)", "reversed", "setp.eq{0} {1}"),
    (r"selp(\S*) ([^,]+), ([^,]+), ([^,]+), (.*)", "operands swapped", "selp{0} {1}, {3}, {2}, {4}"),
    (r"st\.global\S* .*", "store removed", None),
]
# The same for counting: integers added, bits selected, what lanes tell each other.
COUNTING: list[tuple[str, str, str | None]] = [
    (r"add\.s32 (.*)", "subtracts", "sub.s32 {0}"),
    (r"sub\.s32 (.*)", "adds", "add.s32 {0}"),
    (r"and\.(b32|pred) (.*)", "or", "or.{0} {1}"),
    (r"or\.(b32|pred) (.*)", "and", "and.{0} {1}"),
    (r"(?:not|popc)\.b32 (.*)", "bits kept", "mov.b32 {0}"),
    (r"sh[lr]\.\w(\d+) ([^,]+), ([^,]+), .*", "not shifted", "mov.b{0} {1}, {2}"),
    (r"shfl\.sync\S* ([^,|]+)[^,]*, ([^,]+), .*", "a lane's own", "mov.b32 {0}, {1}"),
    (r"vote\.sync\.ballot\.b32 ([^,]+), .*", "no votes", "mov.b32 {0}, 0"),
]
OLDER = """\
The rows of DlogitsOfKept are of the kernel before 9799a1b, those of forwards and of what combines their terms
of those before 3373245, those of Finish, ScaleRows and Reduce of those before 5750fa0, and those of GEMMs of
load warps before 0dfbdc0."""
"""Which of the page's rows are of older kernels: whoever surveys those again takes them out here."""
_STATEMENT = re.compile(
    r"(?m)^(?P<lead>\s*(?:\{\s*)?(?:@!?[%\w$]+\s+)?)(?P<body>[a-z][\w.:]*(?:\s[^;{}]*(?:\{[^;}]*\}[^;{}]*)*)?);"
)


def mutations(ptx: str, rules: list[tuple[str, str, str | None]] = RULES) -> list[Mutation]:
    """Every mutation of a module's synchronisation, or by other rules, in the order of the text."""
    found = []
    for m in _STATEMENT.finditer(ptx):
        body = " ".join(m["body"].split())
        line = ptx.count("\n", 0, m.start("body")) + 1
        for pattern, what, replacement in rules:
            hit = re.fullmatch(pattern, body)
            if hit:
                after = "" if replacement is None else replacement.format(*hit.groups())
                found.append(Mutation(line, what, body, after))
    return found


def entry_of(ptx: str, line: int) -> str:
    """The name of the kernel that a line of a module is in."""
    names = [name for first, name in _entries(ptx) if first <= line]
    return names[-1] if names else ""


@functools.lru_cache(maxsize=4)
def _entries(ptx: str) -> list[tuple[int, str]]:
    """The line in which each kernel of a module begins, and its name."""
    found = re.finditer(r"\.visible \.entry (\w+)", ptx)
    return [(ptx.count("\n", 0, each.start()) + 1, each[1]) for each in found]


def apply(ptx: str, mutation: Mutation) -> str:
    """The module's text with one mutation."""
    lines = ptx.split("\n")
    text = lines[mutation.line - 1]
    m = _STATEMENT.match(text)
    assert m, (text, mutation)
    assert " ".join(m["body"].split()) == mutation.before, (text, mutation)
    after = mutation.after
    arithmetic = re.search(r"(COUNT_PLUS_1|PLUS_16|MINUS_16|PLUS_1)\((.*)\)$", after)
    extra = ""
    if arithmetic:
        amount = {"COUNT_PLUS_1": 1, "PLUS_16": 16, "MINUS_16": -16, "PLUS_1": 1}[arithmetic[1]]
        operand = arithmetic[2].strip()
        if re.fullmatch(r"-?\d+", operand):
            value = str(int(operand) + amount)
        else:  # a register: a scoped temporary holds the altered value
            value = "mutated"
            extra = f".reg .b32 mutated; add.s32 mutated, {operand}, {amount}; "
        after = after[: arithmetic.start()] + value
    after = after + ";" if after else ""
    replacement = f"{{ {extra}{_guarded(m['lead'], after)} }}" if extra else m["lead"] + after
    if not after:
        replacement = re.sub(r"@!?[%\w$]+\s+$", "", m["lead"])
    lines[mutation.line - 1] = replacement + text[m.end() :]
    return "\n".join(lines)


def _guarded(lead: str, statement: str) -> str:
    guard = re.search(r"@!?[%\w$]+\s+$", lead)
    return (guard[0] if guard else "") + statement


def survey(
    emulated: Emulated,
    check: Callable[[Emulated, int], bool],
    seeds: Iterable[int],
    only: Callable[[Mutation], bool] = lambda m: True,
    rules: list[tuple[str, str, str | None]] = RULES,
) -> list[Verdict]:
    """Try every mutation of a function. `check(emulated, seed)` runs it and says whether the result is
    right."""
    original = emulated.ptx
    verdicts = []
    try:
        for mutation in filter(only, mutations(original, rules)):
            emulated.replace_ptx(apply(original, mutation))
            verdict = Verdict(mutation, "", -1, "")
            for seed in seeds:
                try:
                    if not check(emulated, seed):
                        verdict = Verdict(mutation, "wrong result", seed, "")
                except Fault as fault:
                    verdict = Verdict(mutation, fault.code, seed, fault.message.split("\n")[0])
                except EmulatorError as error:
                    verdict = Verdict(mutation, "error", seed, str(error).split("\n")[0])
                if verdict.found:
                    break
            verdicts.append(verdict)
    finally:
        emulated.replace_ptx(original)
    return verdicts


def _shortened(mutation: Mutation) -> str:
    statement = mutation.before
    return statement if len(statement) < 90 else statement[:87] + "..."


def _row(verdict: Verdict, reason: Callable[[Mutation], str | None]) -> str:
    m = verdict.mutation
    what = f"[{verdict.found}]" if verdict.found and verdict.found != "wrong result" else verdict.found
    found = what or "not found: " + (reason(m) or "?")
    return f"| `{_shortened(m)}` | {m.what} | {found} | {verdict.seed if verdict.found else ''} |"


def table(subject_name: str, rows: list[str]) -> str:
    """A Markdown section: every mutation of one kernel and what found it."""
    missed = sum(1 for row in rows if "| not found: " in row)
    head = ["| statement | mutation | found as | seed |", "|---|---|---|---|"]
    return (
        "\n".join([f"## {subject_name}: {len(rows) - missed} of {len(rows)} found", "", *head, *rows]) + "\n"
    )


def _sections(page: str) -> dict[str, list[str]]:
    """The rows of every kernel's table, by the kernel's name."""
    found = {}
    for section in page.split("\n## ")[1:]:
        name = section[: section.index("\n")].rsplit(": ", 1)[0]
        found[name] = [line for line in section.split("\n") if line.startswith("| `")]
    return found


_ROW = re.compile(r"\| `(?P<statement>.*)` \| (?P<what>.*?) \| (?P<verdict>.*) \|")


def _kept(old: list[str], others: list[Mutation], statements: str) -> list[str] | None:
    """The old rows but those of `statements`, if they are of these mutations, in whose statements registers
    may have other names; None: they are not."""
    rows = [m for m in map(_ROW.fullmatch, old) if m and not re.search(statements, m["statement"])]
    then = [(_unnamed(row["statement"]), row["what"]) for row in rows]
    if then != [(_unnamed(_shortened(m)), m.what) for m in others]:
        return None
    return [
        f"| `{_shortened(m)}` | {m.what} | {row['verdict']} |" for m, row in zip(others, rows, strict=True)
    ]


def _unnamed(statement: str) -> str:
    return re.sub(r"%[a-z]+\d+", "%", statement).removesuffix("...")[:60]


def document(rows_of: dict[str, list[str]]) -> str:
    """The page, of each kernel's rows."""
    counts = {
        name: (len(rows), sum("| not found: " not in row for row in rows)) for name, rows in rows_of.items()
    }
    summary = "\n".join(f"| {name} | {count} | {found} |" for name, (count, found) in counts.items())
    text = f"""# Mutations of synchronisation that the emulator finds

Each kernel's PTX with one synchronisation instruction removed or altered, run with the seeds 0 to 5 until one
finds a fault or a wrong result. Of the small kernels of what is kept the arithmetic is altered too, and of
the compaction's also what counts. There a result is wrong if the tests' comparison with float64 fails; of
DlogitsOfKept and the kernels of terms, if a bit of a number or of a gradient differs. In the latter's GEMMs
one of every few statements is altered. The codes are those of tests/emulator/faults.py. Made by
`python3 -m tests.emulator.mutate`, which `--kernels` and `--statements` restrict to some rows;
tests/emulator/test_mutations.py runs the same and fails when a mutation is missed that has no reason here.

{OLDER} No kernel here has spare warps.

| kernel | mutations | found |
|---|---|---|
{summary}

"""
    return text + "\n".join(table(name, rows) for name, rows in rows_of.items())


def main() -> None:
    import argparse
    import tempfile
    from pathlib import Path

    from . import backward_kernels, compaction_kernels, forward_kernels, kept_logits_kernels, term_kernels
    from .mutation_kernels import KERNELS

    parser = argparse.ArgumentParser(description="write docs/emulator-mutations.md")
    parser.add_argument(
        "--kernels", default="", help="only of kernels whose name has this regular expression"
    )
    parser.add_argument("--statements", default="", help="only statements that have this regular expression")
    options = parser.parse_args()
    path = Path(__file__).parents[2] / "docs" / "emulator-mutations.md"
    old = _sections(path.read_text()) if path.exists() else {}
    modules = forward_kernels, backward_kernels, compaction_kernels, kept_logits_kernels, term_kernels
    subjects = [*KERNELS, *(subject for module in modules for subject in module.subjects())]
    rows_of = {subject.name: old.get(subject.name, []) for subject in subjects}
    for subject in subjects:
        if not re.search(options.kernels, subject.name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            emulated = subject.build(folder)
            mine = subject.mutates(emulated.ptx)
            everything = [m for m in mutations(emulated.ptx, subject.rules) if mine(m)]
            chosen = [m for m in everything if re.search(options.statements, _shortened(m))]
            kept = _kept(
                rows_of[subject.name], [m for m in everything if m not in chosen], options.statements
            )
            if kept is None:
                print(f"{subject.name}: other statements have changed, all are surveyed")
                chosen, kept = everything, []
            verdicts = survey(
                emulated, subject.check, subject.seeds, lambda m, some=chosen: m in some, subject.rules
            )
        fresh, before = iter([_row(v, subject.reason) for v in verdicts]), iter(kept)
        rows_of[subject.name] = [next(fresh if m in chosen else before) for m in everything]
        print(subject.name, *(v.found or "not found" for v in verdicts), flush=True)
        # After each kernel: a survey of all takes an hour.
        path.write_text(document(rows_of))


if __name__ == "__main__":
    main()
