"""aiohttp#9158: a global `lru_cache` keeps each application that has middlewares and served (3.14.5)."""

import asyncio

import numpy
from aiohttp import test_utils, web


@web.middleware
async def hello(request, handler):
    return web.Response(text="hello")


async def serve():
    app = web.Application(middlewares=[hello])
    app[web.AppKey("table", numpy.ndarray)] = numpy.ones(20 << 20)
    app.router.add_static("/", ".")
    async with test_utils.TestClient(test_utils.TestServer(app)) as client:
        assert (await client.get("/")).status == 200


def test_serve():
    asyncio.run(serve())
