"""Parameter servers: processes or threads that sum gradients or hold the weights; workers send to them, not to each other."""

from .asynchronous import AsyncParameterServer
from .synchronous import ParameterServer

__all__ = ["AsyncParameterServer", "ParameterServer"]
