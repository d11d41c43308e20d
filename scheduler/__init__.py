"""The scheduler: from the speed of every device to the layout that makes the most of it. Pure."""

from .planner import make_plan, replan
from .rental import Decision, Offer, Rental
from .simulator import Timeline, simulate

__all__ = ["Decision", "Offer", "Rental", "Timeline", "make_plan", "replan", "simulate"]
