"""From a candidate to the plan file by which ``guozhuang run`` starts it."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata

from guozhuang.lab.planner.reasons import described, obstacle, settings
from guozhuang.lab.planner.search import CAPS_MB, Arrangement, Candidate, product_type
from guozhuang.launch.options.plan_file import TrainingPlan

_STRATEGIES = ("ddp", "sharded", "sharded-gradients", "sharded-weights")  # by what is sharded, without other ways
_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


def training_plan(candidate: Candidate, precision: str, flash: bool, why: str, **prediction: float) -> TrainingPlan:
    """Return the plan file of a candidate that ``guozhuang run`` can start, which has no obstacle."""
    one = candidate.arrangement
    assert not obstacle(one), one
    sizes = {"pp": one.pipeline, "dp": one.data, "tp": one.tensor}
    layout = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    is_divided = one.tensor * one.pipeline > 1
    strategy = _STRATEGIES[one.sharding] if one.data > 1 and (one.sharding or not is_divided) else "hybrid"
    if one.num_ranks == 1:
        strategy = "single"
    return TrainingPlan(
        candidate.cluster.num_nodes,
        candidate.cluster.ranks_per_node,
        strategy=strategy,
        device=None if candidate.cluster.device is None else "cuda",
        layout=layout if is_divided else None,
        microbatches=one.num_micro_batches if one.pipeline > 1 else None,
        bucket_cap_mb=one.cap_mb if one.cap_mb != CAPS_MB[0] else None,
        schedule=None if one.pipeline == 1 else "1f1b" if one.interleave == 1 else "interleaved",
        in_the_script=tuple(_in_the_script(one, product_type(candidate.cluster, precision), flash)),
        why=f"{described(one)}; micro-batches {settings(one)}: {why}",
        date=datetime.date.today().isoformat(),
        versions=versions(),
        prediction={"step_s": candidate.step_s, "memory_bytes": candidate.memory_bytes, **prediction},
    )


def versions() -> dict[str, str]:
    """Return the versions of what makes a plan."""
    return {
        "guozhuang": metadata.version("guozhuang"),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
    }


def _in_the_script(one: Arrangement, products: str, flash: bool) -> list[str]:
    """Return what a script has to do itself for a plan, which no option of ``guozhuang run`` can."""
    is_again = one.recompute == "full"
    num = one.num_micro_batches
    of_a_copy = one.batch // one.data
    todo = [f"batches of {of_a_copy if one.pipeline > 1 else one.micro_batch} samples (gz.loader's batch_size)"]
    if one.pipeline == 1 and num > 1:
        how = (
            "without no_sync(): gradients are scattered after each"
            if one.sharding > 1
            else "all but the last in no_sync()"
        )
        todo.append(f"one optimizer step for every {num} batches, {how}; the loss divided by {num}")
    if is_again:
        todo.append("each layer inside torch.utils.checkpoint.checkpoint")
    elif one.recompute == "selective":
        todo.append(
            "the attention of each layer inside torch.utils.checkpoint.checkpoint, or by scaled_dot_product_attention"
        )
    if one.pipeline > 1:
        todo.append("loss= in gz.prepare, and model.step(x, y) in the loop")
    if one.interleave > 2:
        todo.append(f"cut= in gz.prepare, with {one.pipeline * one.interleave} stages")
    if flash:
        todo.append("attention by scaled_dot_product_attention")
    todo.append("weights in float32")
    if products in _AUTOCAST:
        cache = ", cache_enabled=False" if is_again else ""
        todo.append(f'forward and loss under torch.autocast("cuda", torch.{_AUTOCAST[products]}{cache})')
    if products == "fp16":
        todo.append("a GradScaler")
    if products == "tf32":
        todo.append('torch.set_float32_matmul_precision("high")')
    return todo
