"""Parameter servers: gradients summed, or weights held, by processes to which each worker sends every byte once."""

from guozhuang.exchange.parameter_server.asynchronous import AsyncParameterServer
from guozhuang.exchange.parameter_server.synchronous import ParameterServer

__all__ = ["AsyncParameterServer", "ParameterServer"]
