"""Elastic runs: workers come and go, and the others go on.

Read in this order: ``discovery`` (which hosts there are), ``blacklist``, ``assignment`` (which rank each slot gets), ``job``
(when a round begins, who is started and ended), ``board`` (what the driver and the workers tell each other), ``crew`` and
``remote_crew`` (processes), ``printing`` and ``writing`` (what they print), ``driver`` (puts it together), ``worker`` and
``lost_peers`` (the other side).

[Note: rounds] A round is a set of workers, each with its rank. The driver announces the next one only when all who shall be in
it, and live, have come to wait for it: nobody connects to a process that is not there. Who was lost in the meantime is simply
not in it. A worker comes when a collective failed (a peer is gone), or because ``commit()`` told that hosts came or went.
Workers that are started for new slots come first, and only then the running ones are told: they train until then.

[Note: bytes] All that driver and workers tell each other goes through one ``torch.distributed.TCPStore``, which the driver
keeps on loopback, and where the ranks of each round meet too, so that nothing is lost with rank 0. To other hosts it opens
doors that ask for a secret of this run (``guozhuang.net.door``), and ssh starts there what starts the workers.
"""
