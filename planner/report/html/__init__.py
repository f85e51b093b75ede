"""The report of a plan as one HTML file that needs nothing else: `page` makes it."""

from planner.report.html.page import page
from planner.report.html.view import View

__all__ = ["View", "page"]
