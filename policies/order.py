"""An order of applications over all replicas of a fleet: what a policy that accounts for
applications as a whole offers to a fleet that spreads them."""

from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

from twinserve.policies.requests import Application, RequestTable


class ApplicationOrder(ABC):
    """The fleet tells it what happens anywhere, at the time when it does, and stamps what it
    answers on requests (`RequestTable.order`, `Application.order`).

    A stamp is a number: the smaller goes first. No two applications have the same one. A request
    that belongs to no application that is known as a whole is an application by itself.
    """

    @abstractmethod
    def capacity(self, kv_tokens: int) -> int:
        """What an iteration of a replica with KV memory for `kv_tokens` tokens is worth, in the
        unit of `serve`."""

    @abstractmethod
    def serve(self, service: float) -> None:
        """The fleet has served so much since it said so last."""

    @abstractmethod
    def application(self, application: Application) -> float | None:
        """The stamp of an application that arrives; None if its requests are to be stamped one
        by one."""

    @abstractmethod
    def request(self, row: int, requests: RequestTable) -> float:
        """The stamp of a request by itself that arrives."""

    @abstractmethod
    def ended(self, output_tokens: int, kind: str | None) -> None:
        """A request completed; kind: of its application, if that has a stamp."""

    @abstractmethod
    def leaves(self, stamp: float) -> None:
        """The application with this stamp will not complete, as of now. Nothing if it has left
        before."""

    @abstractmethod
    def idles(self) -> None:
        """The fleet has nothing to do, and has had nothing since before now."""


@runtime_checkable
class OrdersFleet(Protocol):
    """A policy that has such an order."""

    def fleet_order(self) -> ApplicationOrder:
        """Return a new order over all replicas of a fleet that includes this policy, already
        prepared. The policy then follows the stamps that it finds (`RequestTable.order`). Raises
        PolicyError if these options allow no such order."""
        ...
