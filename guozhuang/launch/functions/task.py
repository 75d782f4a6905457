"""The program that ``guozhuang.launch`` starts in each rank: ``python -m guozhuang.launch.functions.task``."""

from __future__ import annotations

import os

from guozhuang.launch.functions import mailbox

if __name__ == "__main__":
    mailbox.run(lambda rank=int(os.environ["RANK"]): rank)  # type: ignore[misc]  # a function may change the environment
