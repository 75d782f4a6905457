"""Prices, which are the user's and carry a date; the parts list of a machine, and what contradicts itself in it."""

from __future__ import annotations

import csv
import datetime
import io
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guozhuang import units
from guozhuang.cost.hardware import device
from guozhuang.errors import UsageError, explain

#: What a part is: its kinds, in the order of a parts list.
KINDS = ("device", "processor", "memory", "drive", "network", "rest")
#: Machines of more nodes are not looked at.
MOST_NODES = 1024
_NUMBERS = ("price", "count", "total", "lanes", "slots", "gigabytes", "gbit", "devices", "sockets", "per_hour")
_FORM = "see docs/plan.md for its form"


@dataclass(frozen=True)
class PricedPart:
    """A part of a machine that can be bought.

    Attributes:
        name: what the seller calls it.
        kind: one of ``KINDS``; "rest" is all that a node needs once: board, case, fans, power.
        price: of one.
        device: the name in the hardware table, of a device.
        count: how many the listed machine has; None: it is not in that machine.
        total: what the list says that these cost; None: it does not say.
        lanes: PCI Express lanes that it takes, or that a processor has.
        slots: memory modules for which a processor has room.
        gigabytes: size of a memory module.
        gbit: Gbit/s of a network card.
        devices: for how many devices there is room in a node ("rest").
        sockets: for how many processors there is room in a node ("rest").
    """

    name: str
    kind: str
    price: float
    device: str = ""
    count: int | None = None
    total: float | None = None
    lanes: int = 0
    slots: int = 0
    gigabytes: float = 0.0
    gbit: float = 0.0
    devices: int = 8
    sockets: int = 1


@dataclass(frozen=True)
class Prices:
    """What is in a file of prices.

    Attributes:
        date: the day of the prices, as YYYY-MM-DD; the oldest one that the file names.
        currency: three letters: ``"CNY"``.
        rents: price of an hour of one device, by its name in the hardware table.
        parts: what can be bought.
        source: the file.
    """

    date: str
    currency: str
    rents: Mapping[str, float]
    parts: tuple[PricedPart, ...]
    source: str

    def rent(self, name: str) -> float:
        """Return the price of an hour of a device.

        Raises:
            UsageError: the file has none for it.
        """
        if name not in self.rents:
            what = f"{self.source} has no rent of the device {name}"
            there = ", ".join(self.rents) or "of none"
            raise UsageError(explain(what, fix=f"add it with its date; there are those of {there}"))
        return self.rents[name]

    @property
    def listed(self) -> tuple[PricedPart, ...]:
        """The parts of the machine that the file lists: those with a count."""
        return tuple(part for part in self.parts if part.count is not None)


def read_prices(path: str) -> Prices:
    """Return the prices of a TOML file, or of a CSV file with a header; lines that begin with # are comments in both.

    Raises:
        UsageError: it cannot be read, has no date or no currency, or a row of it cannot be understood; the text names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        document = _of_csv(text) if path.lower().endswith(".csv") else tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        what = f"the prices cannot be read: {getattr(error, 'strerror', None) or error}"
        raise UsageError(explain(what, value=path, fix="give the path of a TOML or CSV file")) from error
    except (tomllib.TOMLDecodeError, csv.Error) as error:
        raise UsageError(explain(f"{path} cannot be read: {error}", fix=_FORM)) from error
    for kind in ("part", "rent"):
        tables = document.get(kind, [])
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            raise UsageError(explain(f"{path}: {kind} is no list of tables, [[{kind}]]", value=tables, fix=_FORM))
    rows = [*document.get("part", ()), *({**each, "kind": "rent"} for each in document.get("rent", ()))]
    if unknown := document.keys() - {"part", "rent", "date", "currency"}:
        raise UsageError(explain(f"{path} has an unknown entry", value=", ".join(sorted(unknown)), fix=_FORM))
    dates = {str(each["date"]) for each in (document, *rows) if each.get("date")}
    if not dates:
        what = f"{path} has prices without a date, and prices change within months"
        raise UsageError(explain(what, fix='say when they were true: date = 2026-11-23, or a column "date"'))
    for each in dates:
        _check_date(each, path)
    currencies = {str(each["currency"]).upper() for each in (document, *rows) if each.get("currency")}
    if len(currencies) != 1:
        what = f"{path} needs one currency for all of its prices"
        found = ", ".join(sorted(currencies)) or "none"
        raise UsageError(explain(what, value=found, fix='write currency = "CNY"'))
    parts, rents = [], {}
    for row in rows:
        values = {
            key: value for key, value in row.items() if key not in ("date", "currency") and value not in ("", None)
        }
        values = {key: _number(key, value, path) if key in _NUMBERS else str(value) for key, value in values.items()}
        if values.pop("kind", "") == "rent":
            rents[device(_needed(values, "device", path)).name] = _needed(values, "per_hour", path)
        else:
            parts.append(_part({**values, "kind": row.get("kind", "")}, path))
    return Prices(min(dates), currencies.pop(), rents, tuple(parts), path)


def _of_csv(text: str) -> dict[str, Any]:
    text = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True, strict=True)
    rows = list(reader)
    if more := next((row[None] for row in rows if None in row), None):
        raise csv.Error(f"a row has values beyond the columns {', '.join(reader.fieldnames or ())}: {more}")
    rows = [{(key or "").strip(): (value or "").strip() for key, value in row.items()} for row in rows]
    return {
        "part": [row for row in rows if row.get("kind") != "rent"],
        "rent": [row for row in rows if row.get("kind") == "rent"],
    }


def _check_date(text: str, path: str) -> None:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        what = f"{path}: the date of prices cannot be read"
        raise UsageError(explain(what, value=text, fix="write it as 2026-11-23")) from None


def _number(key: str, value: object, path: str) -> float:
    try:
        found = float(str(value).replace(",", "").replace("_", ""))
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise UsageError(explain(f"{path}: {key} is no number of at least 0", value=value, fix=_FORM))
    return int(found) if found == int(found) else found


def _needed(values: Mapping[str, Any], key: str, path: str) -> Any:
    if key not in values:
        name = values.get("name") or values.get("device") or "a row"
        raise UsageError(explain(f"{path}: {name} has no {key}", fix=f"add it; {_FORM}"))
    return values[key]


def _part(values: dict[str, Any], path: str) -> PricedPart:
    name, kind = _needed(values, "name", path), values["kind"]
    if kind not in KINDS:
        raise UsageError(
            explain(f"{path}: {name} is of no known kind", value=kind, fix=f"choose {', '.join(KINDS)}, rent")
        )
    if unknown := values.keys() - PricedPart.__dataclass_fields__.keys():
        raise UsageError(explain(f"{path}: {name} has an unknown entry", value=", ".join(sorted(unknown)), fix=_FORM))
    _needed(values, "price", path)
    if kind == "device":
        values["device"] = device(_needed(values, "device", path)).name
        values.setdefault("lanes", 16)
    return PricedPart(**values)


@dataclass(frozen=True)
class Purchase:
    """Nodes of equal parts, and their price.

    Attributes:
        num_nodes: how many nodes.
        parts: the parts of one node with their counts.
    """

    num_nodes: int
    parts: tuple[tuple[PricedPart, int], ...]

    @property
    def price(self) -> float:
        """The price of all nodes."""
        return self.num_nodes * sum(part.price * count for part, count in self.parts)

    def count(self, kind: str) -> int:
        """Return how many parts of a kind a node has."""
        return sum(count for part, count in self.parts if part.kind == kind)

    def total(self, kind: str, attribute: str) -> float:
        """Return the sum of an attribute over the parts of one kind of a node: ``total("memory", "gigabytes")``."""
        return sum(float(getattr(part, attribute)) * count for part, count in self.parts if part.kind == kind)

    @property
    def device_name(self) -> str:
        """The name of its devices in the hardware table; empty without devices."""
        return next((part.device for part, count in self.parts if part.kind == "device"), "")

    @property
    def lanes_short(self) -> int:
        """How many PCI Express lanes devices, drives and network cards of a node need beyond those of its processors."""
        if not self.total("processor", "lanes"):
            return 0
        needed = sum(self.total(kind, "lanes") for kind in ("device", "drive", "network"))
        return max(0, int(needed - self.total("processor", "lanes")))

    @property
    def description(self) -> str:
        """The description of this cluster, as ``--on`` takes it."""
        network = next((part for part, count in self.parts if part.kind == "network"), None)
        link = "" if self.num_nodes == 1 or network is None else f",{network.gbit * self.count('network'):g}gbit"
        return f"{self.num_nodes}x{self.count('device')}x{self.device_name}{link}"

    def named(self) -> str:
        """Return its parts in a line."""
        nodes = f"{self.num_nodes} nodes of " if self.num_nodes > 1 else ""
        return nodes + ", ".join(f"{count} {units.TIMES} {part.name}" for part, count in self.parts)


def listed_machine(prices: Prices, budget: float | None) -> tuple[Purchase, list[str]]:
    """Return the machine that a file lists, and what contradicts itself in the list.

    Where the count of a part and the sum beside it contradict, the count that the sum pays for is taken if it is whole.
    """
    findings, parts = [], []
    for part in prices.listed:
        count = part.count or 0
        if part.total is not None and part.total != part.price * count:
            paid = part.total / part.price if part.price else 0.0
            findings.append(_contradiction(part, count, paid, prices, budget))
            count = int(paid) if paid == int(paid) and paid > 0 else count
        parts.append((part, count))
    machine = Purchase(1, tuple(parts))
    slots, modules = machine.total("processor", "slots"), machine.count("memory")
    for number in sorted({modules, *(part.count or 0 for part in prices.listed if part.kind == "memory")}):
        if slots and number > slots:
            findings.append(f"{number} memory modules do not fit: the processors of a node have {slots:g} slots.")
    return machine, findings + limits_of(machine)


def _contradiction(part: PricedPart, count: int, paid: float, prices: Prices, budget: float | None) -> str:
    text = (
        f"{part.name}: {count} {units.TIMES} {part.price:,.0f} are {count * part.price:,.0f}, and the list says "
        f"{part.total:,.0f}, the price of {paid:g}."
    )
    others = sum(
        (each.total if each.total is not None else each.price * (each.count or 0))
        for each in prices.listed
        if each != part
    )
    for number in (paid, count):
        total = others + number * part.price
        over = "" if budget is None or total <= budget else f", {total - budget:,.0f} over the budget"
        text += f" With {number:g} the machine costs {total:,.0f}{over}."
    return text


def limits_of(machine: Purchase) -> list[str]:
    """Return what a machine cannot do at full speed, or not at all."""
    found = []
    if machine.lanes_short:
        takes = {kind: int(machine.total(kind, "lanes")) for kind in ("device", "drive", "network")}
        counts = {kind: machine.count(kind) for kind in takes}
        uses = ", ".join(
            f"{counts[kind]} {kind}{'s take' if counts[kind] > 1 else ' takes'} {lanes}"
            for kind, lanes in takes.items()
            if lanes
        )
        found.append(
            f"PCI Express: the processors have {machine.total('processor', 'lanes'):g} lanes, and {uses}: "
            f"{machine.lanes_short} too many. Devices fall to 8 lanes, or drives hang on the chipset."
        )
    if machine.num_nodes == 1 and not machine.count("network"):
        found.append("No network card: it stays one node.")
    return found


def purchases(prices: Prices, most: float) -> list[Purchase]:
    """Return the machines that can be made of the parts of a file for at most ``most``, the cheapest first.

    A node has 1, 2, 4 or 8 devices of one kind, the fewest processors with lanes for them, as much memory as its devices have
    together, one drive (which may hang on the chipset) and one of each "rest"; nodes are 1, 2, 4, ... ``MOST_NODES`` and have a
    network card each if they are several.
    """
    by_kind = {kind: [part for part in prices.parts if part.kind == kind] for kind in KINDS}
    found = []
    rest = tuple((part, 1) for part in by_kind["rest"])
    room = min((part.devices for part, _ in rest), default=8)
    sockets = min((part.sockets for part, _ in rest), default=1)
    drive = min(by_kind["drive"], key=lambda part: part.price, default=None)
    for part in by_kind["device"]:
        for count in (number for number in (1, 2, 4, 8) if number <= room):
            for network in (None, *by_kind["network"]):
                inside = [(part, count), *([(drive, 1)] if drive else []), *([(network, 1)] if network else [])]
                node = _node(inside, rest, by_kind, count * device(part.device).memory_bytes / 1e9, sockets)
                num_nodes = 1 if network is None else 2
                while node is not None and num_nodes <= MOST_NODES and Purchase(num_nodes, node).price <= most:
                    found.append(Purchase(num_nodes, node))
                    if network is None:
                        break
                    num_nodes *= 2
    return sorted(found, key=lambda one: one.price)


def _node(
    inside: Iterable[tuple[PricedPart, int]],
    rest: tuple[tuple[PricedPart, int], ...],
    by_kind: Mapping[str, list[PricedPart]],
    gigabytes: float,
    sockets: int,
) -> tuple[tuple[PricedPart, int], ...] | None:
    """Return the cheapest node with these devices, drives and cards; None if no processors have lanes and slots for it."""
    best: Purchase | None = None
    for processor in (*by_kind["processor"], *(() if by_kind["processor"] else (None,))):
        for module in (*by_kind["memory"], *(() if by_kind["memory"] else (None,))):
            for number in range(1, sockets + 1):
                parts = [*inside, *([(processor, number)] if processor else []), *rest]
                if module is not None and module.gigabytes:
                    parts.append((module, -int(-gigabytes // module.gigabytes)))
                made = Purchase(1, tuple(sorted(parts, key=lambda row: KINDS.index(row[0].kind))))
                slots = made.total("processor", "slots")
                fits = made.lanes_short <= made.total("drive", "lanes") and (not slots or made.count("memory") <= slots)
                if fits and (best is None or made.price < best.price):
                    best = made
    return None if best is None else best.parts


def amount(text: str) -> tuple[float, str]:
    """Return an amount of money and its currency, of ``1000000CNY``, ``5,000 USD`` or ``1.2MUSD``.

    Raises:
        UsageError: it is of another form, or not above 0.
    """
    match = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([kKM]?)\s*([A-Za-z]{3})\s*", text)
    value = (
        float(match[1].replace(",", "").replace("_", "")) * {"": 1, "k": 1e3, "M": 1e6}[match[2].replace("K", "k")]
        if match
        else 0
    )
    if match is None or value <= 0:
        what = "--budget is an amount of money with its currency"
        raise UsageError(explain(what, value=text, fix="write it as 1000000CNY or 5000USD"))
    return value, match[3].upper()
