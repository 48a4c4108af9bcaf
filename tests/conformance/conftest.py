"""Every `async def test_...(world)` of this folder runs in both worlds: on real sockets, and in virtual time."""

import inspect
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from worlds import MemoryWorld, TcpWorld, World


@pytest.fixture(params=[TcpWorld, MemoryWorld], ids=["tcp", "memory"])
def world(request):
    return request.param()


@pytest.fixture
def memory():
    """For what would take long in real time: virtual time only."""
    return MemoryWorld()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A coroutine test is run by its world's loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: value for name, value in pyfuncitem.funcargs.items() if name in wanted}
    next(value for value in arguments.values() if isinstance(value, World)).run(pyfuncitem.obj(**arguments))
    return True
