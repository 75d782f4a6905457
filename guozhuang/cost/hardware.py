"""What devices, links and whole machines can do by their data sheets, and the share of it that programs reach.

Sources, unless a row says otherwise: the tables of "Machine Learning Engineering" (S. Bekman, as of August 2026) and of
llm-analysis. Peaks are dense: vendors print twice as much, for sparse matrices. What a row calls unconfirmed was not found in a
source that could be read. Sizes of memory are binary (80 GB in a name are 80 GiB); programs see 1 to 6 % less.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from guozhuang.errors import UsageError, explain

GIB = float(1 << 30)

_GUIDE = "ml-engineering, 2026-08; llm-analysis"
_SHEET = "a third party's table of data sheets"


@dataclass(frozen=True)
class Device:
    """An accelerator, by its data sheet.

    Attributes:
        name: its name in this package: ``"A100-80"``.
        memory_bytes: size of its memory.
        bytes_per_s: rate of that memory.
        flops: dense peak in FLOP/s by number type: ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``; types that it
            does not have are absent.
        generation: of NVIDIA's: ``"volta"`` (and older), ``"ampere"`` (and Ada), ``"hopper"``, ``"blackwell"``; "" for others.
        link_bytes_per_s: of its link to the other devices of a node (NVLink or the like), in one direction; None without one.
        pcie_bytes_per_s: of its PCI Express slot, in one direction.
        watts: the most power that it takes; None if unknown.
        matmul_flops: FLOP/s of the best matrix product that was measured, in bf16; None if unknown.
        most_per_node: how many of them the largest common node has.
        source: where the numbers are from, and which of them are unconfirmed.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: Mapping[str, float] = field(hash=False)
    generation: str
    link_bytes_per_s: float | None = None
    pcie_bytes_per_s: float = 31e9
    watts: float | None = None
    matmul_flops: float | None = None
    most_per_node: int = 8
    source: str = _GUIDE


def _row(
    name: str, memory: float, rate: float, generation: str, peaks: str, link: float | None = None, pcie: float = 31,
    watts: float | None = None, best: float | None = None, most: int = 8, source: str = _GUIDE,
) -> Device:  # fmt: skip
    """Make a device from its row: GiB, GB/s, "type TFLOP/s ...", GB/s, GB/s, W, TFLOP/s."""
    words = peaks.split()
    flops = {kind: float(peak) * 1e12 for kind, peak in zip(words[::2], words[1::2], strict=True)}
    for kind, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if generation != "volta" and other in flops:
            flops.setdefault(kind, flops[other])
    return Device(
        name, memory * GIB, rate * 1e9, flops, generation, link and link * 1e9, pcie * 1e9, watts, best and best * 1e12, most,
        source,
    )  # fmt: skip


_A100 = "fp32 19.5 tf32 156 bf16 312"
_H100 = "fp32 67 tf32 494 bf16 989 fp8 1979"
_V100 = "fp32 15.7 fp16 125"
_ALL = (
    _row("P100", 16, 732, "volta", "fp32 10.6 fp16 21.2", 80, 15.8, 300,
         source=f"{_GUIDE}; memory rate, peaks and power unconfirmed"),
    _row("V100-16", 16, 900, "volta", _V100, 150, 15.8, 300, source=f"{_GUIDE}; power unconfirmed"),
    _row("V100-32", 32, 900, "volta", _V100, 150, 15.8, 300, most=16, source=f"{_GUIDE}; power unconfirmed"),
    _row("A100-40", 40, 1555, "ampere", _A100, 300, 31, 400, 271, 16),
    _row("A100-80", 80, 2039, "ampere", _A100, 300, 31, 400, 271, 16),
    _row("A100-PCIe-40", 40, 1555, "ampere", _A100, None, 31, 300, 253),
    _row("A100-PCIe-80", 80, 2039, "ampere", _A100, None, 31, 300, 253),
    _row("H100", 80, 3350, "hopper", _H100, 450, 63, 700, 794),
    _row("H100-PCIe", 80, 2000, "hopper", "fp32 51 tf32 378 bf16 756 fp8 1513", None, 63, 350,
         source=f"{_GUIDE}; all rates unconfirmed"),
    _row("H200", 141, 4800, "hopper", _H100, 450, 63, 700, 794),
    _row("B200", 180, 8000, "blackwell", "fp32 80 tf32 1125 bf16 2250 fp8 4500", 900, 63, 1000, 1745),
    _row("GB200", 186, 8000, "blackwell", "fp32 80 bf16 2500 fp8 5000", 900, 63, 1200, 1822, 72,
         f"{_GUIDE}; memory rate and fp32 as of B200"),
    _row("B300", 288, 8000, "blackwell", "bf16 2250 fp8 4500", 900, 63, None, 1769, source=f"{_GUIDE}; memory rate as of B200"),
    _row("L40S", 48, 864, "ampere", "fp32 91.6 tf32 183 bf16 362 fp8 733", None, 31, 350),
    _row("A10G", 24, 600, "ampere", "fp32 31.2 bf16 70"),
    _row("L4", 24, 300, "ampere", "fp32 30.3 bf16 121", source=f"{_SHEET}; the 16-bit peak unconfirmed"),
    _row("T4", 16, 320, "volta", "fp32 8.1 fp16 65", None, 15.8, 70, source=f"{_SHEET}; the 16-bit peak and power unconfirmed"),
    _row("RTX-3090", 24, 936, "ampere", "fp32 35.6 bf16 71", source=f"{_SHEET}; the 16-bit peak unconfirmed"),
    _row("RTX-4090", 24, 1008, "ampere", "fp32 82.6 bf16 165", source=f"{_SHEET}; the 16-bit peak unconfirmed"),
    _row("MI300X", 192, 5300, "", "fp32 163 bf16 1307", 448, 63, None, 667, source=f"{_GUIDE}; 51 % of the peak was measured"),
)  # fmt: skip

#: All devices, by their name here.
DEVICES: Mapping[str, Device] = {each.name: each for each in _ALL}


@dataclass(frozen=True)
class System:
    """A node as it is sold or rented.

    Attributes:
        device: the name of its devices.
        num_devices: how many of them a node has.
        network: the rate of its network in one direction, as a description says it: ``"ib=8x200gbit"``.
    """

    device: str
    num_devices: int
    network: str


#: Systems by name. Numbers of cards of DGX-1, DGX-2 and DGX A100 are unconfirmed.
SYSTEMS: Mapping[str, System] = {
    "dgx-1": System("V100-16", 8, "ib=4x100gbit"),
    "dgx-2": System("V100-32", 16, "ib=8x100gbit"),
    "dgx-a100-40": System("A100-40", 8, "ib=8x200gbit"),
    "dgx-a100": System("A100-80", 8, "ib=8x200gbit"),
    "dgx-h100": System("H100", 8, "ib=8x400gbit"),
    "dgx-h200": System("H200", 8, "ib=8x400gbit"),
    "p4d": System("A100-40", 8, "efa=4x100gbit"),
    "p4de": System("A100-80", 8, "efa=4x100gbit"),
    "p5": System("H100", 8, "efa=32x100gbit"),
    "p5en": System("H200", 8, "efa=16x200gbit"),
    "p6-b200": System("B200", 8, "efa=8x400gbit"),
}

#: Bytes/s in one direction of one device's NVLink, by generation, and of 16 lanes of PCI Express (3 unconfirmed).
NVLINK = {1: 80e9, 2: 150e9, 3: 300e9, 4: 450e9, 5: 900e9}
PCIE = {3: 15.8e9, 4: 31e9, 5: 63e9}
#: Bit/s of four lanes of InfiniBand.
INFINIBAND = {"edr": 100e9, "hdr": 200e9, "ndr": 400e9, "xdr": 800e9}
#: What TCP carries of the rate of an Ethernet, beside the headers of frames: at an MTU of 1,500 bytes, and on virtual links
#: between namespaces of one machine, which carry segments of up to 64 KiB with one header each.
TCP_SHARE, TCP_SHARE_VIRTUAL = 0.941, 0.998

_NOISE = re.compile(r"^(nvidia|amd|tesla|geforce|instinct|gpus?|rtx|nvl|hbm\w*|oam|tensor|core|gi?b?)$")


def named(name: str) -> list[Device]:
    """Return the devices that a name may mean: none, one, or several that differ in memory."""
    wanted = _parts(name)
    return [each for each in _ALL if _is_named(each, wanted)]


def device(name: str) -> Device:
    """Return the device of that name, in any common spelling: ``a100-80``, ``A100 80GB``, ``NVIDIA A100-SXM4-80GB``, ``4090``.

    Raises:
        UsageError: there is none, or several with different memory; the text names the nearest.
    """
    found = named(name)
    if len(found) == 1:
        return found[0]
    names = [each.name for each in found] or near(name, DEVICES)
    if found:
        raise UsageError(
            explain("this device comes with different memory", value=name, fix=f"say {' or '.join(names)}")
        )
    meant = f"did you mean {' or '.join(names)}? " if names else ""
    raise UsageError(explain("no such device", value=name, fix=f"{meant}known are {', '.join(DEVICES)}"))


def near(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three of the known words that a mistyped one may have meant, the nearest first."""
    by_lower = {each.lower(): each for each in known}
    digits = re.sub(r"(?<=\d)o|o(?=[\do]*\d)", "0", word.lower())  # H1O0
    digits = re.sub(r"(?<=\d)o", "0", digits)
    return [by_lower[each] for each in difflib.get_close_matches(digits, by_lower, 3, 0.65)]


def _parts(name: str) -> tuple[str, bool, str]:
    """Return what tells devices apart in a name: model, whether it is the PCI Express form, memory in GB or ""."""
    spaced = re.sub(r"(?<=\d)\s*gi?b?\b|sxm\d?\b|^rtx(?=\d)|[-_ ]+", " ", name.lower())
    words = [each for each in spaced.split() if not _NOISE.match(each)]
    is_pcie = any(each.startswith("pcie") for each in words)
    model, *rest = [each for each in words if not each.startswith("pcie")] or [""]
    return model, is_pcie, rest[0] if rest else ""


def _is_named(each: Device, wanted: tuple[str, bool, str]) -> bool:
    model, is_pcie, memory = _parts(each.name)
    alike = (model, is_pcie) == wanted[:2] or (model == wanted[0] and wanted[1] and each.link_bytes_per_s is None)
    return alike and wanted[2] in ("", memory or f"{each.memory_bytes / GIB:.0f}")
