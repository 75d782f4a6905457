"""What our ways for nodes to meet have in common, and other ones of torch elastic do not: their agents tell each other why."""

from __future__ import annotations

import abc
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousHandler

from guozhuang.launch.console.say import say
from guozhuang.launch.rendezvous.signs import OtherNodeError, Others


class AnewError(Exception):
    """Another node of this round is gone before all have heard what they must: the nodes have to meet again."""


class Meeting(RendezvousHandler):
    """A handler for torch elastic, of which the agent asks more than torch elastic does.

    Attributes:
        say: how to say something to the user; the agent sets it to a way that leaves what ranks print whole.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], None] = say
        self._others: Others | None = None

    @property
    def use_agent_store(self) -> bool:
        """An agent keeps the store: ranks are clients."""
        return True

    @property
    @abc.abstractmethod
    def attempt(self) -> int:
        """How many times ranks were started before; the same on all nodes."""

    def give_up(self, text: str, code: int, is_reaction: bool) -> OtherNodeError | None:
        """Tell the other nodes that this one gives the run up, and why; see ``Others.give_up``."""
        return None if self._others is None else self._others.give_up(text, code, is_reaction)

    def told(self, error: Exception) -> Exception:
        """Return what a broken connection to the store means: the node that keeps it is gone, where that is known."""
        return error if self._others is None else OtherNodeError(self._others.who_is_gone())

    @abc.abstractmethod
    def was_told(self, text: str, code: int) -> None:
        """Tell the other nodes that this agent was told to end."""

    @abc.abstractmethod
    def are_all_done(self) -> bool:
        """Say that the ranks of this node have ended well; return whether those of all nodes have.

        Raises:
            OtherNodeError: another node gave up, or is lost.
        """

    def leave(self) -> None:
        """Close what is ours after ``was_told``; ``shutdown`` is for every other end."""
        self.shutdown()
