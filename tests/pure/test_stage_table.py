"""What a comparison prints about the stages of a pipeline."""

from __future__ import annotations

import dataclasses
import json

from guozhuang.lab.results import MeasuredRound, Phases, RankRecord, StrategyRow
from guozhuang.lab.table import stage_lines
from guozhuang.records import build
from guozhuang.units import ABSENT, DASH
from guozhuang.world.layout import StageTimes

PHASES = Phases(0.0, 0.06, 0.04, None, 0.01)


def rank(number: int, *stages: StageTimes) -> RankRecord:
    none = (None, None, False, None, None, None, 0, "", {}, 1, "cpu", 10, 4)
    return RankRecord(number, 3, 1.0, PHASES, (1.0,), *none, stages=stages)


def test_each_stage_has_its_parts_its_times_and_the_idle_share_of_its_rank() -> None:
    """Two copies of a pipeline of two ranks with two stages each: copies are averaged, a rank's stages are added."""

    def stages(of: int, busy_s: float) -> tuple[StageTimes, StageTimes]:
        return (
            StageTimes(of, of, f"layer.{of}", f"layer.{of + 4}", 0.02, busy_s, "4 microbatches"),
            StageTimes(of + 2, of, "head", "head", None, 0.01, "4 microbatches"),
        )

    ranks = tuple(rank(i, *stages(i % 2, 0.02 + 0.02 * (i // 2))) for i in range(4))
    records = tuple(build(RankRecord, json.loads(json.dumps(dataclasses.asdict(each)))) for each in ranks)
    assert records == ranks
    measured = (MeasuredRound(1, 10.0, PHASES, records),)
    row = StrategyRow("pipeline", "", True, True, False, "", 1, 4, measured)
    assert stage_lines(row) == [
        ["0", f"layer.0 {DASH} layer.4", "20.0", "30.0", "60 %"],
        ["1", f"layer.1 {DASH} layer.5", "20.0", "30.0", "60 %"],
        ["2", "head", ABSENT, "10.0", "60 %"],
        ["3", "head", ABSENT, "10.0", "60 %"],
    ]
