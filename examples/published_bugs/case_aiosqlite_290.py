"""aiosqlite#290: a connection that is dropped keeps its thread for ever (0.21.0; right in 0.22.1)."""

import asyncio

import aiosqlite


async def connect():
    connection = aiosqlite.connect(":memory:")
    connection.daemon = True  # so that the old version's thread does not keep the process from its end
    await connection
    await connection.execute("create table t (x)")


def test_dropped():
    asyncio.run(connect())
