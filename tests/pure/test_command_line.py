"""The command line is cut at the script: what is behind it is the script's, whatever it looks like."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from guozhuang.launch.options import script as run_script
from guozhuang.launch.options.arguments import parser
from tests.drawing import examples

OPTIONS = st.sampled_from(
    [
        ["-np", "2"], ["-np=2"], ["--nproc-per-node", "2"], ["--nproc_per_node=2"], ["--nproc-p", "2"], ["--standalone"],
        ["-m"], ["--no_python"], ["-t", "3"], ["-t3"], ["-r", "0:1,1:2"], ["--log-dir", "a b"], ["--log-dir="],
        ["--max-restarts", "-1"], ["-Hhost:2"], ["-H", "host:2,other"], ["-x", "A=-b"], ["--hang-timeout", "3.5"],
    ]
)  # fmt: skip


def test_words_like_options_of_ours_reach_the_script() -> None:
    behind = ["--max", "3", "--n", "-n", "-np", "7", "--nproc-per-node=4", "-H", "--help", "--", "-x", "--rdzv", "-m"]
    found = run_script.read(parser(), ["-np", "2", "train.py", *behind])
    assert (found.num_ranks, found.training_script, found.training_script_args) == ("2", "train.py", behind)
    assert (found.hosts, found.module) == (None, False)


@pytest.mark.parametrize("script", ["train.py", "my script.py", "-", "-odd.py", "--odd"])
def test_two_dashes_end_the_options(script: str) -> None:
    found = run_script.read(parser(), ["-np", "2", "--", script, "-np", "3"])
    assert (found.num_ranks, found.training_script, found.training_script_args) == ("2", script, ["-np", "3"])


@examples()
@given(st.lists(OPTIONS, max_size=5), st.lists(st.sampled_from(["a", "3", "x=y", "-1", ""]), max_size=4))
def test_as_argparse_reads_it_where_nothing_is_like_an_option(options: list[list[str]], behind: list[str]) -> None:
    words = [word for option in options for word in option] + ["train.py", *behind]
    assert vars(run_script.read(parser(), words)) == vars(parser().parse_args(words))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nprocs-per-nod", "2", "train.py"], "unrecognized arguments: --nprocs-per-nod"),
        (["--rdzv", "x", "train.py"], "ambiguous option: --rdzv"),
        (["-np"], "expected one argument"),
        (["-np", "2"], "the following arguments are required: training_script"),
        ([], "the following arguments are required: training_script"),
        (["--standalone=1", "train.py"], "ignored explicit argument '1'"),
    ],
)
def test_what_cannot_be_read_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_script.read(parser(), words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_torchruns_own_parser_is_served_too() -> None:
    ours: argparse.Namespace = run_script.read(get_args_parser(), ["--nnodes", "1:4", "train.py", "--nn", "3"])
    assert (ours.nnodes, ours.training_script_args) == ("1:4", ["--nn", "3"])
