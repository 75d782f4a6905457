"""A comparison that nobody ran, for tests of what is made of one."""

from __future__ import annotations

from guozhuang.lab.results import (
    ComparisonSettings,
    Difference,
    Phases,
    RankRecord,
    Results,
    RunFailure,
    StrategyRow,
    summarize_round,
)
from guozhuang.world.machine import Machine

MIB = 1 << 20
STEPS = 60
_ORDER = ("single", "ddp", "torch-ddp", "dp", "quantize8", "diloco", "none")


def record(
    rank: int, samples_per_s: float, batch_size: int, num_ranks: int, shift: float = 0.0, digest: str = "a"
) -> RankRecord:
    """One rank of a run in which all ranks together make ``samples_per_s``."""
    elapsed_s = STEPS * batch_size * num_ranks / samples_per_s
    step_s = elapsed_s / STEPS
    return RankRecord(
        rank=rank,
        num_steps=STEPS,
        elapsed_s=elapsed_s,
        phases=Phases(
            0.02 * step_s, 0.3 * step_s, 0.5 * step_s, None if num_ranks == 1 else 0.08 * step_s, 0.1 * step_s
        ),
        losses=tuple(1.4 / (1 + 0.05 * i) + shift + 0.01 * rank for i in range(STEPS + 5)),
        sent_bytes=0 if num_ranks == 1 else STEPS * 17 * MIB,
        peak_bytes=400 * MIB + rank * MIB,
        peak_whole_life=False,
        pss_bytes=300 * MIB,
        peak_device_bytes=None,
        main_share=None,
        gradient_bytes=17 * MIB,
        weights_digest=digest,
        metrics={"accuracy": 0.87 + shift} if rank == 0 else {},
        num_threads=2 // num_ranks,
        device="cpu",
        dataset_size=7000,
        batch_size=batch_size,
    )


def row(name: str, *speeds: float, digests: str = "aa", failure: RunFailure | None = None) -> StrategyRow:
    """A strategy whose rounds had these speeds in samples/s."""
    one_process = name in ("single", "dp")
    num_ranks = 1 if one_process else 2
    batch_size = 16 // num_ranks
    shift = 0.05 if name == "none" else 0.0
    rounds = [
        summarize_round(i + 1, [record(r, v, batch_size, num_ranks, shift, digests[r]) for r in range(num_ranks)])
        for i, v in enumerate(speeds)
    ]
    exact = name not in ("quantize8", "diloco", "none")
    return StrategyRow(
        name=name,
        summary=f"what {name} is",
        exact=exact,
        trains=name != "none",
        one_process=one_process,
        source="A paper <1>" if name == "ddp" else "",
        simplicity=_ORDER.index(name),
        num_processes=num_ranks,
        rounds=tuple(rounds),
        difference=Difference(3.1e-7, "encoder.0.weight", 2e-6, 4e-8)
        if exact and name != "single" and rounds
        else None,
        failure=failure,
    )


def comparison(*rows: StrategyRow, notes: tuple[str, ...] = (), **details: str | float) -> Results:
    """A comparison of these rows."""
    return Results(
        created="2026-01-02 03:04 UTC",
        command="guozhuang compare --workload text",
        workload="text",
        workload_details={"model": "bert-tiny", "parameters": 4_386_178, "dropout": 0.0, **details},
        settings=ComparisonSettings(
            num_ranks=2,
            num_steps=STEPS,
            num_warmup_steps=5,
            num_rounds=max((len(r.rounds) for r in rows), default=1),
            num_epochs=None,
            seed=0,
            threads_per_rank=1,
            batch_size=8,
            dataset_size=7000,
        ),
        machine=Machine("A CPU", 2, 8 << 30, (), "Linux 6", "3.11.2", "2.13.0+cpu", "0.1.0"),
        rows=rows,
        notes=notes,
        duration_s=61.0,
    )


def usual() -> Results:
    """Five strategies, of which one failed."""
    return comparison(
        row("single", 100, 104, 98),
        row(
            "dp",
            failure=RunFailure("rank 0: RuntimeError: replicas <b>fell</b> over\nsecond line", "/tmp/logs/dp.log", 1),
        ),
        row("ddp", 180, 186, 183),
        row("torch-ddp", 170, 172, 166),
        row("none", 200, 205, 199),
    )
