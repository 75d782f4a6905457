"""``guozhuang checkpoint``: list, show, verify and export checkpoints, without a training script."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guozhuang.checkpoint.files import sync_folder, write_tensors
from guozhuang.checkpoint.folder import CheckpointFolder, is_checkpoint, manifest_of, parts_of, read_part, verify
from guozhuang.checkpoint.state import Flat
from guozhuang.errors import CheckpointError, UsageError, explain
from guozhuang.units import listed, size

_TORCH_ENDINGS = (".pt", ".pth", ".bin")


def execute(found: argparse.Namespace) -> int:
    """Carry out a parsed command line; return the exit code: 1 if a checkpoint is not whole.

    Raises:
        UsageError: there is no checkpoint, or the output cannot be written; the text says what to do.
    """
    actions = {"list": _list, "show": _show, "verify": _verify, "export": _export}
    try:
        return actions[found.action](found)
    except CheckpointError as error:
        print(error)
        return 1


def _all_in(path: Path) -> Iterator[Path]:
    """Yield the checkpoint, or all checkpoints of the folder, the newest first."""
    if is_checkpoint(path):
        yield path
        return
    folder = CheckpointFolder(path)
    steps = folder.steps()
    if not steps:
        what = "there is no checkpoint here"
        raise UsageError(explain(what, value=str(path), fix="give the DIR of --checkpoint, or a folder step-N in it"))
    yield from map(folder.of, steps)


def _newest(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest whole checkpoint and its manifest; print why newer ones are not whole."""
    error: CheckpointError | None = None
    for each in _all_in(path):
        try:
            return each, verify(each)
        except CheckpointError as why:
            print(why)
            error = why
    assert error is not None
    raise CheckpointError(explain("no checkpoint is whole", value=str(path)))


def _num_bytes(manifest: Mapping[str, Any]) -> int:
    return sum(facts["bytes"] for facts in manifest["files"].values())


def _list(found: argparse.Namespace) -> int:
    is_whole = True
    for each in _all_in(found.path):
        try:
            manifest = manifest_of(each)
            sizes = {name: facts["bytes"] for name, facts in manifest["files"].items()}
            wrong = [n for n, b in sizes.items() if not (each / n).is_file() or (each / n).stat().st_size != b]
            how = ", ".join(manifest["strategies"]) or "own wrapper"
            note = f"  NOT WHOLE: {listed(wrong)}" if wrong else ""
            what = f"{size(sum(sizes.values())):>10}  {manifest['ranks']} rank(s), {how}"
            print(f"{each.name:14}{manifest['saved_at']}  {what}{note}")
            is_whole = is_whole and not wrong
        except CheckpointError as error:
            print(f"{each.name:14}NOT WHOLE: {error}")
            is_whole = False
    return 0 if is_whole else 1


def _show(found: argparse.Namespace) -> int:
    checkpoint, manifest = _newest(found.path)
    shared = _state(checkpoint, manifest, "shared")
    print(f"{checkpoint}: step {manifest['step']}, saved {manifest['saved_at']}, {size(_num_bytes(manifest))}")
    print(f"saved by {manifest['ranks']} rank(s), strategy {', '.join(manifest['strategies']) or 'none of gz.prepare'}")
    print("complete epochs: " + (", ".join(map(str, shared["epochs"])) or "none counted"))
    for i, loader in enumerate(shared["loaders"]):
        print(f"loader {i}: " + ", ".join(f"{key} {value}" for key, value in loader.items()))
    own = _state(checkpoint, manifest, "rank-0")
    for i, (trained, its_own) in enumerate(zip(shared["trained"], own["trained"], strict=True)):
        weights = {**trained.get("parameters", {}), **its_own["parameters"]}
        state = its_own.get("optimizer") or trained["optimizer"]
        print(
            f"model {i}: {trained['class']}, {sum(w.numel() for w in weights.values()):,} weights in {len(weights)} parameters"
        )
        print(f"  optimizer: {len(state['groups'])} group(s), state of {len(state['state'])} parameters")
        for name, weight in weights.items() if found.tensors else ():
            print(f"  {name}: {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}")
    for name, kept in own["kept"].items():
        print(f"kept {name}: {'an object with a state' if kept['stateful'] else repr(kept['state'])}")
    for key, value in manifest["machine"].items():
        print(f"{key}: {value}")
    return 0


def _verify(found: argparse.Namespace) -> int:
    is_whole = True
    for each in _all_in(found.path):
        try:
            manifest = verify(each, afresh=True)
            print(f"{each}: whole, {len(parts_of(manifest))} parts, {size(_num_bytes(manifest))}")
        except CheckpointError as error:
            print(error)
            is_whole = False
    return 0 if is_whole else 1


def _export(found: argparse.Namespace) -> int:
    output = Path(os.path.abspath(found.output))
    if output.suffix not in (".safetensors", *_TORCH_ENDINGS):
        fix = "let its name end with .safetensors, or .pt for torch.load"
        raise UsageError(explain("the format of the output is not known", value=output.name, fix=fix))
    checkpoint, manifest = _newest(found.path)
    models, own = (_state(checkpoint, manifest, part)["trained"] for part in ("shared", "rank-0"))
    if not 0 <= found.model < len(models):
        what = f"the checkpoint holds {len(models)} prepared models"
        raise UsageError(
            explain(what, value=f"--model {found.model}", fix="count from 0; gz.keep's objects are not exported")
        )
    state = _plain_state(models[found.model], own[found.model])
    partial = output.with_name(f"{output.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        if output.suffix == ".safetensors":
            write_tensors(partial, {name: value.contiguous() for name, value in state.items()}, {})
        else:
            with open(partial, "xb") as file:
                torch.save({name: value.clone() for name, value in state.items()}, file)
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, output)
        sync_folder(output.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        what = f"the model cannot be written: {error.strerror}"
        raise UsageError(explain(what, value=str(output), fix="give another path")) from error
    print(f"{output}: {len(state)} tensors of {checkpoint}, {size(output.stat().st_size)}")
    return 0


def _state(checkpoint: Path, manifest: Mapping[str, Any], part: str) -> Any:
    tree, tensors = read_part(checkpoint, manifest, part)
    return Flat(tree["tree"], tensors).state


def _plain_state(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what ``state_dict()`` of the model without a wrapper returned, as far as it is tensors."""
    found = {**shared.get("parameters", {}), **own["parameters"], **own["buffers"]}
    found |= {alias: found[name] for alias, name in shared["tied"].items()}
    extra = {f"{name}._extra_state".lstrip("."): value for name, value in own["extra"].items()}
    found |= {name: value for name, value in extra.items() if isinstance(value, Tensor)}
    return {name: value for name, value in found.items() if name not in shared["left_out"]}
