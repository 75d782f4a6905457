"""Who is gone, and why: processes of this node, heartbeats between ranks, the judge of what they say, and stacks."""
