"""Which calls a worker takes: those meant for this life of it, from the router's present life, until the drain begins."""

from __future__ import annotations

from typing import Final

from cluster import rpc
from cluster.errors import Draining, StaleEpoch
from cluster.pb import worker_pb2 as pb
from cluster.types import WorkerState


class Gate:
    """Checks the header of every call before any work is done for it.

    The router's epoch is learned from its replies to reports and from the calls themselves; it only ever rises, so a placement of
    a router that has been replaced is refused as soon as one word of its successor has arrived.
    """

    def __init__(self, incarnation: str) -> None:
        self.incarnation: Final = incarnation
        self._router_epoch = 0
        self._is_draining = False

    @property
    def router_epoch(self) -> int:
        """The highest epoch seen; 0 before the first."""
        return self._router_epoch

    @property
    def state(self) -> WorkerState:
        return WorkerState.DRAINING if self._is_draining else WorkerState.RUNNING

    def learn_epoch(self, epoch: int) -> None:
        """Takes note of a life of the router."""
        self._router_epoch = max(self._router_epoch, epoch)

    def close(self) -> None:
        """Refuses new work from now on. What runs is not touched, and calls between workers are still answered."""
        self._is_draining = True

    def check(self, header: pb.Header) -> None:
        """Lets a call of the gateway pass.

        Raises:
            WrongIncarnation: it is meant for another life of this worker.
            StaleEpoch: an older life of the router placed it.
            Draining: this worker is about to stop.
        """
        rpc.check_incarnation(header.incarnation, self.incarnation)
        if header.router_epoch < self._router_epoch:
            message = f"the placement is of router epoch {header.router_epoch}, the present one is {self._router_epoch}"
            raise StaleEpoch(message, param="router_epoch")
        self.learn_epoch(header.router_epoch)
        if self._is_draining:
            raise Draining("the worker is stopping")
