"""aiosqlite#317: a cancelled `connect` leaves the connection's thread (0.20.0; right in 0.21.0)."""

import asyncio
import time

import aiosqlite


async def cancelled():
    connection = aiosqlite.Connection(lambda: time.sleep(0.3), 64)
    connection.daemon = True  # so that the old version's thread does not keep the process from its end
    try:
        await asyncio.wait_for(connection, 0.1)
    except asyncio.TimeoutError:
        await asyncio.sleep(0.5)


def test_cancelled():
    asyncio.run(cancelled())
