"""Relay connections: one asyncio thread serves all of them, and reads from one side no faster than the other side receives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

_CHUNK_BYTES = 1 << 16
_END_S = 10.0  # seconds that ``close`` waits for the thread to end
_log = logging.getLogger("guozhuang")


class Relay:
    """A thread that accepts connections and serves each by a coroutine; a connection is closed when its coroutine ends.

    Args:
        listener: a bound and listening socket; the relay owns it from now on.
        serve: the coroutine, called with reader and writer of each connection.
        name: the name of the thread.
        finish: called when the thread ends.
    """

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        name: str,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._serve, self._finish = serve, finish
        self._running: set[asyncio.Task[None]] = set()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop, self._end = asyncio.new_event_loop(), asyncio.Event()
        # A daemon thread, so that a rank that forgets to close the relay can still end.
        self._thread = threading.Thread(target=self._run, args=(self._main(listener, started),), name=name, daemon=True)
        self._thread.start()
        started.result()

    def close(self) -> None:
        """Stop listening, end every connection and the thread. A second call does nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._end.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)

    def _run(self, main: Coroutine[Any, Any, None]) -> None:
        try:
            self._loop.run_until_complete(main)
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
            self._finish()

    async def _main(self, listener: socket.socket, started: concurrent.futures.Future[None]) -> None:
        try:
            server = await asyncio.start_server(self._accepted, sock=listener, backlog=1024)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            await self._end.wait()
        finally:
            server.close()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            for _ in range(3):  # a transport closes its socket in a later turn of the event loop
                await asyncio.sleep(0)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._one(reader, writer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _configure(writer)
            await self._serve(reader, writer)
        except OSError as error:
            _log.debug("a relayed connection ended: %s", error)
        finally:
            await _end_of(writer)


async def relay_both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Relay bytes in both directions until either connection ends; a store and its clients never close just one direction."""
    try:
        _configure(other[1])
        pumps = [asyncio.create_task(_pump(reader, other[1])), asyncio.create_task(_pump(other[0], writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
    finally:
        await _end_of(other[1])


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # a broken connection is treated like one that was closed
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()  # bounds memory: read more only after the receiver has taken enough


def _configure(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def _end_of(writer: asyncio.StreamWriter) -> None:
    """Close a connection: wait up to 1 s until the written bytes are sent, then abort.

    ``close`` is called before any ``await``, which could be cancelled.
    """
    try:
        writer.close()
        async with asyncio.timeout(1.0):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()
    except asyncio.CancelledError:
        writer.transport.abort()
        raise
