"""Cleanup between runs of verl in one Ray."""

from __future__ import annotations

import time

import ray
from ray._private import state
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group


def clear(timeout: float = 60.0) -> None:
    """End all actors and placement groups of this Ray and wait for their removal; raises TimeoutError.

    A run's actors end with its driver actor, but its placement group stays, with its GPUs and a name that the next run
    needs (`global_pool...`). Ray removes it only with the job, which is this process.
    """
    worker = ray._private.worker.global_worker
    end = time.monotonic() + timeout
    while left := _left():
        actors, groups = left
        if time.monotonic() > end:
            raise TimeoutError(f"still there after {timeout:g} s: actors {actors}, placement groups {groups}")
        for actor in actors:
            try:
                worker.core_worker.kill_actor(ray.ActorID.from_hex(actor), True)
            except ray.exceptions.ActorHandleNotFoundError:
                continue  # it belongs to another actor and ends with it
        for group in groups:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group)))
        time.sleep(0.05)


def _left() -> tuple[list[str], list[str]] | None:
    actors = [actor for actor, about in state.actors().items() if about["State"] != "DEAD"]
    groups = [group for group, about in placement_group_table().items() if about["state"] != "REMOVED"]
    return (actors, groups) if actors or groups else None
