"""Coroutines that live and fail together."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Wait until all are done; if one raises, cancel the others and raise that.

    What ``asyncio.TaskGroup`` does, but the failure itself is raised, not a group around it. Of several that failed at
    once the first in order counts.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
