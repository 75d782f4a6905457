"""Programs from a grammar: a strategy and a number give the same model and the same script, on every machine.

    program = make_program("tp=2", 17)
    print(program)              # what the model is made of, and what the script does with it

A program names elements. The model of them is in grown.py, the script in generated.py. ``random.Random`` alone chooses, in one
order, so that a program stays what it is as long as the tables here and in grown.py do.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from guozhuang.world.layout import Layout
from tests.threads.grown import DROPOUT, HOOKS, OF_SEQUENCES, OUTPUTS, PARTS, TIES, WHOLE

USUAL = "none"
# What a script does, in kinds of which a program has one each: the first is what scripts do that do nothing else.
HABITS: dict[str, tuple[str, ...]] = {
    "accumulates": (USUAL, "in gz.accumulate", "in windows of gz.accumulate", "in several backwards", "in no_sync"),
    "clips": (
        *(USUAL, "by gz.clip_grad_norm_", "by clip_grad_norm_", "by clip_grad_value_", "groups", "by hand"),
        "averaged gradients by hand",
    ),
    "skips": (USUAL, "a step", "a batch", "a backward", "gradients after clipping"),
    "freezes": (USUAL, "parts before prepare", "parts in turns", "the head from the second step"),
    "optimizers": (USUAL, "two", "two in turns", "two groups", "a closure", "a group added later"),
    "evaluates": (USUAL, "after steps", "inside of a window", "in inference_mode", "without eval()"),
    "saves": (USUAL, "the model", "the optimizer too", "and goes on", "and goes back"),
    "loss": (
        USUAL,
        "of two forwards",
        "in two backwards",
        "with a penalty on weights",
        "with a slope",
        "by functional_call",
    ),
    "averages": (USUAL, "a copy", "AveragedModel"),
    "changes": (USUAL, "the rate", "weights after the step", "the rate by a scheduler", "zeroed gradients kept"),
}
STEPPERS = ("sgd", "momentum", "adamw", "amsgrad", "rmsprop", "adagrad", "nadam", "lamb", "adafactor", "lbfgs")
UNUSUAL_STEPPERS = ("lamb", "adafactor", "lbfgs")

DATA = ("ddp", "the class", "sharded", "sharded-gradients", "sharded-weights", "sparse-rows")
FULLY = ("sharded-gradients", "sharded-weights")
#: Strategies by what a program is called after: what is prepared, and how the ranks lie.
LAYOUTS: dict[str, tuple[str, Layout]] = {
    "pp=2": ("hybrid", Layout(pp=2)),
    "tp=2": ("hybrid", Layout(tp=2)),
    "pp=2,tp=2": ("hybrid", Layout(pp=2, tp=2)),
    "pp=2,dp=2": ("hybrid", Layout(pp=2, dp=2)),
    "dp=2,tp=2": ("hybrid", Layout(dp=2, tp=2)),
    "sharded pp=2,dp=2": ("sharded", Layout(pp=2, dp=2)),
    "sharded dp=2,tp=2": ("sharded", Layout(dp=2, tp=2)),
}
STRATEGIES = (*DATA, *LAYOUTS)


@dataclass(frozen=True)
class Program:
    """A model and a script.

    Attributes:
        strategy: under which ranks run it; with ``number`` it makes the program again.
        number: which of the strategy's programs it is.
        layout: of the ranks.
        parts: of the model, in order.
        ties: which weights are one.
        hooks: of the model.
        output: what the model returns.
        has_tokens: whether samples are sequences.
        stepper: the optimizer's kind.
        habits: what the script does, by kind.
        num_steps: how many steps it has.
        cut: where the second stage of a pipeline begins.
    """

    strategy: str
    number: int
    layout: Layout
    parts: tuple[str, ...]
    ties: str
    hooks: str
    output: str
    has_tokens: bool
    stepper: str
    habits: Mapping[str, str]
    num_steps: int
    cut: str

    @property
    def elements(self) -> list[str]:
        """What it is made of, but for what is usual."""
        more = {f"ties: {self.ties}", f"hooks: {self.hooks}", f"output: {self.output}", f"optimizer: {self.stepper}"}
        habits = {f"{kind}: {habit}" for kind, habit in self.habits.items() if habit != USUAL}
        return sorted({*self.parts} | habits | {each for each in more if not each.endswith(USUAL)})

    def __str__(self) -> str:
        rows = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in ("strategy", "number", "habits")]
        rows += [(kind, habit) for kind, habit in self.habits.items() if habit != USUAL]
        text = "".join(f"    {name}: {', '.join(v) if isinstance(v, tuple) else v}\n" for name, v in rows)
        return f"make_program({self.strategy!r}, {self.number})\n{text}"


# What runs on processes alone: there ``gz.prepare`` refuses several optimizers where a strategy takes one; and DTensor's own
# collectives are functions of C++, which know the groups of processes alone.
_SEVERAL = {"optimizers: two", "optimizers: two in turns"}
_COLLECTIVE = {*(f"clips: {how}" for how in HABITS["clips"][1:]), "loss: with a penalty on weights"}
NOT_ON_THREADS: dict[str, set[str]] = {
    "sparse-rows": _SEVERAL,
    **{strategy: {*_SEVERAL, *_COLLECTIVE, "skips: gradients after clipping"} for strategy in FULLY},
}

_ALL_ELEMENTS = (
    *PARTS,
    *OF_SEQUENCES,
    *(f"ties: {each}" for each in dict.fromkeys(TIES) if each != USUAL),
    *(f"hooks: {each}" for each in dict.fromkeys(HOOKS) if each != USUAL),
    *(f"output: {each}" for each in OUTPUTS),
    *(f"optimizer: {each}" for each in STEPPERS),
    *(f"{kind}: {each}" for kind, habits in HABITS.items() for each in habits[1:]),
)

#: What a strategy refuses in every program, and why.
_COPIES = "a divided model is not copied"
_MICROBATCHES = "a pipeline calls the model's parts once for each microbatch"
_HAS_STAGES = {
    "averages: a copy": _COPIES,
    "averages: AveragedModel": _COPIES,
    "optimizer: lbfgs": "stages hold some of the weights each",
    "a layer called twice": "a module under two names is called on two stages, and is whole on one",
    "loss: with a penalty on weights": "a sum over this stage's weights is not one over all",
    "loss: with a slope": "a pipeline has no gradients of gradients",
    "loss: in two backwards": "a pipeline frees activations after the first one",
    "batch statistics": "BatchNorm takes those of each microbatch",
    "branches in turns": _MICROBATCHES,
    "draws of its own generator": _MICROBATCHES,
    "a buffer that counts": _MICROBATCHES,
    "a buffer that averages": _MICROBATCHES,
    "spectral_norm": _MICROBATCHES,
    "output: a loss in an attribute": "the last stage alone has it",
}
_HAS_SLICES = {
    "averages: a copy": _COPIES,
    "averages: AveragedModel": _COPIES,
    "optimizer: lbfgs": "ranks hold slices of the weights",
    "loss: with a penalty on weights": "a sum over a slice is not one over the weight",
}
_IS_FULLY = {
    "a parameter without a dimension": "fully_shard divides along the first dimension",
    "optimizer: lbfgs": "it searches along a line through all weights at once",
    "optimizer: adafactor": "it keeps a sum per row and column",
    "hooks: of a parameter": "fully_shard replaces parameters",
}
_AVERAGES_LATE = {"clips: by hand": "p.grad is the rank's own"}
ALWAYS_REFUSED: dict[str, dict[str, str]] = {
    "sharded": {**_AVERAGES_LATE, "optimizer: lbfgs": "each rank steps a part"},
    **dict.fromkeys(FULLY, _IS_FULLY),
    **{
        name: (_HAS_STAGES if layout.pp > 1 else {})
        | (_HAS_SLICES if layout.tp > 1 else {})
        | (_AVERAGES_LATE if of == "sharded" else {})
        for name, (of, layout) in LAYOUTS.items()
    },
}


# Faults that are known and not mended yet: what programs say that fail by them, and the cause.
KNOWN: dict[str, str] = {
    r"mat1 and mat2 shapes cannot be multiplied": "tensor parallelism pairs the layers of the first forward of a kind; a later "
    "one that calls other layers fails in a product of matrices, without words about it",
}


def elements_of(strategy: str, on_threads: bool = True) -> list[str]:
    """All elements that programs of a strategy are made of."""
    left_out = NOT_ON_THREADS.get(strategy, set()) if on_threads else set()
    if strategy in LAYOUTS and LAYOUTS[strategy][1].dp > 1:
        left_out = left_out | {"batch statistics"}  # each copy takes those of its own rows, as under PyTorch's DDP
    return [each for each in _ALL_ELEMENTS if each not in left_out]


def make_program(strategy: str, number: int, on_threads: bool = True) -> Program:
    """Choose a program. Its number says one element, so that each comes; what is always refused comes in no other way."""
    draw = random.Random(f"{strategy} {number} {on_threads}")
    elements, refused = elements_of(strategy, on_threads), ALWAYS_REFUSED.get(strategy, {})
    must = elements[number % len(elements)]

    def one_of(kind: str, choices: Sequence[str]) -> str:
        names = {f"{kind}: {each}" if kind else each: each for each in choices}
        if must in names:
            return names[must]
        names = {n: each for n, each in names.items() if each == USUAL or (n in elements and n not in refused)}
        return draw.choice([each for each in choices if each in names.values()] or [USUAL])

    layout = (
        LAYOUTS[strategy][1] if strategy in LAYOUTS else Layout(dp=draw.choice((2, 2, 2, 3, 4) if on_threads else (2,)))
    )
    has_tokens = draw.random() < 0.4 or must in OF_SEQUENCES
    usual = [each for each in PARTS if each in elements and each not in refused]
    parts = [draw.choice(usual) for _ in range(draw.choice((2, 3, 3, 4)))]
    if layout.tp > 1:  # there has to be something to divide
        parts[0] = draw.choice(("a residual block", "checkpointing"))
    if (has_tokens and draw.random() < 0.5) or must in OF_SEQUENCES:
        parts[-1] = one_of("", tuple(OF_SEQUENCES))
    if not on_threads and layout.dp == 1 and draw.random() < 0.5:
        parts[-1] = DROPOUT
    if must in PARTS:
        parts[-1] = must
    chosen = {*draw.sample(list(HABITS), draw.choice((0, 1, 2, 2, 3, 4))), must.partition(": ")[0]}
    habits = {kind: one_of(kind, HABITS[kind][1:]) if kind in chosen else USUAL for kind in HABITS}
    common = [each for each in STEPPERS if each not in UNUSUAL_STEPPERS]
    stepper = one_of("optimizer", STEPPERS if must.startswith("optimizer:") else common)
    if habits["loss"] == "with a slope":  # of which PyTorch's SyncBatchNorm and attention on CPUs have none
        parts = [each if each not in ("batch statistics", "attention") else "RMSNorm" for each in parts]
    if habits["optimizers"] == "a closure" and must.startswith(("accumulates", "clips", "skips", "saves")):
        habits["optimizers"] = USUAL
    if stepper == "lbfgs":
        habits["optimizers"] = "a closure"
    if habits["optimizers"] == "a closure":  # which computes the batch itself
        habits |= {"accumulates": USUAL, "clips": USUAL, "skips": USUAL, "saves": USUAL}
    if (
        habits["saves"] == "and goes on" and habits["optimizers"] == "a group added later"
    ):  # whose group the new one lacks
        habits |= {"optimizers": USUAL} if must.startswith("saves") else {"saves": USUAL}
    if must.startswith("clips") and habits["skips"] != USUAL:
        habits["skips"] = USUAL
    if habits["skips"] == "gradients after clipping":
        habits["clips"] = "by gz.clip_grad_norm_"
    if habits["evaluates"] == "inside of a window" and habits["accumulates"] == USUAL:
        habits["accumulates"] = "in gz.accumulate"
    cut = draw.choice([f"parts.{i}" for i, each in enumerate(parts) if i and each in WHOLE] or ["last"])
    return Program(
        strategy,
        number,
        layout,
        tuple(parts),
        one_of("ties", TIES),
        one_of("hooks", HOOKS),
        one_of("output", OUTPUTS),
        has_tokens,
        stepper,
        habits,
        draw.choice((3, 4)),
        cut,
    )
