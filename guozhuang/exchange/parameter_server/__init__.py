"""Parameter servers: gradients summed, or weights held, by processes to which each worker sends every byte once."""

from .asynchronous import AsyncParameterServer
from .synchronous import ParameterServer

__all__ = ["AsyncParameterServer", "ParameterServer"]
