"""Detection of lost ranks and hangs: processes of this node, heartbeats of the ranks, the rules that judge them, and stacks."""
