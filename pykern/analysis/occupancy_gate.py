"""``--gate`` and ``--diff``: conditions on kernels, and two builds compared, for scripts and CI."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pykern.analysis.occupancy import Occupancy
from pykern.analysis.occupancy_sources import Case
from pykern.errors import ArgumentError

Value = float | int | None

# name -> (what it is, how it is read). A larger number is better only for occupancy, blocks and warps.
FIELDS: dict[str, tuple[str, Callable[[Case, Occupancy], Value]]] = {
    "regs": ("registers a thread", lambda case, _: case.config.regs),
    "threads": ("threads a block", lambda case, _: case.config.threads),
    "smem": ("static + dynamic shared bytes a block", lambda case, _: case.config.smem),
    "static_smem": ("static shared bytes a block", lambda case, _: case.config.static_smem),
    "dyn_smem": ("dynamic shared bytes a block", lambda case, _: case.config.dyn_smem),
    "barriers": ("named barriers a block", lambda case, _: case.config.barriers),
    "spills": ("bytes of spill stores and loads", lambda case, _: case.facts.spills if case.facts else None),
    "spill_stores": ("bytes of spill stores", lambda case, _: case.facts.spill_stores if case.facts else None),
    "spill_loads": ("bytes of spill loads", lambda case, _: case.facts.spill_loads if case.facts else None),
    "frame": ("bytes of stack frame a thread", lambda case, _: case.facts.frame if case.facts else None),
    "local": ("bytes of all local loads and stores", lambda case, _: _local(case)),
    "occupancy": ("share of the SM's warps, 0 to 1", lambda _, result: result.occupancy),
    "achieved": ("measured share of the SM's warps, 0 to 1 (--ncu)", lambda case, _: case.achieved),
    "blocks": ("blocks an SM", lambda _, result: result.blocks),
    "warps": ("warps an SM", lambda _, result: result.warps),
}
MORE_IS_BETTER = ("occupancy", "blocks", "warps")
COMPARED = ("regs", "static_smem", "barriers", "spills", "frame", "blocks", "occupancy")
_WORSE_IF = ("occupancy", "spills", "frame")  # what makes a build worse; registers alone cost nothing

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}
_CONDITION = re.compile(r"^\s*([a-z_]+)\s*(<=|>=|==|!=|<|>)\s*(\d+(?:\.\d+)?)\s*(%|KiB|KB|B)?\s*$")
_UNITS = {"%": 0.01, "KiB": 1024, "KB": 1024, "B": 1, None: 1}


def _local(case: Case) -> Value:
    facts = case.facts
    if facts is None or facts.local_stores is None:
        return None
    return facts.local_stores + (facts.local_loads or 0)


@dataclass(frozen=True)
class Condition:
    """``name operator limit``."""

    name: str
    operator: str
    limit: float
    text: str

    def holds(self, case: Case, result: Occupancy) -> bool:
        """Whether the condition holds; ArgumentError when the source does not say."""
        value = FIELDS[self.name][1](case, result)
        if value is None:
            raise ArgumentError(f"--gate {self.text}", f"no {self.name} for {case.name}", "a source that says it")
        return _OPERATORS[self.operator](value, self.limit)


def parse_gate(text: str) -> list[Condition]:
    """Conditions joined by commas or ``and``: ``regs<=128, spills==0, occupancy>=50%``."""
    conditions = []
    for part in re.split(r",|\band\b", text):
        match = _CONDITION.match(part)
        if not match or match[1] not in FIELDS:
            names = ", ".join(FIELDS)
            raise ArgumentError("--gate", repr(part.strip()), f"NAME OP NUMBER; OP <= >= == != < >; NAME {names}")
        limit = float(match[3]) * _UNITS[match[4]]
        conditions.append(Condition(match[1], match[2], limit, part.strip()))
    return conditions


@dataclass(frozen=True)
class Verdict:
    """One condition on one kernel."""

    kernel: str
    cc: str
    condition: str
    value: Value
    ok: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"kernel": self.kernel, "cc": self.cc, "gate": self.condition, "value": self.value, "ok": self.ok}


def apply_gate(conditions: list[Condition], case: Case, result: Occupancy) -> list[Verdict]:
    """The verdict of each condition on one kernel."""
    return [
        Verdict(case.name, case.cc, c.text, FIELDS[c.name][1](case, result), c.holds(case, result))
        for c in conditions
    ]


@dataclass(frozen=True)
class Change:
    """One kernel of two builds: values by field as (old, new); ``state`` is worse, better, same, changed, added or
    removed. Worse: less occupancy, or more spills or stack; changed: other numbers moved."""

    kernel: str
    cc: str
    state: str
    values: dict[str, tuple[Value, Value]]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        values = {name: list(pair) for name, pair in self.values.items()}
        return {"kernel": self.kernel, "cc": self.cc, "state": self.state, "values": values}


def compare(old: list[tuple[Case, Occupancy]], new: list[tuple[Case, Occupancy]]) -> list[Change]:
    """Kernels of two builds, matched by name and compute capability, in the order of the new build."""
    before = {(case.name, case.cc): (case, result) for case, result in old}
    after = {(case.name, case.cc): (case, result) for case, result in new}
    changes = []
    for key, pair in after.items():
        changes.append(_change(key, before.get(key), pair))
    changes += [_change(key, pair, None) for key, pair in before.items() if key not in after]
    return changes


def _change(
    key: tuple[str, str], old: tuple[Case, Occupancy] | None, new: tuple[Case, Occupancy] | None
) -> Change:
    values = {
        name: (FIELDS[name][1](*old) if old else None, FIELDS[name][1](*new) if new else None) for name in COMPARED
    }
    if old is None or new is None:
        return Change(*key, "added" if old is None else "removed", values)
    signs = {_sign(name, *values[name]) for name in _WORSE_IF}
    if -1 in signs:
        state = "worse"
    elif 1 in signs:
        state = "better"
    else:
        state = "same" if all(a == b for a, b in values.values()) else "changed"
    return Change(*key, state, values)


def _sign(name: str, old: Value, new: Value) -> int:
    if old is None or new is None or old == new:
        return 0
    return 1 if (new > old) == (name in MORE_IS_BETTER) else -1
