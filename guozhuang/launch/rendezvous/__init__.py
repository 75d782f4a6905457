"""The rendezvous of the agents of several nodes, and the messages between them."""
