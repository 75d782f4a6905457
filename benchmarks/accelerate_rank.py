"""One rank of accelerate_cpu.py: the training of examples/accelerate_text.py, some steps at each word from the parent.

    accelerate_rank.py ADDRESS DATA [OPTIONS OF THE EXAMPLE]

Like the example it knows nothing of Guozhuang. Between turns it waits for the parent, so that several trainings, each in
its own processes, can take turns.
"""

from __future__ import annotations

import itertools
import sys
from multiprocessing.connection import Client

from examples.accelerate_text import parse, prepare, train


def main() -> None:
    address, *words = sys.argv[1:]
    args = parse(words)
    accelerator, model, optimizer, scheduler, loader, _ = prepare(args)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # epoch after epoch
    with Client(address, "AF_UNIX") as parent:
        parent.send(accelerator.num_processes)
        while steps := parent.recv():
            _, loss = train(accelerator, model, optimizer, scheduler, itertools.islice(batches, steps))
            parent.send(loss)
    model, optimizer, scheduler = accelerator.free_memory(model, optimizer, scheduler)
    accelerator.end_training()


if __name__ == "__main__":
    main()
