"""Elastic runs: workers join and leave while the job runs, and the remaining workers continue to train.

Read in this order: ``discovery`` (which hosts exist), ``assignment`` (which rank each slot gets), ``job`` (when a round
begins, which workers are started and ended), ``board`` (the messages between driver and workers), ``crew`` and ``remote_crew``
(the worker processes, which ``guozhuang.launch`` starts, watches and shows), ``driver`` (runs these parts), ``worker`` (the
worker's side).

[Note: rounds] A round is a set of workers, each with its rank. The driver announces the next round only when every living
worker that shall be in it waits for it, so no rank connects to a process that does not exist. Lost workers are left out, and
new ones that start too slowly. A worker waits for a new round when a collective failed (a peer is gone), or when ``commit()``
found that hosts were added or removed. New workers start first; the running ones are notified only when the new ones wait.

[Note: bytes] All messages between driver and workers go through one ``torch.distributed.TCPStore``. The driver keeps it on
loopback; the ranks of each round meet in it too, so the loss of rank 0 does not lose the store. Other hosts reach it through
doors that ask for a secret of this run (``guozhuang.net.door``); ssh starts a process on each of them, ``remote_host``.
"""
