"""A gRPC server whose start is cancelled at any moment: stopped, and no task left that fails."""

import asyncio
import gc

import pytest
from grpc import aio

from coordinator.grpc_server import start_server


@pytest.mark.parametrize("turns", range(5))
async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path, turns):
    failed = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))

    async def start():
        server = aio.server()
        server.add_insecure_port(f"unix:{tmp_path}/s")
        await start_server(server)
        await server.stop(None)

    task = asyncio.create_task(start())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    del task
    for _ in range(5):  # a task that failed is reported when it is collected
        gc.collect()
        await asyncio.sleep(0.01)
    assert failed == []
